"""From shards to full tensors: buckets planned once, each gathered by one fused all-gather straight to where it is whole.

FSDP2 cuts a tensor by rows, a chunk a rank. All chunks of a bucket are gathered in one grouped collective, each to where
its tensor is whole again, so nothing is packed or unpacked. A tensor of many experts may go in several pieces: some rows
of every rank's chunk each time. What the trainer holds wider than it is sent is cast shard by shard before.
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import groupby
from operator import attrgetter

import torch
from torch.distributed.tensor import DTensor, Shard

from harness.weights.groups import PlacedTensor, aligned, fusing_key
from harness.weights.names import CheckpointTensor, span


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


@dataclass(frozen=True, kw_only=True, slots=True)
class Piece:
    """Rows start to stop of each rank's chunk of one live tensor, and where they go in the bucket."""

    live_name: str
    chunks: Chunks
    tensors: Sequence[CheckpointTensor]
    """All of the live tensor; some may lie in other rows."""
    start: int
    stop: int
    offset: int = 0
    """Bytes from the first of the bucket."""

    @property
    def nbytes(self) -> int:
        """Of all ranks' rows together, with the padding of the last ranks."""
        return (self.stop - self.start) * self.chunks.row_bytes

    @property
    def end(self) -> int:
        """Where the next piece may begin."""
        return self.offset + aligned(self.nbytes)

    def entries(self) -> Iterator[PlacedTensor]:
        """Yield the tensors in these rows, where they lie in the bucket once the rows of all ranks are there."""
        for each in self.tensors:
            row, inside = divmod(each.offset, self.chunks.row_elements)
            rank, local = divmod(row, self.chunks.rows)
            if self.start <= local < self.stop:
                gathered = rank * (self.stop - self.start) + local - self.start
                offset = self.offset + (gathered * self.chunks.row_elements + inside) * each.dtype.itemsize
                yield PlacedTensor(
                    name=each.name,
                    dtype=each.dtype,
                    shape=each.shape,
                    stride=each.stride,
                    offset=offset,
                )


@dataclass(frozen=True, slots=True)
class Bucket:
    """What one call carries."""

    pieces: tuple[Piece, ...]
    entries: tuple[PlacedTensor, ...]

    @property
    def nbytes(self) -> int:
        """Of the pieces, with the gaps that align them."""
        return self.pieces[-1].end


def plan_buckets(
    layout: Iterable[CheckpointTensor], live: Mapping[str, torch.Tensor], limit_bytes: int
) -> tuple[Bucket, ...]:
    """Fill buckets up to limit_bytes; what may not be split and is larger gets a bucket of its own.

    What one engine module may fuse, such as q_a_proj and kv_a_proj_with_mqa of one self_attn, stays together: SGLang
    keeps the halves it waits for only until the call returns, and then drops them silently. A tensor of experts is split
    between experts.
    """
    groups: dict[str, dict[str, list[CheckpointTensor]]] = {}
    for tensor in layout:
        groups.setdefault(fusing_key(tensor), {}).setdefault(tensor.live_name, []).append(tensor)
    buckets: list[list[Piece]] = [[]]

    def room() -> int:
        return limit_bytes - (buckets[-1][-1].end if buckets[-1] else 0)

    def add(piece: Piece) -> None:
        buckets[-1].append(replace(piece, offset=limit_bytes - room()))

    for group in groups.values():
        pieces = []
        for name, tensors in group.items():
            chunks = Chunks.of(live[name], tensors[0].dtype)
            piece = Piece(live_name=name, chunks=chunks, tensors=tensors, start=0, stop=chunks.rows)
            pieces.append(piece)
        if len(pieces) == 1 and _splits_by_row(piece, live[piece.live_name]):
            start = 0
            while start < chunks.rows:
                if room() < chunks.row_bytes and buckets[-1]:
                    buckets.append([])
                stop = min(chunks.rows, start + max(1, room() // chunks.row_bytes))
                add(replace(piece, start=start, stop=stop))
                start = stop
        else:
            if sum(each.end for each in pieces) > room() and buckets[-1]:
                buckets.append([])
            for piece in pieces:
                add(piece)
    # By name: an engine that derives the fused name from the last half to arrive (0.4.6) expects kv_a before q_a.
    return tuple(Bucket(tuple(pieces), tuple(_by_name(pieces))) for pieces in buckets if pieces)


def _by_name(pieces: Sequence[Piece]) -> Iterator[PlacedTensor]:
    for _, members in groupby(pieces, key=lambda piece: fusing_key(piece.tensors[0])):
        yield from sorted((entry for piece in members for entry in piece.entries()), key=attrgetter("name"))


def _splits_by_row(piece: Piece, live: torch.Tensor) -> bool:
    """Return whether the tensors are experts of which each lies within one row of the live tensor."""
    row = piece.chunks.row_elements
    within = (each.offset // row == (each.offset + span(each.shape, each.stride) - 1) // row for each in piece.tensors)
    return ".experts." in piece.live_name and live.ndim > 2 and all(within)


@torch.no_grad()
def gather(bucket: Bucket, live: Mapping[str, torch.Tensor]) -> list[tuple[str, torch.Tensor]]:
    """Return the bucket's tensors, full and contiguous, under their checkpoint names; a collective call of the mesh's ranks.

    On CUDA the current stream waits for it, the caller does not.
    """
    buffer = torch.empty(bucket.nbytes, dtype=torch.uint8, device=next(iter(live.values())).device)
    outputs, inputs, group = [], [], None
    for piece in bucket.pieces:
        tensor = live[piece.live_name].detach()
        target = buffer[piece.offset : piece.offset + piece.nbytes]
        if isinstance(tensor, DTensor):
            group = tensor.device_mesh.get_group()
            rows = _bytes(tensor.to_local()[piece.start : piece.stop], piece.chunks.dtype)
            padding = target.numel() // tensor.device_mesh.size() - rows.numel()  # comes behind the tensor's last row
            outputs.append(target)
            inputs.append(torch.nn.functional.pad(rows, (0, padding)) if padding else rows)
        else:
            target.copy_(_bytes(tensor[piece.start : piece.stop] if tensor.ndim else tensor, piece.chunks.dtype))
    if group is not None:
        group.allgather_into_tensor_coalesced(outputs, inputs).wait()
    return [(entry.name, entry.view(buffer).contiguous()) for entry in bucket.entries]


def full_tensor(tensor: torch.Tensor, dtype: torch.dtype | None = None) -> torch.Tensor:
    """Return all of a tensor, contiguous and detached, whether it is sharded or not; in dtype, where that is given."""
    tensor = tensor.detach().to(dtype or tensor.dtype)
    return (tensor.full_tensor() if isinstance(tensor, DTensor) else tensor).contiguous()


def _bytes(tensor: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    return tensor.to(dtype).contiguous().reshape(-1).view(torch.uint8)
