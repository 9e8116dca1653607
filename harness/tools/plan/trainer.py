"""What one rank of the FSDP2 trainer holds, and the buffers of a weight sync. Bytes, of the rank that has most: rank 0.

fully_shard cuts a tensor's rows into equal chunks and pads the last ones, so that every rank keeps ceil(rows / ranks)
rows, though some use none: 256 experts on 512 ranks take twice their bytes. Gathered, a layer has its padding too.
"""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass

from harness.tools.plan.shapes import ModelShape, TensorShape

REDUCE_BYTES = 4  # gradients are added up over ranks in float32 (harness/trainer/model.py)
FLOAT32_BYTES = 4
SLOTS, ALIGNMENT = 2, 256  # as in harness/weights/stream/slots.py


@dataclass(frozen=True, slots=True)
class Precision:
    """Bytes of an element of the trainer's models."""

    master: int
    """In shards, gradients and AdamW's moments."""
    compute: int
    """Gathered, and in activations."""


@dataclass(frozen=True, kw_only=True, slots=True)
class TrainerShare:
    """One model on one rank."""

    parameters: int
    gradients: int
    """Sharded, in the master dtype."""
    optimizer: int
    """AdamW's two moments, in the master dtype."""
    forward: int
    """Largest layer gathered: the flat buffer that all ranks' chunks arrive in, and the parameters copied out of it; this
    rank's chunk cast for it, where the master dtype is wider; and what lies outside of the layers, gathered from the first of
    them to the last."""
    backward: int
    """The same, the flat buffer being the next layer's; gradients of the layer and of what lies outside, and the layer
    before's float32 ones until they are reduced."""
    outside: int
    """What lies outside of the layers, gathered: it is there while logits are computed."""
    optimizer_step: int
    """What AdamW over lists of tensors needs for a while: one more of the size of the parameters."""


def trainer_share(model: ModelShape, ranks: int, precision: Precision, head: bool = True) -> TrainerShare:
    """head: with a language model's head; else with a value head."""
    groups = list(model.groups(head))
    own = sum(_chunk(tensor, ranks) for group in groups for tensor in group if not tensor.is_buffer)
    buffers = sum(tensor.numel for group in groups for tensor in group if tensor.is_buffer) * FLOAT32_BYTES
    *layers, rest = ([t for t in group if not t.is_buffer] for group in groups)
    largest = max(layers, key=lambda group: _gathered(group, ranks))
    padded, real = _gathered(largest, ranks), sum(tensor.numel for tensor in largest)
    master, compute = precision.master, precision.compute
    outside = _gathered(rest, ranks) * compute
    cast = padded // ranks * compute if master != compute else 0
    return TrainerShare(
        parameters=own * master + buffers,
        gradients=own * master,
        optimizer=2 * own * master,
        forward=2 * padded * compute + cast + outside,
        backward=(2 * padded + real) * compute + cast + padded * REDUCE_BYTES + 2 * outside,
        outside=outside,
        optimizer_step=own * master,
    )


def padding_factor(model: ModelShape, ranks: int) -> float:
    """Elements that all ranks keep together, over those that the model has."""
    return ranks * sum(_chunk(t, ranks) for t in model.tensors if not t.is_buffer) / model.parameters


def logits_bytes(sequences: int, tokens: int, vocab_size: int, dtype_bytes: int) -> int:
    """The language model's logits of one microbatch, their float32 copy at temperature, and for the entropy the softmax,
    another copy and their product (harness/trainer/losses.py)."""
    return sequences * tokens * vocab_size * (dtype_bytes + 4 * FLOAT32_BYTES)


def checkpointed_bytes(model: ModelShape, sequences: int, tokens: int, dtype_bytes: int) -> int:
    """What gradient checkpointing keeps of one microbatch: the input of every layer."""
    return sequences * tokens * model.hidden_size * model.layers * dtype_bytes


def largest_bucket(model: ModelShape, ranks: int, dtype_bytes: int, limit_bytes: int) -> int:
    """Bytes of the largest bucket that harness/weights/gather.py would plan: what fuses stays together, padding of the
    trainer's ranks included; experts are split, but not below one row of every rank."""
    filled = largest = 0
    for group in _sync_groups(model.tensors):
        first = group[0]
        if first.cut == "experts":
            row = _row_bytes(first, ranks, dtype_bytes)
            left = -(-first.shape[0] // ranks)
            while left:
                room = (limit_bytes - filled) // row
                if room < 1 and filled:
                    filled = 0
                    continue
                taken = min(left, max(room, 1))
                filled += _aligned(taken * row)
                left -= taken
                largest = max(largest, filled)
            continue
        size = sum(_aligned(_whole_bytes(tensor, ranks, dtype_bytes)) for tensor in group)
        filled = size if filled and filled + size > limit_bytes else filled + size
        largest = max(largest, filled)
    return largest


def slots_bytes(bucket: int) -> int:
    """The two buffers between trainer and scheduler."""
    return SLOTS * (_aligned(bucket) + ALIGNMENT)


def _chunk(tensor: TensorShape, ranks: int) -> int:
    """Elements that every rank keeps of a tensor, padding included."""
    return -(-tensor.shape[0] // ranks) * (tensor.numel // tensor.shape[0])


def _gathered(group: Iterable[TensorShape], ranks: int) -> int:
    return sum(_chunk(tensor, ranks) for tensor in group) * ranks


def _sync_groups(tensors: Iterable[TensorShape]) -> Iterator[list[TensorShape]]:
    groups: dict[str, list[TensorShape]] = {}
    for tensor in tensors:
        key = tensor.name if tensor.cut == "experts" else tensor.name.rsplit(".", 2)[0]
        groups.setdefault(key, []).append(tensor)
    yield from groups.values()


def _row_bytes(tensor: TensorShape, ranks: int, dtype_bytes: int) -> int:
    """One row of every rank."""
    return ranks * (tensor.numel // tensor.shape[0]) * dtype_bytes


def _whole_bytes(tensor: TensorShape, ranks: int, dtype_bytes: int) -> int:
    if tensor.is_buffer:
        return tensor.numel * FLOAT32_BYTES
    return _chunk(tensor, ranks) * ranks * dtype_bytes


def _aligned(nbytes: int) -> int:
    return -(-nbytes // ALIGNMENT) * ALIGNMENT
