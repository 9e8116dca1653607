"""Pulls between real processes: gloo ranks that hold FSDP2's shards, each with one part of a small tensor-parallel
model.

Hosts are names: ranks of another name cannot open each other's memory, so that all between them is exchanged.
"""

import time
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor

from harness.trainer.offload import local
from harness.weights.pull import puller
from harness.weights.pull.transport import islands_of
from harness.weights.tensor_view import TensorView
from tests.cluster.gloo import on_ranks
from tests.weights.toy_model import RankEngine, move, sync_to

ROWS, COLUMNS, EXPERTS, VOCABULARY, HEADS = 10, 12, 3, 11, 2


class Part(nn.Module):
    """Rank `rank` of `tp`: rows, columns, replicated heads, a padded vocabulary, stacked experts, and a norm that is
    doubled."""

    def __init__(self, tp: int, rank: int) -> None:
        super().__init__()
        self.tp, self.rank = tp, rank
        shapes = {
            "embed": (-(-VOCABULARY // tp), COLUMNS),
            "kv": (max(1, HEADS // tp) * 3, COLUMNS),
            "gate": (ROWS * 4 // tp, COLUMNS),
            "down": (ROWS, COLUMNS // tp),
            "w2": (EXPERTS, 4, COLUMNS // tp),
            "norm": (COLUMNS,),
        }
        for name, shape in shapes.items():
            self.register_parameter(name, nn.Parameter(torch.full(shape, -1.0).bfloat16(), requires_grad=False))

    def load_weights(self, weights: Iterable[tuple[str, torch.Tensor]]) -> None:
        for name, loaded in weights:
            held = getattr(self, name.partition(".")[0]).data
            if name == "embed":
                first = min(self.rank * len(held), len(loaded))
                rows = loaded[first : first + len(held)]
                held[: len(rows)].copy_(rows)
                held[len(rows) :].fill_(0)  # more than a copy: SGLang's own loader does it
            elif name == "kv":
                first = self.rank * HEADS // self.tp * 3
                held.copy_(loaded[first : first + len(held)])
            elif name == "gate":
                held.copy_(loaded.narrow(0, self.rank * len(held), len(held)))
            elif name == "down":
                held.copy_(loaded.narrow(1, self.rank * held.shape[1], held.shape[1]))
            elif name.startswith("w2."):
                expert = int(name.partition(".")[2])
                held[expert].copy_(loaded.narrow(1, self.rank * held.shape[2], held.shape[2]))
            else:
                held.copy_(loaded)


SHAPES = {
    "embed": (VOCABULARY, COLUMNS), "kv": (HEADS * 3, COLUMNS), "gate": (ROWS * 4, COLUMNS), "down": (ROWS, COLUMNS),
    "w2": (EXPERTS, 4, COLUMNS), "norm": (COLUMNS,),
}  # fmt: skip


def layout() -> tuple[TensorView, ...]:
    """float32 masters, sent as bfloat16."""
    found = []
    for name, shape in SHAPES.items():
        stride = tuple(torch.empty(shape, device="meta").stride())
        parts = [(name, shape, stride, 0)]
        if name == "w2":
            parts = [(f"w2.{expert}", shape[1:], stride[1:], expert * stride[0]) for expert in range(EXPERTS)]
        found += [
            TensorView(name=each, of=f"{name}.x.weight", shape=size, stride=step, offset=offset, dtype=torch.bfloat16)
            for each, size, step, offset in parts
        ]
    return tuple(found)


def expected(values: Mapping[str, torch.Tensor], tp: int, rank: int) -> Part:
    part, sent = Part(tp, rank), {name: tensor.bfloat16() for name, tensor in values.items()}
    experts = {f"w2.{expert}": tensor for expert, tensor in enumerate(sent.pop("w2"))}
    part.load_weights([*sent.items(), *experts.items()])
    return part


def _pull(rank: int, tp: int, per_host: int, limit: int) -> tuple[list[str], int, int]:
    """What was wrong in three pulls; bytes this rank sent in the last, and the least that its host must receive."""
    world, wrong = dist.get_world_size(), []
    mesh = init_device_mesh("cpu", (world,))
    model = Part(tp, rank % tp)
    engine = RankEngine(model, tuple(range(rank - rank % tp, rank - rank % tp + tp)), f"host{rank // per_host}")
    live = {
        f"{name}.x.weight": nn.Parameter(distribute_tensor(torch.zeros(shape), mesh, [Shard(0)]))
        for name, shape in SHAPES.items()
    }
    sync = sync_to(model, live, layout(), engine, limit)
    for seed in range(3):
        draw = torch.Generator().manual_seed(seed)
        values = {name: torch.randn(shape, generator=draw) for name, shape in SHAPES.items()}
        if seed == 2:
            move(live["down.x.weight"])  # first: what it leaves has the values of the step before
        for name, tensor in values.items():
            local(live[f"{name}.x.weight"]).copy_(local(distribute_tensor(tensor, mesh, [Shard(0)])))
        sync.update_engine()
        right = expected(values, tp, rank % tp)
        wrong += [name for name, held in right.state_dict().items() if not torch.equal(held, model.state_dict()[name])]
        wrong += [f"compared: {found}" for found in sync.differences()]
        model.gate.data[0, 0] += 1
        size = model.gate.numel()
        of_ranks = ", ".join(f"1 of {size} elements on rank {each}" for each in range(min(world, 4)))
        assert sync.differences() == [f"gate: {of_ranks}"]
    needs: list[Any] = [None] * world
    dist.all_gather_object(needs, puller.kept(model).needs())
    of_host = {need for each in range(world) if each // per_host == rank // per_host for need in needs[each]}
    return wrong, sync.transport.sent_bytes, sum(need.nbytes for need in of_host)


@pytest.mark.parametrize(
    ("world", "tp", "per_host"), [(2, 2, 2), (2, 1, 2), (4, 2, 4), (4, 4, 2), (4, 2, 2), (3, 3, 1), (4, 4, 1)]
)
def test_what_every_scheduler_holds_is_what_its_own_loader_would_have_loaded(
    world: int, tp: int, per_host: int, tmp_path: Path
) -> None:
    outcomes = on_ranks(_pull, world, tmp_path, tp, per_host, 1 << 20)
    assert [wrong for wrong, _, _ in outcomes] == [[]] * world
    sent, least = (
        sum(sent for _, sent, _ in outcomes),
        {rank // per_host: each[2] for rank, each in enumerate(outcomes)},
    )
    assert sent == sum(least.values()) and (sent > 0) == (per_host < world)


class LateEngine(RankEngine):
    """An engine whose scheduler on rank 1 is slow to begin."""

    def ask(self, function: Callable[[Any, Any], Any], argument: Any = None) -> Any:
        if function is puller.pull and self.group.rank == 1:
            time.sleep(0.5)
        return super().ask(function, argument)


def _change_at_once(rank: int, per_host: int) -> bool:
    mesh, model = init_device_mesh("cpu", (2,)), Part(1, 0)
    values = {name: torch.randn(shape, generator=torch.Generator().manual_seed(1)) for name, shape in SHAPES.items()}
    live = {f"{name}.x.weight": distribute_tensor(tensor, mesh, [Shard(0)]) for name, tensor in values.items()}
    sync = sync_to(model, live, layout(), LateEngine(model, (rank,), f"host{rank // per_host}"))
    sync.update_engine()
    for tensor in live.values():
        local(tensor).zero_()
    return all(
        torch.equal(held, model.state_dict()[name]) for name, held in expected(values, 1, 0).state_dict().items()
    )


@pytest.mark.parametrize("per_host", [1, 2])
def test_no_rank_may_go_on_before_the_schedulers_of_all_engines_have_read(per_host: int, tmp_path: Path) -> None:
    assert on_ranks(_change_at_once, 2, tmp_path, per_host) == [True, True]


def test_a_small_staging_buffer_makes_several_batches(tmp_path: Path) -> None:
    assert [wrong for wrong, _, _ in on_ranks(_pull, 4, tmp_path, 4, 2, 100)] == [[]] * 4


def test_islands_are_ranks_that_reach_each_other() -> None:
    both = frozenset({0, 1})
    assert islands_of([both, both, frozenset({2}), frozenset({3})]) == {0: 0, 1: 0, 2: 2, 3: 3}
    assert islands_of([both, frozenset({1})]) == {0: 0, 1: 1}, "one way is not enough"
    with pytest.raises(ValueError, match="the engine of rank 1 must see the GPU of rank 1's trainer"):
        islands_of([both, frozenset({0})])
