"""Trace groups that a loader treats alike, such as those of equal layers, in one call: each call of SGLang's loader is
slow.
"""

from collections import Counter, defaultdict
from collections.abc import Hashable, Iterator, Sequence
from dataclasses import dataclass, field

from harness.weights.fusing import FusingGroup
from harness.weights.tensor_view import TensorView, without_numbers
from harness.weights.traced.loader_trace import Copy, GroupTrace

CALL_BYTES = 1 << 36
"""How much is given to one call of a loader. The memory is never touched, but must be a range of addresses."""


@dataclass(slots=True)
class AlikeGroups:
    """What the loader did with one group of each kind alone, by which groups that were loaded together are judged.

    Two groups are of one kind if the same tensors are sent for them under names that differ in numbers alone. A group
    that was loaded together with others is believed if the loader did with it what it does with one of its kind alone.
    So a loader that waits for a tensor of another group is still seen.
    """

    groups: Sequence[FusingGroup]
    _kinds: list[Hashable] = field(init=False)
    _alone: dict[Hashable, set[Hashable]] = field(init=False)
    """Kind -> what was seen of groups of it alone."""

    def __post_init__(self) -> None:
        self._kinds = [_kind(group) for group in self.groups]
        self._alone = defaultdict(set)

    def first_of_each_kind(self) -> list[int]:
        """Return the number of the first group of each kind, and of groups that have a name or tensor in common with
        others.
        """
        names = Counter(name for group in self.groups for name in _names(group))
        shared = [number for number, group in enumerate(self.groups) if any(names[name] > 1 for name in _names(group))]
        firsts = {kind: number for number, kind in reversed(list(enumerate(self._kinds)))}
        return sorted({*firsts.values(), *shared})

    def saw_alone(self, number: int, traced: GroupTrace) -> None:
        """Note what the loader did with a group alone. Only a group that was traced whole may stand for others."""
        if _is_plain(traced):
            self._alone[self._kinds[number]].add(_pattern(traced.copies))

    def calls(self, numbers: Sequence[int]) -> Iterator[list[int]]:
        """Yield the numbers of groups to load in one call each, of kinds that may be loaded together."""
        call, nbytes = list[int](), 0
        for number in numbers:
            if not self._alone[self._kinds[number]]:
                continue
            size = sum(view.nbytes for view in self.groups[number].views)
            if call and nbytes + size > CALL_BYTES:
                yield call
                call, nbytes = [], 0
            call.append(number)
            nbytes += size
        if call:
            yield call

    def split(self, numbers: Sequence[int], traced: GroupTrace) -> dict[int, GroupTrace]:
        """Return the traces of those of the groups loaded in one call that are believed."""
        if not _is_plain(traced):
            return {}
        number_of = {view.name: number for number in numbers for view in self.groups[number].views}
        copies: dict[int, list[Copy]] = {number: [] for number in numbers}
        for copy in traced.copies:
            copies[number_of[copy.source.name]].append(copy)
        return {
            number: GroupTrace(self.groups[number].views, copies=each, used={copy.source.name for copy in each})
            for number, each in copies.items()
            if _pattern(each) in self._alone[self._kinds[number]]
        }


def _is_plain(traced: GroupTrace) -> bool:
    return traced.only_copies and not (traced.zeros or traced.computed or traced.computed_with)


def _names(group: FusingGroup) -> Iterator[str]:
    yield from (view.name for view in group.views)
    yield from (f"of {of}" for of in dict.fromkeys(view.of for view in group.views))


def _kind(group: FusingGroup) -> Hashable:
    return tuple((without_numbers(view.of), view.dtype, *_read(view)) for view in group.views)


def _pattern(copies: Sequence[Copy]) -> Hashable:
    return tuple((*_read(copy.source), copy.target.dtype, copy.target.shape) for copy in copies)


def _read(view: TensorView) -> tuple[Hashable, ...]:
    return without_numbers(view.name), view.shape, view.stride, view.offset
