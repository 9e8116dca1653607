"""The values of a tensor that a rank must hold, put together from a checkpoint's files: a chunk at a time, so that
neither the checkpoint nor the rank needs memory.
"""

from collections import OrderedDict
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Protocol

import numpy as np
import torch
from numpy.typing import NDArray

from harness.runtime.errors import UnsupportedEnvironment
from harness.tools.engine_class.checkpoint_headers import Stored
from harness.tools.engine_class.held_tensors import HeldTensor
from harness.tools.verify.hashes import DIGITS, hash_of
from harness.weights.regions import Cut, Region, regions
from harness.weights.tensor_view import TensorView, span

CHUNK_BYTES = 8 << 20
"""About how much of a tensor is put together at a time."""
KEPT_BYTES = 128 << 20
"""How much of the files one reader keeps, so that ranks which hold columns of the same rows read them once."""
FLOAT8 = torch.arange(256, dtype=torch.uint8).view(torch.float8_e4m3fn).float().numpy()
"""The number that each byte is."""
BLOCK_ROWS = 128
"""Chunks of a matrix begin at multiples of this, so that none cuts a block of float8."""


class Source(Protocol):
    """Who has the values of checkpoint tensors: a reader of files, or an explanation that changes what it reads."""

    def elements(self, name: str, start: int, stop: int) -> torch.Tensor:
        """Return elements start to stop of a tensor, flat, in its own dtype."""
        ...


@dataclass(slots=True)
class CheckpointReader:
    """The tensors of a checkpoint, read where the headers say. For one thread."""

    stored: Mapping[str, Stored]
    read_bytes: int = 0
    """Bytes that were read from files."""
    _kept: OrderedDict[tuple[str, int, int], torch.Tensor] = field(default_factory=OrderedDict)
    _kept_bytes: int = 0

    def elements(self, name: str, start: int, stop: int) -> torch.Tensor:
        shape = self.stored[name].shape or ()
        row = max(1, int(np.prod(shape[1:], dtype=np.int64)))
        first, last = start // row, -(-stop // row)
        rows = self._rows(name, first * row, last * row)
        return rows[start - first * row : stop - first * row]

    def _rows(self, name: str, start: int, stop: int) -> torch.Tensor:
        key = name, start, stop
        if key in self._kept:
            self._kept.move_to_end(key)
            return self._kept[key]
        found = self._read(name, start, stop)
        self._kept[key] = found
        self._kept_bytes += found.nbytes
        while self._kept_bytes > KEPT_BYTES and len(self._kept) > 1:
            self._kept_bytes -= self._kept.popitem(last=False)[1].nbytes
        return found

    def _read(self, name: str, start: int, stop: int) -> torch.Tensor:
        each = self.stored[name]
        assert each.file is not None
        dtype: torch.dtype = getattr(torch, each.dtype)
        data = bytearray((stop - start) * dtype.itemsize)
        with each.file.open("rb") as opened:
            opened.seek(each.start + start * dtype.itemsize)
            if opened.readinto(data) < len(data):
                raise UnsupportedEnvironment(f"{each.file} ended while it was read; is somebody writing it?")
        self.read_bytes += len(data)
        return torch.from_numpy(np.frombuffer(data, np.uint8)).view(dtype)


@dataclass(frozen=True, slots=True)
class Recipe:
    """How to put a tensor together, a chunk at a time."""

    held: HeldTensor
    chunks: tuple[range, ...]
    """Elements of its memory. One chunk of all of it, if it does not lie there row by row."""
    pieces: tuple[tuple[tuple[Region, TensorView], ...], ...]
    """For each chunk what is copied there, in order."""

    @classmethod
    def of(cls, held: HeldTensor) -> "Recipe":
        chunks = _chunks(held)
        cuts = tuple(Cut(number, each.start, each.stop) for number, each in enumerate(chunks))
        pieces: list[list[tuple[Region, TensorView]]] = [[] for _ in chunks]
        for place, source in held.copies:
            for region in regions(place.offset, place.shape, place.stride, source.stride, cuts):
                pieces[region.owner].append((region, source))
        return cls(held, chunks, tuple(map(tuple, pieces)))

    def rows(self, source: Source) -> Iterator[torch.Tensor]:
        """Yield the tensor's chunks: its rows of the first axis, in order."""
        for chunk, pieces in zip(self.chunks, self.pieces, strict=True):
            memory = torch.zeros(len(chunk), dtype=self.held.dtype)
            for region, view in pieces:
                _copy(region, view, memory, source)
            shape, place = self.held.place.shape, self.held.place
            if _is_row_major(self.held):
                yield memory.view(-1, *shape[1:]) if shape else memory.view(())
            else:
                yield memory.as_strided(shape, place.stride, place.offset)


def digest(recipe: Recipe, scale: Recipe | None, source: Source, on_gpu: bool) -> str:
    """Return SGLang's hash of a tensor. scale: of its blocks, if SGLang hashes it dequantized to bfloat16."""
    held = recipe.held
    itemsize = torch.bfloat16.itemsize if scale else held.dtype.itemsize
    taken = hash_of(on_gpu, int(np.prod(held.place.shape, dtype=np.int64)) * itemsize)
    scales = torch.cat([each for each in scale.rows(source)]).float() if scale else None
    row = 0
    for values in recipe.rows(source):
        rows = len(values) if values.ndim else 1
        if scales is None:
            taken.update(bytes_of(values))
        else:
            for piece in dequantized(values, _scales_of_rows(scales, row, rows, held.place.shape)):
                taken.update(bytes_of(piece))
        row += rows
    return taken.hexdigest()[:DIGITS]


def dequantized(values: torch.Tensor, scales: torch.Tensor) -> Iterator[torch.Tensor]:
    """Yield bfloat16 [rows, columns]: float8 values times the scale of their block, some rows at a time, in order.

    values: [..., rows, columns]; scales: float32 [..., blocks, blocks]. The size of a block is that of the columns by
    the scales beside each other, as SGLang's checker infers it (srt/utils/weight_checker_comparator.py). What a byte
    stands for is looked up, as torch converts float8 on a CPU at a quarter of that speed.
    """
    columns, across = values.shape[-1], scales.shape[-1]
    block = columns // across
    for matrix, own in zip(values.view(-1, *values.shape[-2:]), scales.view(-1, *scales.shape[-2:]), strict=True):
        for first in range(0, len(matrix), block):
            held = matrix[first : first + block].view(torch.uint8).numpy()
            part = torch.from_numpy(np.take(FLOAT8, held, mode="clip")).view(-1, across, block)
            yield (part * own[first // block, None, :, None]).to(torch.bfloat16).view(-1, columns)


def bytes_of(values: torch.Tensor) -> NDArray[np.uint8]:
    """Return a tensor's bytes, row by row."""
    found: NDArray[np.uint8] = values.contiguous().reshape(-1).view(torch.uint8).numpy()
    return found


def _scales_of_rows(scales: torch.Tensor, first: int, count: int, shape: tuple[int, ...]) -> torch.Tensor:
    """Return the scales of so many rows of the first axis. Chunks of a matrix begin where a block does."""
    if len(shape) > 2:
        return scales[first : first + count]
    block = shape[-1] // scales.shape[-1]
    return scales[first // block : -(-(first + count) // block)]


def _chunks(held: HeldTensor) -> tuple[range, ...]:
    place = held.place
    if not _is_row_major(held) or not place.shape:
        return (range(held.memory),)
    row = int(np.prod(place.shape[1:], dtype=np.int64))
    step = max(1, CHUNK_BYTES // max(1, row * held.dtype.itemsize))
    if len(place.shape) == 2:
        step = max(BLOCK_ROWS, step // BLOCK_ROWS * BLOCK_ROWS)
    starts = range(0, place.shape[0], step)
    return tuple(range(start * row, min(start + step, place.shape[0]) * row) for start in starts)


def _is_row_major(held: HeldTensor) -> bool:
    """Return whether a tensor is the whole of its memory, row by row."""
    view = torch.empty_strided(held.place.shape, held.place.stride, device="meta")
    return view.is_contiguous() and held.place.offset == 0 and view.numel() == held.memory


def _copy(region: Region, view: TensorView, memory: torch.Tensor, source: Source) -> None:
    """Do one region's copy, with the rounding of torch's own."""
    sizes = [size for size, _, _ in region.axes]
    into = memory.as_strided(sizes, [step for _, step, _ in region.axes], region.source)
    steps = [step for _, _, step in region.axes]
    start = view.offset + region.target
    into.copy_(source.elements(view.of, start, start + span(sizes, steps)).as_strided(sizes, steps))
