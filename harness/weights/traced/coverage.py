"""What the loader of one rank does with what is sent, as a trainer needs to know it."""

import itertools
from collections import Counter, defaultdict
from collections.abc import Collection, Sequence
from dataclasses import dataclass, field

import torch

from harness.weights.tensor_view import NUMBER, TensorView, without_numbers
from harness.weights.zero_padding import ModelSizes


@dataclass(frozen=True, slots=True)
class LoaderCopy:
    """One copy that a scheduler's loader would make, as the trainer needs to know it."""

    source: TensorView
    """What it reads of one of the tensors that are sent."""
    into: str
    """The engine's own tensor that it fills, at least in part; "" if the copy goes into none of them."""
    held: torch.dtype
    """The dtype of that tensor."""


@dataclass(kw_only=True, slots=True)
class LoadCoverage:
    """What the load_weights of one scheduler does with each group of tensors, for the trainer."""

    rank: int
    """The engine rank of the scheduler."""
    dtype: torch.dtype | None = None
    """The dtype of most elements of the engine's parameters."""
    copies: list[list[LoaderCopy]] = field(default_factory=list)
    """The copies of each group."""
    unknown: list[str] = field(default_factory=list)
    """Checkpoint names that the loader ignores."""
    errors: dict[tuple[str, ...], str] = field(default_factory=dict)
    """Checkpoint name, or names that only together are refused -> what the loader raised."""
    aimed: dict[str, str] = field(default_factory=dict)
    """Checkpoint name that the loader refuses -> the engine's tensor that it was about to fill, where that is seen."""
    opaque: list[str] = field(default_factory=list)
    """Checkpoint names that arrive in a way that cannot be followed: only loading them again shows whether they did."""
    computing: list[str] = field(default_factory=list)
    """Names of tensors of the trainer, as sent, that the loader does more with than copy: those to load again."""
    padded: dict[int, dict[str, int]] = field(default_factory=dict)
    """Number of a group -> the engine's tensors that its load makes zero in part -> how many of their elements."""
    sizes: ModelSizes = field(default_factory=ModelSizes)
    """The sizes in the config of the engine's model, which may explain these zeros."""
    derives: bool = False
    """The loader ends with post_load_weights, which derives tensors from what was copied."""
    not_renewed: list[str] = field(default_factory=list)
    """The engine's tensors that its first load derived of weights, and that a load does not derive again."""
    derived_over: list[str] = field(default_factory=list)
    """Those of `computing` that post_load_weights changes in place: only both together can be done again."""
    missing: dict[str, tuple[int, int]] = field(default_factory=dict)
    """The engine's parameter -> (elements that nothing fills, all elements), less those that a refused tensor would
    fill."""

    only_once: str = ""
    """Why the loader cannot load a second time after it has loaded once; "" if it can."""
    overwritten: dict[str, tuple[str, str]] = field(default_factory=dict)
    """The engine's tensor -> the first two checkpoint names that fill the same elements of it; the second one stays."""

    @property
    def filled(self) -> dict[str, list[str]]:
        """The engine's own names of tensors -> checkpoint names that fill them, at least in part."""
        found: dict[str, dict[str, None]] = {}
        for copy in itertools.chain(*self.copies):
            found.setdefault(copy.into, {})[copy.source.name] = None
        return {name: list(names) for name, names in found.items()}


def excuse(
    missing: dict[str, tuple[int, int]], refused: Collection[str], copies: Sequence[Sequence[LoaderCopy]]
) -> None:
    """Subtract from what is missing what the refused tensors would fill if they fitted.

    That is what tensors fill whose names differ from theirs in numbers alone, such as those of another layer. Where
    there are none, nothing is said of the parameter of the same name, or of those of the module that are not filled.
    """
    fills: dict[str, dict[str, Counter[str]]] = defaultdict(lambda: defaultdict(Counter))
    for copy in itertools.chain(*copies):
        fills[without_numbers(copy.source.name)][copy.source.name][copy.into] += copy.source.numel
    for name in refused:
        alike = fills.get(without_numbers(name), {})
        due = {into: count for each in alike.values() for into, count in each.items()}
        numbers = NUMBER.findall(name)
        places = {without_numbers(into): count for into, count in due.items()}
        module = name.rpartition(".")[0]
        for into, (lost, elements) in list(missing.items()):
            numbered = NUMBER.findall(into)
            if numbered == numbers[: len(numbered)] and (count := places.get(without_numbers(into), 0)):
                missing[into] = max(0, lost - count), elements
            elif lost and not due and (into == name or (name not in missing and into.startswith(f"{module}."))):
                del missing[into]
