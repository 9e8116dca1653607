"""The training batch of one rank: sequences, masks, and what is computed of them."""

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn.functional import pad
from torch.nn.utils.rnn import pad_sequence


@dataclass(frozen=True, kw_only=True, eq=False)
class Batch:
    """The sequences of one rank, each a prompt and its response, padded on the right to [B, T].

    Alignment: position t of every [B, T] field is about the token input_ids[:, t].

    - log_probs[:, t] = log p(token t | tokens < t). The model computes it at position t - 1, so it is 0 at t = 0.
    - values[:, t] is the value before token t is emitted. The model computes it at position t - 1 too; 0 at t = 0.

    Only positions with response_mask 1 count in losses, advantages and statistics. A prompt has at least one token, so
    t = 0 never counts.
    """

    input_ids: Tensor  # int64 [B, T]: prompt, response, padding
    attention_mask: Tensor  # int64 [B, T]: 1 at prompt and response, 0 at padding
    response_mask: Tensor  # int64 [B, T]: 1 at the tokens that the policy emitted
    group: Tensor | None = None  # int64 [B]: the same number for all responses of one prompt
    scores: Tensor | None = None  # float [B]: the task's reward of a response
    truncated: Tensor | None = None  # bool [B]: whether the response was cut off at max_response_tokens
    aborted: Tensor | None = None  # bool [B]: whether SGLang aborted it; it may have no token
    weight_version: Tensor | None = None  # int64 [B]: the step whose weights generated it; -1: the engine did not tell
    draft_rounds: Tensor | None = None  # int64 [B]: how often the engine verified drafts; 0 without a draft model
    rollout_log_probs: Tensor | None = None  # float [B, T]: as the engine reported them
    old_log_probs: Tensor | None = None  # float [B, T]: before this step's updates, as the trainer computes them
    reference_log_probs: Tensor | None = None  # float [B, T]: by the frozen reference
    old_values: Tensor | None = None  # float [B, T]: before this step's updates
    advantages: Tensor | None = None  # float [B, T]
    returns: Tensor | None = None  # float [B, T]: targets of the values
    routed_experts: Tensor | None = None  # int32 [B, T, L, K]: the experts that token t took in the engine, or -1

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
        """Return the batch with T = length, by adding padding or cutting it off."""
        width = self.input_ids.shape[1]
        wider = {name: pad(each, (0, length - width)) for name, each in self.tensors().items() if each.ndim == 2}
        if self.routed_experts is not None:
            wider["routed_experts"] = pad(self.routed_experts, (0, 0, 0, 0, 0, length - width), value=-1)
        return self.replace(**wider)


def from_sequences(prompts: Sequence[Sequence[int]], responses: Sequence[Sequence[int]], pad_id: int) -> Batch:
    """Return the batch of these token ids, padded on the right to the longest.

    There is one prompt for each response.
    """

    def padded(rows: list[list[int]], value: int) -> Tensor:
        return pad_sequence([torch.tensor(row) for row in rows], batch_first=True, padding_value=value)

    pairs = list(zip(prompts, responses, strict=True))
    return Batch(
        input_ids=padded([[*prompt, *response] for prompt, response in pairs], pad_id),
        attention_mask=padded([[1] * (len(prompt) + len(response)) for prompt, response in pairs], 0),
        response_mask=padded([[0] * len(prompt) + [1] * len(response) for prompt, response in pairs], 0),
    )


def scatter_responses(values: Sequence[Sequence[float]], batch: Batch) -> Tensor:
    """Return numbers of the response tokens, one list for each response, in the batch's alignment: float32 [B, T], 0
    elsewhere.
    """
    aligned = torch.zeros(batch.input_ids.shape)
    aligned[batch.response_mask.bool()] = torch.tensor([number for row in values for number in row])
    return aligned
