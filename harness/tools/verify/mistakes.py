"""What senders do wrong with the tensors that fill one tensor of the engine: each mistake as what would be read of them
then, and the phrase that says so.

Each is one that a user reported, or one of the senders in docs/measurements/foreign_senders.md.
"""

import re
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache, partial
from itertools import chain, combinations
from math import nan, prod

import torch

from harness.tools.verify.values import Source
from harness.weights.tensor_view import NUMBER, without_numbers

EXPERT = re.compile(r"(.*\.experts\.\d+)\..*")
"""A tensor of an expert; the group is the expert's path."""
HALVES = {"first": 0, "second": 1}
KEPT = 2
"""How many changed tensors are kept while the engine's is put together in chunks."""

Shapes = Mapping[str, tuple[int, ...]]
Change = Callable[[torch.Tensor], torch.Tensor]
"""A checkpoint tensor, or elements of one -> as many elements of the same dtype."""
Reads = Mapping[str, Callable[[int, int], torch.Tensor]]
"""Name of a checkpoint tensor -> what gives its elements start to stop, as Source.elements does."""


@dataclass(frozen=True, slots=True)
class Instead:
    """A source of which some tensors are read in another way."""

    source: Source
    reads: Reads

    def elements(self, name: str, start: int, stop: int) -> torch.Tensor:
        read = self.reads.get(name)
        return read(start, stop) if read else self.source.elements(name, start, stop)


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
    for ordered in (sorted(names), sorted(sorted(names), key=lambda name: list(map(int, NUMBER.findall(name))))):
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


def left_out(
    moved: Sequence[str], of: int, shapes: Shapes, source: Source, older: Source
) -> Iterator[tuple[str, Reads]]:
    """Yield what may have kept the values of the checkpoint before; first all names together.

    moved: the names that have other values there. of: as sets_of() takes it.
    """
    sets = list(sets_of(moved, of))
    for members, subject in sets:
        yield f"{subject} kept the values of --was", read_from(older, zip(members, members, strict=True))
    for place, half in HALVES.items():
        for members, subject in sets:
            left = partial(_old_in_half, half, shapes, source, older)
            yield f"{subject} kept the values of --was in the {place} half", _read_whole(members, left)
    for members, subject in runs_of(moved):
        yield f"{subject} kept the values of --was", read_from(older, zip(members, members, strict=True))


def changed(members: Iterable[str], shapes: Shapes, source: Source) -> Iterator[tuple[str, Reads]]:
    """Yield what may become of tensors on their way, each with the phrase that follows their name."""
    for said, change in OF_ELEMENTS.items():
        yield f"arrived {said}", {name: partial(_changed_part, change, source, name) for name in members}
    for said, change in OF_TENSORS.items():
        yield f"arrived {said}", _read_whole(members, partial(_changed_whole, change, shapes, source))


def read_from(source: Source, instead: Iterable[tuple[str, str]]) -> Reads:
    """Return reads that give for the first of each pair of names what a source has by the second."""
    return {name: partial(source.elements, other) for name, other in instead}


def _read_whole(names: Iterable[str], left: Callable[[str], torch.Tensor]) -> Reads:
    """Return reads of what a mistake leaves of whole tensors. left: name -> that."""
    kept = lru_cache(KEPT)(left)
    return {name: partial(_part, kept, name) for name in names}


def _part(left: Callable[[str], torch.Tensor], name: str, start: int, stop: int) -> torch.Tensor:
    return left(name).reshape(-1)[start:stop]


def _changed_part(change: Change, source: Source, name: str, start: int, stop: int) -> torch.Tensor:
    return change(source.elements(name, start, stop))


def _changed_whole(change: Change, shapes: Shapes, source: Source, name: str) -> torch.Tensor:
    return change(_whole(source, name, shapes))


def _old_in_half(half: int, shapes: Shapes, source: Source, older: Source, name: str) -> torch.Tensor:
    return _mixed(half, _whole(source, name, shapes), _whole(older, name, shapes))


def _whole(source: Source, name: str, shapes: Shapes) -> torch.Tensor:
    """Return all of a checkpoint tensor, in its shape."""
    return source.elements(name, 0, prod(shapes[name])).view(shapes[name])


def _mixed(half: int, one: torch.Tensor, other: torch.Tensor) -> torch.Tensor:
    """Return a tensor with the first (0) or second (1) half of another's rows."""
    rows = len(one) // 2 if one.ndim else 0
    first, second = (one, other) if half else (other, one)
    return torch.cat([first[:rows], second[rows:]]) if rows else one


def _half_zero(half: int) -> Change:
    return lambda each: _mixed(half, each, torch.zeros_like(each))


def _of_floats(change: Change) -> Change:
    return lambda each: change(each).to(each.dtype) if each.is_floating_point() and each.numel() else each


def _of_norms(change: Change) -> Change:
    return lambda each: change(each) if each.ndim == 1 and each.is_floating_point() and each.itemsize > 1 else each


def _without_scale(each: torch.Tensor) -> torch.Tensor:
    """Scale a tensor so that its largest value is float8's, round it to float8, and forget the scale."""
    scale = each.float().abs().max() / torch.finfo(torch.float8_e4m3fn).max
    return (each.float() / scale).to(torch.float8_e4m3fn)


OF_ELEMENTS: Mapping[str, Change] = {
    "as zeros, or never": torch.zeros_like,
    "as ones, or never": torch.ones_like,
    "as NaN": _of_floats(lambda each: torch.full_like(each, nan)),
    "rounded to bfloat16": _of_floats(torch.Tensor.bfloat16),
    "rounded to float16": _of_floats(torch.Tensor.half),
    "rounded to float8_e4m3fn": _of_floats(lambda each: each.to(torch.float8_e4m3fn)),
}
"""What may become of each element, with the phrase that says so."""
OF_TENSORS: Mapping[str, Change] = {
    "transposed": lambda each: each.mT.contiguous() if each.ndim > 1 else each,
    "as float8 without its scale": _of_floats(_without_scale),
    **{f"in half: its {place} half is zero": _half_zero(half) for place, half in HALVES.items()},
    "greater by 1, as norms around zero are by those around one": _of_norms(lambda each: each + 1),
    "less by 1, as norms around zero are by those around one": _of_norms(lambda each: each - 1),
}
"""What may become of a whole tensor."""


def exchanged(names: Sequence[str], shapes: Shapes) -> Iterator[tuple[str, list[tuple[str, str]]]]:
    """Yield (to, from) of tensors that may be in each other's place, with the sentence that says so: those of two layers,
    such as gate_proj and up_proj, with their scales or without, and experts whose ranks were numbered backwards.
    """
    kinds = grouped(names)
    linears = grouped(sorted(names, key=lambda name: name.rpartition(".")[2]), _kind_of_linear)
    for parts in (linears, kinds) if len(linears) < len(kinds) else (kinds,):
        for first, second in combinations(parts.values(), 2):
            if [shapes[name] for name in first] == [shapes[name] for name in second]:
                each = ", in every expert" if ".experts." in first[0] else ""
                pairs = [*zip(first, second, strict=True), *zip(second, first, strict=True)]
                yield f"{first[0]} and {second[0]} are in each other's place{each}", pairs
    experts = _experts(names)
    for ranks in range(2, len(experts) + 1):
        size, rest = divmod(len(experts), ranks)
        if not rest:
            backwards = [each for start in range(len(experts), 0, -size) for each in experts[start - size : start]]
            pairs = [*zip(chain(*experts), chain(*backwards), strict=True)]
            yield f"the experts are those of {ranks} ranks in reversed order", pairs


def _experts(names: Sequence[str]) -> list[list[str]]:
    """Return the names of each expert, in one order; empty if these are not the tensors of experts alone."""
    found: dict[int, list[str]] = defaultdict(list)
    for name in sorted(names, key=without_numbers):
        number = NUMBER.search(name.partition(".experts")[2])
        if not number:
            return []
        found[int(number[0])].append(name)
    alike = len({tuple(map(without_numbers, each)) for each in found.values()}) == 1
    return [found[number] for number in sorted(found)] if alike else []
