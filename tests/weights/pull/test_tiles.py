"""Tiles cover every element of every region once; the kernel, in Triton's interpreter, copies and casts them."""

import os
import re
import subprocess
import sys

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from harness.weights.pull.tiles import Move, TileKind, in_pairs, tile_tables
from harness.weights.regions import Region


@st.composite
def moves(draw: st.DrawFn) -> tuple[torch.Tensor, torch.Tensor, Move]:
    """(source view, target view, the move between them)."""
    dtypes = draw(
        st.sampled_from(
            [
                (torch.float32, torch.bfloat16),
                (torch.float32, torch.float16),
                (torch.bfloat16, torch.bfloat16),
                (torch.float32,) * 2,
            ]
        )
    )
    shape = draw(
        st.lists(st.sampled_from([1, 2, 3, 8, 130, 1040]), min_size=1, max_size=3).filter(lambda s: np.prod(s) < 30000)
    )
    room = [size + draw(st.sampled_from([0, 0, 1, 8])) for size in shape]
    order = draw(st.permutations(range(len(shape))))
    skip = draw(st.sampled_from([0, 1, 2, 8]))

    def view(dtype: torch.dtype, axes: list[int]) -> torch.Tensor:
        memory = torch.zeros(int(np.prod(room)) + skip, dtype=dtype)[skip:]
        whole = memory.reshape([room[axis] for axis in axes])
        return whole[tuple(slice(0, shape[axis]) for axis in axes)].permute(*np.argsort(axes).tolist())

    source, target = view(dtypes[0], order), view(dtypes[1], list(range(len(shape))))
    axes = tuple(
        (size, step, to) for size, step, to in zip(shape, source.stride(), target.stride(), strict=True) if size > 1
    )
    axes = tuple(sorted(axes, key=lambda axis: -axis[2]))
    return source, target, Move(Region(0, 0, 0, axes), source.data_ptr(), target.data_ptr(), dtypes[0], *dtypes)


@settings(max_examples=50, deadline=None)
@given(moves())
def test_tiles_cover_each_element_once(drawn: tuple[torch.Tensor, torch.Tensor, Move]) -> None:
    source, target, move = drawn
    pairs: list[np.ndarray] = []
    for kind, table in tile_tables([move]).items():
        per_word = (
            max(1, kind.source_dtype.itemsize // source.element_size()) if move.source_dtype == move.target_dtype else 1
        )
        for at, to, rows, columns, step, target_step, stride, target_stride in table.tolist():
            assert rows <= kind.shape[0] and columns <= kind.shape[1]
            i, j = np.arange(rows)[:, None], np.arange(columns)[None]
            place = at + (i * step + j * stride) * kind.source_dtype.itemsize
            goal = to + (i * target_step + j * target_stride) * kind.target_dtype.itemsize
            for part in range(per_word):
                pairs.append(
                    np.stack([place + part * source.element_size(), goal + part * target.element_size()], -1).reshape(
                        -1, 2
                    )
                )
    found = np.concatenate(pairs)
    steps = np.indices(source.shape).reshape(source.ndim, -1)
    due = np.stack(
        [each.data_ptr() + (np.array(each.stride()) @ steps) * each.element_size() for each in (source, target)],
        -1,
    )
    assert sorted(map(tuple, found.tolist())) == sorted(map(tuple, due.tolist()))


@settings(max_examples=100, deadline=None)
@given(moves())
def test_a_vector_of_an_aligned_tile_lies_at_a_multiple_of_its_size(
    drawn: tuple[torch.Tensor, torch.Tensor, Move],
) -> None:
    """Else the GPU ends the kernel: "misaligned address"."""
    for kind, table in tile_tables([drawn[2]]).items():
        for at, to, rows, columns, step, target_step, stride, target_stride in table.tolist() if kind.aligned else ():
            assert at % 16 == to % 16 == 0 and (stride, target_stride) == (1, 1)
            assert columns % kind.vector == 0
            assert rows == 1 or step % kind.vector == target_step % kind.vector == 0


INTERPRETED = """
import torch
from harness.weights.pull.copy_kernel import copy_tiles
from harness.weights.regions import Region
from harness.weights.pull.tiles import Move, in_pairs, tile_tables
torch.manual_seed(0)
for source_dtype, target_dtype in ((torch.float32, torch.float16), (torch.bfloat16, torch.bfloat16), (torch.bfloat16, torch.float32)):
    for rows, columns, room, skip in ((20, 600, 600, 0), (70, 100, 104, 8), (3, 5, 7, 1), (1, 9000, 9000, 0)):
        source = torch.randn(rows * room + skip, dtype=source_dtype)[skip:].reshape(rows, room)[:, :columns]
        target = torch.zeros(rows, columns, dtype=target_dtype)
        axes = tuple(axis for axis in ((rows, room, columns), (columns, 1, 1)) if axis[0] > 1)
        move = Move(Region(0, 0, 0, axes), source.data_ptr(), target.data_ptr(), source_dtype, source_dtype, target_dtype)
        for kind, table in tile_tables([move]).items():
            copy_tiles(kind, torch.from_numpy(in_pairs(kind, table)).contiguous())
        assert torch.equal(target, source.to(target_dtype)), (rows, columns, source_dtype)
print("same")
"""


def test_the_kernel_casts_as_copy_does() -> None:
    done = subprocess.run(
        [sys.executable, "-c", INTERPRETED], env=os.environ | {"TRITON_INTERPRET": "1"}, capture_output=True, text=True
    )
    assert done.stdout.strip() == "same", done.stderr


COMPILED = """
import torch
import triton
from triton.backends.compiler import GPUTarget
from harness.weights.pull.copy_kernel import TRITON_DTYPES, _copy_tiles
from harness.weights.pull.tiles import WIDE, TileKind
for dtypes in ((torch.int64,) * 3, (torch.float32, torch.bfloat16, torch.bfloat16)):
    kind = TileKind(*dtypes, WIDE, aligned=True)
    given = (*(TRITON_DTYPES[dtype] for dtype in dtypes), *kind.shape, kind.aligned, kind.vector)
    constants = dict(zip(_copy_tiles.arg_names[1:], given, strict=True))
    source = triton.compiler.ASTSource(
        fn=_copy_tiles,
        signature={"table": "*i64"} | dict.fromkeys(constants, "constexpr"),
        constexprs={(_copy_tiles.arg_names.index(name),): value for name, value in constants.items()},
    )
    made = triton.compile(source, target=GPUTarget("cuda", 90, 32), options={"num_warps": 8}).asm
    print(made["ttgir"], made["ptx"])
"""


def test_on_a_gpu_a_thread_loads_sixteen_bytes_at_a_time_and_its_neighbour_the_next_sixteen() -> None:
    """A mask or a stride of which the compiler knows too little makes it load single elements; longer vectors leave
    gaps."""
    done = subprocess.run([sys.executable, "-c", COMPILED], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    loads = set(re.findall(r"ld\.global\.(v\d\.b\d+)", done.stdout))
    stores = set(re.findall(r"st\.global\.(v\d\.b\d+|b\d+)", done.stdout))
    assert loads == {"v2.b64", "v4.b32"} and stores == {"v2.b64", "v2.b32"}
    assert set(re.findall(r"sizePerThread = \[1, (\d+)\]", done.stdout)) == {"2", "4"}


def test_a_step_that_is_too_long_for_the_table_is_refused() -> None:
    tile = np.array([[1 << 40, 1 << 41, 2, 3, 2**31, 5, 1, 1]], dtype=np.int64)
    apart, aligned = (TileKind(*(torch.int64,) * 3, (16, 512), aligned) for aligned in (False, True))
    with pytest.raises(ValueError, match="below 2\\*\\*31, got 2147483648"):
        in_pairs(apart, tile)
    tile[0, 4] = 2**31 - 1
    row = [1 << 40, 1 << 41, 2 | 3 << 32, (2**31 - 1) | 5 << 32, 1 | 1 << 32]
    assert (in_pairs(apart, tile).tolist(), in_pairs(aligned, tile).tolist()) == ([row], [row[:4]])
