"""A diagnosis for people, and as JSON for programs."""

import json
import textwrap
from typing import Any

from harness.tools.diagnose.diagnose import CatalogueMatch, Diagnosis
from harness.tools.diagnose.entries import Affected, CatalogueEntry, surroundings
from harness.tools.diagnose.tracebacks import LogLine

WIDTH = 110
LONGEST = 300  # characters of a log's line that are shown
OTHERS = 4
NOTHING_SEEN = (
    "no exception, no crash and no words of failure, except in settings, counters and messages known as harmless"
)
WENT_ON = "The log goes on well after this failure: the run survived it, or was started again."


def as_text(found: Diagnosis) -> str:
    """Return several lines; the first one has the slug, or "unknown", or says that no failure was recognized."""
    if found.verdict == "no failure":
        return "\n".join(_without_failure(found))
    lines = ["unknown: no known failure explains what this log shows"]
    if found.finding:
        entry = found.finding.entry
        lines = [("" if found.finding.is_known else "unknown, ") + named(found.finding)]
        lines += [f"  {signature.role + ':':<7} {_shown(line)}" for signature, line in found.finding.evidence]
        if entry.consequence:
            why = "perhaps from the line before it" if found.suspicious else "which these logs do not show"
            lines.append(f"  This is a consequence: something else failed first, {why}.")
    if found.suspicious:
        what = "before it, unknown" if found.finding else "first suspicious line"
        lines.append(f"  {what}: {_shown(found.suspicious)}")
    if found.ending:
        lines.append(f"  ends with: {_shown(found.ending)}")
    if found.went_on:
        lines.append(f"  went on:   {_shown(found.went_on)}")
        lines.append(_paragraph("note", WENT_ON))
    if step := next_step(found):
        lines.append(_paragraph("next", step))
    if found.finding:
        lines += [*_explained(found.finding.entry), *(_paragraph("link", link) for link in found.finding.entry.links)]
    for each in found.others[:OTHERS]:
        lines.append(
            f"  {'consequence' if each.entry.consequence else 'seen as well'}: {each.entry.slug}, {_shown(each.line)}"
        )
    return "\n".join(lines)


def _without_failure(found: Diagnosis) -> list[str]:
    lines = [f"no failure seen: {NOTHING_SEEN}"]
    if found.doubts:
        lines = ["no failure recognized, but these lines have words of failure:"]
        lines += [f"  in doubt: {_shown(line)}" for line in found.doubts]
    return [*lines, *(f"  last line: {_shown(line)}" for line in found.last)]


def next_step(found: Diagnosis) -> str:
    """Return what to look at if the cause is unknown; "" if it is known, or if nothing failed."""
    if found.verdict == "no failure" or (found.finding and not found.finding.entry.consequence):
        return ""
    # After an unknown failure, how the log ends says little: it is its consequence.
    shown = (found.suspicious, *((found.finding.line, found.ending) if found.finding else ()))
    calls = [f"{call.file} in {call.function}" for call in found.calls]
    for line in filter(None, shown):
        for step in surroundings().next_steps:
            is_near = step.near is None or any(map(step.near.regex.search, calls))
            if is_near and step.pattern.regex.search(line.whole):
                return " ".join(step.text.split())
    return "Give the logs of all ranks and of the engine: the first failure may be in another file."


def named(finding: CatalogueMatch) -> str:
    return f"{'known as' if finding.is_known else 'looks like'} {finding.entry.slug}: {finding.entry.title}"


def in_brief(found: Diagnosis) -> list[str]:
    """Return name, cause, fix, versions and a link, for a verdict that has already told what happened."""
    if not found.finding:
        return ["no known failure of the catalogue"] if found.verdict == "unknown" else []
    entry = found.finding.entry
    lines = [named(found.finding)]
    lines += [line for paragraph in _explained(entry) for line in paragraph.splitlines()]
    return [*lines, *(_paragraph("link", link) for link in entry.links[:1])]


def as_json(found: Diagnosis) -> str:
    """Return the same as JSON. slug: of the entry that it is, or that it looks like; also has the others."""
    finding = found.finding
    values: dict[str, Any] = {
        "verdict": found.verdict,
        "slug": finding.entry.slug if finding else None,
        "consequence": finding.entry.consequence if finding else None,
        "evidence": _evidence(finding) if finding else [],
        "suspicious": _line(found.suspicious) if found.suspicious else None,
        "ending": _line(found.ending) if found.ending else None,
        "went_on": _line(found.went_on) if found.went_on else None,
        "next": next_step(found) or None,
        "doubts": [_line(line) for line in found.doubts],
        "last": [_line(line) for line in found.last],
        "also": [{"slug": each.entry.slug, "evidence": _evidence(each)} for each in found.others],
    }
    names = ("title", "cause", "fix", "links") if finding else ()
    return json.dumps(values | {name: getattr(finding.entry, name) for name in names if finding}, indent=1)


def _evidence(finding: CatalogueMatch) -> list[dict[str, Any]]:
    return [{"role": signature.role, **_line(line)} for signature, line in finding.evidence]


def _line(line: LogLine) -> dict[str, Any]:
    return {"file": line.file, "line": line.number, "text": line.whole[:LONGEST], "process": line.process or None}


def _shown(line: LogLine) -> str:
    text = line.whole.strip()
    return f"{line.place}: {text if len(text) <= LONGEST else text[:LONGEST] + '...'}"


def _explained(entry: CatalogueEntry) -> list[str]:
    lines = [_paragraph("cause", entry.cause), _paragraph("fix", entry.fix)]
    versions = "; ".join(filter(None, map(_affected, entry.affected)))
    return [*lines, _paragraph("versions", versions)] if versions else lines


def _paragraph(name: str, text: str) -> str:
    first, later = f"  {name + ':':<10}", " " * 12
    return textwrap.fill(text, WIDTH, initial_indent=first, subsequent_indent=later, break_long_words=False)


def _affected(affected: Affected) -> str:
    """Return the releases that are known to have it; "" if none is."""
    note = f" ({affected.note})" if affected.note else ""
    first, last = affected.first, affected.last
    if first and last:
        releases = f" {first} to {last}" if first != last else f" {first}"
    else:
        releases = f" {first} and newer" if first else f" until {last}" if last else ""
    return f"{affected.package}{releases}{note}" if releases or note else ""
