"""Which rank computes which sequences of all ranks' batches, in which microbatch.

Rows are numbered over all ranks: first those of rank 0's batch, then those of rank 1's, and so on.
"""

import heapq
import itertools
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.nn.functional import pad

from harness.config.schema import ActorConfig
from harness.trainer.batch import Batch

Rows = list[int]


@dataclass(frozen=True, kw_only=True)
class Microbatches:
    """The microbatches of one rank, and the way back from their results to its own batch."""

    parts: list[Batch]
    """Each is as wide as its longest sequence."""
    held: list[Rows]
    """The rows of each rank's own batch."""
    computed: list[Rows]
    """The rows that each rank computes, in the order of its microbatches."""
    longest: int
    """Tokens of the longest sequence of all ranks."""
    width: int
    """T of this rank's own batch."""
    group: dist.ProcessGroup

    def bring_back(self, results: Iterable[Tensor]) -> Tensor:
        """Return one kind of result, [b, t] of each microbatch, for this rank's own batch: [B, T], 0 where padded.

        A collective call; only for microbatches of all rows.
        """
        wide = torch.cat([pad(result, (0, self.longest - result.shape[1])) for result in results])
        [own] = exchange_rows([wide], self.computed, self.held, self.group)
        return pad(own, (0, self.width - self.longest))


def make_microbatches(
    batch: Batch,
    mesh: DeviceMesh,
    device: torch.device,
    updates: ActorConfig,
    packed: bool,
    rows: Sequence[int] | None = None,
) -> Microbatches:
    """Return this rank's microbatches of these rows of all ranks' batches (None: all rows), on the device.

    A collective call; the batches of all ranks must have the same number of sequences.
    """
    group, ranks, rank = mesh.get_group(), mesh.size(), mesh.get_local_rank()
    batch = batch.to(device)
    own_lengths = batch.attention_mask.sum(-1)
    all_lengths = [torch.empty_like(own_lengths) for _ in range(ranks)]
    dist.all_gather(all_lengths, own_lengths, group=group)
    lengths = torch.cat(all_lengths).tolist()
    longest = max(lengths)
    held = [list(range(number * len(batch), (number + 1) * len(batch))) for number in range(ranks)]
    plan = plan_microbatches(range(len(lengths)) if rows is None else rows, lengths, ranks, updates, packed)
    computed = [[row for microbatch in plan for row in microbatch[number]] for number in range(ranks)]
    # Rows travel between ranks, so their tensors must have one shape: that of the longest sequence.
    fields = batch.as_wide_as(longest).tensors()
    here = Batch(**dict(zip(fields, exchange_rows(list(fields.values()), held, computed, group), strict=True)))
    own_plan = [microbatch[rank] for microbatch in plan]
    starts = itertools.accumulate(map(len, own_plan), initial=0)
    parts = [
        here.select(slice(start, start + len(own))).as_wide_as(max(lengths[row] for row in own))
        for start, own in zip(starts, own_plan, strict=False)
    ]
    return Microbatches(
        parts=parts, held=held, computed=computed, longest=longest, width=batch.input_ids.shape[1], group=group
    )


def plan_microbatches(
    rows: Sequence[int], lengths: Sequence[int], ranks: int, updates: ActorConfig, packed: bool
) -> list[list[Rows]]:
    """Return the rows of each microbatch and rank. Every row is in one of them; every rank has as many microbatches.

    lengths: tokens of every row. With updates.tokens_per_microbatch, microbatches of about equal size within that
    budget, as few as the greedy partition finds; a longer row gets its own microbatch. Otherwise
    updates.microbatch_size rows each, in order. The plan depends only on the arguments, so every rank finds the same
    one. Raise ValueError unless every rank can have the same number of rows.
    """
    share, rest = divmod(len(rows), ranks)
    if rest or not share:
        raise ValueError(f"a minibatch must have the same number of sequences on {ranks} ranks, got {len(rows)}")
    budget, size = updates.tokens_per_microbatch, updates.microbatch_size
    if not budget:
        own = [rows[rank * share : (rank + 1) * share] for rank in range(ranks)]
        return [[list(each[start : start + size]) for each in own] for start in range(0, share, size)]
    tokens = sum(lengths[row] for row in rows)
    fewest = -(-tokens // (ranks * budget))  # rounded up
    for count in range(min(fewest, share), share + 1):
        parts = partition(rows, lengths, count * ranks, packed)
        if max(tokens_of(part, lengths, packed) for part in parts) <= budget:
            break
    return [parts[start : start + ranks] for start in range(0, len(parts), ranks)]


def tokens_of(rows: Sequence[int], lengths: Sequence[int], packed: bool) -> int:
    """Return the tokens of a microbatch of these rows; without packing, padding to the longest row counts."""
    own = [lengths[row] for row in rows]
    return sum(own) if packed else len(own) * max(own)


def partition(rows: Sequence[int], lengths: Sequence[int], count: int, packed: bool) -> list[Rows]:
    """Cut rows into `count` parts of about as many tokens, the largest part first.

    No part is empty if there are enough rows.

    Greedy (Graham, 1969): the rows, longest first, each go to the part that is smallest so far. Without packing, the
    size of a part is what it would have with one row more, padded to its longest row, which is its first.
    """
    parts: list[Rows] = [[] for _ in range(count)]
    by_size = [(0, number) for number in range(count)]  # a heap
    for row in sorted(rows, key=lambda row: (-lengths[row], row)):
        size, number = by_size[0]
        part = parts[number]
        part.append(row)
        heapq.heapreplace(by_size, (size + lengths[row] if packed else (len(part) + 1) * lengths[part[0]], number))
    return sorted(parts, key=lambda part: -tokens_of(part, lengths, packed))


def exchange_rows(
    tensors: Sequence[Tensor], held: Sequence[Rows], wanted: Sequence[Rows], group: dist.ProcessGroup
) -> list[Tensor]:
    """Return the rows that this rank wants, of tensors whose rows are spread over the ranks. A collective call.

    held, wanted: the rows of each rank of the group. Tensors are [held rows, ...] before and [wanted rows, ...] after;
    every row is held by one rank, and all rows of a tensor have one shape.
    """
    if held == wanted:
        return list(tensors)
    rank = dist.get_rank(group)
    owner = {row: number for number, rows in enumerate(held) for row in rows}
    position = {row: index for index, row in enumerate(held[rank])}
    # Each rank sends the others' rows in the order in which they want them, and receives its own sorted by owner.
    sent = [[position[row] for row in rows if row in position] for rows in wanted]
    received = [sum(owner[row] == number for row in wanted[rank]) for number in range(len(held))]
    as_it_arrives = sorted(range(len(wanted[rank])), key=lambda index: owner[wanted[rank][index]])
    found = []
    for tensor in tensors:
        arrived = tensor.new_empty((len(as_it_arrives), *tensor.shape[1:]))
        outgoing = tensor[torch.tensor([index for rows in sent for index in rows], dtype=torch.int64)]
        dist.all_to_all_single(arrived, outgoing, received, [len(rows) for rows in sent], group=group)
        in_order = torch.empty_like(arrived)
        in_order[torch.tensor(as_it_arrives)] = arrived
        found.append(in_order)
    return found
