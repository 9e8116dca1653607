"""Run by faults_program.py on two ranks; trainer and engine both tie the embeddings."""

import threading
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
from torch.distributed.tensor import DTensor

from harness.cluster.world import all_gather
from harness.trainer.offload import local
from harness.weights.pull import puller, transport
from harness.weights.verification.comparison import FingerprintComparison
from tests.weights.faults_in_scheduler import LINGER, SKIP
from tests.weights.faults_stand import Stand, patching, raising, run, update_one_by_one

REST_SECONDS = 1.0
"""How long a pull waits in the middle of its copies. The fault happens after half of that time."""


def tied_embeddings_are_sent_once(stand: Stand) -> list[str]:
    """Not a fault for this model: its lm_head is tied to the embedding, so it is not sent, and no check refuses
    that."""
    sent = [tensor.name for tensor in stand.sync.weights.layout if tensor.name == "lm_head.weight"]
    return [*sent, *stand.refused()]


def one_tensor_a_call_where_nothing_fuses(stand: Stand) -> list[str]:
    """SGLang fuses q, k and v of a dense model row by row, whenever they come."""
    stand.change()
    update_one_by_one(stand.sync)
    return stand.seen()


def moved_shards_are_pulled_from_where_they_are(stand: Stand) -> list[str]:
    """Healthy: since the last pull the shards of rank 1 have moved."""
    move_shards(stand)
    return stand.synced(stand.sync)


def move_shards(stand: Stand) -> None:
    """Move the shards of rank 1 as model.to(...) does, which FSDP2 supports."""
    if stand.world.rank == 1:
        stand.model._apply(torch.clone)


def stale_prefix_cache(stand: Stand, broken: bool) -> list[str]:
    """The same prompts before and after an update that leaves the cache as it is."""
    before = stand.log_prob_violations()
    assert stand.engine.has_prefixes
    keep = (lambda engine: None) if broken else None
    with patching({"harness.rollout.verl_engine.VerlEngine.flush_cache": keep}):
        return [*before, *stand.synced(stand.sync)]


@torch.no_grad()
def add_to_shards(stand: Stand) -> None:
    for tensor in stand.sync.weights.tensors.values():
        local(tensor).add_(0.125)


def shards_changed_before_they_are_read(stand: Stand, broken: bool) -> list[str]:
    """A trainer that does not wait for the engine changes its shards when the schedulers have read half of them."""
    stand.hook(LINGER, str(REST_SECONDS))
    ask, timer = stand.engine.ask, threading.Timer(REST_SECONDS / 2, add_to_shards, [stand])

    def ask_and_go_on(function: Callable[..., Any], argument: object = None) -> Any:
        if function is puller.pull:
            timer.start()
        return ask(function, argument)

    stand.change()
    with patch.object(stand.engine, "ask", ask_and_go_on if broken else ask):
        stand.sync.update_engine()
    if broken:
        timer.join()
    else:
        add_to_shards(stand)
        stand.sync.update_engine()
    stand.hook(LINGER, "")
    return stand.seen()


def two_syncs_at_once(stand: Stand, broken: bool) -> list[str]:
    """Begin the second sync while the schedulers are in the middle of the first. The first one is still whole."""
    stand.change()
    stand.hook(LINGER, str(REST_SECONDS))
    stand.sync.update_engine()
    first = threading.Timer(0, stand.sync.update_engine)
    with raising() as raised:
        first.start()
        try:
            if broken:
                first.join(REST_SECONDS / 2)
                assert first.is_alive()
                stand.sync.update_engine()
        finally:
            first.join()  # before this rank's next collective call
    stand.hook(LINGER, "")
    return [*raised, *stand.seen()]


def pull_out_of_turn(stand: Stand, broken: bool) -> list[str]:
    if broken:
        stand.sync.transport._pulled += 1  # type: ignore[attr-defined]
    stand.change()
    with raising() as raised:
        stand.sync.update_engine()
    return [*raised, *([] if broken else stand.seen())]


def move_that_nobody_sees(stand: Stand, broken: bool) -> list[str]:
    """The shards of rank 1 move, but the pull reads their old place. The read-back reads the new one."""
    mine = [name for name, tensor in stand.sync.weights.tensors.items() if local(tensor).numel()]
    stand.sync.update_engine()
    move_shards(stand)
    stand.change()
    with patching({"harness.weights.pull.transport.have_moved": (lambda *_: False) if broken else None}):
        stand.sync.update_engine()
    moved = [f"moved: {name}" for name in all_gather(mine)[1]]
    return [*(moved if broken else []), *stand.seen()]


def memory_that_cannot_be_opened(stand: Stand, broken: bool) -> list[str]:
    """No scheduler can open the memory of rank 1."""
    export = transport.export_shards

    def export_elsewhere(*given: Any, **named: Any) -> Any:
        found = export(*given, **named)
        lost = stand.world.rank == 1
        return replace(found, memories=tuple(f"{path}9999" for path in found.memories)) if lost else found

    stand.change()
    stand.sync.close()  # the next pull opens anew
    with (
        raising() as raised,
        patching({"harness.weights.pull.transport.export_shards": export_elsewhere if broken else None}),
    ):
        stand.sync.update_engine()
    return [*raised, *([] if broken else stand.seen())]


def small_changes(stand: Stand) -> None:
    """One bit of one element of every tensor on rank 1's shard: far less than any log-prob shows."""
    for tensor in stand.sync.weights.tensors.values():
        local = tensor.to_local() if isinstance(tensor, DTensor) else tensor[:0]
        if stand.world.rank == 1 and local.numel():
            local.view(-1)[-1:].view(torch.int32).bitwise_xor_(1)


def named(compared: FingerprintComparison) -> list[str]:
    return [f"fingerprint: {name}" for name in sorted(compared.wrong)]


def sync_that_does_nothing(stand: Stand, broken: bool) -> list[str]:
    stand.sync.update_engine()
    small_changes(stand)
    if not broken:
        stand.sync.update_engine()
    return named(stand.compared())


def last_bucket_dropped(stand: Stand, broken: bool) -> list[str]:
    with stand.syncing(transport="tensor") as sync:
        sync.update_engine()
        small_changes(stand)
        everything = sync.weights.buckets
        with patch.object(sync.weights, "buckets", everything[:-1] if broken else everything):
            sync.update_engine()
        found = named(stand.compared(sync))
    dropped = sorted(f"dropped: {view.name}" for view in everything[-1].views)
    return [*dropped, *found] if broken else found


def one_rank_stale(stand: Stand, broken: bool) -> list[str]:
    """Engine rank 1 copies nothing; on engine rank 0 all arrives."""
    stand.sync.update_engine()
    small_changes(stand)
    if broken:
        stand.hook(SKIP, "1")
    stand.sync.update_engine()
    if broken:
        stand.hook(SKIP, "")
    return named(stand.compared())


CASES = (
    sync_that_does_nothing,
    last_bucket_dropped,
    one_rank_stale,
    stale_prefix_cache,
    shards_changed_before_they_are_read,
    two_syncs_at_once,
    pull_out_of_turn,
    move_that_nobody_sees,
    memory_that_cannot_be_opened,
)


def main(folder: Path) -> None:
    run(
        folder,
        "llama",
        CASES,
        [
            tied_embeddings_are_sent_once,
            one_tensor_a_call_where_nothing_fuses,
            moved_shards_are_pulled_from_where_they_are,
        ],
        shape={"tie_word_embeddings": True},
    )
