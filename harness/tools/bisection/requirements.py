"""Where a candidate that is laid over other packages does not get what it asks for."""

import importlib.metadata
import tomllib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from packaging.requirements import InvalidRequirement, Requirement
from packaging.utils import canonicalize_name

from harness.tools.bisection.environment import canonical
from harness.tools.bisection.state import Record, State

MOST_NAMED = 3


@dataclass(frozen=True, slots=True)
class Unmet:
    """A requirement, and what there is in its place."""

    package: str
    wants: str
    has: str
    """A version; "" where it is not installed."""


def unmet(state: State, record: Record) -> list[Unmet]:
    """Those of a candidate whose own files lie over an environment that is not its own; none where they are gone."""
    found = []
    for text in _requirements(record.paths, state.question.options.package):
        try:
            asked = Requirement(text)
        except InvalidRequirement:
            continue
        if asked.marker is not None and not asked.marker.evaluate({"extra": ""}):
            continue
        has = record.freeze.get(canonicalize_name(asked.name), "")
        if not has or not asked.specifier.contains(has, prereleases=True):
            found.append(Unmet(str(canonicalize_name(asked.name)), str(asked.specifier) or "any", has))
    return sorted(found, key=lambda each: (not each.has, each.package))


def sentence(state: State, record: Record) -> str:
    """On one candidate; "" where it has what it asks for."""
    lacks = unmet(state, record)
    if not lacks:
        return ""
    others = [each for each in lacks if each.has]
    told = [f"{each.package} {each.has} (it asks for {each.wants})" for each in others[:MOST_NAMED]]
    if len(others) > MOST_NAMED:
        told.append(f"{len(others) - MOST_NAMED} others that it does not ask for")
    missing = len(lacks) - len(others)
    told += [f"without {missing} of its requirements"] if missing else []
    instead = "; without --only-package it gets its own" if state.question.options.only_package else ""
    return f"{record.name[:12]} ran with {', '.join(told)}{instead}.".replace("ran with without", "ran without")


def table(state: State, record: Record) -> Iterator[str]:
    """What it wants and what it had."""
    if lacks := unmet(state, record):
        yield from (
            f"## Requirements that {record.name[:12]} did not get",
            "",
            "| package | wants | has |",
            "|---|---|---|",
        )
        yield from (
            f"| {each.package} | {each.wants.replace('|', '/')} | {each.has or 'not installed'} |" for each in lacks
        )
        yield ""


def _requirements(paths: Sequence[str], package: str) -> list[str]:
    """Of its metadata, or of the pyproject.toml of a checkout."""
    for path in paths:
        for found in importlib.metadata.distributions(path=[path]):
            if canonical(found.metadata["Name"] or "") == canonical(package):
                return found.requires or []
        for project in (Path(path) / "pyproject.toml", Path(path).parent / "pyproject.toml"):
            if project.is_file():
                return _declared(project)
    return []


def _declared(project: Path) -> list[str]:
    try:
        told = tomllib.loads(project.read_text(encoding="utf-8")).get("project", {})
    except tomllib.TOMLDecodeError:
        return []  # of a commit that is broken
    return list(told.get("dependencies", []))
