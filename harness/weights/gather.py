"""From shards to full tensors: buckets are planned once, and each is gathered by one fused all-gather.

FSDP2 cuts a tensor by rows (trainer/rows.py). All chunks of a bucket are gathered in one grouped collective, straight
to the place where the tensor is whole again, so nothing is packed or unpacked. A tensor of many experts may go in
several pieces, some rows of every rank's chunk each time. Eight rows on two ranks, in two pieces:

    rank 0 holds  r0 r1 r2 r3        first piece:   r0 r1 r4 r5
    rank 1 holds  r4 r5 r6 r7        second piece:  r2 r3 r6 r7

Tensors that are sent in a narrower dtype are cast shard by shard, before the all-gather.
"""

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace

import torch
from torch.distributed.tensor import DTensor

from harness.trainer.rows import RowShards
from harness.weights.fusing import FusingGroup
from harness.weights.tensor_view import TensorView, span

ALIGNMENT = 256
"""Bytes: where tensors may begin in a bucket."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Piece:
    """Rows start to stop of every rank's chunk of one tensor, and where they lie in the bucket."""

    of: str
    """The tensor's name."""
    shards: RowShards
    dtype: torch.dtype
    """As it is sent."""
    views: tuple[TensorView, ...]
    """All checkpoint tensors of this tensor; some may lie in other rows."""
    start: int
    stop: int
    offset_bytes: int = 0
    """From the first byte of the bucket."""

    @property
    def row_bytes(self) -> int:
        """Bytes of one row of every rank."""
        return self.shards.ranks * self.shards.row_elements * self.dtype.itemsize

    @property
    def nbytes(self) -> int:
        """Bytes of all ranks' rows together, with the padding of the last ranks."""
        return (self.stop - self.start) * self.row_bytes

    @property
    def end_bytes(self) -> int:
        """Where the next piece may begin."""
        return self.offset_bytes + aligned(self.nbytes)

    def views_in_bucket(self) -> Iterator[TensorView]:
        """Yield the checkpoint tensors that begin in these rows, where they lie in the bucket once it is gathered."""
        rows, row_elements = self.stop - self.start, self.shards.row_elements
        first = self.offset_bytes // self.dtype.itemsize
        for view in self.views:
            row, inside = divmod(view.offset, row_elements)
            rank, own_row = divmod(row, self.shards.chunk)
            if self.start <= own_row < self.stop:
                row_in_piece = rank * rows + own_row - self.start
                yield view.at(first + row_in_piece * row_elements + inside)

    @property
    def splits_by_row(self) -> bool:
        """Whether these are experts, each within one row of the tensor: SGLang does not need them all in one call.

        Experts are known by their names, which are the same in every checkpoint that SGLang loads:
        "....experts.3.up_proj.weight".
        """
        size = self.shards.row_elements
        ends = ((view.offset, view.offset + span(view.shape, view.stride) - 1) for view in self.views)
        return ".experts." in self.of and all(first // size == last // size for first, last in ends)


@dataclass(frozen=True, slots=True)
class Bucket:
    """What one call carries."""

    pieces: tuple[Piece, ...]
    views: tuple[TensorView, ...]
    """The checkpoint tensors in the bucket."""

    @property
    def nbytes(self) -> int:
        """Bytes of the pieces, with the gaps that align them."""
        return self.pieces[-1].end_bytes

    def named_tensors(self, buffer: torch.Tensor) -> list[tuple[str, torch.Tensor]]:
        """Return the checkpoint tensors in the gathered buffer, full and contiguous."""
        return [(view.name, view.in_memory(buffer).contiguous()) for view in self.views]


@dataclass(slots=True)
class _Filling:
    """Buckets being filled; the last one is open."""

    limit_bytes: int
    buckets: list[list[Piece]] = field(default_factory=lambda: [[]])

    @property
    def filled_bytes(self) -> int:
        return self.buckets[-1][-1].end_bytes if self.buckets[-1] else 0

    @property
    def room_bytes(self) -> int:
        return self.limit_bytes - self.filled_bytes

    def make_room(self, nbytes: int) -> None:
        """Open the next bucket, unless that many bytes fit into this one or it is empty anyway."""
        if nbytes > self.room_bytes and self.buckets[-1]:
            self.buckets.append([])

    def add(self, piece: Piece) -> None:
        self.buckets[-1].append(replace(piece, offset_bytes=self.filled_bytes))

    def add_together(self, pieces: Iterable[Piece]) -> None:
        pieces = tuple(pieces)
        self.make_room(sum(piece.end_bytes for piece in pieces))
        for piece in pieces:
            self.add(piece)

    def add_by_row(self, whole: Piece) -> None:
        start = whole.start
        while start < whole.stop:
            self.make_room(whole.row_bytes)
            stop = min(whole.stop, start + max(1, self.room_bytes // whole.row_bytes))
            self.add(replace(whole, start=start, stop=stop))
            start = stop


def plan_buckets(
    groups: Iterable[FusingGroup], shards: Mapping[str, RowShards], limit_bytes: int
) -> tuple[Bucket, ...]:
    """Fill buckets up to limit_bytes. What may not be split and is larger gets a bucket for itself.

    A fusing group stays together: SGLang keeps the half that it waits with only until the call returns, and then drops
    it silently. A tensor of experts may be split between experts.
    """
    filling = _Filling(limit_bytes)
    for group in groups:
        pieces = [
            Piece(of=of, shards=shards[of], dtype=views[0].dtype, views=views, start=0, stop=shards[of].chunk)
            for of, views in group.by_tensor.items()
        ]
        if len(pieces) == 1 and pieces[0].splits_by_row:
            filling.add_by_row(pieces[0])
        else:
            filling.add_together(pieces)
    return tuple(
        Bucket(tuple(pieces), tuple(view for piece in pieces for view in piece.views_in_bucket()))
        for pieces in filling.buckets
        if pieces
    )


@torch.no_grad()
def gather(bucket: Bucket, tensors: Mapping[str, torch.Tensor]) -> torch.Tensor:
    """Return the bucket's buffer, uint8 [nbytes], with every row of its pieces; a collective call of the mesh's ranks.

    On CUDA the current stream waits for the all-gather; the caller does not.
    """
    buffer = torch.empty(bucket.nbytes, dtype=torch.uint8, device=next(iter(tensors.values())).device)
    outputs, inputs, group = [], [], None
    for piece in bucket.pieces:
        tensor = tensors[piece.of].detach()
        target = buffer[piece.offset_bytes : piece.offset_bytes + piece.nbytes]
        if isinstance(tensor, DTensor):
            group = tensor.device_mesh.get_group()
            rows = _bytes(tensor.to_local()[piece.start : piece.stop], piece.dtype)
            padding = target.numel() // piece.shards.ranks - rows.numel()  # behind the tensor's last row
            outputs.append(target)
            inputs.append(torch.nn.functional.pad(rows, (0, padding)) if padding else rows)
        else:
            target.copy_(_bytes(tensor[piece.start : piece.stop] if tensor.ndim else tensor, piece.dtype))
    if group is not None:
        # torch's public all_gather_into_tensor takes one tensor. This method of ProcessGroup takes a list and makes one
        # NCCL group of it; FSDP2's own all-gather, which copies into one flat buffer first, would need a copy back out
        # of it.
        group.allgather_into_tensor_coalesced(outputs, inputs).wait()
    return buffer


def full_tensor(tensor: torch.Tensor, dtype: torch.dtype | None = None) -> torch.Tensor:
    """Return all of a tensor, contiguous and detached, whether it is sharded or not. dtype: cast to it first."""
    tensor = tensor.detach().to(dtype or tensor.dtype)
    return (tensor.full_tensor() if isinstance(tensor, DTensor) else tensor).contiguous()


def aligned(nbytes: int, alignment: int = ALIGNMENT) -> int:
    """Return where the next tensor may begin behind so many bytes."""
    return -(-nbytes // alignment) * alignment


def _bytes(tensor: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    return tensor.to(dtype).contiguous().reshape(-1).view(torch.uint8)
