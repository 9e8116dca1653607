"""The training batch of one rank, and which rank computes which of all ranks' sequences in which microbatch."""

import dataclasses
import heapq
from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn.functional import pad
from torch.nn.utils.rnn import pad_sequence

from harness.config.schema import Updates


@dataclass(frozen=True, kw_only=True, eq=False)
class Batch:
    """Sequences of one rank, prompt and response, padded on the right to [B, T].

    Alignment: position t of every [B, T] field speaks of the token input_ids[:, t]. log_probs[:, t] = log p(token t |
    tokens < t), which the model computes at position t - 1; it is defined for t >= 1, and 0 at t = 0. values[:, t] is
    the value before token t is emitted, which the model also computes at position t - 1; 0 at t = 0. Only positions
    with response_mask 1 count in losses, advantages and statistics. A prompt has at least one token, so t = 0 never
    does.
    """

    input_ids: Tensor  # int64 [B, T]: prompt, response, padding
    attention_mask: Tensor  # int64 [B, T]: 1 at prompt and response, 0 at padding
    response_mask: Tensor  # int64 [B, T]: 1 at the tokens the policy emitted
    group: Tensor | None = None  # int64 [B]: number of the prompt; responses of one prompt share it
    scores: Tensor | None = None  # float [B]: the task's reward of a response
    truncated: Tensor | None = None  # bool [B]: whether its longest length cut the response off
    aborted: Tensor | None = None  # bool [B]: whether SGLang gave it up; it may have no token
    rollout_log_probs: Tensor | None = None  # float [B, T]: as the engine reported them
    old_log_probs: Tensor | None = None  # float [B, T]: before this step's updates, as the trainer computes them
    reference_log_probs: Tensor | None = None  # float [B, T]: of the frozen reference
    old_values: Tensor | None = None  # float [B, T]: before this step's updates
    advantages: Tensor | None = None  # float [B, T]
    returns: Tensor | None = None  # float [B, T]: what the values are trained towards

    def __len__(self) -> int:
        """Return the number of sequences, B."""
        return self.input_ids.shape[0]

    def tensors(self) -> dict[str, Tensor]:
        """Return the fields that are set, by name."""
        fields = {field.name: getattr(self, field.name) for field in dataclasses.fields(self)}
        return {name: tensor for name, tensor in fields.items() if tensor is not None}

    def require(self, name: str) -> Tensor:
        """Return the field of that name. Raise KeyError if it is not set."""
        return self.tensors()[name]

    def replace(self, **fields: Tensor) -> "Batch":
        """Return the batch with these fields set."""
        return dataclasses.replace(self, **fields)

    def select(self, rows: Tensor | slice) -> "Batch":
        """Return the batch of these rows, in this order."""
        return Batch(**{name: tensor[rows] for name, tensor in self.tensors().items()})

    def to(self, device: torch.device | str) -> "Batch":
        """Return the batch with every tensor on that device."""
        return Batch(**{name: tensor.to(device) for name, tensor in self.tensors().items()})

    def as_wide_as(self, length: int) -> "Batch":
        """Return the batch with T = length: padding, or what should be padding, is added or left out."""
        width = self.input_ids.shape[1]
        fields = self.tensors().items()
        return Batch(**{name: pad(each, (0, length - width)) if each.ndim == 2 else each for name, each in fields})


def from_sequences(prompts: Sequence[Sequence[int]], responses: Sequence[Sequence[int]], pad_id: int) -> Batch:
    """Return the batch of these token ids, one prompt for each response, padded on the right to the longest."""

    def padded(rows: list[list[int]], value: int) -> Tensor:
        return pad_sequence([torch.tensor(row) for row in rows], batch_first=True, padding_value=value)

    pairs = list(zip(prompts, responses, strict=True))
    return Batch(
        input_ids=padded([[*prompt, *response] for prompt, response in pairs], pad_id),
        attention_mask=padded([[1] * (len(prompt) + len(response)) for prompt, response in pairs], 0),
        response_mask=padded([[0] * len(prompt) + [1] * len(response) for prompt, response in pairs], 0),
    )


Rows = list[int]
"""Sequences, numbered over all ranks: those of rank 0's batch first."""


def plan_microbatches(
    rows: Sequence[int], lengths: Sequence[int], ranks: int, updates: Updates, packed: bool
) -> list[list[Rows]]:
    """Return, for each microbatch and rank, the rows that it takes: each once, and every rank as many microbatches.

    lengths: tokens of every row there is. Under updates.tokens_per_microbatch as few microbatches as the greedy partition
    finds, all of about one size, on all ranks; a row that is longer has a microbatch of its own. Else
    updates.microbatch_size rows each, in order. A function of its arguments alone: the same on every rank. Raise
    ValueError unless every rank can have as many rows.
    """
    share, rest = divmod(len(rows), ranks)
    if rest or not share:
        raise ValueError(f"a minibatch must have the same number of sequences on {ranks} ranks, got {len(rows)}")
    budget, size = updates.tokens_per_microbatch, updates.microbatch_size
    if not budget:
        own = [rows[rank * share : (rank + 1) * share] for rank in range(ranks)]
        return [[list(each[start : start + size]) for each in own] for start in range(0, share, size)]
    fewest = -(-sum(lengths[row] for row in rows) // (ranks * budget))
    for count in range(min(fewest, share), share + 1):
        parts = partition(rows, lengths, count * ranks, packed)
        if max(tokens_of(part, lengths, packed) for part in parts) <= budget:
            break
    return [parts[start : start + ranks] for start in range(0, len(parts), ranks)]


def tokens_of(rows: Sequence[int], lengths: Sequence[int], packed: bool) -> int:
    """Return the tokens of these rows in one microbatch; not packed, padded to the longest."""
    own = [lengths[row] for row in rows]
    return sum(own) if packed else len(own) * max(own)


def partition(rows: Sequence[int], lengths: Sequence[int], count: int, packed: bool) -> list[Rows]:
    """Cut rows into `count` parts of about as many tokens, largest part first; none is empty where there are as many rows.

    Greedy, longest row first (Graham, 1969): each goes to the part that is smallest, packed by its tokens, else by what it
    would have, padded to its longest, with one row more.
    """
    parts: list[Rows] = [[] for _ in range(count)]
    smallest = [(0, number) for number in range(count)]
    for row in sorted(rows, key=lambda row: (-lengths[row], row)):
        size, number = smallest[0]
        part = parts[number]
        part.append(row)
        heapq.heapreplace(smallest, (size + lengths[row] if packed else (len(part) + 1) * lengths[part[0]], number))
    return sorted(parts, key=lambda part: -tokens_of(part, lengths, packed))


def redistribute(
    tensors: Sequence[Tensor], held: Sequence[Rows], wanted: Sequence[Rows], group: dist.ProcessGroup
) -> list[Tensor]:
    """Return the wanted rows of tensors whose held rows this rank has: [held, ...] -> [wanted, ...]; a collective call.

    held, wanted: of each rank of the group, in the order of its tensors; a row is held once, and all must be of one shape.
    """
    if held == wanted:
        return list(tensors)
    rank = dist.get_rank(group)
    owner = {row: number for number, rows in enumerate(held) for row in rows}
    position = {row: index for index, row in enumerate(held[rank])}
    sent = [[position[row] for row in rows if row in position] for rows in wanted]
    order = sorted(range(len(wanted[rank])), key=lambda index: owner[wanted[rank][index]])  # by rank, as it arrives
    received = [sum(owner[row] == number for row in wanted[rank]) for number in range(len(held))]
    found = []
    for tensor in tensors:
        arrived = tensor.new_empty((len(order), *tensor.shape[1:]))
        outgoing = tensor[torch.tensor([index for rows in sent for index in rows], dtype=torch.int64)]
        dist.all_to_all_single(arrived, outgoing, received, [len(rows) for rows in sent], group=group)
        found.append(torch.empty_like(arrived))
        found[-1][torch.tensor(order)] = arrived
    return found


def scatter_responses(values: Sequence[Sequence[float]], batch: Batch) -> Tensor:
    """Align one number for each response token, as the engine reports them, with the batch: float32 [B, T], 0 elsewhere."""
    aligned = torch.zeros(batch.input_ids.shape)
    aligned[batch.response_mask.bool()] = torch.tensor([number for row in values for number in row])
    return aligned
