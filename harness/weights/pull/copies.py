"""The copies of a plan, ready to run again and again: tables of tiles for one GPU kernel, or pairs of CPU tensors."""

import ctypes
from collections.abc import Sequence

import torch

from harness.weights.pull.tiles import Move, in_pairs, tile_tables
from harness.weights.tensor_view import span


class CpuCopies:
    """Pairs of views of this process's memory."""

    def __init__(self, moves: Sequence[Move]) -> None:
        self.pairs = []
        for move in moves:
            shape, source_stride, target_stride = zip(*move.region.axes or ((1, 1, 1),), strict=True)
            source = _view(move.source, move.source_dtype, shape, source_stride)
            self.pairs.append((_view(move.target, move.target_dtype, shape, target_stride), source, move.sent_dtype))

    def run(self) -> None:
        for target, source, sent in self.pairs:
            target.copy_(source.to(sent))


class GpuCopies:
    """Tables of tiles, shuffled so that not all GPUs read from the same peer at once. run() does not wait for the
    GPU.
    """

    def __init__(self, moves: Sequence[Move], device: torch.device) -> None:
        generator = torch.Generator().manual_seed(device.index or 0)
        self.tables = {}
        for kind, tiles in tile_tables(moves).items():
            order = torch.randperm(len(tiles), generator=generator)
            self.tables[kind] = torch.from_numpy(in_pairs(kind, tiles))[order].contiguous().to(device)

    def run(self) -> None:
        from harness.weights.pull.copy_kernel import copy_tiles  # Triton is of no use without a GPU

        for kind, table in self.tables.items():
            copy_tiles(kind, table)


Copies = CpuCopies | GpuCopies


def copies_of(moves: Sequence[Move], device: torch.device) -> Copies:
    return GpuCopies(moves, device) if device.type == "cuda" else CpuCopies(moves)


def _view(address: int, dtype: torch.dtype, shape: Sequence[int], stride: Sequence[int]) -> torch.Tensor:
    """Return memory of this process as a tensor, which does not keep it alive."""
    memory = (ctypes.c_uint8 * (span(shape, stride) * dtype.itemsize)).from_address(address)
    return torch.frombuffer(memory, dtype=dtype).as_strided(shape, stride)
