"""From shards to full tensors: buckets planned once, each gathered by one fused all-gather straight into its slot.

FSDP2 cuts a tensor by rows, a chunk a rank. All chunks of a bucket are gathered in one grouped collective, each to where
its tensor is whole again, so nothing is packed before and nothing is unpacked after. A tensor of many experts may go in
several pieces: some rows of every rank's chunk each time. What the trainer holds wider than it is sent (float32 master
weights of a bfloat16 engine) is cast shard by shard before the collective.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor, Shard

from harness.weights.names import CheckpointTensor
from harness.weights.stream.slots import ALIGNMENT, SlotEntry


@dataclass(frozen=True, kw_only=True, slots=True)
class Piece:
    """Rows start to stop of each rank's chunk of one live tensor, and where they go in the slot."""

    live_name: str
    dtype: torch.dtype
    """As it is sent."""
    start: int
    stop: int
    offset: int
    """Bytes from the first of the slot."""
    nbytes: int
    """Of all ranks' rows together, with the padding of the last ranks."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Bucket:
    """What one call or one slot carries."""

    pieces: tuple[Piece, ...]
    entries: tuple[SlotEntry, ...]
    nbytes: int
    """Of the pieces, with the gaps that align them."""


@dataclass(frozen=True, slots=True)
class Chunks:
    """How a live tensor is cut by rows over the ranks of its mesh; a tensor that is not sharded is one chunk."""

    ranks: int
    rows: int
    """Of one full chunk; the last ranks may hold fewer."""
    row_elements: int
    dtype: torch.dtype
    """As it is sent."""

    @classmethod
    def of(cls, tensor: torch.Tensor, dtype: torch.dtype) -> "Chunks":
        """Raise ValueError for a DTensor that is not sharded by rows over a one-dimensional mesh."""
        rows = tensor.shape[0] if tensor.ndim else 1
        row_elements = tensor.numel() // max(rows, 1)
        if not isinstance(tensor, DTensor):
            return cls(1, rows, row_elements, dtype)
        if tuple(tensor.placements) != (Shard(0),):
            raise ValueError(f"placements must be (Shard(0),), rows over ranks, for a sync, got {tensor.placements}")
        ranks = tensor.device_mesh.size()
        return cls(ranks, -(-rows // ranks), row_elements, dtype)

    @property
    def row_bytes(self) -> int:
        """Bytes of one row of every rank."""
        return self.ranks * self.row_elements * self.dtype.itemsize


def plan_buckets(
    layout: Iterable[CheckpointTensor], live: Mapping[str, torch.Tensor], limit_bytes: int
) -> tuple[Bucket, ...]:
    """Fill buckets up to limit_bytes; what may not be split and is larger gets a bucket of its own.

    What one engine module may fuse, such as q_a_proj and kv_a_proj_with_mqa of one self_attn, stays together: SGLang
    keeps the halves it waits for only until the call returns, and then drops them silently. A tensor of experts is split
    between experts.
    """
    groups: dict[str, list[CheckpointTensor]] = {}
    for tensor in layout:
        groups.setdefault(_fusing_group(tensor), []).append(tensor)
    filler = _Filler(limit_bytes)
    for number, unsorted in enumerate(groups.values()):
        # By name: an engine that derives the fused name from the last half to arrive (0.4.6) expects kv_a before q_a.
        group = sorted(unsorted, key=lambda tensor: tensor.name)
        chunks = {tensor.live_name: Chunks.of(live[tensor.live_name], tensor.dtype) for tensor in group}
        if len(chunks) == 1 and _splits_by_row(group, live[group[0].live_name]):
            filler.add_rows(number, chunks[group[0].live_name], group)
        else:
            filler.add_whole(number, chunks, group)
    filler.close_bucket()
    return tuple(filler.buckets)


def _fusing_group(tensor: CheckpointTensor) -> str:
    """Return the live tensor for experts (an expert fuses within itself), else the module above the one that owns it."""
    if ".experts." in tensor.live_name:
        # An unfused expert is experts.3.gate_proj.weight: its own module, experts.3, is the group.
        path, _, rest = tensor.live_name.partition(".experts.")
        return f"{path}.experts.{rest.split('.')[0]}"
    return tensor.live_name.rsplit(".", 2)[0]


def _splits_by_row(group: Sequence[CheckpointTensor], live: torch.Tensor) -> bool:
    """Return whether the tensors are experts of which each lies within one row of the live tensor."""
    if ".experts." not in group[0].live_name or live.ndim < 3:
        return False
    row = live.numel() // live.shape[0]
    spans = [sum((size - 1) * step for size, step in zip(each.shape, each.stride, strict=True)) for each in group]
    return all(each.offset // row == (each.offset + span) // row for each, span in zip(group, spans, strict=True))


class _Filler:
    def __init__(self, limit_bytes: int) -> None:
        self.limit = limit_bytes
        self.buckets: list[Bucket] = []
        self.pieces: list[Piece] = []
        self.entries: list[SlotEntry] = []
        self.filled = 0

    def add_whole(self, group: int, chunks: Mapping[str, Chunks], tensors: Sequence[CheckpointTensor]) -> None:
        """Add whole live tensors, all in one bucket."""
        size = sum(_aligned(each.rows * each.row_bytes) for each in chunks.values())
        if self.filled and self.filled + size > self.limit:
            self.close_bucket()
        at = {name: self._add_piece(name, 0, each.rows, each) for name, each in chunks.items()}
        for tensor in tensors:
            self._add_entry(tensor, at[tensor.live_name], tensor.offset, group)

    def add_rows(self, group: int, chunks: Chunks, tensors: Sequence[CheckpointTensor]) -> None:
        """Add as many rows of every chunk as a bucket still takes, then the rest in the next ones."""
        start = 0
        while start < chunks.rows:
            room = (self.limit - self.filled) // chunks.row_bytes
            if room < 1 and self.filled:
                self.close_bucket()
                continue
            stop = min(chunks.rows, start + max(room, 1))
            at = self._add_piece(tensors[0].live_name, start, stop, chunks)
            for tensor in tensors:
                row, inside = divmod(tensor.offset, chunks.row_elements)
                rank, local = divmod(row, chunks.rows)
                if start <= local < stop:
                    gathered = rank * (stop - start) + local - start
                    self._add_entry(tensor, at, gathered * chunks.row_elements + inside, group)
            start = stop

    def close_bucket(self) -> None:
        if self.pieces:
            self.buckets.append(Bucket(pieces=tuple(self.pieces), entries=tuple(self.entries), nbytes=self.filled))
        self.pieces, self.entries, self.filled = [], [], 0

    def _add_piece(self, name: str, start: int, stop: int, chunks: Chunks) -> int:
        at, nbytes = self.filled, (stop - start) * chunks.row_bytes
        self.pieces.append(Piece(live_name=name, dtype=chunks.dtype, start=start, stop=stop, offset=at, nbytes=nbytes))
        self.filled += _aligned(nbytes)
        return at

    def _add_entry(self, tensor: CheckpointTensor, piece_at: int, elements: int, group: int) -> None:
        at = piece_at + elements * tensor.dtype.itemsize
        shape, stride = tensor.shape, tensor.stride
        entry = SlotEntry(name=tensor.name, dtype=tensor.dtype, shape=shape, stride=stride, offset=at, group=group)
        self.entries.append(entry)


@torch.no_grad()
def gather_into(slot: torch.Tensor, bucket: Bucket, live: Mapping[str, torch.Tensor]) -> None:
    """Fill the slot (uint8, 1-D) with the bucket's tensors, whole; a collective call of the mesh's ranks.

    On CUDA the current stream waits for it, the caller does not. A rank that holds fewer rows than others sends padding,
    which lies behind the tensor's last row.
    """
    outputs, inputs, group = [], [], None
    for piece in bucket.pieces:
        tensor = live[piece.live_name].detach()
        target = slot[piece.offset : piece.offset + piece.nbytes]
        if isinstance(tensor, DTensor):
            group = tensor.device_mesh.get_group()
            rows = _bytes(tensor.to_local()[piece.start : piece.stop], piece.dtype)
            padding = target.numel() // tensor.device_mesh.size() - rows.numel()
            outputs.append(target)
            inputs.append(torch.nn.functional.pad(rows, (0, padding)) if padding else rows)
        else:
            target.copy_(_bytes(tensor[piece.start : piece.stop] if tensor.ndim else tensor, piece.dtype))
    if group is not None:
        group.allgather_into_tensor_coalesced(outputs, inputs).wait()


def gather(bucket: Bucket, live: Mapping[str, torch.Tensor]) -> list[tuple[str, torch.Tensor]]:
    """Return the bucket's tensors, full and contiguous, under their checkpoint names, in memory of their own.

    live: by live name; DTensors are gathered over their mesh, so every rank of it must call this with the same bucket.
    """
    slot = torch.empty(bucket.nbytes, dtype=torch.uint8, device=next(iter(live.values())).device)
    gather_into(slot, bucket, live)
    return [(entry.name, entry.view(slot).contiguous()) for entry in bucket.entries]


def group_of(live: Mapping[str, torch.Tensor]) -> dist.ProcessGroup | None:
    return next((each.device_mesh.get_group() for each in live.values() if isinstance(each, DTensor)), None)


def full_tensor(tensor: torch.Tensor, dtype: torch.dtype | None = None) -> torch.Tensor:
    """Return all of a tensor, contiguous and detached, whether it is sharded or not; in dtype, where that is given."""
    tensor = tensor.detach().to(dtype or tensor.dtype)
    return (tensor.full_tensor() if isinstance(tensor, DTensor) else tensor).contiguous()


def _bytes(tensor: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    return tensor.to(dtype).contiguous().reshape(-1).view(torch.uint8)


def _aligned(nbytes: int) -> int:
    return -(-nbytes // ALIGNMENT) * ALIGNMENT
