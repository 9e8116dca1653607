"""Shards that do not fit together, or hold what must not be sent, on two real ranks."""

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Shard, distribute_tensor

from harness.weights.names import CheckpointTensor
from harness.weights.presync_checks import WeightsRefused
from harness.weights.shards import check_covered, check_finite, check_shards
from tests.cluster.gloo import on_ranks

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


def nan_in_a(live: Live, rank: int) -> None:
    if rank == 1:
        local(live["a"])[1, 2] = float("nan")


def infinity_in_both(live: Live, rank: int) -> None:
    if rank == 0:
        local(live["b"])[0, 0] = float("-inf")
    live["plain"][0] = float("inf")


def huge(live: Live, rank: int) -> None:
    local(live["a"]).fill_(3.4e38)  # finite, though the sum is not


def missing(live: Live, rank: int) -> None:
    if rank == 1:
        live["a"] = with_rows(live["a"], 1)


def absent(live: Live, rank: int) -> None:
    if rank == 1:
        del live["plain"]


def only_on_the_second(live: Live, rank: int) -> None:
    if rank == 1:
        live["more"] = torch.ones(1)


def other_shape(live: Live, rank: int) -> None:
    if rank == 1:
        live["plain"] = torch.ones(4)


def other_dtype(live: Live, rank: int) -> None:
    if rank == 1:
        live["plain"] = torch.ones(3, dtype=torch.bfloat16)


def on_meta(live: Live, rank: int) -> None:
    if rank == 1:
        live["plain"] = torch.ones(3, device="meta")


CHECKS: tuple[tuple[Callable[[Live], None], Callable[[Live, int], None] | None, str], ...] = (
    (check_shards, None, ""),
    (check_finite, None, ""),
    (check_finite, huge, ""),
    (check_finite, nan_in_a, "1 tensor(s) hold a NaN or an infinity: a (rank 1); nothing was sent."),
    (
        check_finite,
        infinity_in_both,
        "2 tensor(s) hold a NaN or an infinity: plain (rank 0), b (rank 0); nothing was sent.",
    ),
    (check_shards, missing, "a: rank 1 holds 1 of the 2 rows of its shard"),
    (check_shards, absent, "plain: rank 1 has none, but every rank must hold its shard."),
    (check_shards, only_on_the_second, "more: rank 0 has none, but every rank must hold its shard."),
    (check_shards, other_shape, "plain: ((4,), 'torch.float32') on rank 1 but ((3,), 'torch.float32') on rank 0."),
    (check_shards, other_dtype, "plain: ((3,), 'torch.bfloat16') on rank 1 but ((3,), 'torch.float32') on rank 0."),
    (check_shards, on_meta, "plain: rank 1 has it on the meta device, without values"),
)


def _say(rank: int) -> list[str]:
    mesh = init_device_mesh("cpu", (RANKS,))
    said = []
    for check, spoil, _ in CHECKS:
        live = sound(mesh)
        if spoil:
            spoil(live, rank)
        try:
            check(live)
            said.append("")
        except WeightsRefused as refused:
            said.append(str(refused))
    return said


def test_what_is_wrong_is_said_on_every_rank_with_the_tensor_and_the_rank(tmp_path: Path) -> None:
    expected = [sentence for _, _, sentence in CHECKS]
    assert on_ranks(_say, RANKS, tmp_path) == [expected] * RANKS


def part(rows: int, first: int = 0) -> CheckpointTensor:
    """Rows of a live tensor [5, 3]."""
    return CheckpointTensor(
        name=f"from {first}", live_name="a", shape=(rows, 3), stride=(3, 1), offset=3 * first, dtype=torch.float32
    )


def test_a_checkpoint_form_that_has_every_element_covers() -> None:
    check_covered([part(5)], {"a": torch.ones(5, 3)})
    check_covered([part(2), part(3, 2)], {"a": torch.ones(5, 3)})


@pytest.mark.parametrize(("parts", "held"), [([], 0), ([part(2)], 6), ([part(2), part(5)], 21)])
def test_a_checkpoint_form_that_has_too_few_elements_or_too_many_is_refused(
    parts: list[CheckpointTensor], held: int
) -> None:
    with pytest.raises(WeightsRefused, match=f"^a: the checkpoint's tensors hold {held} of its 15 elements"):
        check_covered(parts, {"a": torch.ones(5, 3)})
