"""Cases: known failures that a minimal program reproduces, each beside a control run that passes.

A case is a module of cases/ with CASE and program(broken). `python -m harness.tools.repro.cases SLUG broken` fails in the
known way, `... healthy` passes; the two differ in one thing. A program that cannot run here raises UnsupportedEnvironment,
one whose failure this version cannot have raises NotPresent: a line that begins with CANNOT (exit code 125), or ABSENT (0).
"""

import difflib
import importlib
import pkgutil
import re
from collections.abc import Collection
from dataclasses import dataclass, replace
from typing import Literal

from harness.tools.diagnose.entries import CatalogueEntry, ReproClass, catalogue
from harness.tools.repro import cases

Variant = Literal["broken", "healthy"]
GPUS: dict[ReproClass, int] = {"cpu": 0, "one_gpu": 1, "several_gpus": 2, "hosts": 0}
"""GPUs that each class takes; hosts are emulated in namespaces, without GPUs."""
CANNOT = "cannot run here: "
ABSENT = "not present in this version: "


class UnknownCase(ValueError):
    """No case has that name."""


class NotPresent(Exception):
    """The failure cannot happen in this version."""


@dataclass(frozen=True, kw_only=True)
class Number:
    """The measure of a silent failure: a variant prints `NAME: VALUE`, and the last one printed counts."""

    name: str
    broken_above: float
    """Larger values show the failure."""
    healthy_below: float
    """Smaller values show its absence; a NaN, or a value between the two, shows neither."""

    def read(self, output: str) -> float | None:
        """Return the last number that was printed, None without one."""
        found = re.findall(rf"^.*\b{re.escape(self.name)}: (\S+)$", output, re.MULTILINE)
        return float(found[-1]) if found else None


@dataclass(frozen=True, kw_only=True)
class Case:
    """One failure that can be reproduced, and how it is recognized."""

    title: str = ""
    """The first line of the module's docstring; load() fills it in."""
    needs: ReproClass = "cpu"
    broken: str
    """What the broken variant does in the one thing in which the two differ."""
    healthy: str
    """What the healthy control does there."""
    signature: tuple[str, ...] = ()
    """Regular expressions: the broken variant's output must match all of them, the control's none."""
    number: Number | None = None
    """Printed by both variants; without a signature the number alone decides."""
    failure: str = ""
    """Slug of the catalogue's entry, where it is not the case's own."""
    engine: bool = False
    """Starts real SGLang engines, which takes half a minute each in CPU mode."""
    on_gpu: bool = False
    """A case of class cpu that is worth a run on a GPU too, where other kernels run."""
    timeout_seconds: float = 0.0
    """Limit of a variant; 0 means 60, or with an engine 420 on CPU and 150 on a GPU."""
    requires: tuple[str, ...] = ()
    """Packages that it needs, as requirement specifiers: "sglang>=0.5.21"."""

    def __post_init__(self) -> None:
        """Raise ValueError where nothing could show the failure, and fill in the default time limit."""
        if not self.signature and self.number is None:
            raise ValueError(f'the case "{self.broken}" must have a signature or a number, got neither.')
        default = 60.0 if not self.engine else 420.0 if self.needs == "cpu" else 150.0
        object.__setattr__(self, "timeout_seconds", self.timeout_seconds or default)

    def is_of(self, classes: Collection[ReproClass]) -> bool:
        """Return whether this is a case of one of these classes."""
        return self.needs in classes or (self.on_gpu and "one_gpu" in classes)

    def gpus(self, available: int) -> int:
        """Return how many of the available GPUs it takes; an engine takes one wherever there is one."""
        return GPUS[self.needs] or min(int(self.engine), available)

    def difference(self) -> str:
        """Return the one thing in which the two variants differ."""
        return f"differs in: {self.broken} (broken) | {self.healthy} (healthy)"


def slugs() -> list[str]:
    """Return the names of all cases, in alphabetical order."""
    names = (module.name for module in pkgutil.iter_modules(cases.__path__))
    return sorted(name.replace("_", "-") for name in names if name != "__main__")


def module_name(slug: str) -> str:
    """Return the module of a case."""
    return f"{cases.__name__}.{slug.replace('-', '_')}"


def load(slug: str) -> Case:
    """Return the case; raise UnknownCase, which names the nearest."""
    if slug in slugs():
        module = importlib.import_module(module_name(slug))
        return replace(module.CASE, title=(module.__doc__ or "").splitlines()[0].removesuffix("."))
    if entry := catalogue().get(slug):
        if entry.repro.no_case:
            raise UnknownCase(f'"{slug}" is a known failure that has no case: {entry.repro.no_case}')
        if named := [each for each in slugs() if load(each).failure == slug]:
            raise UnknownCase(f'"{slug}" is a known failure with cases of other names: {", ".join(named)}.')
    nearest = difflib.get_close_matches(slug, slugs(), n=1, cutoff=0.0)[0]
    raise UnknownCase(f'case "{slug}" is unknown: did you mean {nearest}? `list` shows all.')


def entry_of(slug: str, case: Case) -> CatalogueEntry:
    """Return the catalogue's entry of a case."""
    return catalogue()[case.failure or slug]


def describe(slug: str, case: Case) -> str:
    """Return the case, its entry in the catalogue, and where it was seen, for a reader."""
    entry, number = entry_of(slug, case), case.number
    lines = [f"{slug}: {case.title}"]
    lines += [f"needs: {', '.join((case.needs, *case.requires))}; at most {case.timeout_seconds:.0f} s a variant"]
    lines += [case.difference(), *(f"signature: {each}" for each in case.signature)]
    if number:
        lines += [f"number: {number.name} > {number.broken_above:g}; control < {number.healthy_below:g}"]
    lines += [f"entry: {entry.slug}, in {', '.join(entry.phases)}"]
    lines += [f"cause: {' '.join(entry.cause.split())}", f"fix: {' '.join(entry.fix.split())}", *entry.links]
    for seen in entry.seen:
        versions = ", ".join(f"{name} {version}" for name, version in seen.versions.items())
        lines += [f"seen: {seen.date}, {seen.device}, {versions}: {' '.join(seen.result.split())}"]
    lines += [f"by hand: PYTHONPATH=. python -m {cases.__name__} {slug} broken"]
    return "\n".join(lines)
