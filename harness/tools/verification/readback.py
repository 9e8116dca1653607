"""Compare every element that the engine holds with the trainer's, bit for bit.

Whichever transport brought them, each scheduler reads the trainers' shards (pull/), by a plan made anew for the comparison,
and compares them with what its own loader, as traced, fills from there.
"""

import torch

from harness.cluster.world import all_gather
from harness.tools.verification import in_scheduler
from harness.weights.pull.link import PullLink
from harness.weights.sync import WeightSync


def compare(link: PullLink) -> in_scheduler.Differences:
    """Return what the scheduler of this rank holds otherwise. A collective call of all ranks."""
    wrong: dict[str, tuple[int, int]] = {}
    stale: list[str] = []
    with link.alone():
        for index in link.arrivals():
            found, more = link.engine.ask(in_scheduler.compare, index)
            wrong |= found  # a tensor is of one group, and so of one batch
            stale += more
    return wrong, stale


@torch.no_grad()
def weight_differences(sync: WeightSync) -> list[str]:
    """Return one sentence for each checkpoint tensor that an engine does not hold as the trainer does.

    And one for each tensor that an engine derives from weights and has not derived anew. A collective call of all ranks;
    the same answer on every rank. Needs custom weight loaders (sglang 0.4.8).
    """
    mine = compare(sync.link)
    if sync.transport_name != "pull" or sync.offloaded:
        sync.link.release()
    # A sync without verification has not checked that every name is read.
    names = [tensor.name for tensor in sync.layout]
    read = {source.name for each in sync.link.coverage for sources in each.sources for source in sources}
    never = set(names) - read - set(unreadable(sync.link))
    found: dict[str, list[str]] = {name: ["the engine holds nothing of it"] for name in names if name in never}
    for rank, (wrong, stale) in enumerate(all_gather(mine)):
        for name, (count, size) in wrong.items():
            found.setdefault(name, []).append(f"{count} of {size} elements on rank {rank}")
        for name in stale:
            found.setdefault(f"{name} (derived by the engine)", []).append(f"stale on rank {rank}")
    return [f"{name}: {', '.join(places[:4])}{' ...' if len(places) > 4 else ''}" for name, places in found.items()]


def unreadable(link: PullLink) -> list[str]:
    """Return the names that arrive in a way that cannot be followed, which `weight_differences` does not cover."""
    return sorted({name for each in link.coverage for name in each.opaque})
