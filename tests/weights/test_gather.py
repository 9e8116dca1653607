"""Properties of plan_buckets, for any layout, world size and limit, and of gather on real ranks.

- every checkpoint tensor is in exactly one bucket, and no bucket is empty;
- a fusing group is never split, except a tensor of experts between rows;
- groups keep the order in which the layout first names them;
- a bucket is above the limit only where one group, or one row of experts, alone is, and no two neighbours would fit into one;
- pieces are aligned and do not overlap, and each tensor lies inside a piece of its own live tensor.
"""

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby, pairwise
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor

from harness.trainer.rows import RowShards
from harness.weights.fusing import fusing_groups, fusing_key
from harness.weights.gather import ALIGNMENT, Bucket, aligned, full_tensor, gather, plan_buckets
from harness.weights.tensor_view import TensorView, span
from tests.cluster.gloo import on_ranks

MODULES = ("self_attn.q_a_proj", "self_attn.kv_a_proj_with_mqa", "self_attn.o_proj", "mlp.gate_proj", "mlp.up_proj",
           "mlp.shared_experts.up_proj", "mlp.experts.0.gate_proj", "mlp.experts.0.up_proj", "mlp.experts.1.up_proj",
           "input_layernorm")  # fmt: skip
LIVE_NAMES = [f"model.layers.{layer}.{module}.weight" for layer in range(3) for module in MODULES]
LIVE_NAMES += [f"model.layers.{layer}.mlp.experts.gate_up_proj" for layer in range(3)]
LIVE_NAMES += ["model.embed_tokens.weight", "model.norm.weight", "lm_head.weight"]
FIRST_FUSED = 7
"""Numbers of fused experts begin here: a drawn model may have unfused ones too."""
DTYPES = (torch.float32, torch.bfloat16)


@dataclass(frozen=True)
class Sharded:
    """A tensor that `ranks` ranks share."""

    shape: tuple[int, ...]
    dtype: torch.dtype
    ranks: int

    @property
    def shards(self) -> RowShards:
        return RowShards(self.shape[0], torch.Size(self.shape).numel() // self.shape[0], self.ranks)


def checkpoint_of(live_name: str, shape: tuple[int, ...], dtype: torch.dtype) -> list[TensorView]:
    """A fused tensor of experts [experts, 2 * n, k] as one gate and one up for each; any other as itself."""
    size = torch.Size(shape)
    strides = tuple(torch.empty(size, device="meta").stride())
    if not live_name.endswith("gate_up_proj"):
        return [TensorView(name=live_name, of=live_name, shape=shape, stride=strides, dtype=dtype)]
    prefix, (experts, rows, columns) = live_name.removesuffix("gate_up_proj"), shape
    return [
        TensorView(
            name=f"{prefix}{FIRST_FUSED + expert}.{name}.weight",
            of=live_name,
            shape=(rows // 2, columns),
            stride=(columns, 1),
            offset=(2 * expert + half) * rows // 2 * columns,
            dtype=dtype,
        )
        for expert in range(experts)
        for half, name in enumerate(("gate_proj", "up_proj"))
    ]


@st.composite
def models(draw: st.DrawFn, ranks: st.SearchStrategy[int]) -> dict[str, Sharded]:
    live = {}
    world_size = draw(ranks)
    for name in draw(st.lists(st.sampled_from(LIVE_NAMES), unique=True)):
        shape: tuple[int, ...]
        if name.endswith("gate_up_proj"):
            shape = (draw(st.integers(1, 9)), 2 * draw(st.integers(1, 4)), draw(st.integers(1, 20)))
        else:
            shape = tuple(draw(st.lists(st.integers(1, 20), min_size=1, max_size=2)))
        live[name] = Sharded(shape, draw(st.sampled_from(DTYPES)), draw(st.sampled_from((1, world_size))))
    return live


def layout_of(live: dict[str, Sharded]) -> list[TensorView]:
    return [tensor for name, each in live.items() for tensor in checkpoint_of(name, each.shape, each.dtype)]


def plan(live: dict[str, Sharded], limit: int) -> tuple[Bucket, ...]:
    return plan_buckets(fusing_groups(layout_of(live)), {name: each.shards for name, each in live.items()}, limit)


def shards_of(live: Mapping[str, torch.Tensor]) -> dict[str, RowShards]:
    return {name: RowShards.of(tensor) for name, tensor in live.items()}


def gathered(bucket: Bucket, live: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    return dict(bucket.named_tensors(gather(bucket, live)))


def bytes_of(entry: TensorView) -> tuple[int, int]:
    """First byte, and the one after the last."""
    first = entry.offset * entry.dtype.itemsize
    return first, first + span(entry.shape, entry.stride) * entry.dtype.itemsize


@given(models(st.integers(1, 5)), st.integers(1, 12_000))
@settings(max_examples=60, deadline=None)
def test_a_plan_is_as_said_above(live: dict[str, Sharded], limit: int) -> None:
    layout, buckets = layout_of(live), plan(live, limit)
    check_order(layout, buckets)
    check_sizes({each.of: fusing_key(each) for each in layout}, buckets, limit)
    live_name = {each.name: each.of for each in layout}
    rows_sent: dict[str, list[tuple[int, int]]] = {}
    for bucket in buckets:
        assert all(piece.offset_bytes % ALIGNMENT == 0 for piece in bucket.pieces)
        for one, other in pairwise(bucket.pieces):
            assert one.offset_bytes + one.nbytes <= other.offset_bytes
        assert bucket.pieces[-1].offset_bytes + bucket.pieces[-1].nbytes <= bucket.nbytes
        for piece in bucket.pieces:
            rows_sent.setdefault(piece.of, []).append((piece.start, piece.stop))
        for entry in bucket.views:
            start, end = bytes_of(entry)
            assert start % entry.dtype.itemsize == 0
            assert any(
                piece.offset_bytes <= start and end <= piece.offset_bytes + piece.nbytes
                for piece in bucket.pieces
                if piece.of == live_name[entry.name]
            )
        spans = sorted(bytes_of(entry) for entry in bucket.views)  # each entry here is contiguous
        assert all(one[1] <= other[0] for one, other in pairwise(spans))
    for name, rows in rows_sent.items():  # each chunk's rows once, in order
        assert rows[0][0] == 0 and rows[-1][1] == live[name].shards.chunk
        assert all(one[1] == other[0] for one, other in pairwise(rows))


def check_order(layout: Sequence[TensorView], buckets: Sequence[Bucket]) -> None:
    group_of = {each.name: fusing_key(each) for each in layout}
    sent = [entry for bucket in buckets for entry in bucket.views]
    assert sorted(entry.name for entry in sent) == sorted(each.name for each in layout)
    assert {(entry.name, entry.shape, entry.stride, entry.dtype) for entry in sent} == {
        (each.name, each.shape, each.stride, each.dtype) for each in layout
    }
    assert all(bucket.pieces for bucket in buckets)
    runs = [group for group, _ in groupby(sent, key=lambda entry: group_of[entry.name])]
    assert runs == list(dict.fromkeys(group_of.values()))  # in order, and none split
    places = {(group_of[entry.name], index) for index, bucket in enumerate(buckets) for entry in bucket.views}
    split = [group for group, count in Counter(group for group, _ in places).items() if count > 1]
    assert all(group.endswith(".experts.gate_up_proj") for group in split)


def check_sizes(live_group: Mapping[str, str], buckets: Sequence[Bucket], limit: int) -> None:
    for bucket in buckets:
        assert bucket.nbytes == sum(aligned(piece.nbytes) for piece in bucket.pieces)
        if bucket.nbytes > aligned(limit):
            assert len({live_group[piece.of] for piece in bucket.pieces}) == 1
            for piece in bucket.pieces:
                assert not piece.of.endswith("gate_up_proj") or piece.stop - piece.start == 1
    for before, after in pairwise(buckets):
        first = after.pieces[0].of
        if first.endswith("gate_up_proj"):
            least = after.pieces[0].row_bytes
        else:
            together = [piece for piece in after.pieces if live_group[piece.of] == live_group[first]]
            least = sum(aligned(piece.nbytes) for piece in together)
        assert before.nbytes + least > limit


@given(st.permutations(LIVE_NAMES), st.integers(1, 12_000))
@settings(max_examples=20, deadline=None)
def test_what_the_engine_fuses_is_in_one_bucket_whatever_the_order(names: list[str], limit: int) -> None:
    live = {name: Sharded((2, 4, 7) if name.endswith("gate_up_proj") else (5, 9), torch.bfloat16, 2) for name in names}
    buckets = plan(live, limit)
    bucket_of = {entry.name: index for index, bucket in enumerate(buckets) for entry in bucket.views}
    for layer in range(3):
        prefix = f"model.layers.{layer}"
        for one, other in (
            ("self_attn.q_a_proj", "self_attn.kv_a_proj_with_mqa"),
            ("mlp.gate_proj", "mlp.up_proj"),
            ("mlp.experts.0.gate_proj", "mlp.experts.0.up_proj"),
            ("mlp.experts.7.gate_proj", "mlp.experts.7.up_proj"),
            ("mlp.experts.8.gate_proj", "mlp.experts.8.up_proj"),
        ):
            assert bucket_of[f"{prefix}.{one}.weight"] == bucket_of[f"{prefix}.{other}.weight"]


def fused_down(live_name: str, experts: int, rows: int, columns: int) -> list[TensorView]:
    """Experts of which each checkpoint tensor is transposed: its elements do not lie in a row of their own."""
    return [
        TensorView(
            name=f"{live_name.removesuffix('down_proj')}{expert}.down_proj.weight",
            of=live_name,
            shape=(columns, rows),
            stride=(1, columns),
            offset=expert * rows * columns,
            dtype=torch.bfloat16,
        )
        for expert in range(experts)
    ]


def _model(seed: int) -> tuple[dict[str, torch.Tensor], list[TensorView], set[str]]:
    """Full tensors of random shapes, their checkpoint form, and the names that are plain buffers on every rank."""
    draw = torch.Generator().manual_seed(seed)

    def size(low: int, high: int) -> int:
        return int(torch.randint(low, high + 1, (), generator=draw))

    full: dict[str, torch.Tensor] = {}
    layout: list[TensorView] = []
    for layer in range(3):
        dtype = DTYPES[(seed + layer) % 2]
        hidden = size(1, 7)
        shapes: dict[str, tuple[int, ...]] = {
            "self_attn.q_a_proj.weight": (size(1, 9), hidden),
            "self_attn.kv_a_proj_with_mqa.weight": (size(1, 9), hidden),
            "mlp.gate.e_score_correction_bias": (size(1, 5),),
            "mlp.experts.gate_up_proj": (size(1, 8), 2 * size(1, 3), hidden),
            "input_layernorm.weight": (hidden,),
        }
        for name, shape in shapes.items():
            live_name = f"model.layers.{layer}.{name}"
            full[live_name] = torch.randn(shape, generator=draw).to(dtype)
            layout += checkpoint_of(live_name, shape, dtype)
        down = f"model.layers.{layer}.mlp.experts.down_proj"
        experts, rows, columns = size(1, 8), size(1, 3), hidden
        full[down] = torch.randn((experts, rows, columns), generator=draw).to(torch.bfloat16)
        layout += fused_down(down, experts, rows, columns)
    return full, layout, {name for name in full if name.endswith("bias")}


def _gather_all(rank: int, ranks: int, seeds: Sequence[int]) -> list[str]:
    """What did not arrive whole, over many models and limits; and how many tensors of experts were split."""
    mesh = init_device_mesh("cpu", (ranks,))
    wrong, split = [], 0
    for seed in seeds:
        full, layout, plain = _model(seed)
        live = {
            name: tensor if name in plain else torch.nn.Parameter(distribute_tensor(tensor, mesh, [Shard(0)]))
            for name, tensor in full.items()
        }
        expected = {view.name: view.in_memory(full[view.of]) for view in layout}
        for limit in (1, 300, 2000, 1 << 20):
            buckets = plan_buckets(fusing_groups(layout), shards_of(live), limit)
            found: dict[str, torch.Tensor] = {}
            for bucket in buckets:
                split += any(piece.start for piece in bucket.pieces)
                found |= gathered(bucket, live)
            wrong += [
                f"rank {rank}, seed {seed}, limit {limit}: {name}"
                for name, tensor in expected.items()
                if not (found[name].dtype == tensor.dtype and torch.equal(found[name], tensor))
            ]
            assert found.keys() == expected.keys()
        for name, tensor in live.items():
            assert torch.equal(full_tensor(tensor), full[name])
    assert split, "no tensor of experts was ever split, so this would prove nothing of it"
    return wrong


@pytest.mark.parametrize("ranks", [2, 3])
def test_gather_gives_the_full_tensors_bit_for_bit_on_every_rank(ranks: int, tmp_path: Path) -> None:
    assert on_ranks(_gather_all, ranks, tmp_path, ranks, range(4)) == [[]] * ranks


def test_of_one_rank_too(alone: None) -> None:
    assert _gather_all(0, 1, range(4)) == []
    parameter = torch.nn.Parameter(torch.arange(6.0).view(2, 3).T)
    full = full_tensor(parameter)
    assert full.is_contiguous() and not full.requires_grad and torch.equal(full, parameter)


def test_gather_gives_full_contiguous_tensors_without_a_gradient(alone: None) -> None:
    whole = torch.arange(20.0).view(5, 4)
    live = {"a": torch.nn.Parameter(distribute_tensor(whole, init_device_mesh("cpu", (1,)), [Shard(0)])), "b": -whole}

    def part(name: str, of: str, offset: int) -> TensorView:
        return TensorView(name=name, of=of, shape=(5, 2), stride=(4, 1), offset=offset, dtype=torch.float32)

    parts = [part("left", "a", 0), part("right", "a", 2), part("plain", "b", 2)]
    (bucket,) = plan_buckets(fusing_groups(parts), shards_of(live), 1 << 20)
    assert sum(entry.nbytes for entry in bucket.views) == 3 * 10 * 4
    found = gathered(bucket, live)
    assert all(each.is_contiguous() and not each.requires_grad for each in found.values())
    expected = {"left": whole[:, :2], "right": whole[:, 2:], "plain": -whole[:, 2:]}
    assert found.keys() == expected.keys()
    assert all(torch.equal(found[name], tensor) for name, tensor in expected.items())


def test_experts_that_are_not_sharded_are_gathered_in_several_buckets_too() -> None:
    whole = torch.arange(6 * 4 * 8.0).view(6, 4, 8)
    live = {"model.layers.0.mlp.experts.gate_up_proj": whole}
    layout = checkpoint_of(next(iter(live)), (6, 4, 8), torch.float32)
    buckets = plan_buckets(fusing_groups(layout), shards_of(live), 300)
    assert len(buckets) == 3
    found = {name: tensor for bucket in buckets for name, tensor in gathered(bucket, live).items()}
    assert all(torch.equal(found[view.name], view.in_memory(whole)) for view in layout)
