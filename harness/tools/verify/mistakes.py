"""What senders do wrong with the tensors that fill one tensor of the engine: each mistake as a source that reads what it
would have left, and the phrase that says so.
"""

import re
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import chain, combinations, islice
from math import prod

import torch

from harness.tools.verify.values import Source
from harness.weights.tensor_view import NUMBER, without_numbers
from harness.weights.traced.model_state import INTEGER

EXPERT = re.compile(r"(.*\.experts\.\d+)\..*")
"""A tensor of an expert; the group is the expert's path."""
PAIRS = 2000
"""How many pairs of experts are tried at most, each with the two exchanged."""

Shapes = Mapping[str, tuple[int, ...]]
Change = Callable[[torch.Tensor], torch.Tensor]
"""The whole of a checkpoint tensor -> as many elements of the same dtype."""


@dataclass(frozen=True, slots=True)
class Changed:
    """A source whose tensors of some names were changed on their way."""

    source: Source
    names: Collection[str]
    shapes: Shapes
    change: Change

    def elements(self, name: str, start: int, stop: int) -> torch.Tensor:
        if name not in self.names:
            return self.source.elements(name, start, stop)
        return self.change(whole(self.source, name, self.shapes)).reshape(-1)[start:stop]


@dataclass(frozen=True, slots=True)
class Exchanged:
    """A source in which tensors are in the places of others."""

    source: Source
    instead: Mapping[str, str]

    def elements(self, name: str, start: int, stop: int) -> torch.Tensor:
        return self.source.elements(self.instead.get(name, name), start, stop)


@dataclass(frozen=True, slots=True)
class PartlyOld:
    """A source in which some tensors, or parts of their rows, are those of the checkpoint before."""

    source: Source
    older: Source
    names: Collection[str]
    shapes: Shapes
    half: int | None = None
    """0 or 1: only the first or the second half of their rows."""

    def elements(self, name: str, start: int, stop: int) -> torch.Tensor:
        if name not in self.names:
            return self.source.elements(name, start, stop)
        if self.half is None:
            return self.older.elements(name, start, stop)
        mixed = whole(self.source, name, self.shapes).clone()
        _half(mixed, self.half).copy_(_half(whole(self.older, name, self.shapes), self.half))
        return mixed.reshape(-1)[start:stop]


def whole(source: Source, name: str, shapes: Shapes) -> torch.Tensor:
    """Return all of a checkpoint tensor, in its shape."""
    return source.elements(name, 0, prod(shapes[name])).view(shapes[name])


def sets_of(names: Sequence[str], of: int) -> Iterator[tuple[frozenset[str], str]]:
    """Yield each set of names that a single mistake may have hit, with what to call it: all names, those of a kind,
    those of one expert, a weight with its scales, a name alone.

    of: how many fill the tensor; so many together are called "it".
    """
    seen = set()
    for key in (lambda _: "", without_numbers, _kind_of_linear, partial(EXPERT.sub, r"\1"), _linear_of, str):
        for members in grouped(names, key).values():
            if (found := frozenset(members)) not in seen:
                seen.add(found)
                yield found, "it" if len(members) == of else called(members)


def runs_of(names: Sequence[str]) -> Iterator[tuple[frozenset[str], str]]:
    """Yield the sets of names that an update leaves out if it ends in the middle, or lacks a file: all before a name, or
    from it on, in the order of their text and in that of their numbers.
    """
    for ordered in (sorted(names), sorted(sorted(names), key=_numbers_in)):
        for cut in range(1, len(ordered)):
            for members in (ordered[cut:], ordered[:cut]):
                yield frozenset(members), f"all from {members[0]} to {members[-1]}"


def called(names: Sequence[str]) -> str:
    return " and ".join(names) if len(names) < 3 else f"{names[0]} and {len(names) - 1} more like it"


def grouped(names: Iterable[str], key: Callable[[str], str] = without_numbers) -> dict[str, list[str]]:
    """Return the names by what they have in common; by default all but numbers, as the gate_proj of all experts has."""
    found: dict[str, list[str]] = {}
    for name in names:
        found.setdefault(key(name), []).append(name)
    return found


def _linear_of(name: str) -> str:
    """Return the path of a tensor's linear layer, which a weight and its scales have in common."""
    return name.rpartition(".")[0]


def _kind_of_linear(name: str) -> str:
    return without_numbers(_linear_of(name))


def changes() -> Iterator[tuple[str, Change]]:
    """Yield what may become of a tensor on its way, each with the phrase that follows its name."""
    yield "arrived as zeros, or never", torch.zeros_like
    yield "arrived as ones, or never", torch.ones_like
    yield "arrived transposed", _transposed
    for dtype in (torch.bfloat16, torch.float16, torch.float8_e4m3fn):
        yield f"arrived rounded to {str(dtype).removeprefix('torch.')}", _rounded(dtype)
    yield "arrived as float8 without its scale", _without_scale
    yield "arrived cut to bfloat16, not rounded to it", _cut_to_bfloat16
    yield "arrived as NaN", lambda each: torch.full_like(each, torch.nan) if each.is_floating_point() else each
    for element, place in ((0, "first"), (-1, "last")):
        yield f"arrived with NaN as its {place} element", _with_nan(element)
    for half, place in ((0, "first"), (1, "second")):
        yield f"arrived in half: its {place} half is zero", _with_zeros(half)
        yield f"arrived in half: its {place} half is the other one again", _with_other_half(half)
    for more, said in ((1, "greater"), (-1, "less")):
        yield f"arrived {said} by 1, as norms around zero are by those around one", _moved_by(more)


def exchanges(names: Sequence[str], shapes: Shapes) -> Iterator[tuple[str, dict[str, str]]]:
    """Yield tensors that may be in each other's place, with the sentence that says so: those of two layers, such as
    gate_proj and up_proj, with their scales or without, and all experts in another order.
    """
    kinds = grouped(names)
    linears = grouped(sorted(names, key=lambda name: name.rpartition(".")[2]), _kind_of_linear)
    for parts in (linears, kinds) if len(linears) < len(kinds) else (kinds,):
        for first, second in combinations(parts.values(), 2):
            if [shapes[name] for name in first] == [shapes[name] for name in second]:
                each = ", in every expert" if ".experts." in first[0] else ""
                yield f"{first[0]} and {second[0]} are in each other's place{each}", _swap(first, second)
    experts = _by_number(names)
    numbers = list(experts)
    for order, said in _expert_orders(numbers):
        yield (
            f"the experts are {said}",
            {
                name: other
                for to, source in zip(numbers, order, strict=True)
                for name, other in zip(experts[to], experts[source], strict=True)
            },
        )


def swaps_in_an_expert(names: Sequence[str], shapes: Shapes) -> Iterator[tuple[str, dict[str, str]]]:
    """Yield two tensors of one expert, such as its gate_proj and up_proj, that may be in each other's place."""
    for own in _by_number(names).values():
        for one, other in combinations(own, 2):
            if shapes[one] == shapes[other]:
                yield f"{one} and {other} are in each other's place", _swap([one], [other])


def expert_pairs(names: Sequence[str]) -> Iterator[tuple[str, dict[str, str]]]:
    """Yield pairs of experts that may have been swapped, or of which one may have been sent in both places."""
    experts = _by_number(names)
    for one, other in islice(combinations(experts, 2), PAIRS):
        yield f"experts {one} and {other} are in each other's place", _swap(experts[one], experts[other])
        for twice, lost in ((one, other), (other, one)):
            yield (
                f"expert {twice} is in the place of expert {lost} too",
                dict(zip(experts[lost], experts[twice], strict=True)),
            )


def _expert_orders(numbers: Sequence[int]) -> Iterator[tuple[list[int], str]]:
    """Yield which expert may be in the place of each, with the phrase that says so. Ranks: of expert parallelism."""
    yield sorted(numbers, key=str), "in the order of their numbers as text (0, 1, 10, 11, 2)"
    for ranks in range(2, len(numbers) + 1):
        size, rest = divmod(len(numbers), ranks)
        if rest:
            continue
        blocks = [list(numbers[start : start + size]) for start in range(0, len(numbers), size)]
        places = f"{size} place{'s' * (size > 1)}"
        for order, said in (
            (blocks[::-1], f"those of {ranks} ranks in reversed order"),
            (blocks[1:] + blocks[:1], f"{places} too early"),
            (blocks[-1:] + blocks[:-1], f"{places} too late"),
            ([list(numbers[rank::ranks]) for rank in range(ranks)], f"dealt out to {ranks} ranks in turn"),
            (blocks[:1] * ranks, f"those of the first of {ranks} ranks on each of them"),
        ):
            yield list(chain.from_iterable(order)), said


def _by_number(names: Sequence[str]) -> dict[int, list[str]]:
    """Return the names of each expert, in one order; empty if these are not the tensors of several experts."""
    found: dict[int, list[str]] = {}
    for name in sorted(names, key=without_numbers):
        if ".experts." not in name:
            return {}
        number = NUMBER.search(name.partition(".experts")[2])
        if not number:
            return {}
        found.setdefault(int(number[0]), []).append(name)
    alike = len({tuple(map(without_numbers, each)) for each in found.values()}) == 1
    return dict(sorted(found.items())) if alike and len(found) > 1 else {}


def _swap(first: Sequence[str], second: Sequence[str]) -> dict[str, str]:
    return dict(zip([*first, *second], [*second, *first], strict=True))


def _transposed(each: torch.Tensor) -> torch.Tensor:
    return bits_of(each).mT.contiguous().view(each.dtype) if each.ndim > 1 else each


def _rounded(dtype: torch.dtype) -> Change:
    return lambda each: each.to(dtype).to(each.dtype) if each.is_floating_point() else each


def _numbers_in(name: str) -> list[int]:
    return [int(each) for each in NUMBER.findall(name)]


def _without_scale(each: torch.Tensor) -> torch.Tensor:
    """Scale a tensor so that its largest value is float8's, round it to float8, and forget the scale."""
    if not each.is_floating_point() or each.itemsize == 1 or not each.numel():
        return each
    largest = torch.finfo(torch.float8_e4m3fn).max
    return (each.float() / (each.float().abs().max() / largest)).to(torch.float8_e4m3fn).to(each.dtype)


def _moved_by(more: int) -> Change:
    return lambda each: each + more if each.ndim == 1 and each.is_floating_point() and each.itemsize > 1 else each


def _cut_to_bfloat16(each: torch.Tensor) -> torch.Tensor:
    return (each.view(torch.int32) & -65536).view(torch.float32) if each.dtype == torch.float32 else each


def _with_nan(element: int) -> Change:
    def change(each: torch.Tensor) -> torch.Tensor:
        found = each.clone()
        if each.is_floating_point() and each.numel():
            found.view(-1)[element] = torch.nan
        return found

    return change


def _with_zeros(half: int) -> Change:
    def change(each: torch.Tensor) -> torch.Tensor:
        found = each.clone()
        _half(found, half).zero_()
        return found

    return change


def _with_other_half(half: int) -> Change:
    def change(each: torch.Tensor) -> torch.Tensor:
        found = each.clone()
        if each.ndim and len(each) % 2 == 0:
            _half(found, half).copy_(_half(each, 1 - half))
        return found

    return change


def _half(each: torch.Tensor, half: int) -> torch.Tensor:
    """Return the first or second half of a tensor's rows; nothing of one without rows."""
    rows = len(each) // 2 if each.ndim else 0
    flat = each if each.ndim else each.view(1)
    return (flat[:rows] if half == 0 else flat[rows:]) if rows else flat[:0]


def bits_of(each: torch.Tensor) -> torch.Tensor:
    """Return a tensor as integers, as 8-bit floats can be moved and not much else."""
    return each.view(INTEGER[each.itemsize])
