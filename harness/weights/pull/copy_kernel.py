"""The kernel that works through a table of tiles: each program copies one, cast as Tensor.copy_ would."""

import torch
import triton
import triton.language as tl

from harness.weights.pull.tiles import TileKind

TRITON_DTYPES = {
    torch.float32: tl.float32,
    torch.bfloat16: tl.bfloat16,
    torch.float16: tl.float16,
    torch.uint8: tl.uint8,
    torch.int16: tl.int16,
    torch.int32: tl.int32,
    torch.int64: tl.int64,
}


@triton.jit
def _copy_tiles(
    table: tl.tensor,
    source_dtype: tl.constexpr,
    sent_dtype: tl.constexpr,
    target_dtype: tl.constexpr,
    tile_rows: tl.constexpr,
    tile_columns: tl.constexpr,
    aligned: tl.constexpr,
    vector: tl.constexpr,
) -> None:
    tile = table + tl.program_id(0) * (4 if aligned else 5)
    source = tl.load(tile).to(tl.pointer_type(source_dtype))
    target = tl.load(tile + 1).to(tl.pointer_type(target_dtype))
    size, step = tl.load(tile + 2), tl.load(tile + 3)
    rows, columns = size & 0xFFFFFFFF, size >> 32
    source_step, target_step = step & 0xFFFFFFFF, step >> 32
    row = tl.arange(0, tile_rows)[:, None]
    column = tl.arange(0, tile_columns)[None, :]
    if aligned:
        source, target = tl.multiple_of(source, 16), tl.multiple_of(target, 16)
        source_step, target_step = tl.multiple_of(source_step, vector), tl.multiple_of(target_step, vector)
        column = tl.max_contiguous(tl.multiple_of(column, [1, vector]), [1, vector])
        # With a mask that may end anywhere, the compiler would load one element at a time.
        mask = (row < rows) & (column < tl.multiple_of(columns, vector))
        values = tl.load(source + row * source_step + column, mask=mask)
        tl.store(target + row * target_step + column, values.to(sent_dtype).to(target_dtype), mask=mask)
    else:
        mask = (row < rows) & (column < columns)
        stride = tl.load(tile + 4)
        source_stride, target_stride = stride & 0xFFFFFFFF, stride >> 32
        values = tl.load(source + row * source_step + column * source_stride, mask=mask)
        tl.store(target + row * target_step + column * target_stride, values.to(sent_dtype).to(target_dtype), mask=mask)


def copy_tiles(kind: TileKind, table: torch.Tensor) -> None:
    """Copy the tiles of a table, as `in_pairs` makes it, on the GPU, on its current stream."""
    _copy_tiles[(len(table),)](
        table,
        TRITON_DTYPES[kind.source_dtype],
        TRITON_DTYPES[kind.sent_dtype],
        TRITON_DTYPES[kind.target_dtype],
        *kind.shape,
        kind.aligned,
        kind.vector,
        num_warps=8,
    )
