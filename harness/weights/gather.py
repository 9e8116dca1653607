"""From shards to full tensors: buckets planned once, each gathered by one fused all-gather straight into its slot.

FSDP2 cuts a tensor by rows, a chunk a rank. All chunks of a bucket are gathered in one grouped collective, each to
where its tensor is whole again, so nothing is packed before and nothing is unpacked after. A tensor of many experts
may go in several pieces: some rows of every rank's chunk each time. What the trainer holds wider than it is sent
(float32 master weights of a bfloat16 engine) is cast shard by shard before the collective, which moves no byte more.
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence
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
    """Bytes from the slot's first."""
    nbytes: int
    """Of all ranks' rows together, padding of the last ranks included."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Bucket:
    """What one call or one slot carries."""

    pieces: tuple[Piece, ...]
    entries: tuple[SlotEntry, ...]
    nbytes: int
    """Of the pieces, with the gaps that align them."""

    @property
    def payload_bytes(self) -> int:
        """Bytes of the checkpoint tensors alone."""
        return sum(entry.nbytes for entry in self.entries)


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
        """Raises ValueError for a DTensor that is not sharded by rows over a one-dimensional mesh."""
        rows = tensor.shape[0] if tensor.ndim else 1
        row_elements = tensor.numel() // max(rows, 1)
        if not isinstance(tensor, DTensor):
            return cls(1, rows, row_elements, dtype)
        if tuple(tensor.placements) != (Shard(0),):
            raise ValueError(
                f"a tensor has placements {tensor.placements}, but a sync gathers tensors sharded by rows: (Shard(0),)"
            )
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
    keeps the halves it waits for only until the call returns, and then drops them without a word. A tensor of experts
    is split between experts.
    """
    filler = _Filler(limit_bytes)
    for number, group in enumerate(_groups(layout)):
        dtypes = {tensor.live_name: tensor.dtype for tensor in group}
        chunks = {name: Chunks.of(live[name], dtype) for name, dtype in dtypes.items()}
        names = list(chunks)
        if len(names) == 1 and _splits_by_row(group, live[names[0]]):
            filler.add_rows(number, names[0], chunks[names[0]], group)
        else:
            filler.add_whole(number, chunks, group)
    return filler.finish()


class _Filler:
    def __init__(self, limit_bytes: int) -> None:
        self.limit = limit_bytes
        self.buckets: list[Bucket] = []
        self.pieces: list[Piece] = []
        self.entries: list[SlotEntry] = []
        self.filled = 0

    def add_whole(self, group: int, chunks: Mapping[str, Chunks], tensors: Sequence[CheckpointTensor]) -> None:
        """Whole live tensors, all in one bucket."""
        size = sum(_aligned(each.rows * each.row_bytes) for each in chunks.values())
        if self.filled and self.filled + size > self.limit:
            self._close()
        at = {name: self._place(name, 0, each.rows, each) for name, each in chunks.items()}
        self.entries += [_entry(tensor, at[tensor.live_name], tensor.offset, group) for tensor in tensors]

    def add_rows(self, group: int, name: str, chunks: Chunks, tensors: Sequence[CheckpointTensor]) -> None:
        """As many rows of every chunk as a bucket still takes, then the rest in the next ones."""
        start = 0
        while start < chunks.rows:
            room = (self.limit - self.filled) // chunks.row_bytes
            if room < 1 and self.filled:
                self._close()
                continue
            stop = min(chunks.rows, start + max(room, 1))
            at = self._place(name, start, stop, chunks)
            for tensor in tensors:
                row, inside = divmod(tensor.offset, chunks.row_elements)
                rank, local = divmod(row, chunks.rows)
                if start <= local < stop:
                    gathered = rank * (stop - start) + local - start
                    self.entries.append(_entry(tensor, at, gathered * chunks.row_elements + inside, group))
            start = stop

    def finish(self) -> tuple[Bucket, ...]:
        self._close()
        return tuple(self.buckets)

    def _place(self, name: str, start: int, stop: int, chunks: Chunks) -> int:
        nbytes = (stop - start) * chunks.row_bytes
        self.pieces.append(
            Piece(live_name=name, dtype=chunks.dtype, start=start, stop=stop, offset=self.filled, nbytes=nbytes)
        )
        self.filled += _aligned(nbytes)
        return self.pieces[-1].offset

    def _close(self) -> None:
        if self.pieces:
            bucket = Bucket(pieces=tuple(self.pieces), entries=tuple(self.entries), nbytes=self.filled)
            self.buckets.append(bucket)
        self.pieces, self.entries, self.filled = [], [], 0


@torch.no_grad()
def gather_into(slot: torch.Tensor, bucket: Bucket, live: Mapping[str, torch.Tensor]) -> None:
    """Fill the slot (uint8, 1-D) with the bucket's tensors, whole; a collective call of the mesh's ranks.

    On CUDA the current stream waits for it, the caller does not. A rank that holds fewer rows than others sends
    padding, which lies behind the tensor's last row.
    """
    outputs, inputs, group = [], [], None
    for piece in bucket.pieces:
        tensor = live[piece.live_name].detach()
        target = slot[piece.offset : piece.offset + piece.nbytes]
        if isinstance(tensor, DTensor):
            group = tensor.device_mesh.get_group()
            outputs.append(target)
            inputs.append(_own_rows(tensor, piece, target.numel() // tensor.device_mesh.size()))
        else:
            target.copy_(_bytes(tensor[piece.start : piece.stop] if tensor.ndim else tensor, piece.dtype))
    if group is not None:
        group.allgather_into_tensor_coalesced(outputs, inputs).wait()


def gather(bucket: Bucket, live: Mapping[str, torch.Tensor]) -> list[tuple[str, torch.Tensor]]:
    """The bucket's tensors, full and contiguous, under their checkpoint names, in memory of their own.

    live: by live name; DTensors are gathered over their mesh, so every rank of it must call this with the same bucket.
    """
    device = next(iter(live.values())).device
    slot = torch.empty(bucket.nbytes, dtype=torch.uint8, device=device)
    gather_into(slot, bucket, live)
    return [(entry.name, entry.view(slot).contiguous()) for entry in bucket.entries]


def group_of(live: Mapping[str, torch.Tensor]) -> dist.ProcessGroup | None:
    """The group over which the tensors are sharded; None, the default one, where none is."""
    meshes = [tensor.device_mesh for tensor in live.values() if isinstance(tensor, DTensor)]
    return meshes[0].get_group() if meshes else None


def full_tensor(tensor: torch.Tensor, dtype: torch.dtype | None = None) -> torch.Tensor:
    """All of a tensor, contiguous and detached, whether it is sharded or not; in dtype, where that is given."""
    tensor = tensor.detach().to(dtype or tensor.dtype)
    whole = tensor.full_tensor() if isinstance(tensor, DTensor) else tensor
    return whole.contiguous()


def _own_rows(tensor: DTensor, piece: Piece, nbytes: int) -> torch.Tensor:
    """uint8 [nbytes]: this rank's rows of the piece, as they are sent, padded where it holds fewer."""
    rows = _bytes(tensor.to_local()[piece.start : piece.stop], piece.dtype)
    if rows.numel() == nbytes:
        return rows
    padded = torch.zeros(nbytes, dtype=torch.uint8, device=rows.device)
    padded[: rows.numel()] = rows
    return padded


def _bytes(tensor: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    return tensor.to(dtype).contiguous().reshape(-1).view(torch.uint8)


def _entry(tensor: CheckpointTensor, piece_offset: int, elements: int, group: int) -> SlotEntry:
    return SlotEntry(
        name=tensor.name,
        dtype=tensor.dtype,
        shape=tensor.shape,
        stride=tensor.stride,
        offset=piece_offset + elements * tensor.dtype.itemsize,
        group=group,
    )


def _groups(layout: Iterable[CheckpointTensor]) -> Iterator[list[CheckpointTensor]]:
    groups: dict[str, list[CheckpointTensor]] = {}
    for tensor in layout:
        groups.setdefault(_fusing_group(tensor), []).append(tensor)
    for group in groups.values():
        # By name: an engine that derives the fused name from the last half to arrive (0.4.6) expects kv_a before q_a.
        yield sorted(group, key=lambda tensor: tensor.name)


def _fusing_group(tensor: CheckpointTensor) -> str:
    """The live tensor for experts (an expert fuses within itself), else the module above the one that owns it."""
    if ".experts." in tensor.live_name:
        # An unfused expert is experts.3.gate_proj.weight: its own module, experts.3, is the group.
        path, _, rest = tensor.live_name.partition(".experts.")
        return f"{path}.experts.{rest.split('.')[0]}"
    return tensor.live_name.rsplit(".", 2)[0]


def _splits_by_row(group: Sequence[CheckpointTensor], live: torch.Tensor) -> bool:
    """Whether the tensors are experts of which each lies within one row of the live tensor."""
    if ".experts." not in group[0].live_name or live.ndim < 3:
        return False
    row = live.numel() // live.shape[0]
    ends = [
        tensor.offset + sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride, strict=True))
        for tensor in group
    ]
    return all(tensor.offset // row == end // row for tensor, end in zip(group, ends, strict=True))


def _aligned(nbytes: int) -> int:
    return -(-nbytes // ALIGNMENT) * ALIGNMENT
