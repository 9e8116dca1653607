"""Packed sequences: the tokens of a batch in one row without padding, with attention inside each sequence.

transformers recognizes packed rows by position ids that restart. flash_attention_2 then calls its varlen kernel. For
sdpa and eager, transformers builds a mask of the whole row squared: 256 MiB of booleans for 16,384 tokens. Here sdpa
and eager are called for one sequence after the other instead. sdpa then needs no mask (and uses its flash kernel on a
GPU); eager and sliding windows get a mask of one sequence squared.
"""

import sys
from functools import partial
from typing import Any, Final

import torch
from torch import Tensor, nn
from transformers import AttentionInterface
from transformers.integrations.sdpa_attention import sdpa_attention_forward

from harness.trainer.batch import Batch

PACKED_SDPA: Final = "packed_sdpa"
PACKED_EAGER: Final = "packed_eager"
"""The names of attention_by_sequence in transformers' registry of attention functions."""


def model_inputs(batch: Batch, packed: bool) -> dict[str, Any]:
    """Return the arguments of a model's forward for the batch: ids and mask [B, T], or packed [1, N] without
    padding.
    """
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
    """Return what was computed at the positions of model_inputs in the batch's alignment: [B, T], 0 at position 0.

    numbers: [B, T - 1], or packed [1, N - 1]; the model computes them one position before the token that they are
    about. A packed number that is about the first token of a sequence comes from the sequence before it, and is
    dropped.
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
    sequence_lengths: tuple[int, ...],
    sliding_window: int | None = None,
    **options: Any,
) -> tuple[Tensor, None]:
    """Attend inside each sequence of a packed row. An attention function of transformers: [1, H, N, D] -> [1, N, H, D].

    kind: sdpa, or eager for the model's own. sequence_lengths: from model_inputs; transformers passes it through to
    here. attention_mask is not read: it would be the whole row's.
    """
    attend = sdpa_attention_forward if kind == "sdpa" else sys.modules[type(module).__module__].eager_attention_forward
    parts = zip(*(each.split(sequence_lengths, dim=2) for each in (query, key, value)), strict=True)
    outputs = []
    for q, k, v in parts:
        window = sliding_window if sliding_window and sliding_window < q.shape[2] else None
        mask = _causal_mask(q, window) if kind == "eager" or window else None
        outputs.append(attend(module, q, k, v, mask, **options)[0])
    return torch.cat(outputs, dim=1), None


def _causal_mask(query: Tensor, window: int | None) -> Tensor:
    """Return [1, 1, T, T] to add to attention logits: the lowest value at later tokens and at tokens before the
    window.
    """
    size = query.shape[2]
    hidden = torch.ones((size, size), dtype=torch.bool, device=query.device).tril_().logical_not_()
    if window:
        hidden |= torch.ones_like(hidden).tril_(-window)
    return torch.zeros_like(hidden, dtype=query.dtype).masked_fill_(hidden, torch.finfo(query.dtype).min)[None, None]


AttentionInterface.register(PACKED_SDPA, partial(attention_by_sequence, "sdpa"))
AttentionInterface.register(PACKED_EAGER, partial(attention_by_sequence, "eager"))
