"""Cases: known failures that a minimal program reproduces, each beside a control run that passes.

A case is a function of cases/ below @Case(...), its name with hyphens the slug. `python -m harness.tools.repro.cases SLUG broken`
fails in the known way, `... healthy` passes. A program that cannot run here raises UnsupportedEnvironment (printed after
CANNOT, exit code 125); one whose failure this version cannot have prints a line that begins with ABSENT, and returns.
"""

import difflib
import importlib
import pkgutil
import re
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, replace
from functools import cache
from typing import Literal

from harness.tools.diagnose.entries import CatalogueEntry, ReproClass, catalogue
from harness.tools.repro import cases

Variant = Literal["broken", "healthy"]
Program = Callable[[bool], None]
GPUS: dict[ReproClass, int] = {"cpu": 0, "one_gpu": 1, "several_gpus": 2, "hosts": 0}
"""GPUs that each class takes; hosts are emulated in namespaces, without GPUs."""
CANNOT = "cannot run here: "
ABSENT = "not present in this version: "
_registered: "dict[str, Case]" = {}


class UnknownCase(ValueError):
    """No case has that name."""


@dataclass(frozen=True, kw_only=True)
class Number:
    """The measure of a silent failure: a variant prints `NAME: VALUE`, and the last one printed counts."""

    name: str
    broken_above: float  # larger values show the failure
    healthy_below: float  # smaller values show its absence; a NaN, or a value between the two, shows neither

    def read(self, output: str) -> float:
        """Return the last number that was printed, NaN without one."""
        found = re.findall(rf"^.*\b{re.escape(self.name)}: (\S+)$", output, re.MULTILINE)
        return float(found[-1]) if found else float("nan")


@dataclass(frozen=True, kw_only=True)
class Case:
    """One failure that can be reproduced, and how it is recognized: the decorator of its program."""

    broken: str  # what the broken variant does in the one thing in which the two differ
    healthy: str
    needs: ReproClass = "cpu"
    engine: bool = False  # starts real SGLang engines, which takes half a minute each in CPU mode
    on_gpu: bool = False  # of class cpu, but worth a run on a GPU too, where other kernels run
    requires: tuple[str, ...] = ()  # packages, as requirement specifiers: "sglang>=0.5.21"
    signature: tuple[str, ...] = ()
    """Regular expressions: the broken variant's output must match all of them, the control's none."""
    number: Number | None = None
    """Printed by both variants; without a signature the number alone decides."""
    failure: str = ""
    """Slug of the catalogue's entry; the case's own by default."""
    slug: str = ""
    title: str = ""
    """The first line of the program's docstring."""
    program: Program = print

    def __call__(self, program: Program) -> Program:
        """Register the case of this program."""
        slug, title = program.__name__.replace("_", "-"), (program.__doc__ or "").splitlines()[0].removesuffix(".")
        _registered[slug] = replace(self, slug=slug, title=title, program=program, failure=self.failure or slug)
        return program

    @property
    def timeout_seconds(self) -> float:
        """The limit of a variant."""
        return 120.0 if not self.engine else 420.0 if self.needs == "cpu" else 150.0

    @property
    def entry(self) -> CatalogueEntry:
        """The catalogue's entry."""
        return catalogue()[self.failure]

    def is_of(self, classes: Collection[ReproClass]) -> bool:
        """Return whether this is a case of one of these classes."""
        return self.needs in classes or (self.on_gpu and "one_gpu" in classes)

    def difference(self) -> str:
        """Return the one thing in which the two variants differ."""
        return f"differs in: {self.broken} (broken) | {self.healthy} (healthy)"


@cache
def all_cases() -> Mapping[str, Case]:
    """Return the cases of all modules of cases/ by slug, in alphabetical order."""
    for module in pkgutil.iter_modules(cases.__path__):
        if module.name != "__main__":
            importlib.import_module(f"{cases.__name__}.{module.name}")
    return dict(sorted(_registered.items()))


def load(slug: str) -> Case:
    """Return the case; raise UnknownCase, which names the nearest."""
    if found := all_cases().get(slug):
        return found
    if entry := catalogue().get(slug):
        named = ", ".join(name for name, case in all_cases().items() if case.failure == slug)
        known = f"with cases of other names: {named}" if named else f"that has no case: {entry.repro.no_case}"
        raise UnknownCase(f'"{slug}" is a known failure {known}')
    nearest = difflib.get_close_matches(slug, all_cases(), n=1, cutoff=0.0)[0]
    raise UnknownCase(f'case "{slug}" is unknown: did you mean {nearest}? `list` shows all.')


def describe(case: Case) -> str:
    """Return the case, its entry in the catalogue, and where it was seen, for a reader."""
    entry, number = case.entry, case.number
    lines = [f"{case.slug}: {case.title}"]
    lines += [f"needs: {', '.join((case.needs, *case.requires))}; at most {case.timeout_seconds:.0f} s a variant"]
    lines += [case.difference(), *(f"signature: {each}" for each in case.signature)]
    if number:
        lines += [f"number: {number.name} > {number.broken_above:g}; control < {number.healthy_below:g}"]
    lines += [f"entry: {entry.slug}, in {', '.join(entry.phases)}"]
    lines += [f"cause: {' '.join(entry.cause.split())}", f"fix: {' '.join(entry.fix.split())}", *entry.links]
    for seen in entry.seen:
        versions = ", ".join(f"{name} {version}" for name, version in seen.versions.items())
        lines += [f"seen: {seen.date}, {seen.device}, {versions}: {' '.join(seen.result.split())}"]
    program = case.program.__code__
    lines += [f"program: {case.program.__module__.replace('.', '/')}.py, line {program.co_firstlineno}"]
    lines += [f"by hand: PYTHONPATH=. python -m {cases.__name__} {case.slug} broken"]
    return "\n".join(lines)
