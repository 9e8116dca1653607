"""The training batch of one rank, and how it is cut into minibatches and microbatches."""

import dataclasses
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True, kw_only=True, eq=False)
class Batch:
    """Sequences of one rank, prompt and response, padded on the right to [B, T].

    Alignment: position t of every [B, T] field speaks of the token input_ids[:, t]. log_probs[:, t] = log p(token t |
    tokens < t), which the model computes at position t - 1; it is defined for t >= 1, and 0 at t = 0. values[:, t] is
    the value before token t is emitted, which the model also computes at position t - 1; 0 at t = 0. Only positions
    with response_mask 1 count in losses, advantages and statistics. A prompt has at least one token, so t = 0 never
    does.
    """

    input_ids: Tensor
    """int64 [B, T]: prompt, response, padding."""
    attention_mask: Tensor
    """int64 [B, T]: 1 at prompt and response, 0 at padding."""
    response_mask: Tensor
    """int64 [B, T]: 1 at the tokens the policy emitted."""
    group: Tensor | None = None
    """int64 [B]: number of the prompt; responses of one prompt share it."""
    scores: Tensor | None = None
    """float [B]: the task's reward of a response."""
    truncated: Tensor | None = None
    """bool [B]: whether its longest length cut the response off."""
    rollout_log_probs: Tensor | None = None
    """float [B, T]: log-probs as the engine reported them."""
    old_log_probs: Tensor | None = None
    """float [B, T]: log-probs of the policy before this step's updates, as the trainer computes them."""
    reference_log_probs: Tensor | None = None
    """float [B, T]: log-probs of the frozen reference."""
    old_values: Tensor | None = None
    """float [B, T]: values before this step's updates."""
    advantages: Tensor | None = None
    """float [B, T]."""
    returns: Tensor | None = None
    """float [B, T]: what the values are trained towards."""

    def __post_init__(self) -> None:
        """Raise ValueError if a field's shape does not fit input_ids."""
        rows, length = self.input_ids.shape
        for name, tensor in self.tensors().items():
            shape = (rows,) if name in ("group", "scores", "truncated") else (rows, length)
            if tuple(tensor.shape) != shape:
                raise ValueError(f"batch field {name} must have shape {shape}, got {tuple(tensor.shape)}")

    def __len__(self) -> int:
        """Return the number of sequences, B."""
        return self.input_ids.shape[0]

    def tensors(self) -> dict[str, Tensor]:
        """Return the fields that are set, by name."""
        fields = {field.name: getattr(self, field.name) for field in dataclasses.fields(self)}
        return {name: tensor for name, tensor in fields.items() if tensor is not None}

    def require(self, name: str) -> Tensor:
        """Return the field of that name. Raise ValueError if it is not set."""
        tensor = self.tensors().get(name)
        if tensor is None:
            raise ValueError(f"batch field {name} is not set, but this update needs it")
        return tensor

    def replace(self, **fields: Tensor) -> "Batch":
        """Return the batch with these fields set."""
        return dataclasses.replace(self, **fields)

    def select(self, rows: Tensor | slice) -> "Batch":
        """Return the batch of these rows, in this order."""
        return Batch(**{name: tensor[rows] for name, tensor in self.tensors().items()})

    def to(self, device: torch.device | str) -> "Batch":
        """Return the batch with every tensor on that device."""
        return Batch(**{name: tensor.to(device) for name, tensor in self.tensors().items()})


def from_sequences(prompts: Sequence[Sequence[int]], responses: Sequence[Sequence[int]], pad_id: int) -> Batch:
    """Return the batch of these token ids, one prompt for each response, padded on the right to the longest.

    Raise ValueError if the numbers differ, or a prompt or response has no token.
    """
    if len(prompts) != len(responses):
        raise ValueError(
            f"there are {len(prompts)} prompts and {len(responses)} responses, but each response needs its own"
        )
    for row, (prompt, response) in enumerate(zip(prompts, responses, strict=True)):
        if not prompt or not response:
            raise ValueError(
                f"sequence {row} has {len(prompt)} prompt and {len(response)} response tokens, but needs one of each"
            )
    longest = max((len(prompt) + len(response) for prompt, response in zip(prompts, responses, strict=True)), default=0)
    input_ids = torch.full((len(prompts), longest), pad_id, dtype=torch.int64)
    attention_mask, response_mask = torch.zeros_like(input_ids), torch.zeros_like(input_ids)
    for row, (prompt, response) in enumerate(zip(prompts, responses, strict=True)):
        before, end = len(prompt), len(prompt) + len(response)
        input_ids[row, :end] = torch.tensor([*prompt, *response])
        attention_mask[row, :end] = 1
        response_mask[row, before:end] = 1
    return Batch(input_ids=input_ids, attention_mask=attention_mask, response_mask=response_mask)


def scatter_responses(values: Sequence[Sequence[float]], batch: Batch, dtype: torch.dtype = torch.float32) -> Tensor:
    """Align one number for each response token, as the engine reports them, with the batch: [B, T], 0 elsewhere.

    Raise ValueError if a row has more or fewer numbers than response tokens.
    """
    aligned = torch.zeros(batch.input_ids.shape, dtype=dtype)
    mask = batch.response_mask.bool().cpu()
    for row, numbers in enumerate(values):
        if len(numbers) != int(mask[row].sum()):
            raise ValueError(f"sequence {row} has {len(numbers)} numbers for {int(mask[row].sum())} response tokens")
        aligned[row, mask[row]] = torch.tensor(numbers, dtype=dtype)
    return aligned


def minibatches(batch: Batch, size: int, generator: torch.Generator) -> Iterator[Batch]:
    """Yield the batch's rows in the generator's order, in minibatches of `size` rows.

    Every rank draws the same permutation if its generator has the same seed and its batch as many rows.
    Raise ValueError if size does not divide the batch.
    """
    if size < 1 or len(batch) % size:
        raise ValueError(f"a rank's minibatch must divide its batch of {len(batch)} sequences, got {size}")
    order = torch.randperm(len(batch), generator=generator).to(batch.input_ids.device)
    for start in range(0, len(batch), size):
        yield batch.select(order[start : start + size])


def microbatches(batch: Batch, size: int) -> Iterator[Batch]:
    """Yield the batch's rows in order, at most `size` at a time. Raise ValueError if size is below 1."""
    if size < 1:
        raise ValueError(f"microbatch_size must be at least 1, got {size}")
    for start in range(0, len(batch), size):
        yield batch.select(slice(start, start + size))
