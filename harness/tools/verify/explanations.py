"""Why a tensor of the engine differs: the mistakes that senders make, each tried by hashing what it would have left.

A hash says nothing about what it is of. So an explanation is what gives exactly the server's hash, and where nothing
does, the cause is unknown.
"""

import time
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import ExitStack, closing
from dataclasses import dataclass, replace
from functools import partial
from itertools import chain

import torch

from harness.runtime.ranks import runs
from harness.tools.engine_class.checkpoint_headers import Stored
from harness.tools.engine_class.held_tensors import Place
from harness.tools.verify.comparison import Compared, Made
from harness.tools.verify.mistakes import (
    Changed,
    Exchanged,
    PartlyOld,
    bits_of,
    changes,
    exchanges,
    expert_pairs,
    runs_of,
    sets_of,
    swaps_in_an_expert,
    whole,
)
from harness.tools.verify.values import CheckpointReader, Recipe, Source, digest
from harness.weights.tensor_view import TensorView

TENSOR_SECONDS, ALL_SECONDS = 60.0, 600.0
"""How long explanations of one tensor, and of all together, are tried."""
CONSTANT = "<constant>"
"""Stands for elements of one value; no checkpoint has such a name."""


@dataclass(frozen=True, slots=True)
class Candidate:
    """What a tensor may be made of instead, and the phrase that then says why it differs."""

    why: str
    recipe: Recipe
    scale: Recipe | None
    source: Source


@dataclass(kw_only=True)
class Explainer:
    """Tries candidates, within a time."""

    stored: Mapping[str, Stored]
    was: Mapping[str, Stored] | None
    """The checkpoint before, of --was."""
    on_gpu: bool
    elsewhere: Mapping[str, Mapping[int, str]]
    """The hash of what each tensor of each rank must hold -> the rank -> that tensor's name."""
    spent: float = 0.0
    given_up: int = 0
    """For how many tensors the time was too short."""

    def explain(self, compared: Compared) -> str:
        """Return why a tensor differs, rank by rank if that differs; "" if nothing that was tried gives the server's
        hash.
        """
        began, found = time.monotonic(), dict[str, list[int]]()
        with ExitStack() as stack:
            reader = stack.enter_context(closing(CheckpointReader(self.stored)))
            older = stack.enter_context(closing(CheckpointReader(self.was))) if self.was else None
            end = began + min(TENSOR_SECONDS, ALL_SECONDS - self.spent)
            for rank, told in compared.wrong.items():
                made = compared.tensor.made
                old = self._old(made[rank], reader, older) if older else []
                simple = partial(_simplest, old, made[rank], reader)
                others = partial(self._candidates, old, made, rank, reader)
                why = (
                    self._tried(simple, told, found, end)
                    or self._known(compared, rank, told)
                    or self._tried(others, told, found, end)
                )
                found.setdefault(why, []).append(rank)
        self.spent += time.monotonic() - began
        self.given_up += "" in found and time.monotonic() > end
        if len(found) == 1:
            return next(iter(found))
        return "; ".join(f"on {called_ranks(ranks)}, {why or 'cause unknown'}" for why, ranks in found.items())

    def _known(self, compared: Compared, rank: int, told: str) -> str:
        """Return what else of this engine must have that hash; "" for nothing."""
        for other, known in compared.digests.items():
            if known == told:
                return f"it holds the shard of rank {other}"
        there = self.elsewhere.get(told, {})
        if rank in there:
            return f"it holds what {there[rank]} must hold"
        return next((f"it holds what {name} on rank {other} must hold" for other, name in there.items()), "")

    def _tried(
        self, candidates: Callable[[], Iterator[Candidate]], told: str, before: Collection[str], end: float
    ) -> str:
        """Return which candidate gives the hash, those first that explained the ranks before."""
        again = (each for each in candidates() if each.why in before) if any(before) else ()
        for each in chain(again, candidates()):
            if digest(each.recipe, each.scale, each.source, self.on_gpu) == told:
                return each.why
            if time.monotonic() > end:
                break
        return ""

    def _old(self, made: Made, reader: Source, older: Source) -> list[Candidate]:
        """Return the tensor with what may not have been updated: first with all of it."""
        recipe, scale = made.recipes()
        names = _sources(recipe, scale)
        shapes = {name: self.stored[name].shape or () for name in names}
        return [
            Candidate(
                f"{subject} kept the values of --was{said}",
                recipe,
                scale,
                PartlyOld(reader, older, members, shapes, half),
            )
            for members, subject, said, half in _left_out(self._moved(shapes, reader, older), len(names))
        ]

    def _candidates(
        self, old: Sequence[Candidate], made: Mapping[int, Made], rank: int, reader: Source
    ) -> Iterator[Candidate]:
        yield from old[1:]
        recipe, scale = made[rank].recipes()
        names = list(_sources(recipe, scale))
        shapes = {name: self.stored[name].shape or () for name in names}
        if not names:
            return
        sets = list(sets_of(names, len(names)))
        everywhere = list(dict.fromkeys(name for each in made.values() for name in _sources(*each.recipes())))
        for why, instead in exchanges(everywhere, {name: self.stored[name].shape or () for name in everywhere}):
            yield Candidate(why, recipe, scale, Exchanged(reader, instead))
        for other in made.keys() - {rank}:
            theirs, their_scale = made[other].recipes()
            for members, subject in sets:
                mixed = _with_shards_of(recipe, theirs, members)
                scales = _with_shards_of(scale, their_scale, members) if scale and their_scale else None
                if mixed or scales:
                    why = f"{subject} arrived as the shard of rank {other}"
                    yield Candidate(why, mixed or recipe, scales or scale, reader)
        for members, subject in sets:
            for said, change in changes():
                yield Candidate(f"{subject} {said}", recipe, scale, Changed(reader, members, shapes, change))
        for why, instead in chain(swaps_in_an_expert(names, shapes), expert_pairs(everywhere)):
            yield Candidate(why, recipe, scale, Exchanged(reader, instead))
        yield from (Candidate(why, *padded) for why, padded in _paddings(recipe, scale, reader))

    def _moved(self, shapes: Mapping[str, tuple[int, ...]], reader: Source, older: Source) -> list[str]:
        """Return the names that --was has in the same form with other values."""
        was, found = self.was or {}, []
        for name, shape in shapes.items():
            each = was.get(name)
            if each and each.file and (each.shape, each.dtype) == (shape, self.stored[name].dtype):
                pair = [bits_of(whole(source, name, shapes)) for source in (reader, older)]
                found += [] if torch.equal(*pair) else [name]
        return found


def called_ranks(ranks: Sequence[int]) -> str:
    return f"rank{'s' * (len(ranks) > 1)} {runs(sorted(ranks))}"


def sources_of(compared: Compared) -> tuple[str, ...]:
    """Return the checkpoint tensors that fill a tensor on the ranks where it differs."""
    made = [compared.tensor.made[rank].recipes() for rank in compared.wrong]
    return tuple(dict.fromkeys(name for recipes in made for name in _sources(*recipes)))


def _sources(recipe: Recipe, scale: Recipe | None) -> tuple[str, ...]:
    return tuple(dict.fromkeys((*recipe.held.sources, *(scale.held.sources if scale else ()))))


def _left_out(moved: Sequence[str], of: int) -> Iterator[tuple[frozenset[str], str, str, int | None]]:
    """Yield what may not have been updated: a set of names, what it is called, and which half of each tensor."""
    for said, half in (("", None), (" in the first half", 0), (" in the second half", 1)):
        for members, subject in sets_of(moved, of):
            yield members, subject, said, half
    for members, subject in runs_of(moved):
        yield members, subject, "", None


def _simplest(old: Sequence[Candidate], made: Made, reader: Source) -> Iterator[Candidate]:
    """Yield the tensor as it was before, as nothing but zeros, and as nothing but ones.

    They are tried before hashes are looked up: many norms and biases are of one value, and others must hold the same.
    """
    yield from old[:1]
    recipe, scale = made.recipes()
    held = recipe.held
    yield Candidate("it is all zero", Recipe.of(replace(held, copies=())), scale, reader)
    if held.dtype.is_floating_point and not scale:
        source = _OneValue(reader, torch.ones(1).to(held.dtype))
        ones = Recipe.of(replace(held, copies=((held.place, _constant(held.place, held.dtype)),)))
        yield Candidate("it is all one, as SGLang makes a norm before anything is loaded", ones, None, source)


def _with_shards_of(recipe: Recipe, other: Recipe, names: frozenset[str]) -> Recipe | None:
    """Return the tensor with another rank's shards of some checkpoint tensors; None if they do not fit there."""
    theirs = [copy for copy in other.held.copies if copy[1].name in names]
    own = [copy for copy in recipe.held.copies if copy[1].name in names]
    if theirs == own or [place for place, _ in theirs] != [place for place, _ in own]:
        return None
    replaced = iter(theirs)
    copies = tuple(next(replaced) if copy[1].name in names else copy for copy in recipe.held.copies)
    return Recipe.of(replace(recipe.held, copies=copies))


@dataclass(frozen=True, slots=True)
class _OneValue:
    """A source that has CONSTANT too, all of whose elements are one value."""

    source: Source
    value: torch.Tensor

    def elements(self, name: str, start: int, stop: int) -> torch.Tensor:
        return self.value if name == CONSTANT else self.source.elements(name, start, stop)


def _paddings(
    recipe: Recipe, scale: Recipe | None, reader: Source
) -> Iterator[tuple[str, tuple[Recipe, Recipe | None, Source]]]:
    """Yield the tensor with something else than zeros where SGLang's loader makes them."""
    held = recipe.held
    for said, value in (("one", 1.0), ("NaN", torch.nan)) if held.zeros and held.dtype.is_floating_point else ():
        element = torch.tensor([value]).to(held.dtype)
        copies = tuple((place, _constant(place, held.dtype)) for place in held.zeros) + held.copies
        padded = Recipe.of(replace(held, copies=copies))
        yield f"its padding is {said}, and not zero", (padded, scale, _OneValue(reader, element))


def _constant(place: Place, dtype: torch.dtype) -> TensorView:
    return TensorView(name=CONSTANT, of=CONSTANT, dtype=dtype, shape=place.shape, stride=(0,) * len(place.shape))
