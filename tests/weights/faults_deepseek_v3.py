"""Run by faults_program.py on two ranks; see test_faults.py for what each case must say."""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
from torch.distributed.tensor import DTensor

from harness.rollout.engine import NamedTensors
from harness.rollout.engine_ranks import Group
from harness.weights.gather import Bucket, full_tensor
from harness.weights.names import checkpoint_layout
from harness.weights.tensor_view import TensorView
from tests.weights.faults_in_scheduler import REPLAN, SPOIL
from tests.weights.faults_stand import (
    Stand,
    live_layout,
    no_bit_is_missed,
    no_shard_is_padding,
    rename_live,
    run,
    two_hundred_updates,
    update_one_by_one,
)

EXPERTS = "model.layers.1.mlp.experts"
O_PROJ = "model.layers.0.self_attn.o_proj.weight"
NORM = "model.layers.1.input_layernorm.weight"

Gathered = list[tuple[str, torch.Tensor]]


def live_names_that_the_engine_knows(stand: Stand) -> list[str]:
    """Healthy: since 0.5.20 SGLang's DeepSeek-V3 loads fused experts too."""
    return stand.refused(layout=live_layout)


def one_tensor_a_call(stand: Stand, broken: bool) -> list[str]:
    stand.change()
    if broken:
        update_one_by_one(stand.sync)
    else:
        stand.sync.update_engine()
    return stand.seen()


def lost_correction_bias(stand: Stand, broken: bool) -> list[str]:
    """It is a buffer, which named_parameters() does not list."""
    return stand.refused(names=(lambda model: model.named_parameters()) if broken else None)


def sent_as(stand: Stand, gathered: Callable[[Gathered], Gathered] | None) -> list[str]:
    """A sync by named tensors, of which the engine is sent something else than was gathered."""

    with stand.syncing(transport="tensor") as sync:
        gather = sync.weights.gather

        def other(bucket: Bucket) -> Gathered:
            return gathered(gather(bucket)) if gathered else gather(bucket)

        with patch.object(sync.weights, "gather", other):
            return stand.synced(sync)


def dropped_expert(stand: Stand, broken: bool) -> list[str]:
    def drop(tensors: Gathered) -> Gathered:
        return [each for each in tensors if not each[0].startswith(f"{EXPERTS}.0.")]

    return sent_as(stand, drop if broken else None)


def expert_dropped_from_the_plan(stand: Stand, broken: bool) -> list[str]:
    def planned(*given: Any) -> tuple[TensorView, ...]:
        layout = checkpoint_layout(*given)
        return tuple(tensor for tensor in layout if not tensor.name.startswith(f"{EXPERTS}.0."))

    return stand.refused(layout=planned if broken else None)


def replanned(stand: Stand, text: str) -> list[str]:
    """A pull by plans that every scheduler has got wrong; what is read back is planned rightly."""
    if text:
        stand.hook(REPLAN, text)
    stand.sync.close()  # the next pull plans anew
    stand.change()
    stand.sync.update_engine()
    found = [*(f"fingerprint: {name}" for name in stand.compared().wrong), *stand.seen()]
    if text:
        stand.hook(REPLAN, "")
    stand.sync.close()
    return found


def a_region_shifted_by_a_row(stand: Stand, broken: bool) -> list[str]:
    return replanned(stand, f"shift {O_PROJ}" if broken else "")


def swapped_experts(stand: Stand, broken: bool) -> list[str]:
    return replanned(stand, f"swap {EXPERTS}.0. {EXPERTS}.4." if broken else "")


def experts_swapped_in_the_plan(stand: Stand, broken: bool) -> list[str]:
    def planned(*given: Any) -> tuple[TensorView, ...]:
        layout = {tensor.name: tensor for tensor in checkpoint_layout(*given)}
        for name in [name for name in layout if name.startswith(f"{EXPERTS}.0.")]:
            other = name.replace(f"{EXPERTS}.0.", f"{EXPERTS}.4.")
            layout[name], layout[other] = replace(layout[other], name=name), replace(layout[name], name=other)
        return tuple(layout.values())

    with stand.syncing(layout=planned if broken else None) as sync:
        return stand.synced(sync)


def partial_update(stand: Stand, broken: bool) -> list[str]:
    with stand.syncing(transport="tensor") as sync:
        sync.update_engine()
        everything = sync.weights.buckets
        buckets = everything[: len(everything) // 2] if broken else everything
        stand.change()
        with patch.object(sync.weights, "buckets", buckets):
            sync.update_engine()
        sent = {view.name for bucket in buckets for view in bucket.views}
        found = stand.seen(sync)
    unsent = [view.name for view in sync.weights.layout if view.name not in sent]
    return [*(f"unsent: {name}" for name in unsent), *found]


class SwappedGroup(Group):
    """Hands the head the ranks' payloads the wrong way round."""

    __slots__ = ()

    def gather(self, payload: Any) -> list[Any]:
        return super().gather(payload)[::-1]


def payloads_of_two_ranks_swapped(stand: Stand, broken: bool) -> list[str]:
    """ "direct" takes each rank's own shard, under the engine's own name; the values are those it has already."""
    engine, group = stand.engine, stand.engine.group
    columns = full_tensor(stand.sync.weights.tensors[O_PROJ]).chunk(2, dim=1)
    shards: NamedTensors = [(O_PROJ, columns[stand.world.rank].contiguous())]
    if broken:
        engine.group = SwappedGroup(**{name: getattr(group, name) for name in Group.__slots__})
    try:
        with engine.weight_update():
            engine.update_weights_from_tensor(shards, load_format="direct")
    finally:
        engine.group = group
    return stand.seen()


def unknown_parameter(stand: Stand, broken: bool) -> list[str]:
    def add(live: dict[str, torch.Tensor]) -> None:
        live["model.layers.1.self_attn.sinks.weight"] = torch.ones(16)

    return stand.refused(names=rename_live(add) if broken else None)


def with_rows(stand: Stand, rows: int) -> list[str]:
    def cut(live: dict[str, torch.Tensor]) -> None:
        live[O_PROJ] = torch.ones(rows, live[O_PROJ].shape[1])

    return stand.refused(names=rename_live(cut) if rows != stand.sync.weights.tensors[O_PROJ].shape[0] else None)


def too_few_rows(stand: Stand, broken: bool) -> list[str]:
    return with_rows(stand, 63 if broken else 64)


def too_many_columns(stand: Stand, broken: bool) -> list[str]:
    """The engine's loader would take each rank's share of the columns and leave the rest."""

    def widen(live: dict[str, torch.Tensor]) -> None:
        live[O_PROJ] = torch.ones(64, 2 * live[O_PROJ].shape[1])

    return stand.refused(names=rename_live(widen) if broken else None)


def wrong_dtype(stand: Stand, broken: bool) -> list[str]:
    def widen(live: dict[str, torch.Tensor]) -> None:
        live[NORM] = torch.ones(64, dtype=torch.float64)

    return stand.refused(names=rename_live(widen) if broken else None)


def not_a_number(stand: Stand, broken: bool) -> list[str]:
    """On one rank alone, in the last element of its shard."""
    parameter = stand.model.get_parameter(NORM)
    assert isinstance(parameter, DTensor)
    local = parameter.to_local().detach()
    kept = local.clone()
    if broken and stand.world.rank == 1:
        local[-1] = torch.nan
    try:
        return stand.refused()
    finally:
        if broken:
            local.copy_(kept)


def missing_shard(stand: Stand, broken: bool) -> list[str]:
    def lose(live: dict[str, torch.Tensor]) -> None:
        whole = live[O_PROJ]
        assert isinstance(whole, DTensor)
        rows = whole.to_local().detach()[: 32 if stand.world.rank == 0 else 20]
        live[O_PROJ] = DTensor.from_local(
            rows, whole.device_mesh, whole.placements, run_check=False, shape=whole.shape, stride=whole.stride()
        )

    return stand.refused(names=rename_live(lose) if broken else None)


def stale_derived(stand: Stand, broken: bool, name: str) -> list[str]:
    """MLA attends with w_kc and w_vc alone, which SGLang derives from kv_b_proj."""
    stand.change()
    stand.sync.update_engine()
    if broken:
        stand.hook(SPOIL, f"1 model.layers.0.self_attn.{name}")
    assert not stand.compared().wrong, "no fingerprint shows it"
    return [*stand.reloaded(), *stand.seen()]


def one_bit_of_w_kc(stand: Stand, broken: bool) -> list[str]:
    return stale_derived(stand, broken, "w_kc")


def one_bit_of_w_vc(stand: Stand, broken: bool) -> list[str]:
    return stale_derived(stand, broken, "w_vc")


CASES = (
    one_bit_of_w_kc,
    one_bit_of_w_vc,
    one_tensor_a_call,
    lost_correction_bias,
    dropped_expert,
    expert_dropped_from_the_plan,
    a_region_shifted_by_a_row,
    swapped_experts,
    experts_swapped_in_the_plan,
    partial_update,
    payloads_of_two_ranks_swapped,
    unknown_parameter,
    too_few_rows,
    too_many_columns,
    wrong_dtype,
    not_a_number,
    missing_shard,
)


def main(folder: Path) -> None:
    run(
        folder,
        "deepseek_v3",
        CASES,
        [live_names_that_the_engine_knows, no_shard_is_padding, no_bit_is_missed, two_hundred_updates],
    )
