"""What an engine's schedulers report of themselves: snapshots of their weights, and their GPUs; a sentinel fill of them."""

from harness.cluster.world import World, all_gather
from harness.rollout.verl_engine import VerlEngine
from harness.weights.sync import WeightSync
from harness.weights.worker import model_state

Snapshot = dict[str, int]
"""The engine's own name of a tensor -> a fingerprint of its bytes, in the scheduler beside this rank."""


def snapshot_weights(engine: VerlEngine) -> Snapshot:
    """Return fingerprints of all that the scheduler beside this rank holds; empty before sglang 0.4.8. Collective."""
    if not engine.api.custom_weight_loader:
        return {}
    with engine.weight_update():
        return engine.ask(model_state.held_tensors)


def changed_tensors(sync: WeightSync, before: Snapshot) -> list[str]:
    """Return the engine's tensors, of all ranks, that changed since a snapshot, each with its checkpoint names.

    A name that only one snapshot has is another name of a tensor, which SGLang makes when it first needs it (DeepSeek's
    attn_mha.kv_b_proj).
    """
    after = snapshot_weights(sync.engine)
    mine = {name for name, held in before.items() if after.get(name, held) != held}
    return [describe_tensor(sync, name) for name in sorted({name for each in all_gather(mine) for name in each})]


def describe_tensor(sync: WeightSync, engine_name: str) -> str:
    """Return an engine's name of a tensor with the checkpoint tensors that it is made of: SGLang fuses some."""
    known = [tensor.name for tensor in sync.layout]
    parts = dict.fromkeys(part for each in sync.link.coverage for part in each.filled.get(engine_name, ()))
    module, _, attribute = engine_name.rpartition(".")  # what the engine derives, it derives from its module's
    derived_from = f"{module}.{model_state.DERIVED.get(attribute, '')}"
    names = list(parts) or [name for name in known if name.startswith(derived_from)]
    if engine_name in known or not names:
        return engine_name
    more = [f"{len(names) - 4} more"] if len(names) > 4 else []
    return f"{engine_name} ({', '.join([*names[:4], *more])})"


def fill_with_sentinel(engine: VerlEngine, seed: str) -> None:
    """Fill the engine's weights with garbage drawn from seed; needs custom weight loaders. A collective call."""
    with engine.weight_update():
        engine.ask(model_state.fill_model, seed)
    engine.flush_cache()


def check_gpus(world: World, engine: VerlEngine, colocate: bool) -> None:
    """Compare the GPUs of trainers and engines; a collective call of all ranks. See check_devices."""
    if world.device.type == "cuda":
        asked = engine.api.custom_weight_loader
        found = all_gather(engine.ask(model_state.current_gpu_uuid) if asked else None)
        engines = {rank: gpu for rank, gpu in enumerate(found) if gpu is not None}
        check_devices(all_gather(model_state.current_gpu_uuid()), engines, colocate)


def check_devices(trainers: list[str], engines: dict[int, str], colocate: bool) -> None:
    """Raise ValueError when an engine rank is on a wrong GPU.

    trainers: GPU UUID by world rank; engines: of the ranks that are known. With colocate a trainer rank and its engine
    rank share a GPU; without, an engine rank shares none with a trainer or another engine rank.
    """
    users = {} if colocate else {gpu: f"rank {rank} trains there" for rank, gpu in enumerate(trainers)}
    for rank, gpu in sorted(engines.items()):
        misplaced = colocate and gpu != trainers[rank]
        problem = f"its trainer is on GPU {trainers[rank]}" if misplaced else users.get(gpu)
        if problem:
            raise ValueError(
                f"the engine rank of rank {rank} runs on GPU {gpu}, but {problem} (parallel.colocate ="
                f" {str(colocate).lower()}); check CUDA_VISIBLE_DEVICES of that host's ranks."
            )
        users[gpu] = f"so does the engine rank of rank {rank}"
