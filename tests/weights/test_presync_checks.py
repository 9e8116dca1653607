"""What is refused before it is sent, from what each scheduler's loader would do with it."""

from itertools import product

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from harness.weights.presync_checks import SHOWN, WeightsRefused, check_coverage, problems
from harness.weights.stream.slots import SlotEntry
from harness.weights.worker.reader import LoadCoverage, Region


def entry(
    name: str = "a", shape: tuple[int, ...] = (4, 6), dtype: torch.dtype = torch.bfloat16, offset: int = 0
) -> SlotEntry:
    stride = tuple(torch.empty(shape, device="meta").stride())
    return SlotEntry(name=name, dtype=dtype, shape=shape, stride=stride, offset=offset, group=0)


def region(view: torch.Tensor, held: torch.dtype = torch.bfloat16, name: str = "a", index: bool = False) -> Region:
    """What a copy from the view would read; the view is one of a slot of bfloat16 that begins with the entry."""
    return Region(
        names=(name,),
        dtype=torch.bfloat16,
        shape=tuple(view.shape),
        stride=view.stride(),
        offset=int(view.storage_offset()),
        target_dtype=held,
        index=torch.zeros(view.shape, dtype=torch.int64) if index else None,
    )


def coverage(*per_rank: list[torch.Tensor]) -> list[LoadCoverage]:
    return [LoadCoverage(rank=rank, regions=[[region(view) for view in views]]) for rank, views in enumerate(per_rank)]


WHOLE = torch.zeros(4, 6, dtype=torch.bfloat16)
TOP, BOTTOM = WHOLE[:2], WHOLE[2:]
LEFT, RIGHT = WHOLE[:, :3], WHOLE[:, 3:]


@pytest.mark.parametrize(
    "ranks",
    [
        ([WHOLE],),
        ([WHOLE], [WHOLE]),
        ([TOP], [BOTTOM]),
        ([LEFT], [RIGHT]),
        ([TOP, BOTTOM],),
        ([TOP], [TOP], [BOTTOM], [BOTTOM]),
        ([WHOLE.T],),
        ([], [WHOLE]),
        ([WHOLE[:2, :3], WHOLE[2:, 3:]], [WHOLE[:2, 3:], WHOLE[2:, :3]]),
    ],
    ids=["whole", "replicated", "rows", "columns", "two copies", "replicated heads", "transposed", "one only", "tiles"],
)
def test_a_tensor_that_the_ranks_take_together_is_whole(ranks: tuple[list[torch.Tensor], ...]) -> None:
    assert problems([[entry()]], coverage(*ranks)) == []


@pytest.mark.parametrize(
    ("ranks", "read"),
    [
        (([TOP], [TOP]), 12),
        (([LEFT], [LEFT]), 12),
        (([TOP], []), 12),
        (([WHOLE[:3]], [WHOLE[:3]]), 18),
        (([], []), 0),
        pytest.param(
            ([WHOLE[:3]], [WHOLE[1:3]]), 18, id="overlapping"
        ),
        pytest.param(
            ([TOP], [WHOLE[:1], WHOLE[1:2]]), 12, id="the same half in two"
        ),
        pytest.param(
            ([WHOLE[:1].expand(4, 6)],), 6, id="one row for all"
        ),
    ],
)  # fmt: skip
def test_a_tensor_of_which_a_part_is_never_read_is_refused(ranks: tuple[list[torch.Tensor], ...], read: int) -> None:
    (sentence,) = problems([[entry()]], coverage(*ranks))
    assert sentence == (f"a: of its 24 elements ([4, 6]) the engine would read {read}; its shape is not the engine's")


@given(
    st.integers(1, 6), st.integers(1, 6), st.integers(1, 3), st.integers(1, 3), st.sampled_from([None, 0, 1]), st.data()
)
def test_a_tensor_cut_into_tiles_is_whole_and_without_one_of_them_is_not(
    rows: int, columns: int, down: int, across: int, axis: int | None, data: st.DataObject
) -> None:
    """Tiles are dealt out to ranks in any way."""
    whole = torch.zeros(rows * down, columns * across, dtype=torch.bfloat16)
    tiles = [
        whole[i * rows : (i + 1) * rows, j * columns : (j + 1) * columns]
        for i, j in product(range(down), range(across))
    ]
    ranks: list[list[torch.Tensor]] = [[] for _ in range(3)]
    for tile in tiles:
        ranks[data.draw(st.integers(0, 2))].append(tile)
    sent = [[entry(shape=tuple(whole.shape))]]
    assert problems(sent, coverage(*ranks)) == []
    lost = data.draw(st.sampled_from([rank for rank, views in enumerate(ranks) if views]))
    ranks[lost].pop()
    assert len(problems(sent, coverage(*ranks))) == 1


@pytest.mark.parametrize(
    ("sent", "held", "fits"),
    [
        ("bfloat16", "bfloat16", True),
        ("bfloat16", "float32", True),
        ("float32", "float32", True),
        ("float16", "float32", True),
        ("float32", "bfloat16", False),
        ("float16", "bfloat16", False),
        ("bfloat16", "float16", False),
        ("float64", "float32", False),
        ("int64", "int32", False),
    ],
)
def test_a_dtype_that_would_be_rounded_is_refused(sent: str, held: str, fits: bool) -> None:
    given, kept = getattr(torch, sent), getattr(torch, held)
    taken = Region(names=("a",), dtype=given, shape=(4, 6), stride=(6, 1), offset=0, target_dtype=kept)
    found = problems([[entry(dtype=given)]], [LoadCoverage(rank=0, regions=[[taken]])])
    said = f"a: sent as {sent}, but the engine holds {held}: it would be rounded; send {held}"
    assert found == ([] if fits else [said])


def test_unknown_on_all_ranks_is_refused_but_not_on_one() -> None:
    one = LoadCoverage(rank=0, regions=[[region(WHOLE)]])
    padding_only = LoadCoverage(rank=1, regions=[[]], unknown=["a"])
    assert problems([[entry()]], [one, padding_only]) == []
    neither = LoadCoverage(rank=0, regions=[[]], unknown=["a"])
    said = ["a: the engine knows no such parameter and would ignore it"]
    assert problems([[entry()]], [neither, padding_only]) == said


def test_unfilled_on_all_ranks_is_refused_but_not_on_one() -> None:
    first = LoadCoverage(rank=0, filled=["embed"], unfilled=["head", "norm"])
    last = LoadCoverage(rank=1, filled=["embed", "head"], unfilled=["norm"])
    said = ["norm: a parameter of the engine that nothing sent would fill"]
    assert problems([], [first, last]) == problems([], [last, first]) == said


def test_unfilled_in_one_pipeline_stage_is_refused() -> None:
    stages = [LoadCoverage(rank=0, filled=["layers.0.norm"]), LoadCoverage(rank=1, unfilled=["layers.3.norm"])]
    assert problems([], stages) == ["layers.3.norm: a parameter of the engine that nothing sent would fill"]


def test_what_a_loader_raises_is_said_once_and_nothing_else_of_that_tensor() -> None:
    refusing = [LoadCoverage(rank=rank, regions=[[]], errors={"a, b": "AssertionError: no"}) for rank in range(2)]
    sent = [[entry(), entry("b")]]
    assert problems(sent, refusing) == ["a, b: the engine's loader refuses it: AssertionError: no"]


def test_what_cannot_be_followed_is_not_refused() -> None:
    assert problems([[entry()]], [LoadCoverage(rank=0, regions=[[]], opaque=["a"])]) == []


def test_elements_by_index_are_left_to_the_readback() -> None:
    assert problems([[entry()]], [LoadCoverage(rank=0, regions=[[region(TOP, index=True)]])]) == []


def test_each_bucket_is_judged_by_its_own_regions() -> None:
    sent = [[entry()], [entry("b")]]
    right = LoadCoverage(rank=0, regions=[[region(WHOLE)], [region(WHOLE, name="b")]])
    assert problems(sent, [right]) == []
    swapped = LoadCoverage(rank=0, regions=[[region(WHOLE, name="b")], [region(WHOLE)]])
    assert [sentence.split(":")[0] for sentence in problems(sent, [swapped])] == ["a", "b"]


def test_the_refusal_names_the_first_and_counts_the_rest() -> None:
    names = [f"tensor{index}" for index in range(SHOWN + 3)]
    nothing = LoadCoverage(rank=0, regions=[[]], unknown=names)
    with pytest.raises(WeightsRefused) as raised:
        check_coverage([[entry(name) for name in names]], [nothing])
    said = str(raised.value)
    assert f"tensor{SHOWN - 1}:" in said and f"tensor{SHOWN}:" not in said and said.endswith("; and 3 more")
    check_coverage([[entry()]], coverage([WHOLE]))
