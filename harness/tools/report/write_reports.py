"""Write report.md, report.html and trace.json of a run directory, from the files in it.

python -m harness.tools.report.write_reports RUN_DIR
"""

import json
import re
import sys
from collections.abc import Sequence
from contextlib import suppress
from html import escape
from pathlib import Path
from typing import Any

from markdown_it import MarkdownIt

from harness.runtime import redact
from harness.runtime.files import is_regular, replace_file
from harness.tools.diagnose.diagnose import CatalogueMatch, diagnose
from harness.tools.diagnose.log_lines import log_files
from harness.tools.export.subject import read_subject
from harness.tools.report.issue_text import Metrics, issue_text, outcome_of
from harness.tools.report.trace import write_trace

READ_NEXT = ("failure*.json", "stacks*.txt", "flight-record-*", "engines", "events", "config.toml")
"""Files that explain a failure; at most MOST_OF_ONE_KIND of each pattern are named."""
MOST_OF_ONE_KIND = 8

_LINK = re.compile(r"https?://[^\s<>\"')]+")


def write_reports(folder: Path) -> list[Path]:
    """Write the three files, each at once or not at all, and return their paths.

    Raise ConfigError if the folder is not a run directory, OSError if it cannot be written to.
    """
    subject = read_subject([str(folder)])
    metrics = read_metrics(folder / "metrics.jsonl")
    outcome = outcome_of(subject.seen)
    failed = outcome != "PASSED"
    finding = known_failure(folder) if failed else None
    files = files_to_read(folder) if failed else []
    text = redact.text(issue_text(subject, metrics, finding, files, fold=True))
    unfolded = redact.text(issue_text(subject, metrics, finding, files, fold=False))
    replace_file(folder / "report.md", text)
    replace_file(folder / "report.html", page(unfolded, outcome))
    trace = write_trace(folder, subject.events, subject.seen.time if subject.seen else 0.0)
    return [folder / "report.md", folder / "report.html", trace]


def read_metrics(file: Path) -> list[Metrics]:
    """Return the rows of metrics.jsonl; none if there is no such file. A row that was cut off is left out."""
    rows: list[Metrics] = []
    for line in file.read_text(encoding="utf-8", errors="replace").splitlines() if is_regular(file) else []:
        with suppress(ValueError, RecursionError):
            row = json.loads(line)
            if isinstance(row, dict) and _has_numbers(row):
                rows.append(row)
    return rows


def _has_numbers(row: Metrics) -> bool:
    """Return whether a row, which anybody may have written, has the numbers that a report counts with."""
    counted = [row.get("step", 0), *(value for key, value in row.items() if key.startswith("startup/"))]
    if row.get("kind") == "validation":
        counted.append(row.get("validation/step"))
    return all(isinstance(value, int | float) for value in counted)


def known_failure(folder: Path) -> CatalogueMatch | None:
    """Return the catalogue's entry for the failure, if it has one."""
    with suppress(ValueError):  # the run was killed before it wrote a line
        return diagnose(log_files([str(folder)])).finding
    return None


def files_to_read(folder: Path) -> list[str]:
    """Return the files of the run directory that explain a failure, the most telling first."""
    found = [sorted(folder.glob(pattern))[:MOST_OF_ONE_KIND] for pattern in READ_NEXT]
    return [str(each.relative_to(folder)) for some in found for each in some]


def page(markdown: str, outcome: str) -> str:
    """Return the Markdown as one HTML page that needs no other file.

    The text holds whatever a failed program printed, so only the few rules that issue_text uses are enabled: no raw
    HTML, no images, and no links but the http ones that are made below.
    """
    parser = MarkdownIt("zero").enable(["backticks", "escape", "fence", "heading", "list", "table"])
    parser.add_render_rule("text", _with_links)
    style = Path(__file__).with_name("page.css").read_text(encoding="utf-8")
    title = escape(markdown.partition("\n")[0].removeprefix("# "))
    return (
        '<!DOCTYPE html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n'
        '<meta name="viewport" content="width=device-width">\n'
        f"<title>{title}</title>\n<style>\n{style}</style>\n</head>\n"
        f'<body class="{outcome.split()[0]}">\n{parser.render(markdown)}</body>\n</html>\n'
    )


def _with_links(renderer: object, tokens: Sequence[Any], index: int, options: object, env: object) -> str:
    """Render one text token of Markdown, with http addresses as links."""
    text, parts, at = tokens[index].content, [], 0
    for found in _LINK.finditer(text):
        address = escape(found[0])
        parts += [escape(text[at : found.start()]), f'<a href="{address}">{address}</a>']
        at = found.end()
    return "".join([*parts, escape(text[at:])])


if __name__ == "__main__":
    write_reports(Path(sys.argv[1]))
