"""Run by faults_program.py on two ranks, with an sglang that has update sessions."""

from contextlib import nullcontext
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from harness.task.tiny_models import save_tiny_model
from harness.trainer.model import load_causal_lm
from harness.weights.worker.kept_copies import find_copies, stale_copies
from tests.weights.faults_in_scheduler import KEEP
from tests.weights.faults_stand import Stand, live_layout, no_bit_is_missed, no_shard_is_padding, patching, raising, run


def has_sessions(stand: Stand) -> list[str]:
    """Healthy where the release is one that the other cases are about."""
    return [] if stand.engine.api.update_session else [f"sglang {stand.engine.api.version} has no update sessions"]


def live_names(stand: Stand, broken: bool) -> list[str]:
    return stand.refused(layout=live_layout if broken else None)


def live_names_that_nobody_asked_about(stand: Stand, broken: bool) -> list[str]:
    """With verification off nothing is refused; the engine answers Success, and computes something else."""
    with stand.syncing(layout=live_layout if broken else None, check=False) as sync:
        return stand.synced(sync)


def tied_embeddings_sent_once(stand: Stand, broken: bool) -> list[str]:
    """SGLang's Qwen3-MoE has a separate lm_head whatever the model's config says. A trainer that ties sends none."""
    model = None
    if broken:
        folder = stand.folder / "tied"
        if stand.world.rank == 0:
            save_tiny_model("qwen3_moe", folder, 0, overrides={"tie_word_embeddings": True}, texts=["hello"])
        dist.barrier()
        model = load_causal_lm(str(folder), torch.float32, torch.device("cpu"), stand.mesh)
    return stand.refused(model=model)


def outside_a_session(stand: Stand, broken: bool) -> list[str]:
    """Try a pull, whose connection is made by an update call, and SGLang's own calls."""

    def no_session(*_: Any) -> Any:
        return nullcontext()

    found = []
    sent = [("model.norm.weight", stand.sync.weights.tensors["model.norm.weight"])]
    stand.change()
    with patching({"harness.rollout.verl_engine.VerlEngine._session": no_session if broken else None}):
        with raising() as raised:
            stand.sync.update_engine()
        found += [f"pull: {text}" for text in raised]
        for way, load_format in (("bucket", "flattened_bucket"), ("tensor", None)):
            with raising() as raised:
                stand.engine.update_weights_from_tensor(sent, load_format)
            found += [f"{way}: {text}" for text in raised]
    return [*found, *stand.seen()]


def a_copy_that_a_router_keeps(stand: Stand, broken: bool) -> list[str]:
    """The router's module keeps a copy of its weight. Read back, everything is as it was sent."""
    if broken:
        stand.hook(KEEP, "model.layers.0.mlp.gate")
    stand.engine.ask(find_copies)
    stand.change()
    stand.sync.update_engine()
    stale = stand.engine.ask(stale_copies).items()
    found = [*(f"{name}, a copy of {of}" for name, of in stale), *stand.compared().wrong]
    stand.hook(KEEP, "")
    return found


CASES = (
    live_names,
    live_names_that_nobody_asked_about,
    tied_embeddings_sent_once,
    outside_a_session,
    a_copy_that_a_router_keeps,
)


def main(folder: Path) -> None:
    run(folder, "qwen3_moe", CASES, [has_sessions, no_shard_is_padding, no_bit_is_missed])
