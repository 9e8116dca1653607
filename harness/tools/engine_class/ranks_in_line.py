"""Ranks of a pipeline stage that need not be built: what they read differs from what their neighbours read in a number
alone.

If the parts that the first, the second and the last rank read lie on one line, so do those of the ranks between. A
tensor that breaks the line, such as an expert that is lost, is seen where a rank's place on it has no such tensor, or
one of another shape.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace

from harness.weights.fusing import FusingGroup
from harness.weights.tensor_view import NUMBER, TensorView
from harness.weights.traced.coverage import LoadCoverage, LoaderCopy


@dataclass(frozen=True, slots=True)
class _Copy:
    """One copy of the first rank, and how that of the next one differs."""

    copy: LoaderCopy
    numbers: tuple[int, ...]
    """What the numbers in the name grow by from rank to rank: those of experts."""
    elements: int
    """What the first element within the checkpoint tensor grows by."""


@dataclass(frozen=True, slots=True)
class RanksInLine:
    """The ranks of one stage, told by the first of them."""

    groups: Sequence[FusingGroup]
    """What was given to each."""
    first: LoadCoverage
    copies: tuple[_Copy, ...]

    @classmethod
    def of(
        cls, groups: Sequence[FusingGroup], first: LoadCoverage, second: LoadCoverage, last: LoadCoverage
    ) -> "RanksInLine | None":
        """Return the line through three ranks; None if there is none, or if it is not known what a name stands for."""
        views = _views(groups)
        if len(views) < sum(len(group.views) for group in groups):
            return None
        pairs = zip(_all_copies(first), _all_copies(second), strict=False)
        line = cls(groups, first, tuple(_step(one, other, views) for one, other in pairs))
        found = (first, second, last)
        return line if all(_is_same(line.at(each.rank - first.rank), each) for each in found) else None

    def at(self, place: int) -> LoadCoverage | None:
        """Return what the loader of the rank so many places behind the first does; None if a tensor there breaks the
        line.
        """
        views = _views(self.groups)
        number_of = {view.name: number for number, group in enumerate(self.groups) for view in group.views}
        copies: list[list[LoaderCopy]] = [[] for _ in self.groups]
        for each in self.copies:
            source, name = each.copy.source, _moved(each.copy.source.name, each.numbers, place)
            here, there = views[source.name], views.get(name)
            if there is None or _kind(there) != _kind(here):
                return None
            offset = there.offset + source.offset - here.offset + place * each.elements
            moved = replace(source, name=name, of=there.of, offset=offset)
            copies[number_of[name]].append(replace(each.copy, source=moved))
        known = {copy.source.name for members in copies for copy in members}
        known |= {*self.first.opaque, *(name for names in self.first.errors for name in names)}
        unknown = [name for name in views if name not in known]
        return replace(self.first, rank=self.first.rank + place, copies=copies, unknown=unknown)


def _views(groups: Sequence[FusingGroup]) -> dict[str, TensorView]:
    return {view.name: view for group in groups for view in group.views}


def _all_copies(coverage: LoadCoverage) -> list[LoaderCopy]:
    return [copy for copies in coverage.copies for copy in copies]


def _step(one: LoaderCopy, other: LoaderCopy, views: dict[str, TensorView]) -> _Copy:
    names = one.source.name, other.source.name
    numbers = zip(*(map(int, NUMBER.findall(name)) for name in names), strict=False)
    begins = [each.source.offset - views[each.source.name].offset for each in (one, other)]
    return _Copy(one, tuple(after - before for before, after in numbers), begins[1] - begins[0])


def _moved(name: str, numbers: Sequence[int], place: int) -> str:
    if not any(numbers):
        return name
    steps = iter(numbers)
    return NUMBER.sub(lambda found: str(int(found[0]) + place * next(steps, 0)), name)


def _kind(view: TensorView) -> tuple[object, ...]:
    return view.dtype, view.shape, view.stride


def _is_same(one: LoadCoverage | None, other: LoadCoverage) -> bool:
    return one is not None and replace(one, unknown=sorted(one.unknown)) == replace(
        other, unknown=sorted(other.unknown)
    )
