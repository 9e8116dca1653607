"""What one rank of an SGLang engine, and one rank of the FSDP2 trainer, holds of a model, in bytes.

Engine, rules as of sglang 0.5.20: VocabParallelEmbedding pads the vocabulary to a multiple of 64; key-value heads are repeated
where there are fewer than ranks; norms, routers and MLA's low-rank down projections are whole on every rank; MLA keeps
kv_b_proj a second time, absorbed (w_kc, w_vc); experts are cut by number or by intermediate size, together tp ways;
get_pp_indices gives layers that remain to the last stages.

Trainer: fully_shard cuts a tensor's rows into equal chunks and pads the last ones, so that every rank keeps
ceil(rows / ranks) rows, though some use none: 256 experts on 512 ranks take twice their bytes. Gathered, a layer has its
padding too. Shares are of rank 0, which has most.
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

from harness.tools.plan.model_shapes import LM_HEAD, ModelShape, TensorShape

VOCAB_PADDING = 64
FLOAT32_BYTES = 4
REDUCE_BYTES = 4  # gradients are added up over ranks in float32 (harness/trainer/model.py)
SLOTS, ALIGNMENT = 2, 256  # as in harness/weights/stream/slots.py


@dataclass(frozen=True, kw_only=True, slots=True)
class EngineShare:
    """Weights, and KV cache of one token, of each rank of one pipeline stage."""

    stage: int
    first_layer: int
    last_layer: int
    weights: int
    kv_token: int


@dataclass(frozen=True, kw_only=True, slots=True)
class TrainerShare:
    """One model on one rank, in bytes. Parameters, gradients and AdamW's two moments are sharded, in the master dtype; each
    moment, and what AdamW over lists of tensors needs for a while, is of the size of the gradients.

    forward: the largest layer gathered, that is the flat buffer that all ranks' chunks arrive in and the parameters copied out
    of it; this rank's chunk cast for it, where the master dtype is wider; and what lies outside of the layers, gathered from
    the first of them to the last. backward: the same, the flat buffer being the next layer's; gradients of the layer and of
    what lies outside, and the layer before's float32 ones until they are reduced.
    """

    parameters: int
    gradients: int
    forward: int
    backward: int
    outside: int  # what lies outside of the layers, gathered: it is there while logits are computed


def kv_element_bytes(dtype_bytes: int, arguments: Mapping[str, Any]) -> int:
    """Return the bytes of one element of KV cache under these engine.args."""
    kv_dtype = str(arguments.get("kv_cache_dtype", "auto"))
    return 1 if kv_dtype.startswith("fp8") else 2 if kv_dtype in ("bfloat16", "bf16") else dtype_bytes


def stage_layers(layers: int, pp: int) -> list[range]:
    """Return the decoder layers of each stage; what remains goes to the last ones, one each."""
    base, rest = divmod(layers, pp)
    starts = [stage * base + max(0, stage - (pp - rest)) for stage in range(pp + 1)]
    return [range(start, stop) for start, stop in pairwise(starts)]


def engine_shares(model: ModelShape, tp: int, pp: int, weight_bytes: int, kv_bytes: int) -> list[EngineShare]:
    """Return the share of each pipeline stage; all its tp ranks hold as much. weight_bytes, kv_bytes: of one element."""
    shares = []
    for stage, layers in enumerate(stage_layers(model.layers, pp)):
        held = [tensor for tensor in model.tensors if _stage_has(tensor, stage, layers, pp)]
        if stage == pp - 1 and pp > 1 and not any(tensor.name == LM_HEAD for tensor in held):
            held.append(model.tensors[0])  # tied: the last stage has a copy of the embedding to compute logits with
        kv_heads = 1 if model.is_mla else max(1, model.kv_heads // tp)
        shares.append(
            EngineShare(
                stage=stage,
                first_layer=layers.start,
                last_layer=layers.stop - 1,
                weights=sum(_engine_bytes(tensor, model, tp, weight_bytes) for tensor in held),
                kv_token=kv_heads * model.kv_width * len(layers) * kv_bytes,
            )
        )
    return shares


def _stage_has(tensor: TensorShape, stage: int, layers: range, pp: int) -> bool:
    """Return whether a stage has the tensor: the embedding is on the first one, norm and head are on the last."""
    if tensor.layer is not None:
        return tensor.layer in layers
    return stage == (0 if tensor.cut == "vocab" and tensor.name != LM_HEAD else pp - 1)


def _engine_bytes(tensor: TensorShape, model: ModelShape, tp: int, weight_bytes: int) -> int:
    if tensor.is_buffer:
        return tensor.numel * FLOAT32_BYTES
    numel = -(-tensor.numel // tp)
    if tensor.cut == "whole":
        numel = tensor.numel
    elif tensor.cut == "vocab":
        padded = -(-model.vocab_size // VOCAB_PADDING) * VOCAB_PADDING
        numel = -(-padded // tp) * (tensor.numel // model.vocab_size)
    elif tensor.cut == "kv_heads":
        numel = tensor.numel // model.kv_heads * max(1, model.kv_heads // tp)
    return numel * weight_bytes * (2 if tensor.name.endswith("kv_b_proj.weight") else 1)


def trainer_share(model: ModelShape, ranks: int, master: int, compute: int, head: bool = True) -> TrainerShare:
    """Return the share of a model with a language model's head, or else with a value head.

    master: bytes of an element in shards, gradients and moments; compute: gathered, and in activations.
    """
    groups = model.groups(head)
    *layers, rest = ([tensor for tensor in group if not tensor.is_buffer] for group in groups)
    own = sum(_chunk(tensor, ranks) for group in (*layers, rest) for tensor in group) * master
    buffers = sum(tensor.numel for group in groups for tensor in group if tensor.is_buffer) * FLOAT32_BYTES
    padded, real = max((_gathered(group, ranks), sum(tensor.numel for tensor in group)) for group in layers)
    outside = _gathered(rest, ranks) * compute
    cast = padded // ranks * compute if master != compute else 0
    return TrainerShare(
        parameters=own + buffers,
        gradients=own,
        forward=2 * padded * compute + cast + outside,
        backward=(2 * padded + real) * compute + cast + padded * REDUCE_BYTES + 2 * outside,
        outside=outside,
    )


def largest_bucket(model: ModelShape, ranks: int, dtype_bytes: int, limit_bytes: int) -> int:
    """Return the bytes of the largest bucket that harness/weights/gather.py would plan.

    What fuses stays together, padding of the trainer's ranks included; experts are split, but not below one row of every
    rank.
    """
    groups: dict[str, list[TensorShape]] = {}
    for tensor in model.tensors:
        groups.setdefault(tensor.name if tensor.cut == "experts" else tensor.name.rsplit(".", 2)[0], []).append(tensor)
    filled = largest = 0
    for group in groups.values():
        first = group[0]
        if first.cut != "experts":
            sizes = (t.numel * FLOAT32_BYTES if t.is_buffer else _chunk(t, ranks) * ranks * dtype_bytes for t in group)
            size = sum(map(_aligned, sizes))
            filled = size if filled and filled + size > limit_bytes else filled + size
            largest = max(largest, filled)
            continue
        row = ranks * (first.numel // first.shape[0]) * dtype_bytes
        left = -(-first.shape[0] // ranks)
        while left:
            room = (limit_bytes - filled) // row
            if room < 1 and filled:
                filled = 0
                continue
            taken = min(left, max(room, 1))
            filled, left = filled + _aligned(taken * row), left - taken
            largest = max(largest, filled)
    return largest


def slots_bytes(bucket: int) -> int:
    """Return the bytes of the two buffers between trainer and scheduler."""
    return SLOTS * (_aligned(bucket) + ALIGNMENT)


def _aligned(nbytes: int) -> int:
    return -(-nbytes // ALIGNMENT) * ALIGNMENT


def _chunk(tensor: TensorShape, ranks: int) -> int:
    """Return the elements that every rank keeps of a tensor, padding included."""
    return -(-tensor.shape[0] // ranks) * (tensor.numel // tensor.shape[0])


def _gathered(group: Iterable[TensorShape], ranks: int) -> int:
    return sum(_chunk(tensor, ranks) for tensor in group) * ranks
