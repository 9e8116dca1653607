"""Write report.md and report.html of a run directory, from its files alone.

python -m harness.tools.report.write_reports RUN_DIR
"""

import sys
from pathlib import Path

from harness.tools.export.subject import read_subject
from harness.tools.report.issue_text import issue, known_failure
from harness.tools.report.run_page import page, read_metrics
from harness.tools.report.run_sections import run_sections


def write_reports(folder: Path) -> tuple[Path, Path]:
    """Return the paths of both. Raise ConfigError where the folder is no run directory, OSError where it is not writable."""
    subject = read_subject([str(folder)])
    finding, metrics = known_failure(subject), read_metrics(folder)
    written = folder / "report.md", folder / "report.html"
    texts = issue(subject, finding, run_sections(metrics, subject.events)), page(subject, finding, metrics)
    for file, text in zip(written, texts, strict=True):
        part = file.with_name(f".{file.name}.part")
        part.write_text(text, encoding="utf-8")
        part.replace(file)
    return written


if __name__ == "__main__":
    write_reports(Path(sys.argv[1]))
