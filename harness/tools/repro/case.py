"""What one reproducible failure is: where it can run, how its two variants differ, and what shows that it happened.

A case is a module of cases/ with CASE and a program of two variants: `python -m harness.tools.repro.cases.NAME broken` fails in
the known way, `... healthy` is its control, which differs in one thing and passes.
"""

import difflib
import importlib
import pkgutil
import re
from collections.abc import Collection
from dataclasses import dataclass
from typing import Literal

from harness.tools.diagnose.entries import Entry, ReproClass, catalogue
from harness.tools.repro import cases

Variant = Literal["broken", "healthy"]
GPUS: dict[ReproClass, int] = {"cpu": 0, "one_gpu": 1, "several_gpus": 2, "hosts": 0}
"""How many each class takes; hosts are emulated in namespaces, without GPUs."""


ALL = "`list` shows all."


class UnknownCase(ValueError):
    """No case has that name."""


@dataclass(frozen=True, kw_only=True)
class Number:
    """What a silent failure is known by: a variant prints `NAME: VALUE`, and the last one printed counts."""

    name: str
    broken_above: float
    """Larger: the failure is there."""
    healthy_below: float
    """Smaller: it is not; a NaN is neither. Between the two nothing is said."""

    def read(self, output: str) -> float | None:
        """None where no number was printed."""
        found = re.findall(rf"^.*\b{re.escape(self.name)}: (\S+)$", output, re.MULTILINE)
        return float(found[-1]) if found else None


@dataclass(frozen=True, kw_only=True)
class Case:
    """One failure that can be had on purpose."""

    title: str
    needs: ReproClass
    broken: str
    """What the broken variant does in the one thing in which the two differ."""
    healthy: str
    """What the healthy control does there."""
    signature: tuple[str, ...] = ()
    """Regular expressions, all of which the broken variant's output must show, and none of which the control's may."""
    number: Number | None = None
    """Measured by both variants; without a signature the number alone decides."""
    failure: str = ""
    """Slug of the catalogue's entry; empty where it is the case's own. What a case needs stands here alone."""
    engine: bool = False
    """It starts real SGLang engines, which takes half a minute each in CPU mode."""
    on_gpu: bool = False
    """Of class cpu, and worth a run on a GPU too, where other kernels run: it is then one of class one_gpu as well."""
    seconds: float = 60.0
    """After which a variant is ended; one that has shown its signature by then has failed in the known way."""
    requires: tuple[str, ...] = ()
    """Packages without which it means nothing, as requirement specifiers: "sglang>=0.5.21"."""

    def __post_init__(self) -> None:
        if not self.signature and self.number is None:
            raise ValueError(
                f'"{self.title}" has neither signature nor number, so nothing could show that it happened.'
            )

    def is_of(self, classes: Collection[ReproClass]) -> bool:
        """Whether it is a case of one of these classes."""
        return self.needs in classes or (self.on_gpu and "one_gpu" in classes)

    def gpus(self, there: int) -> int:
        """How many it takes of those that are there: an engine takes a GPU where there is one."""
        return GPUS[self.needs] or min(int(self.engine), there)


def slugs() -> list[str]:
    """Names of all cases, in alphabetical order."""
    return sorted(module.name.replace("_", "-") for module in pkgutil.iter_modules(cases.__path__))


def module_name(slug: str) -> str:
    """The module of a case, for `python -m`."""
    return f"{cases.__name__}.{slug.replace('-', '_')}"


def load(slug: str) -> Case:
    """Raises UnknownCase, naming the nearest."""
    known = slugs()
    if slug not in known:
        nearest = difflib.get_close_matches(slug, known, n=1, cutoff=0.0)[0]
        raise UnknownCase(_why_there_is_none(slug) or f'case "{slug}" is unknown: did you mean {nearest}? {ALL}')
    case: Case = importlib.import_module(module_name(slug)).CASE
    return case


def entry_of(slug: str, case: Case) -> Entry:
    """The catalogue's entry of which it is a case."""
    return catalogue()[case.failure or slug]


def _why_there_is_none(slug: str) -> str:
    """Of an entry of the catalogue that cannot be had here; empty for what is no entry, or has cases of other names."""
    entry = catalogue().get(slug)
    if entry and entry.repro.no_case:
        return f'"{slug}" is a known failure that has no case: {entry.repro.no_case}'
    named = [each for each in slugs() if load(each).failure == slug] if entry else []
    return f'"{slug}" is a known failure with cases of other names: {", ".join(named)}.' if named else ""
