"""Cut regions into tiles of a table that one kernel works through. Addresses are in bytes; only numpy is used.

A tile is a matrix of at most tile rows x tile columns, whose columns lie side by side on both sides:

    source   . . a a a a . . .         target   a a a a . .
             . . b b b b . . .    ->            b b b b . .
             . . c c c c . . .                  c c c c . .

If both sides have the same dtype, elements are moved in words as wide as all addresses and strides allow.
"""

from collections import defaultdict
from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np
import torch

from harness.weights.regions import Region

FIELDS = ("source", "target", "rows", "columns", "source_step", "target_step", "source_stride", "target_stride")
"""Columns of a table: two addresses, the tile's size, then elements from row to row and from column to column."""
WIDE, NARROW = (16, 512), (64, 128)
WORDS = (16, 8, 4, 2, 1)
"""Bytes. A word of 16 is moved as two of 8, but tells the compiler that vectors are aligned."""
AT_ONCE = 16
"""The most bytes that a thread can load or store at a time."""


@dataclass(frozen=True, slots=True)
class TileKind:
    """What all tiles of one table have in common: they are one launch."""

    source_dtype: torch.dtype
    sent_dtype: torch.dtype
    """Between the two: wider values of the trainer are rounded to it."""
    target_dtype: torch.dtype
    shape: tuple[int, int]
    """Rows and columns of a full tile."""
    aligned: bool
    """Both addresses are multiples of 16 bytes, columns lie side by side, and their number and the steps from row to
    row are multiples of `vector`."""

    @property
    def vector(self) -> int:
        """How many elements a thread moves at a time, if the tile is aligned."""
        return elements_at_once(self.source_dtype, self.target_dtype)


def elements_at_once(source_dtype: torch.dtype, target_dtype: torch.dtype) -> int:
    """Return how many elements of the wider dtype fill one load or store.

    With twice as many, each thread would load 32 bytes in two halves, and every 32 bytes would cross NVLink twice:
    float32 masters of Qwen2-7B on four H100 took 0.0117 s in place of 0.0081.
    """
    return AT_ONCE // max(source_dtype.itemsize, target_dtype.itemsize)


@dataclass(frozen=True, slots=True)
class Move:
    """A region with the addresses that this process sees it at."""

    region: Region
    source: int
    target: int
    source_dtype: torch.dtype
    sent_dtype: torch.dtype
    target_dtype: torch.dtype


def tile_tables(moves: Iterable[Move]) -> dict[TileKind, np.ndarray]:
    """Return int64 [tiles, len(FIELDS)] for each kind; together the tiles cover every element of every move once."""
    boxes: dict[TileKind, list[np.ndarray]] = defaultdict(list)
    for move in moves:
        kind, matrices = _matrices(move)
        boxes[kind].append(matrices)
    return {kind: _tiles(np.concatenate(parts), kind) for kind, parts in boxes.items()}


def in_pairs(kind: TileKind, tiles: np.ndarray) -> np.ndarray:
    """Return int64 [tiles, 5]: the two addresses, and the other fields in pairs, the first of each in the lower 32
    bits.

    Aligned tiles make [tiles, 4], without the strides of columns, which are 1: the table of a large model is tens of
    MiB. Raise ValueError for a field of more than 31 bits.
    """
    pairs = tiles[:, 2:].reshape(-1, 3, 2)
    if pairs.max(initial=0) >= 1 << 31:
        raise ValueError(f"the sizes and steps of tiles must be below 2**31, got {pairs.max()}")
    found = np.concatenate([tiles[:, :2], pairs[..., 0] | pairs[..., 1] << 32], axis=1)
    return found[:, :4] if kind.aligned else found


def _matrices(move: Move) -> tuple[TileKind, np.ndarray]:
    """Return the kind and the matrices [n, len(FIELDS)] of one move: its two innermost axes, for each place of the
    others.
    """
    source_size, target_size = move.source_dtype.itemsize, move.target_dtype.itemsize
    axes = list(move.region.axes)
    if not axes or axes[-1][1:] != (1, 1):
        axes.append((1, 1, 1))
    dtypes = move.source_dtype, move.sent_dtype, move.target_dtype
    source, target = move.source, move.target
    if move.source_dtype == move.sent_dtype == move.target_dtype:
        steps = [axes[-1][0], *(step for _, *pair in axes[:-1] for step in pair)]
        word = next(
            size
            for size in WORDS
            if source % size == target % size == 0 and all(step * source_size % size == 0 for step in steps)
        )
        unit = min(word, 8)
        dtypes = (_INTEGER[unit],) * 3
        scale = unit // source_size if unit >= source_size else 0
        assert scale, "an address must be a multiple of its dtype's size"
        axes = [(n, s // scale, t // scale) for n, s, t in axes[:-1]] + [(axes[-1][0] // scale, 1, 1)]
        source_size = target_size = unit
        aligned = word == AT_ONCE
    else:
        steps = [axes[-1][0], *(step for _, *pair in axes[:-1] for step in pair)]
        vector = elements_at_once(move.source_dtype, move.target_dtype)
        aligned = source % AT_ONCE == target % AT_ONCE == 0 and all(step % vector == 0 for step in steps)
    columns = axes.pop()
    # No two elements are adjacent in memory, so the innermost axis becomes the columns, whatever its strides.
    if columns[0] == 1 and axes:
        columns, aligned = axes.pop(), False
    if not axes and columns[1:] == (1, 1) and columns[0] > WIDE[1]:  # one long run: full rows of tiles, and the rest
        full, rest = divmod(columns[0], WIDE[1])
        axes = [(full, WIDE[1], WIDE[1])]
        runs = [(source, target, full, WIDE[1])]
        if rest:
            runs.append((source + full * WIDE[1] * source_size, target + full * WIDE[1] * target_size, 1, rest))
        found = np.array([(*run, WIDE[1], WIDE[1], 1, 1) for run in runs], dtype=np.int64)
        return TileKind(*dtypes, WIDE, aligned), found
    rows = axes.pop() if axes else (1, columns[0], columns[0])
    at = np.array([[source, target]], dtype=np.int64)
    for size, step, target_step in axes:
        move_by = np.arange(size)[:, None] * np.array([[step * source_size, target_step * target_size]])
        at = (at[:, None] + move_by[None]).reshape(-1, 2)
    tail = np.array([[rows[0], columns[0], *rows[1:], *columns[1:]]], dtype=np.int64)
    shape = NARROW if columns[0] <= NARROW[1] else WIDE
    return TileKind(*dtypes, shape, aligned), np.concatenate([at, np.repeat(tail, len(at), axis=0)], axis=1)


def _tiles(matrices: np.ndarray, kind: TileKind) -> np.ndarray:
    tile_rows, tile_columns = kind.shape
    down = -(-matrices[:, 2] // tile_rows)
    across = -(-matrices[:, 3] // tile_columns)
    count = down * across
    which = np.repeat(np.arange(len(matrices)), count)
    number = np.arange(len(which)) - np.repeat(np.cumsum(count) - count, count)
    row, column = number // across[which] * tile_rows, number % across[which] * tile_columns
    tiles = matrices[which]
    for address, step, stride, dtype in ((0, 4, 6, kind.source_dtype), (1, 5, 7, kind.target_dtype)):
        tiles[:, address] += (row * tiles[:, step] + column * tiles[:, stride]) * dtype.itemsize
    tiles[:, 2] = np.minimum(tiles[:, 2] - row, tile_rows)
    tiles[:, 3] = np.minimum(tiles[:, 3] - column, tile_columns)
    return tiles


_INTEGER = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
