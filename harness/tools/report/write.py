"""Write report.md and report.html of a run directory, from its files alone."""

from pathlib import Path

from harness.tools.export.subject import read_subject
from harness.tools.report.issue import issue, known_failure, own_sections
from harness.tools.report.page import page, read_metrics


def write_reports(folder: Path) -> tuple[Path, Path]:
    """The paths of both. Raises ConfigError where the folder is no run directory, OSError where it cannot be written."""
    subject = read_subject([str(folder)])
    finding = known_failure(subject)
    written = folder / "report.md", folder / "report.html"
    texts = issue(subject, finding, own_sections(written[0])), page(subject, finding, read_metrics(folder))
    for file, text in zip(written, texts, strict=True):
        part = file.with_name(f".{file.name}.part")
        part.write_text(text, encoding="utf-8")
        part.replace(file)
    return written
