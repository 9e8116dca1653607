"""Properties of plan_buckets, for any layout and limit:

- every tensor is in exactly one bucket, and no bucket is empty;
- a fusing group is never split;
- groups keep the order in which the layout first names them; within a group, tensors are in the order of their names;
- a bucket above the limit holds one group, and no two neighbours would fit into one bucket together.
"""

from itertools import groupby, pairwise
from pathlib import Path

import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor

from harness.weights.gather import Bucket, _fusing_group, full_tensor, gather, plan_buckets
from harness.weights.names import CheckpointTensor
from tests.gloo import on_ranks

MODULES = ("self_attn.q_a_proj", "self_attn.kv_a_proj_with_mqa", "self_attn.o_proj", "mlp.gate_proj", "mlp.up_proj",
           "mlp.shared_experts.up_proj", "mlp.experts.0.gate_proj", "mlp.experts.0.up_proj", "mlp.experts.1.up_proj",
           "input_layernorm")  # fmt: skip
LIVE_NAMES = [f"model.layers.{layer}.{module}.weight" for layer in range(3) for module in MODULES]
LIVE_NAMES += [f"model.layers.{layer}.mlp.experts.gate_up_proj" for layer in range(3)]
LIVE_NAMES += ["model.embed_tokens.weight", "model.norm.weight", "lm_head.weight"]


def tensor(name: str, elements: int = 1, live_name: str | None = None) -> CheckpointTensor:
    return CheckpointTensor(
        name=name, live_name=live_name or name, shape=(elements,), stride=(1,), offset=0, dtype=torch.bfloat16
    )


def experts_of(live_name: str, elements: int) -> list[CheckpointTensor]:
    """The checkpoint tensors of a live one: several of a fused one, else itself."""
    if live_name.endswith("gate_up_proj"):
        prefix = live_name.removesuffix("gate_up_proj")
        return [tensor(f"{prefix}{i}.{half}.weight", elements, live_name) for i in (7, 8) for half in ("gate", "up")]
    return [tensor(live_name, elements)]


layouts = st.lists(st.tuples(st.sampled_from(LIVE_NAMES), st.integers(0, 100)), unique_by=lambda pair: pair[0]).map(
    lambda pairs: [each for name, elements in pairs for each in experts_of(name, elements)]
)


@given(layouts, st.integers(1, 1000))
def test_plan_buckets(layout: list[CheckpointTensor], limit: int) -> None:
    buckets = plan_buckets(layout, limit)
    sent = [each for bucket in buckets for each in bucket.tensors]
    assert sorted(sent, key=lambda each: each.name) == sorted(layout, key=lambda each: each.name)
    assert all(bucket.tensors for bucket in buckets)

    groups = [[_fusing_group(each) for each in bucket.tensors] for bucket in buckets]
    runs = [group for bucket in groups for group, _ in groupby(bucket)]
    assert runs == list(dict.fromkeys(_fusing_group(each) for each in layout))  # in order, and none split
    for _, members in groupby(sent, key=_fusing_group):
        names = [each.name for each in members]
        assert names == sorted(names)

    assert all(bucket.nbytes <= limit or len(set(group)) == 1 for bucket, group in zip(buckets, groups, strict=True))
    for before, after in pairwise(buckets):
        next_group = [each for each in after.tensors if _fusing_group(each) == _fusing_group(after.tensors[0])]
        assert before.nbytes + Bucket(tensors=tuple(next_group)).nbytes > limit


@given(st.permutations(LIVE_NAMES), st.integers(1, 1000))
def test_what_the_engine_fuses_is_in_one_bucket_whatever_the_order(names: list[str], limit: int) -> None:
    buckets = plan_buckets([each for name in names for each in experts_of(name, 50)], limit)
    bucket_of = {each.name: index for index, bucket in enumerate(buckets) for each in bucket.tensors}
    for layer in range(3):
        prefix = f"model.layers.{layer}"
        for one, other in (
            ("self_attn.q_a_proj", "self_attn.kv_a_proj_with_mqa"),
            ("mlp.gate_proj", "mlp.up_proj"),
            ("mlp.experts.0.gate_proj", "mlp.experts.0.up_proj"),
            ("mlp.experts.7.gate", "mlp.experts.7.up"),
        ):
            assert bucket_of[f"{prefix}.{one}.weight"] == bucket_of[f"{prefix}.{other}.weight"]
    for bucket in buckets:
        order = [each.name.split(".")[-2] for each in bucket.tensors if "_a_proj" in each.name]
        assert order == ["kv_a_proj_with_mqa", "q_a_proj"] * (len(order) // 2)  # what sglang 0.4.6 needs


def test_of_no_tensors_there_are_no_buckets() -> None:
    assert plan_buckets([], 100) == ()


def test_a_bucket_gathers_a_fused_tensor_once() -> None:
    fused = experts_of("model.layers.0.mlp.experts.gate_up_proj", 4)
    bucket = Bucket(tensors=(*fused, tensor("model.norm.weight", 3)))
    assert bucket.live_names == ("model.layers.0.mlp.experts.gate_up_proj", "model.norm.weight")
    assert bucket.nbytes == 2 * (4 * 4 + 3)


def _gather(rank: int) -> tuple[dict[str, list[list[float]]], bool]:
    """A DTensor of 5 rows over 2 ranks, and a tensor that every rank holds whole."""
    mesh = init_device_mesh("cpu", (2,))
    whole = torch.arange(20.0).view(5, 4)
    parameter = torch.nn.Parameter(distribute_tensor(whole, mesh, [Shard(0)]))
    assert parameter.to_local().shape[0] == (3, 2)[rank]  # type: ignore[attr-defined]

    def part(name: str, live_name: str, offset: int) -> CheckpointTensor:
        return CheckpointTensor(
            name=name, live_name=live_name, shape=(5, 2), stride=(4, 1), offset=offset, dtype=torch.float32
        )

    bucket = Bucket(tensors=(part("left", "a", 0), part("right", "a", 2), part("plain", "b", 2)))
    gathered = gather(bucket, {"a": parameter, "b": whole + 100})
    sound = all(each.is_contiguous() and not each.requires_grad for _, each in gathered)
    return {name: each.tolist() for name, each in gathered}, sound


def test_gather_gives_full_contiguous_tensors_on_every_rank(tmp_path: Path) -> None:
    whole = torch.arange(20.0).view(5, 4)
    parts = {"left": whole[:, :2].tolist(), "right": whole[:, 2:].tolist(), "plain": (whole[:, 2:] + 100).tolist()}
    assert on_ranks(_gather, 2, tmp_path) == [(parts, True)] * 2


def test_full_tensor_of_a_plain_strided_parameter() -> None:
    parameter = torch.nn.Parameter(torch.arange(6.0).view(2, 3).T)
    full = full_tensor(parameter)
    assert full.is_contiguous() and not full.requires_grad and torch.equal(full, parameter)
