"""Packed sequences: the tokens of a batch in one row without padding, and attention within each sequence alone.

transformers takes packed rows by position ids that restart: flash_attention_2 then calls its varlen kernel; sdpa and eager
build a mask of the whole row squared, and before 4.53 none, so that sequences read each other. Here sdpa and eager are
called for one sequence after the other: no mask for sdpa (with is_causal, on a GPU its flash kernel), and where there is
one, for eager and for sliding windows, it is as large as one sequence squared.
"""

import sys
from functools import partial
from itertools import pairwise
from typing import Any, Final

import torch
from torch import Tensor, nn
from transformers import AttentionInterface
from transformers.integrations.sdpa_attention import sdpa_attention_forward

from harness.trainer.batch import Batch

PACKED_SDPA: Final = "packed_sdpa"
PACKED_EAGER: Final = "packed_eager"
"""The names under which transformers knows attention_by_sequence."""


def model_inputs(batch: Batch, packed: bool) -> dict[str, Any]:
    """Return what a model's forward takes for the batch: [B, T] with its mask, or packed [1, N] without padding."""
    if not packed:
        return {"input_ids": batch.input_ids, "attention_mask": batch.attention_mask}
    mask = batch.attention_mask.bool()
    positions = torch.arange(mask.shape[1], device=mask.device).expand(mask.shape)
    return {
        "input_ids": batch.input_ids[mask][None],
        "position_ids": positions[mask][None],
        "sequence_lengths": tuple(mask.sum(-1).tolist()),
    }


def align(numbers: Tensor, batch: Batch, packed: bool) -> Tensor:
    """Return [B, T], in batch's alignment, of what was computed at model_inputs' positions but the last; 0 at position 0.

    numbers: [B, T - 1], or packed [1, N - 1], of which those that one sequence's end has for the next's begin are dropped.
    """
    numbers = nn.functional.pad(numbers, (1, 0))
    if not packed:
        return numbers
    mask = batch.attention_mask.bool()
    rows = numbers.new_zeros(mask.shape).masked_scatter(mask, numbers[0])
    return nn.functional.pad(rows[:, 1:], (1, 0))


def attention_by_sequence(
    kind: str,
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    *,
    position_ids: Tensor | None = None,
    sequence_lengths: tuple[int, ...] | None = None,
    sliding_window: int | None = None,
    **options: Any,
) -> tuple[Tensor, None]:
    """Attend within each sequence of a packed row, as an attention function of transformers: [1, H, N, D] -> [1, N, H, D].

    kind: sdpa, or eager, the model's own. attention_mask, which is the whole row's where there is one, is not read. Layers of
    transformers 4.51 that are checkpointed hand on no sequence_lengths: position_ids, [1, N], tell them, at the price of a
    wait for the GPU.
    """
    if sequence_lengths is None:
        if position_ids is None:
            raise ValueError(
                f"the attention of {type(module).__name__} must be given position_ids for packed sequences"
            )
        starts = (position_ids[0] == 0).nonzero()[:, 0].tolist()
        sequence_lengths = tuple(end - start for start, end in pairwise([*starts, query.shape[2]]))
    attend = sdpa_attention_forward if kind == "sdpa" else sys.modules[type(module).__module__].eager_attention_forward
    parts = zip(*(each.split(sequence_lengths, dim=2) for each in (query, key, value)), strict=True)
    outputs = []
    for q, k, v in parts:
        window = sliding_window if sliding_window and sliding_window < q.shape[2] else None
        mask = _causal_mask(q, window) if kind == "eager" or window else None
        outputs.append(attend(module, q, k, v, mask, **options)[0])
    return torch.cat(outputs, dim=1), None


def _causal_mask(query: Tensor, window: int | None) -> Tensor:
    """Return [1, 1, T, T] to add to attention logits: the lowest value at later tokens, and at those before the window."""
    size = query.shape[2]
    hidden = torch.ones((size, size), dtype=torch.bool, device=query.device).tril_().logical_not_()
    if window:
        hidden |= torch.ones_like(hidden).tril_(-window)
    return torch.zeros_like(hidden, dtype=query.dtype).masked_fill_(hidden, torch.finfo(query.dtype).min)[None, None]


AttentionInterface.register(PACKED_SDPA, partial(attention_by_sequence, "sdpa"))
AttentionInterface.register(PACKED_EAGER, partial(attention_by_sequence, "eager"))
