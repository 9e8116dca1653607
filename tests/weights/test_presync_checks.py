"""What is refused before it is sent, from what each scheduler's loader would do with it."""

from collections.abc import Callable
from dataclasses import replace
from itertools import product
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Shard, distribute_tensor

from harness.weights.fusing import FusingGroup
from harness.weights.presync_checks import (
    SHOWN,
    WeightsRefused,
    check_complete,
    check_coverage,
    check_finite,
    check_shards,
    coverage_problems,
    elements_read,
    unfilled_on_some_ranks,
)
from harness.weights.tensor_view import TensorView
from harness.weights.traced.coverage import LoadCoverage, LoaderCopy
from harness.weights.zero_padding import ModelSizes
from tests.cluster.gloo import on_ranks
from tests.weights.toy_model import view_of


def entry(
    name: str = "a", shape: tuple[int, ...] = (4, 6), dtype: torch.dtype = torch.bfloat16, offset: int = 0
) -> TensorView:
    return view_of(name, shape, dtype=dtype, offset=offset)


def said(*given: Any, **more: Any) -> list[str]:
    """The sentences on what would not arrive."""
    return list(map(str, coverage_problems(*given, **more)))


def groups(*members: list[TensorView]) -> list[FusingGroup]:
    return [FusingGroup(views=tuple(each)) for each in members]


def copy_of(part: torch.Tensor, held: torch.dtype = torch.bfloat16, name: str = "a") -> LoaderCopy:
    """A copy of a part of a tensor that begins its storage, into a tensor of the engine."""
    shape, stride, offset = tuple(part.shape), part.stride(), int(part.storage_offset())
    source = TensorView(name=name, of=name, dtype=part.dtype, shape=shape, stride=stride, offset=offset)
    return LoaderCopy(source, "engine's", held)


def coverage(*per_rank: list[torch.Tensor]) -> list[LoadCoverage]:
    return [LoadCoverage(rank=rank, copies=[[copy_of(part) for part in parts]]) for rank, parts in enumerate(per_rank)]


def filling(*names: str) -> list[list[LoaderCopy]]:
    """Copies into the engine's tensors of these names."""
    return [[LoaderCopy(entry(), name, torch.bfloat16) for name in names]]


WHOLE = torch.zeros(4, 6, dtype=torch.bfloat16)
TOP, BOTTOM = WHOLE[:2], WHOLE[2:]
LEFT = WHOLE[:, :3]


@pytest.mark.parametrize(
    "ranks",
    [
        ([TOP], [TOP], [BOTTOM], [BOTTOM]),
        ([WHOLE.T],),
        ([], [WHOLE]),
    ],
    ids=["replicated heads", "transposed", "one only"],
)
def test_a_tensor_that_the_ranks_take_together_is_whole(ranks: tuple[list[torch.Tensor], ...]) -> None:
    """Tiles are below."""
    assert said(groups([entry()]), coverage(*ranks)) == []


@pytest.mark.parametrize(
    ("ranks", "read"),
    [
        (([LEFT], [LEFT]), 12),
        (([], []), 0),
        (([WHOLE[:3]], [WHOLE[1:3]]), 18),
        (([TOP], [WHOLE[:1], WHOLE[1:2]]), 12),
        (([WHOLE[:1].expand(4, 6)],), 6),
    ],
    ids=["one half", "nothing", "overlapping", "the same half in two", "one row for all"],
)
def test_a_tensor_of_which_a_part_is_never_read_is_refused(ranks: tuple[list[torch.Tensor], ...], read: int) -> None:
    (sentence,) = said(groups([entry()]), coverage(*ranks))
    assert sentence == (f"a: of its 24 elements ([4, 6]) the engine would read {read}; its shape is not the engine's")


@given(
    st.integers(1, 6), st.integers(1, 6), st.integers(1, 3), st.integers(1, 3), st.sampled_from([None, 0, 1]), st.data()
)
@settings(deadline=None)
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
    assert said(groups(*sent), coverage(*ranks)) == []
    lost = data.draw(st.sampled_from([rank for rank, views in enumerate(ranks) if views]))
    ranks[lost].pop()
    assert len(said(groups(*sent), coverage(*ranks))) == 1


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
    taken = copy_of(torch.zeros(4, 6, dtype=given), kept)
    found = said(groups([entry(dtype=given)]), [LoadCoverage(rank=0, copies=[[taken]])])
    sentence = f"a: sent as {sent}, but the engine holds {held}: it would be rounded; send {held}"
    assert found == ([] if fits else [sentence])


def test_what_is_unknown_or_unfilled_on_all_ranks_is_refused_but_not_on_one() -> None:
    one = LoadCoverage(rank=0, copies=[[copy_of(WHOLE)]])
    padding_only = LoadCoverage(rank=1, copies=[[]], unknown=["a"])
    assert said(groups([entry()]), [one, padding_only]) == []
    neither = LoadCoverage(rank=0, copies=[[]], unknown=["a"])
    sentence = ["a: the engine knows no such parameter and would ignore it"]
    assert said(groups([entry()]), [neither, padding_only]) == sentence
    first = LoadCoverage(rank=0, copies=filling("embed"), missing={"head": (4, 4), "norm": (4, 4)})
    last = LoadCoverage(rank=1, copies=filling("embed", "head"), missing={"head": (0, 4), "norm": (4, 4)})
    unfilled = "a parameter of the engine that nothing sent would fill"
    assert said([], [first, last]) == said([], [last, first]) == [f"norm: {unfilled}"]
    stages = [
        LoadCoverage(rank=0, copies=filling("layers.0.norm")),
        LoadCoverage(rank=1, missing={"layers.3.norm": (2, 2)}),
    ]
    assert said([], stages) == [f"layers.3.norm: {unfilled}"], "of a pipeline stage"
    partly = [LoadCoverage(rank=rank, missing={"qkv.bias": (2, 6)}) for rank in range(2)]
    assert said([], partly) == [f"qkv.bias: {unfilled}, in 2 of its 6 elements"]


def test_what_the_models_own_checkpoint_does_not_fill_either_is_told_and_not_refused() -> None:
    """FalconH1's q_norm, in SGLang: a parameter that no checkpoint has, and that is not used."""
    ranks = [LoadCoverage(rank=0, missing={"q_norm": (4, 4), "up": (0, 4)})]
    with pytest.raises(WeightsRefused, match=r"q_norm: .* nothing sent would fill"):
        check_coverage([], ranks)
    [sentence] = check_coverage([], ranks, whole_checkpoint=True)
    assert sentence.startswith("q_norm: ") and "nor does the model's own checkpoint" in sentence
    said = "q_norm: .*the trainer ties it to embed, and SGLang's class does not"
    with pytest.raises(WeightsRefused, match=said):
        check_coverage([], ranks, whole_checkpoint=True, tied={"q_norm": "embed"})
    ranks[0].errors["up",] = "AssertionError: no"
    with pytest.raises(WeightsRefused, match="refuses it"):
        check_coverage([], ranks, whole_checkpoint=True)


def test_what_the_engine_holds_narrower_by_its_own_choice_is_not_refused() -> None:
    """dots1's correction bias: float32 in a trainer of bfloat16, and bfloat16 in SGLang, from disk too. Apertus'
    activation in bfloat16, in an engine of float32."""
    weight, bias = entry("w"), entry("bias", shape=(4,), dtype=torch.float32)
    taken = [copy_of(torch.zeros(4, 6, dtype=torch.bfloat16), name="w"), copy_of(torch.zeros(4), name="bias")]
    held = [LoadCoverage(rank=0, dtype=torch.bfloat16, copies=[taken])]
    assert said(groups([weight, bias]), held, buffers=["bias"]) == []
    assert "bias: sent as float32, but" in said(groups([weight, bias]), held)[0], "a parameter"
    rounded = copy_of(torch.zeros(4, 6), torch.bfloat16)
    for dtype, problems in ((torch.float32, 0), (torch.bfloat16, 1)):
        rank = LoadCoverage(rank=0, dtype=dtype, copies=[[rounded]])
        assert len(said(groups([entry(dtype=torch.float32)]), [rank])) == problems


def test_what_a_loader_raises_or_removes_is_said_once_and_nothing_else_of_that_tensor() -> None:
    refusing = [LoadCoverage(rank=rank, copies=[[]], errors={("a", "b"): "AssertionError: no"}) for rank in range(2)]
    sent = [[entry(), entry("b")]]
    assert said(groups(*sent), refusing) == ["a, b: the engine's loader refuses it: AssertionError: no"]
    ranks = [LoadCoverage(rank=rank, copies=[[copy_of(WHOLE)]], only_once="it removes a, and") for rank in range(2)]
    (problem,) = said(groups([entry()]), ranks)
    assert "only once" in problem and problem.endswith("it removes a, and")
    opaque = LoadCoverage(rank=0, copies=[[]], opaque=["a"])
    assert said(groups([entry()]), [opaque]) == [], "what cannot be followed is not refused"


def test_each_group_is_judged_by_what_is_read_of_it_and_a_name_is_sent_once() -> None:
    sent = [[entry()], [entry("b")]]
    right = LoadCoverage(rank=0, copies=[[copy_of(WHOLE)], [copy_of(WHOLE, name="b")]])
    assert said(groups(*sent), [right]) == []
    swapped = LoadCoverage(rank=0, copies=[[copy_of(WHOLE, name="b")], [copy_of(WHOLE)]])
    assert [sentence.split(":")[0] for sentence in said(groups(*sent), [swapped])] == ["a", "b"]
    twice = LoadCoverage(rank=0, copies=[[copy_of(WHOLE)], [copy_of(WHOLE)]])
    again = groups([entry()], [replace(entry(), of="again")])
    assert said(again, [twice]) == ["a: sent 2 times, and the engine keeps the last of them"]


def test_the_refusal_names_the_first_and_counts_the_rest() -> None:
    names = [f"tensor{index}" for index in range(SHOWN + 3)]
    nothing = LoadCoverage(rank=0, copies=[[]], unknown=names)
    with pytest.raises(WeightsRefused) as raised:
        check_coverage(groups([entry(name) for name in names]), [nothing])
    words = str(raised.value)
    assert f"tensor{SHOWN - 1}:" in words and f"tensor{SHOWN}:" not in words and words.endswith("; and 3 more")
    check_coverage(groups([entry()]), coverage([WHOLE]))


RANKS = 2
Live = dict[str, torch.Tensor]


def sound(mesh: DeviceMesh) -> Live:
    whole = {"a": torch.ones(5, 3), "b": torch.ones(1, 2, dtype=torch.bfloat16)}  # of b, rank 1 holds no row
    sharded: Live = {name: distribute_tensor(tensor, mesh, [Shard(0)]) for name, tensor in whole.items()}
    return sharded | {"plain": torch.ones(3), "steps": torch.tensor(7)}


def local(tensor: torch.Tensor) -> torch.Tensor:
    assert isinstance(tensor, DTensor)
    return tensor.to_local()


def with_rows(tensor: torch.Tensor, rows: int) -> torch.Tensor:
    """The same DTensor, of which this rank holds fewer rows than it says."""
    assert isinstance(tensor, DTensor)
    return DTensor.from_local(
        tensor.to_local()[:rows],
        tensor.device_mesh,
        [Shard(0)],
        run_check=False,
        shape=tensor.shape,
        stride=tensor.stride(),
    )


def check_finite_in_float16(live: Live) -> None:
    """Of "a" alone, as "plain" stays wider."""
    check_finite(live, [view_of("a", (1,), dtype=torch.float16), view_of("plain", (3,), dtype=torch.float32)])


NAN, INFINITY = float("nan"), float("inf")
TOO_LARGE = 65520.0
"""In float16 it is rounded to the number after 65504."""
NOT_FINITE = "tensor(s) hold a NaN or an infinity"
CHECKS: tuple[tuple[Callable[[Live], None], dict[int, Callable[[Live], object]], str], ...] = (
    (check_shards, {}, ""),
    (check_finite, {}, ""),
    (check_finite, {1: lambda live: local(live["a"]).fill_(3.4e38)}, ""),  # finite, though the sum is not
    (
        check_finite,
        {1: lambda live: local(live["a"])[1, 2].fill_(NAN)},
        f"1 {NOT_FINITE}: a (rank 1); nothing was sent.",
    ),
    (
        check_finite,
        {
            0: lambda live: (local(live["b"])[0, 0].fill_(-INFINITY), live["plain"][0].fill_(INFINITY)),
            1: lambda live: live["plain"][0].fill_(INFINITY),
        },
        f"2 {NOT_FINITE}: plain (rank 0), b (rank 0); nothing was sent.",
    ),
    (check_finite, {1: lambda live: local(live["a"])[0, 0].fill_(TOO_LARGE)}, ""),
    (check_finite_in_float16, {}, ""),
    (
        check_finite_in_float16,
        {1: lambda live: local(live["a"])[0, 0].fill_(TOO_LARGE)},
        f"1 {NOT_FINITE}, as they are sent in float16 (up to 65504): a (rank 1); nothing was sent.",
    ),
    (
        check_shards,
        {1: lambda live: live.update(a=with_rows(live["a"], 1))},
        "a: rank 1 holds 1 of the 2 rows of its shard",
    ),
    (
        check_shards,
        {1: lambda live: live.pop("plain")},
        "plain: rank 1 has none, but every rank must hold its shard.",
    ),
    (
        check_shards,
        {1: lambda live: live.update(more=torch.ones(1))},
        "more: rank 0 has none, but every rank must hold its shard.",
    ),
    (
        check_shards,
        {1: lambda live: live.update(plain=torch.ones(4))},
        "plain: ((4,), 'torch.float32') on rank 1 but ((3,), 'torch.float32') on rank 0.",
    ),
    (
        check_shards,
        {1: lambda live: live.update(plain=torch.ones(3, dtype=torch.bfloat16))},
        "plain: ((3,), 'torch.bfloat16') on rank 1 but ((3,), 'torch.float32') on rank 0.",
    ),
    (
        check_shards,
        {1: lambda live: live.update(plain=torch.ones(3, device="meta"))},
        "plain: rank 1 has it on the meta device, without values",
    ),
)
"""A check, what is spoilt on which rank, and what every rank says."""


def _say(rank: int) -> list[str]:
    mesh = init_device_mesh("cpu", (RANKS,))
    words = []
    for check, spoilt, _ in CHECKS:
        live = sound(mesh)
        if rank in spoilt:
            spoilt[rank](live)
        try:
            check(live)
            words.append("")
        except WeightsRefused as refused:
            words.append(str(refused))
    return words


def test_what_is_wrong_is_said_on_every_rank_with_the_tensor_and_the_rank(tmp_path: Path) -> None:
    expected = [sentence for _, _, sentence in CHECKS]
    assert on_ranks(_say, RANKS, tmp_path) == [expected] * RANKS


def part(rows: int, first: int = 0) -> TensorView:
    """Rows of a tensor [5, 3]."""
    return view_of(f"from {first}", (rows, 3), of="a", offset=3 * first)


def test_a_checkpoint_form_that_has_too_few_elements_or_too_many_is_refused() -> None:
    whole = {"a": torch.ones(5, 3)}
    check_complete([part(5)], whole)
    check_complete([part(2), part(3, 2)], whole)
    for parts, held in (([], 0), ([part(2)], 6), ([part(2), part(5)], 21)):
        with pytest.raises(WeightsRefused, match=f"^a: the checkpoint's tensors hold {held} of its 15 elements"):
            check_complete(parts, whole)


@st.composite
def tensors_and_parts(draw: st.DrawFn) -> tuple[torch.Tensor, list[torch.Tensor]]:
    """Draw a part of a larger tensor, in any order of its axes, and parts of that part, which may share elements."""
    shape = draw(st.lists(st.integers(1, 5), min_size=1, max_size=3))
    whole = torch.arange(torch.Size(shape).numel()).view(shape).permute(draw(st.permutations(range(len(shape)))))

    def part(tensor: torch.Tensor) -> torch.Tensor:
        for axis, size in enumerate(tensor.shape):
            start = draw(st.integers(0, size - 1))
            tensor = tensor.narrow(axis, start, draw(st.integers(1, size - start)))
        return tensor

    held = part(whole)
    return held, [part(held) for _ in range(draw(st.integers(0, 4)))]


def view_onto(tensor: torch.Tensor) -> TensorView:
    return TensorView(
        name="a", of="a", dtype=tensor.dtype, shape=tuple(tensor.shape), stride=tuple(tensor.stride()),
        offset=int(tensor.storage_offset()),
    )  # fmt: skip


@settings(deadline=None)
@given(tensors_and_parts())
def test_elements_read_by_several_ranks_are_counted_once(drawn: tuple[torch.Tensor, list[torch.Tensor]]) -> None:
    held, parts = drawn
    read = {element for part in parts for element in part.flatten().tolist()}
    assert elements_read(view_onto(held), [view_onto(part) for part in parts]) == len(read)


def test_elements_of_an_expert_of_full_size_are_counted_without_marking_each() -> None:
    """Only torch on the meta device could hold ten thousand such tensors; marking one takes longer than all of this."""
    expert = view_of("a", (1 << 20, 1 << 20), dtype=torch.bfloat16)
    halves = [expert.at(start * expert.stride[0]) for start in (0, 1 << 19)]
    reads = [
        TensorView(name="a", of="a", dtype=each.dtype, shape=(1 << 19, 1 << 20), stride=each.stride, offset=each.offset)
        for each in halves
    ]
    assert elements_read(expert, reads) == 1 << 40 and elements_read(expert, reads[:1]) == 1 << 39


def test_two_names_that_fill_the_same_elements_are_named_and_the_rank_if_others_do_not() -> None:
    held = {"head": (0, 4)}
    ranks = [LoadCoverage(rank=rank, missing=held) for rank in range(2)]
    ranks[1].overwritten = {"head": ("embed", "lm_head")}
    sentence = "head: embed and lm_head fill the same elements of it"
    assert said([], ranks) == [f"{sentence} on engine rank 1; the engine keeps the second"]
    ranks[0].overwritten = ranks[1].overwritten
    assert said([], ranks) == [f"{sentence}; the engine keeps the second"]


def test_a_parameter_that_one_rank_ignores_is_refused_where_two_others_hold_the_same() -> None:
    whole = [LoadCoverage(rank=rank, copies=filling("norm"), missing={"norm": (0, 24)}) for rank in range(2)]
    ignoring = LoadCoverage(rank=2, copies=[[]], missing={"norm": (24, 24)})
    assert unfilled_on_some_ranks(whole) == []
    shards = [
        LoadCoverage(
            rank=rank, copies=[[LoaderCopy(entry(offset=6 * rank), "norm", torch.bfloat16)]], missing={"norm": (0, 6)}
        )
        for rank in range(2)
    ]
    assert unfilled_on_some_ranks([*shards, ignoring]) == [], "other shards leave padding to the last"
    with pytest.raises(
        WeightsRefused, match="norm: filled on engine rank 0, 1, but the loader of engine rank 2 ignores"
    ):
        check_coverage([], [*whole, ignoring])
    # Of two ranks, the second may hold nothing but padding: the run goes on, and its verdict says so.
    [sentence] = check_coverage([], [whole[0], ignoring])
    assert sentence.startswith("norm: ") and "or it holds padding" in sentence


def padded(zeros: int, config: dict[str, int], *per_rank: torch.Tensor) -> list[LoadCoverage]:
    """Two ranks that read these parts, the last of which makes so many elements zero behind its own."""
    found = coverage(*([part] for part in per_rank))
    last = replace(found[-1], padded={0: {"engine's": zeros}}, sizes=ModelSizes.of(with_config(config)))
    return [*found[:-1], last]


def with_config(config: dict[str, int]) -> torch.nn.Module:
    model = torch.nn.Module()
    model.config = config
    return model


@pytest.mark.parametrize(
    ("config", "rows", "zeros", "explained"),
    [
        ({"intermediate_size": 5, "hidden_size": 6}, 5, 6, True),
        ({"original_num_heads": 5, "num_heads": 8}, 5, 18, True),
        ({"intermediate_size": 8, "hidden_size": 6}, 4, 24, False),
        ({"intermediate_size": 5, "hidden_size": 6}, 4, 9, False),
        ({}, 4, 6, False),
        ({"hidden_size": 6}, 4, 8, False),
        ({"original_max_position_embeddings": 4, "max_position_embeddings": 8}, 4, 24, False),
    ],
    ids=[
        "rounded up to two ranks",
        "by SGLang's CPU mode",
        "one rank's shard",
        "more than the ranks need",
        "no such size",
        "a size of the other axis",
        "no size of a weight",
    ],
)
def test_zeros_are_padding_only_behind_a_size_that_does_not_divide(
    config: dict[str, int], rows: int, zeros: int, explained: bool
) -> None:
    whole = torch.zeros(rows, 6, dtype=torch.bfloat16)
    found = said(groups([entry(shape=(rows, 6))]), padded(zeros, config, whole[:3], whole[3:]))
    too_short = f"a: sent as [{rows}, 6], which is too short for the engine's engine's: it would make {zeros}"
    assert [sentence[: len(too_short)] for sentence in found] == ([] if explained else [too_short])


def test_of_experts_the_one_that_is_too_short_is_named() -> None:
    names = [f"experts.{number}" for number in range(3)]
    views = [entry(name=name, shape=(2 if name == "experts.1" else 4, 6)) for name in names]
    ranks = []
    for rank in range(2):
        parts = {name: WHOLE[2 * rank : 2 * rank + 2] for name in names if (rank, name) != (1, "experts.1")}
        copies = [copy_of(part, name=name) for name, part in parts.items()]
        ranks.append(LoadCoverage(rank=rank, copies=[copies], padded={0: {"engine's": 12}} if rank else {}))
    (sentence,) = said(groups(views), ranks)
    assert sentence.startswith("experts.1: sent as [2, 6], which is too short")


def test_a_tensor_of_which_each_rank_lacks_as_much_is_too_short_but_not_a_bias_that_ranks_add_up() -> None:
    ranks = [replace(each, padded={0: {"engine's": 12}}) for each in coverage([TOP], [BOTTOM])]
    [sentence] = said(groups([entry()]), ranks)
    assert sentence.startswith("a: sent as [4, 6], which is too short") and "24 elements zero" in sentence
    sizes = ModelSizes.of(with_config({"hidden_size": 6}))
    for size, problems in ((6, 0), (3, 1)):  # as that of gpt-oss' down_proj, and a shard of another bias
        first = LoadCoverage(rank=0, copies=[[copy_of(torch.zeros(size, dtype=torch.bfloat16), name="down.bias")]])
        other = LoadCoverage(rank=1, copies=[[]], padded={0: {"engine's": size}}, sizes=sizes)
        assert len(said(groups([entry(name="down.bias", shape=(size,))]), [first, other])) == problems
