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
from harness.tools.sync.job import push_one_by_one
from harness.tools.verification.fingerprint import FingerprintComparison
from harness.trainer.offload import local
from harness.weights.gather import gather
from harness.weights.pull import link
from harness.weights.worker import puller
from tests.weights.faults_in_scheduler import LINGER, SKIP
from tests.weights.faults_stand import Stand, patching, raising, run

REST_SECONDS = 1.0
"""For which a pull rests in its middle; half of it passes before something is done to it."""


def tied_embeddings_are_sent_once(stand: Stand) -> list[str]:
    """Healthy here: what is said of lm_head, which is not sent, and of a sync after a first question to the engine."""
    sent = [tensor.name for tensor in stand.sync.layout if tensor.name == "lm_head.weight"]
    return [*sent, *stand.refused()]


def one_tensor_a_call_where_nothing_fuses(stand: Stand) -> list[str]:
    """SGLang fuses q, k and v of a dense model row by row, whenever they come."""
    stand.change()
    push_one_by_one(stand.sync)
    return stand.seen()


def moved_shards_are_pulled_from_where_they_are(stand: Stand) -> list[str]:
    """Healthy: rank 1's are elsewhere than at the last pull."""
    move_shards(stand)
    return stand.pushed(stand.sync)


def move_shards(stand: Stand) -> None:
    """As model.to(...) does, of which FSDP2 knows."""
    if stand.world.rank == 1:
        stand.model._apply(torch.clone)


def stale_prefix_cache(stand: Stand, broken: bool) -> list[str]:
    """The same prompts before and after an update that leaves the cache as it is."""
    before = stand.log_prob_violations()
    assert stand.engine.has_prefixes
    keep = (lambda engine: None) if broken else None
    with patching({"harness.rollout.verl_engine.VerlEngine.flush_cache": keep}):
        return [*before, *stand.pushed(stand.sync)]


@torch.no_grad()
def add_to_shards(stand: Stand) -> None:
    for tensor in stand.sync.live.values():
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
        stand.sync.push()
    if broken:
        timer.join()
    else:
        add_to_shards(stand)
        stand.sync.push()
    stand.hook(LINGER, "")
    return stand.seen()


def two_syncs_at_once(stand: Stand, broken: bool) -> list[str]:
    """The second is begun while the schedulers are in the middle of the first, which is whole all the same."""
    stand.change()
    stand.hook(LINGER, str(REST_SECONDS))
    stand.sync.push()
    first = threading.Timer(0, torch.no_grad()(stand.sync.link.pull))
    with raising() as raised:
        first.start()
        try:
            if broken:
                first.join(REST_SECONDS / 2)
                assert first.is_alive()
                stand.sync.link.pull()
        finally:
            first.join()  # before this rank's next collective call
    stand.hook(LINGER, "")
    return [*raised, *stand.seen()]


def pull_out_of_turn(stand: Stand, broken: bool) -> list[str]:
    if broken:
        stand.sync.link._pulled += 1
    stand.change()
    with raising() as raised:
        stand.sync.push()
    return [*raised, *([] if broken else stand.seen())]


def move_that_nobody_sees(stand: Stand, broken: bool) -> list[str]:
    """Rank 1's shards move, and are pulled from where they were; read back they are from where they are."""
    mine = [name for name, tensor in stand.sync.live.items() if local(tensor).numel()]
    stand.sync.push()
    move_shards(stand)
    stand.change()
    with patching({"harness.weights.pull.link.have_moved": (lambda *_: False) if broken else None}):
        stand.sync.push()
    moved = [f"moved: {name}" for name in all_gather(mine)[1]]
    return [*(moved if broken else []), *stand.seen()]


def memory_that_cannot_be_opened(stand: Stand, broken: bool) -> list[str]:
    """Rank 1's, by the scheduler of either rank."""
    export = link.export_shards

    def export_elsewhere(*given: Any) -> Any:
        found = export(*given)
        lost = stand.world.rank == 1
        return replace(found, memories=tuple(f"{path}9999" for path in found.memories)) if lost else found

    stand.change()
    stand.sync.link.release()  # the next pull opens anew
    with (
        raising() as raised,
        patching({"harness.weights.pull.link.export_shards": export_elsewhere if broken else None}),
    ):
        stand.sync.push()
    return [*raised, *([] if broken else stand.seen())]


def small_changes(stand: Stand) -> None:
    """One bit of one element of every tensor on rank 1's shard: far less than any log-prob shows."""
    for tensor in stand.sync.live.values():
        local = tensor.to_local() if isinstance(tensor, DTensor) else tensor[:0]
        if stand.world.rank == 1 and local.numel():
            local.view(-1)[-1:].view(torch.int32).bitwise_xor_(1)


def named(compared: FingerprintComparison) -> list[str]:
    return [f"fingerprint: {name}" for name in sorted(compared.wrong)]


def push_that_does_nothing(stand: Stand, broken: bool) -> list[str]:
    stand.sync.push()
    small_changes(stand)
    if not broken:
        stand.sync.push()
    return named(stand.compared())


def last_bucket_dropped(stand: Stand, broken: bool) -> list[str]:
    with stand.syncing(transport="tensor") as sync:
        sync.push()
        small_changes(stand)
        buckets = sync.buckets[:-1] if broken else sync.buckets
        sync.transport.push(buckets, lambda bucket: gather(bucket, sync.live))
        found = named(stand.compared(sync))
    dropped = sorted(f"dropped: {entry.name}" for entry in sync.buckets[-1].entries)
    return [*dropped, *found] if broken else found


def one_rank_stale(stand: Stand, broken: bool) -> list[str]:
    """Engine rank 1 copies nothing; on engine rank 0 all arrives."""
    stand.sync.push()
    small_changes(stand)
    if broken:
        stand.hook(SKIP, "1")
    stand.sync.push()
    if broken:
        stand.hook(SKIP, "")
    return named(stand.compared())


CASES = (
    push_that_does_nothing,
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
