"""Cases: known failures that a minimal program reproduces, each with a control run that passes.

A case is a function in cases/ below the decorator @Case(...); its name with hyphens is the case's name. `python -m
harness.tools.repro.cases NAME broken` fails in the known way, `... healthy` passes. A program that cannot run here
raises UnsupportedEnvironment, which is printed with exit code 125.
"""

import difflib
import importlib
import pkgutil
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import cache
from typing import Literal

from harness.tools.diagnose.entries import CatalogueEntry, catalogue
from harness.tools.repro import cases

ReproClass = Literal["cpu", "one_gpu", "several_gpus", "hosts"]
Variant = Literal["broken", "healthy"]
Program = Callable[[bool], None]
GPUS: dict[ReproClass, int] = {"cpu": 0, "one_gpu": 1, "several_gpus": 2, "hosts": 0}
"""GPUs that each class takes; hosts are emulated in namespaces, without GPUs."""
_registered: "dict[str, Case]" = {}


class UnknownCase(ValueError):
    """No case has that name."""


@dataclass(frozen=True, kw_only=True)
class Case:
    """One failure that can be reproduced, and how it is recognized: the decorator of its program."""

    broken: str  # what the broken variant does in the one thing in which the two differ
    healthy: str
    needs: ReproClass = "cpu"
    engine: bool = (
        False  # starts real SGLang engines: on the GPU if there is one, else in CPU mode (half a minute each)
    )
    new_python: bool = False
    """Whether each variant must run in a new Python, and SGLang must spawn its engine's processes: where the failure is
    about imports or the start of a process, or where the program itself only starts other programs. Otherwise they may
    be forked from a process that has done the imports."""
    requires: tuple[str, ...] = ()  # packages, as requirement specifiers: "sglang>=0.5.21"
    release: str = ""
    """The release of SGLang that the variants run in, if another one is installed. Its first use installs it, which
    needs a package index."""
    signature: tuple[str, ...]
    """Regular expressions: the broken variant's output must match all of them, the control's none."""
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
        return 240.0 if not self.engine else 420.0 if self.needs == "cpu" else 150.0

    @property
    def entry(self) -> CatalogueEntry:
        """The catalogue's entry."""
        return catalogue()[self.failure]

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


def find(name: str) -> list[Case]:
    """Return the case of that name, or all cases of a failure of the catalogue or of an issue's number.

    Raise UnknownCase, which says what is nearest.
    """
    cases = all_cases()
    if name in cases:
        return [cases[name]]
    number = name.partition("#issuecomment")[0].rstrip("/").rpartition("/")[2].removeprefix("#")
    if number.isdigit():
        failures = [entry for entry in catalogue().values() if any(each.endswith(f"/{number}") for each in entry.links)]
        if not failures:
            raise UnknownCase(f"the catalogue links no issue {number}; `launch/repro.py list` shows all cases.")
    else:
        failures = [catalogue()[name]] if name in catalogue() else []
    if not failures:
        nearest = difflib.get_close_matches(name, cases, n=1, cutoff=0.0)[0]
        raise UnknownCase(f'case "{name}" is unknown: did you mean {nearest}? `launch/repro.py list` shows all cases.')
    slugs = [entry.slug for entry in failures]
    if found := [case for case in cases.values() if case.failure in slugs]:
        return found
    raise UnknownCase(f"{' and '.join(slugs)} is a known failure without a case: {failures[0].no_case}")


def describe(case: Case) -> str:
    """Return the case, its entry in the catalogue, and where it was seen, for a reader."""
    entry = case.entry
    lines = [f"{case.slug}: {case.title}"]
    lines += [f"needs: {', '.join((case.needs, *case.requires))}; at most {case.timeout_seconds:.0f} s a variant"]
    if case.release:
        lines += [f"installs: sglang {case.release}, so it needs a package index the first time"]
    lines += [case.difference(), *(f"signature: {each}" for each in case.signature)]
    lines += [f"catalogue: {entry.slug}"]
    lines += [f"cause: {' '.join(entry.cause.split())}", f"fix: {' '.join(entry.fix.split())}", *entry.links]
    for seen in entry.seen:
        versions = ", ".join(f"{name} {version}" for name, version in seen.versions.items())
        lines += [f"seen: {seen.date}, {seen.device}, {versions}: {' '.join(seen.result.split())}"]
    program = case.program.__code__
    lines += [f"program: {case.program.__module__.replace('.', '/')}.py, line {program.co_firstlineno}"]
    python = f"PYTHON-OF-SGLANG-{case.release}" if case.release else "python"
    lines += [f"by hand: PYTHONPATH=. {python} -m {cases.__name__} {case.slug} broken"]
    return "\n".join(lines)
