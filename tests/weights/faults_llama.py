"""Run by faults_program.py on two ranks; trainer and engine both tie the embeddings."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch.distributed.tensor import DTensor

from harness.tools.sync.job import push_one_by_one
from harness.weights.fingerprint import FingerprintComparison
from harness.weights.gather import gather, gather_into
from harness.weights.stream.slots import SLOTS
from harness.weights.stream.weight_link import WeightLink
from tests.weights.faults_stand import Stand, patching, raising, run

LINGER_SECONDS = 0.1

call = WeightLink._call
await_read = WeightLink._await_read
say_filled = WeightLink._say_filled


def tied_embeddings_are_sent_once(stand: Stand) -> list[str]:
    """Healthy here: what is said of lm_head, which is not sent, and of a sync after a first question to the engine."""
    sent = [tensor.name for tensor in stand.sync.layout if tensor.name == "lm_head.weight"]
    return [*sent, *stand.refused()]


def one_tensor_a_call_where_nothing_fuses(stand: Stand) -> list[str]:
    """SGLang fuses q, k and v of a dense model row by row, whenever they come."""
    stand.change()
    push_one_by_one(stand.sync)
    return stand.seen()


def stale_prefix_cache(stand: Stand, broken: bool) -> list[str]:
    """The same prompts before and after an update that leaves the cache as it is."""

    def keep_the_cache(
        link: WeightLink, what: str, meanwhile: Callable[..., Any], flush_cache: bool = False, **details: int
    ) -> Any:
        return call(link, what, meanwhile, flush_cache=False, **details)

    before = stand.log_prob_violations()
    with patching({"harness.weights.stream.weight_link.WeightLink._call": keep_the_cache if broken else None}):
        return [*before, *stand.pushed(stand.sync)]


def bucket_reused_before_it_is_read(stand: Stand, broken: bool) -> list[str]:
    """Readers linger over each slot; a trainer that does not wait for them fills it again meanwhile."""

    def do_not_wait(link: WeightLink, index: int, ended: Callable[[], bool]) -> None:
        if index == len(link.layout) - SLOTS:  # all are filled: take the answers that were passed over
            for passed_over in range(index):
                await_read(link, passed_over, ended)
        if index >= len(link.layout) - SLOTS:
            await_read(link, index, ended)

    stand.slow(LINGER_SECONDS)
    with (
        raising() as raised,
        patching({"harness.weights.stream.weight_link.WeightLink._await_read": do_not_wait if broken else None}),
    ):
        stand.change()
        stand.sync.push()
    stand.slow(0)
    return [*raised, *stand.seen()]


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
    """Engine rank 1 takes nothing out of its slots; on engine rank 0 all arrives."""
    stand.sync.push()
    small_changes(stand)

    def deaf(link: WeightLink, index: int) -> None:
        if stand.world.rank == 1:  # the slot that its scheduler reads is filled with what it holds already
            link.link.slots[index % SLOTS][: len(old[index])].copy_(old[index])
        say_filled(link, index)

    if not broken:
        stand.sync.push()
        return named(stand.compared())
    old: list[torch.Tensor] = []
    small_changes(stand)  # as it was
    for bucket in stand.sync.buckets:
        slot = torch.zeros(bucket.nbytes, dtype=torch.uint8)
        gather_into(slot, bucket, stand.sync.live)
        old.append(slot)
    small_changes(stand)
    with patching({"harness.weights.stream.weight_link.WeightLink._say_filled": deaf}):
        stand.sync.push()
    return named(stand.compared())


CASES = (
    push_that_does_nothing,
    last_bucket_dropped,
    one_rank_stale,
    stale_prefix_cache,
    bucket_reused_before_it_is_read,
)


def main(folder: Path) -> None:
    run(
        folder,
        "llama",
        CASES,
        [tied_embeddings_are_sent_once, one_tensor_a_call_where_nothing_fuses],
        shape={"tie_word_embeddings": True},
    )
