"""What a server's ranks hold against what they must hold, tensor by tensor."""

import os
import sys
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass

from harness.runtime.events import working
from harness.tools.engine_class.checkpoint_headers import Stored
from harness.tools.engine_class.held_tensors import HeldTensor
from harness.tools.verify.rank_predictions import RankPrediction
from harness.tools.verify.server import TARGET, ServerRank
from harness.tools.verify.values import CheckpointReader, Recipe, digest

Engine = Mapping[tuple[str, int], RankPrediction]
"""(role, rank of the engine) -> what that model of that rank must hold."""


@dataclass(frozen=True, slots=True)
class Made:
    """One tensor of one rank: who knows how it is made."""

    by: RankPrediction
    name: str

    @property
    def nbytes(self) -> int:
        return self.by.nbytes[self.name]

    def recipes(self) -> tuple[Recipe, Recipe | None]:
        """Return how it is made, and how the scales that its hash includes are."""
        scale = self.by.dequantized.get(self.name)
        return Recipe.of(self.by.held(self.name)), Recipe.of(self.by.held(scale)) if scale else None


@dataclass(frozen=True, kw_only=True)
class Tensor:
    """One tensor of the engine, on all ranks that tell its hash."""

    role: str
    name: str
    told: tuple[tuple[ServerRank, str], ...]
    """What the server says."""
    made: Mapping[int, Made]
    """Rank of the engine -> how it is made there."""

    @property
    def label(self) -> str:
        return self.name if self.role == TARGET else f"{self.role}: {self.name}"

    @property
    def nbytes(self) -> int:
        return sum(each.nbytes for each in self.made.values())


@dataclass(frozen=True, kw_only=True)
class Compared:
    """A tensor, and the hashes of what its ranks must hold."""

    tensor: Tensor
    digests: Mapping[int, str]
    """Rank of the engine -> hash."""

    @property
    def wrong(self) -> dict[int, str]:
        """Ranks that hold something else -> the hash of that; the first, if several engines have such a rank."""
        found: dict[int, str] = {}
        for rank, told in self.tensor.told:
            if self.digests[rank.rank] != told:
                found.setdefault(rank.rank, told)
        return found

    @property
    def is_wrong_everywhere(self) -> bool:
        return all(told != self.digests[rank.rank] for rank, told in self.tensor.told)

    @property
    def wrong_replicas(self) -> list[int]:
        """Which engines hold something else, if data parallelism without DP attention has several; otherwise empty."""
        if len(self.tensor.told) == len(self.tensor.made):
            return []
        return sorted({rank.dp_rank for rank, told in self.tensor.told if self.digests[rank.rank] != told})


Unpredicted = dict[str, list[str]]
"""Reason -> the engine's tensors that could not be compared."""
NOTHING = "nothing in the checkpoint fills it"
UNKNOWN = "the class that predicts has no such tensor"
UNTOLD = "the server does not tell its hash"
UNTOLD_OF_DRAFT = f"{UNTOLD}, which is a draft model's"


def tensors_of(engine: Engine, told: Sequence[ServerRank]) -> tuple[list[Tensor], Unpredicted]:
    """Return the tensors that can be compared, in the server's order, and the others."""
    found: dict[tuple[str, str], list[tuple[ServerRank, str]]] = defaultdict(list)
    made: dict[tuple[str, str], dict[int, Made]] = defaultdict(dict)
    others: dict[str, dict[str, None]] = defaultdict(dict)
    for rank in told:
        prediction, target = engine[rank.role, rank.rank], engine.get((TARGET, rank.rank))
        for name, checksum in rank.checksums.items():
            each = _made(prediction, target, name)
            if isinstance(each, str):
                others[each][name] = None
                continue
            found[rank.role, name].append((rank, checksum))
            made[rank.role, name][rank.rank] = each
        for name in sorted(prediction.nbytes.keys() - rank.checksums.keys() - {*prediction.dequantized.values()}):
            reason = prediction.doubts.get(name) or (UNTOLD if rank.role == TARGET else UNTOLD_OF_DRAFT)
            others[reason][name] = None
    tensors = [
        Tensor(role=role, name=name, told=tuple(ranks), made=made[role, name]) for (role, name), ranks in found.items()
    ]
    return tensors, {reason: list(names) for reason, names in others.items() if names}


def _made(prediction: RankPrediction, target: RankPrediction | None, name: str) -> Made | str:
    """Return how a tensor of a rank is made, or why that is not known."""
    part = next((part for part, own in prediction.embedding_and_head.items() if own == name), "")
    if name not in prediction.nbytes and part and target and (own := target.embedding_and_head.get(part)):
        return Made(target, own)
    if name not in prediction.nbytes:
        return NOTHING if name in prediction.unfilled else UNKNOWN
    for each in (name, prediction.dequantized.get(name, name)):
        if doubt := prediction.doubts.get(each):
            return doubt
    return Made(prediction, name)


def compare(
    tensors: Sequence[Tensor], stored: Mapping[str, Stored], on_gpu: bool, threads: int
) -> tuple[list[Compared], int]:
    """Return each tensor with the hashes of what its ranks must hold, and the bytes that were read for that."""

    def digests_of(tensor: Tensor) -> tuple[Compared, int]:
        known: dict[tuple[HeldTensor, HeldTensor | None], str] = {}
        found = {}
        reader = CheckpointReader(stored)
        for rank, made in tensor.made.items():
            recipe, scale = made.recipes()
            key = recipe.held, scale.held if scale else None
            if key not in known:  # many tensors are the same on all ranks
                known[key] = digest(recipe, scale, reader, on_gpu)
            found[rank] = known[key]
        return Compared(tensor=tensor, digests=found), reader.read_bytes

    compared, read = [], 0
    with _progress(sum(each.nbytes for each in tensors)) as done, ThreadPoolExecutor(threads) as pool:
        for each, nbytes in pool.map(digests_of, tensors):
            compared.append(each)
            read += nbytes
            done(each.tensor.nbytes)
    return compared, read


@contextmanager
def _progress(total: int) -> Iterator[Callable[[int], None]]:
    """Show how many of the bytes that the ranks hold are hashed: a bar on a terminal, otherwise a line now and then."""
    if os.isatty(2):
        from rich.console import Console
        from rich.progress import BarColumn, DownloadColumn, Progress, TimeRemainingColumn, TransferSpeedColumn

        columns = (BarColumn(), DownloadColumn(), TransferSpeedColumn(), TimeRemainingColumn())
        with Progress("hashing what must be held", *columns, console=Console(file=sys.stderr), transient=True) as bar:
            task = bar.add_task("", total=total)
            yield lambda nbytes: bar.advance(task, nbytes)
        return
    done = 0
    with working("hashing what must be held") as work:

        def advance(nbytes: int) -> None:
            nonlocal done
            done += nbytes
            work.what = f"hashing what must be held: {done / 1e9:.1f} of {total / 1e9:.1f} GB"

        yield advance
