"""Compare every element that the engine holds with the trainer's, bit for bit.

Whichever transport brought the weights, each trainer rank gathers them bucket by bucket and hands each bucket to the
scheduler next to it (CUDA IPC, or shared memory). The scheduler compares it with what its loader, as traced, fills from there.
"""

import torch

from harness.cluster.world import all_gather
from harness.weights.loader import EngineLoader
from harness.weights.trainer_weights import TrainerWeights
from harness.weights.worker import readback


@torch.no_grad()
def weight_differences(weights: TrainerWeights, loader: EngineLoader) -> list[str]:
    """Return one sentence for each checkpoint tensor that an engine does not hold as the trainer does.

    Also one for each tensor that an engine derives from weights and has not derived anew. A collective call of all ranks,
    with the same answer on every rank. It needs an engine that can be asked. Tensors in loader.opaque are left out.
    """
    loader.trace_once()
    wrong: readback.Differences = {}
    with loader.engine.weight_update():
        for bucket in weights.buckets:
            wrong |= loader.engine.ask(readback.compare, (weights.gather_buffer(bucket), bucket.views))
        stale = loader.engine.ask(readback.stale_tensors)
    # A sync that checks nothing has not made sure that every name is read.
    read = {copy.source.name for each in loader.coverage for copies in each.copies for copy in copies}
    never = {view.name for view in weights.layout} - read - set(loader.opaque)
    found: dict[str, list[str]] = {
        view.name: ["the engine holds nothing of it"] for view in weights.layout if view.name in never
    }
    for rank, (differing, stale_there) in enumerate(all_gather((wrong, stale))):
        for name, (count, size) in differing.items():
            found.setdefault(name, []).append(f"{count} of {size} elements on rank {rank}")
        for name in stale_there:
            found.setdefault(f"{name} (derived by the engine)", []).append(f"stale on rank {rank}")
    return [f"{name}: {', '.join(places[:4])}{' ...' if len(places) > 4 else ''}" for name, places in found.items()]
