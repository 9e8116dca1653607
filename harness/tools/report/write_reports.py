"""Write report.md, report.html and trace.json of a run directory, from the files in it."""

import json
import re
from collections.abc import Sequence
from contextlib import suppress
from html import escape
from pathlib import Path
from typing import Any

from markdown_it import MarkdownIt
from markupsafe import Markup

from harness.config.layers import to_toml
from harness.runtime import redact
from harness.runtime.files import is_regular, replace_file
from harness.tools.export.subject import Subject, read_subject
from harness.tools.page_template import page_template
from harness.tools.report.issue_text import Metrics, details, folded_config, opening, outcome_of
from harness.tools.report.pictures import number_or_none, pictures_of
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
    first = "\n".join(opening(subject, files_to_read(folder) if failed else []))
    rest = "\n".join(details(subject, metrics))
    whole = "\n".join(folded_config(subject.config))
    replace_file(folder / "report.md", redact.text(f"{first}\n{rest}\n{whole}\n"))
    trace = write_trace(folder, subject.events, subject.seen.time if subject.seen else 0.0)
    # Last: matplotlib takes a second or two, and the watchdog of a run that failed does not wait long.
    replace_file(folder / "report.html", page(subject, redact.text(first), redact.text(rest), metrics))
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
    return all(number_or_none(value) is not None for value in counted)


def files_to_read(folder: Path) -> list[str]:
    """Return the files of the run directory that explain a failure, the most telling first."""
    found = [sorted(folder.glob(pattern))[:MOST_OF_ONE_KIND] for pattern in READ_NEXT]
    return [str(each.relative_to(folder)) for some in found for each in some]


def page(subject: Subject, first: str, rest: str, metrics: Sequence[Metrics]) -> str:
    """Return one HTML page that needs no script, no network and no other file.

    first, rest: the Markdown above and below the pictures. It holds whatever a failed program printed, so only the few
    rules that issue_text uses are enabled: no raw HTML, no images, and no links but the http ones that are made below.
    The template escapes everything else.
    """
    template = page_template(Path(__file__).parent)
    return template.render(
        title=first.partition("\n")[0].removeprefix("# "),
        outcome=outcome_of(subject.seen),
        style=Markup(Path(__file__).with_name("page.css").read_text(encoding="utf-8")),
        first=to_html(first),
        rest=to_html(rest),
        pictures=[Markup(each) for each in pictures_of(subject.events, subject.seen, metrics)],
        config=redact.text(to_toml(subject.config)),
    )


def to_html(markdown: str) -> Markup:
    """Return Markdown as HTML. Only what issue_text writes is understood; all else is text."""
    parser = MarkdownIt("zero").enable(["backticks", "escape", "fence", "heading", "list", "table"])
    parser.add_render_rule("text", _with_links)
    return Markup(parser.render(markdown))


def _with_links(renderer: object, tokens: Sequence[Any], index: int, options: object, env: object) -> str:
    """Render one text token of Markdown, with http addresses as links."""
    text, parts, at = tokens[index].content, [], 0
    for found in _LINK.finditer(text):
        address = escape(found[0])
        parts += [escape(text[at : found.start()]), f'<a href="{address}">{address}</a>']
        at = found.end()
    return "".join([*parts, escape(text[at:])])
