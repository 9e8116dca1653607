"""How the files that a failure's traceback names differ between the two sides of an edge."""

import re
from collections.abc import Iterator
from difflib import unified_diff
from pathlib import Path

from harness.tools.bisection import changes
from harness.tools.bisection.state import Record
from harness.tools.bisection.trace import module_of, relative, trace_at
from harness.tools.diagnose.log_lines import LogLine

MOST_LINES, MOST_LINES_OF_A_FILE = 160, 60


def section(before: Record, after: Record, bad: Record, package: str, folder: Path) -> Iterator[str]:
    """Of a report; nothing where the failure names no file of the package, or where a side's files are gone. Raises OSError."""
    module = module_of(package)
    roots = [changes.root_of(record, module) for record in (before, after)]
    old, new = roots
    if old is None or new is None or old == new or not (files := _named(bad, package, folder, (old, new))):
        return
    yield from ("## What changed in the files of the traceback", "")
    left, unchanged = MOST_LINES, []
    for file in files:
        lines = _diff(old / file, new / file, file)
        if not lines:
            unchanged.append(file)
        elif left > 0:
            shown = lines[: min(left, MOST_LINES_OF_A_FILE)]
            left -= len(shown)
            more = [f"... {len(lines) - len(shown)} lines more"] if len(shown) < len(lines) else []
            yield from ("```", *shown, *more, "```", "")
    if unchanged:
        yield from (f"Unchanged: {', '.join(unchanged)}.", "")


def _named(bad: Record, package: str, folder: Path, roots: tuple[Path, Path]) -> list[str]:
    """Files below either root, the deepest frame's first, then those of modules that the message names."""
    decisive, module = bad.decisive, module_of(package)
    if decisive is None:
        return []
    found = []
    if decisive.line and (folder / decisive.log).is_file():
        trace = trace_at(LogLine(str(folder / decisive.log), 0, decisive.line, "", "", "", None))
        found += [relative(frame.file, package) for frame in reversed(trace.inside(package))] if trace else []
    for name in re.findall(rf"\b{re.escape(module)}(?:\.\w+)*", decisive.failure):
        path = name.replace(".", "/")
        found += [f"{path}.py", f"{path}/__init__.py"]
    return [file for file in dict.fromkeys(found) if any((root / file).is_file() for root in roots)]


def _diff(old: Path, new: Path, name: str) -> list[str]:
    was, now = (path.read_text(errors="replace").splitlines() if path.is_file() else [] for path in (old, new))
    lines = unified_diff(was, now, f"before/{name}", f"after/{name}", lineterm="")
    return [line.encode("ascii", "replace").decode().replace("```", "'''") for line in lines]
