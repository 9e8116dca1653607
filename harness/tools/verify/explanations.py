"""Why a tensor of the engine differs: the mistakes that senders make, each tried by hashing what it would have left.

A hash says nothing about what it is of. So an explanation is what gives exactly the server's hash, and where nothing
does, the cause is unknown.
"""

import time
from collections.abc import Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from functools import partial
from itertools import chain, islice
from math import prod

import torch

from harness.runtime.ranks import ranks_in_words
from harness.tools.engine_class.checkpoint_headers import Stored
from harness.tools.verify.comparison import Compared, Made
from harness.tools.verify.mistakes import Instead, Reads, Shapes, changed, exchanged, left_out, read_from, sets_of
from harness.tools.verify.values import CheckpointReader, Recipe, Source, digest

TENSOR_SECONDS, ALL_SECONDS = 60.0, 600.0
"""How long explanations of one tensor, and of all together, are tried."""
SIMPLE = 3
"""The first candidates: all of it old, zero, or one. Many norms and biases are of one value, and then hold what others
must hold, too."""

Candidate = tuple[str, Recipe, Recipe | None, Source]
"""The phrase that says why a tensor differs, and what it is then made of: its recipe, that of its scales, the source."""


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
        end = began + min(TENSOR_SECONDS, ALL_SECONDS - self.spent)
        reader, older = CheckpointReader(self.stored), CheckpointReader(self.was or {})
        moved = {name for name in sources_of(compared) if self._has_moved(name, reader, older)}
        for rank, told in compared.wrong.items():
            candidates = partial(self._candidates, compared.tensor.made, rank, moved, reader, older)
            if why := self._known(compared, rank, told):
                why = self._tried(islice(candidates(), SIMPLE), told, end) or why
            else:  # what explained the ranks before comes first
                again = (each for each in candidates() if each[0] in found) if any(found) else ()
                why = self._tried(chain(again, candidates()), told, end)
            found.setdefault(why, []).append(rank)
        self.spent += time.monotonic() - began
        self.given_up += "" in found and time.monotonic() > end
        if len(found) == 1:
            return next(iter(found))
        return "; ".join(f"on {ranks_in_words(ranks)}, {why or 'cause unknown'}" for why, ranks in found.items())

    def _known(self, compared: Compared, rank: int, told: str) -> str:
        """Return what else of this engine must have that hash; "" for nothing."""
        for other, known in compared.digests.items():
            if known == told:
                return f"it holds the shard of rank {other}"
        there = self.elsewhere.get(told, {})
        if rank in there:
            return f"it holds what {there[rank]} must hold"
        return next((f"it holds what {name} on rank {other} must hold" for other, name in there.items()), "")

    def _tried(self, candidates: Iterable[Candidate], told: str, end: float) -> str:
        """Return the phrase of the candidate that gives the server's hash; "" if none does, or no time is left."""
        for why, recipe, scale, source in candidates:
            if digest(recipe, scale, source, self.on_gpu) == told:
                return why
            if time.monotonic() > end:
                break
        return ""

    def _candidates(
        self, made: Mapping[int, Made], rank: int, moved: Collection[str], reader: Source, older: Source
    ) -> Iterator[Candidate]:
        """Yield what a rank's tensor may be made of instead. moved: the names that have other values in --was."""
        (recipe, scale), names = made[rank].recipes(), _sources([made[rank]])
        shapes, sets = self._shapes(names), list(sets_of(names, len(names)))
        old = left_out([name for name in names if name in moved], len(names), shapes, reader, older)
        changes = (
            (f"{subject} {said}", reads)
            for members, subject in sets
            for said, reads in changed(members, shapes, reader)
        )
        simple = islice(chain(islice(old, 1), changes), SIMPLE)
        for why, reads in chain(simple, old, self._exchanges(made.values(), reader)):
            yield why, recipe, scale, Instead(reader, reads)
        for other in made.keys() - {rank}:
            theirs, their_scale = made[other].recipes()
            for members, subject in sets:
                mixed = _with_shards_of(recipe, theirs, members)
                scales = _with_shards_of(scale, their_scale, members) if scale and their_scale else None
                if mixed or scales:
                    yield f"{subject} arrived as the shard of rank {other}", mixed or recipe, scales or scale, reader
        for why, reads in changes:
            yield why, recipe, scale, Instead(reader, reads)

    def _exchanges(self, made: Collection[Made], reader: Source) -> Iterator[tuple[str, Reads]]:
        """Yield tensors of all ranks in each other's place."""
        names = _sources(made)
        for why, pairs in exchanged(names, self._shapes(names)):
            yield why, read_from(reader, pairs)

    def _shapes(self, names: Iterable[str]) -> Shapes:
        return {name: self.stored[name].shape or () for name in names}

    def _has_moved(self, name: str, reader: Source, older: Source) -> bool:
        """Return whether --was has a tensor in the same form with other values."""
        new, was = self.stored[name], (self.was or {}).get(name)
        if not was or not was.file or (was.shape, was.dtype) != (new.shape, new.dtype):
            return False
        pair = [each.elements(name, 0, prod(new.shape or ())).view(torch.uint8) for each in (reader, older)]
        return not torch.equal(*pair)


def sources_of(compared: Compared) -> tuple[str, ...]:
    """Return the checkpoint tensors that fill a tensor on the ranks where it differs."""
    return _sources(compared.tensor.made[rank] for rank in compared.wrong)


def _sources(made: Iterable[Made]) -> tuple[str, ...]:
    recipes = (recipe for each in made for recipe in each.recipes() if recipe)
    return tuple(dict.fromkeys(name for recipe in recipes for name in recipe.held.sources))


def _with_shards_of(recipe: Recipe, other: Recipe, names: frozenset[str]) -> Recipe | None:
    """Return the tensor with another rank's shards of some checkpoint tensors; None if they do not fit there."""
    theirs = [copy for copy in other.held.copies if copy[1].name in names]
    own = [copy for copy in recipe.held.copies if copy[1].name in names]
    if theirs == own or [place for place, _ in theirs] != [place for place, _ in own]:
        return None
    replaced = iter(theirs)
    copies = tuple(next(replaced) if copy[1].name in names else copy for copy in recipe.held.copies)
    return Recipe.of(replace(recipe.held, copies=copies))
