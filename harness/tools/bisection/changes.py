"""What differs between two environments: packages, and what this harness probes of SGLang."""

import re
from collections.abc import Iterator, Mapping
from dataclasses import fields
from pathlib import Path

from harness.tools.bisection.state import Record
from harness.tools.bisection.trace import module_of

_FRAME = re.compile(r'File "[^"]*?/(?:site-packages|site|python)/(?P<module>\w+)[./]')
_EXCEPTION_LINE = re.compile(r"^[\w.]*(?:Error|Exception|Exit|Interrupt)\b", re.MULTILINE)
_SKIPPED_FIELDS = ("tree", "version", "engine_arguments")


def normal(package: str) -> str:
    """The normal form of a package's name."""
    return re.sub(r"[-_.]+", "-", package).lower()


def packages(before: Mapping[str, str], after: Mapping[str, str]) -> dict[str, tuple[str, str]]:
    """Package -> its two versions, "" where it is not there; only those that differ."""
    return {
        name: (before.get(name, ""), after.get(name, ""))
        for name in sorted({*before, *after})
        if before.get(name) != after.get(name)
    }


def suspect(log: str, changed: Mapping[str, tuple[str, str]], moved: str) -> str:
    """The changed package in whose code the first traceback of a log ends, or which its exception names; else the one that was
    moved, if it changed; else the only one that changed."""
    by_module = {module_of(name): name for name in changed}
    exception = _EXCEPTION_LINE.search(log)
    trace = log[: exception.start()] if exception else ""
    frames = [match["module"] for match in _FRAME.finditer(trace)]
    if frames and frames[-1] in by_module:
        return by_module[frames[-1]]
    if normal(moved) in changed:
        return normal(moved)
    return next(iter(changed)) if len(changed) == 1 else ""


def root_of(record: Record, module: str) -> Path | None:
    """The folder that holds the module in the environment of a run, if it is still there."""
    roots = [Path(each) for each in record.paths]
    roots += sorted(Path(record.python).parent.parent.glob("lib/python3*/site-packages")) if record.python else []
    return next((r for r in roots if (r / module / "__init__.py").is_file() or (r / f"{module}.py").is_file()), None)


def api(before: Record, after: Record) -> Iterator[str]:
    """Lines on the engine arguments and other facts of the two SGLangs that differ."""
    roots = [root_of(record, "sglang") for record in (before, after)]
    if roots[0] is None or roots[1] is None or roots[0] == roots[1]:
        return
    from harness.rollout.sglang_api.probe import probe
    from harness.rollout.sglang_api.source import SourceTree

    try:
        old, new = (probe(SourceTree(root / "sglang")) for root in roots if root)
    except ValueError:
        return  # a package of this name that is not SGLang, or a tree of another age
    yield from ("## Changed engine arguments and API", "")
    lines = []
    if gone := sorted(old.engine_arguments - new.engine_arguments):
        lines.append(f"- engine arguments gone: {', '.join(gone)}")
    if added := sorted(new.engine_arguments - old.engine_arguments):
        lines.append(f"- engine arguments new: {', '.join(added)}")
    for field in fields(old):
        was, now = getattr(old, field.name), getattr(new, field.name)
        if field.name not in _SKIPPED_FIELDS and was != now:
            lines.append(f"- {field.name}: {was!r} -> {now!r}")
    yield from [*(lines or ["None of those that this harness probes."]), ""]
