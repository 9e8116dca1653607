"""The engine on a checkpoint that the trainer saved: what SGLang's own loader makes of it, compared with what it held."""

import shutil
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch.distributed as dist

from harness.cluster.world import World, all_gather
from harness.config.layers import ConfigError
from harness.rollout.verl_engine import VerlEngine
from harness.weights.fused import describe
from harness.weights.snapshot import Snapshot, changed, snapshot_weights
from harness.weights.sync import WeightSync

GREEDY = {"temperature": 0.0, "max_new_tokens": 8, "ignore_eos": True}
SHARED_FOLDER_SECONDS = 10.0
"""How long a file system may take to show on one host what another one wrote."""

Output = list[tuple[float, int]]
"""(log-prob, token) of one greedy response."""


@dataclass(kw_only=True, slots=True)
class Reload:
    """Saves the trainer's weights, and lets the engine load them from disk. Every method is a collective call."""

    sync: WeightSync
    world: World
    source: Path
    """The model's own folder, for its config and tokenizer."""
    folder: Path
    """Where checkpoints go, for as long as they are needed; all hosts see it."""

    def save(self) -> None:
        """Write the trainer's weights as they are now."""
        self.sync.save(self.folder, self.source, self.world.rank)
        dist.barrier()

    def load(self) -> None:
        """Let the engine load what was saved."""
        self.sync.engine.update_weights_from_disk(str(self.folder))

    def remove(self) -> None:
        """Delete the folder, once nobody reads it."""
        dist.barrier()
        if self.world.rank == 0:
            shutil.rmtree(self.folder, ignore_errors=True)

    def suspects(self) -> list[str]:
        """Engine tensors that are not what the trainer's checkpoint makes of them, each with its checkpoint names.

        Changes what the engine holds. Empty where this sglang has no door into its schedulers.
        """
        before = snapshot_weights(self.sync.engine)
        self.save()
        self.load()
        self.remove()
        return self.described(before, snapshot_weights(self.sync.engine))

    def described(self, before: Snapshot, after: Snapshot) -> list[str]:
        """The engine's tensors, of all ranks, that changed, each with its checkpoint names."""
        names = {name for each in all_gather(changed(before, after)) for name in each}
        known = [tensor.name for tensor in self.sync.layout]
        return [describe(name, known) for name in sorted(names)]


def check_shared(folder: Path, world: World, key: str) -> None:
    """Raises ConfigError, on every rank, when a host does not see what rank 0 writes; key names the setting. Collective."""
    note = folder / ".seen"
    if world.rank == 0:
        folder.mkdir(parents=True, exist_ok=True)
        note.write_text("", encoding="utf-8")
    dist.barrier()
    deadline = time.monotonic() + SHARED_FOLDER_SECONDS
    while not note.exists() and time.monotonic() < deadline:
        time.sleep(0.1)
    seen = all_gather((world.host, note.exists()))
    if world.rank == 0:
        note.unlink()
    blind = sorted({host for host, found in seen if not found})
    if blind:
        raise ConfigError(
            f"{key} = {folder}, as rank 0 sees it, is not there on {', '.join(blind)}; give a folder that all hosts share."
        )


def greedy(engine: VerlEngine, prompts: Sequence[Sequence[int]]) -> list[Output]:
    """The greedy responses, one prompt a call: neither timing nor a neighbour in the batch can change them.

    A collective call of the engine's ranks; the same answer on each.
    """
    if engine.api.engine_flushes_cache:
        engine.flush_cache()  # a prompt whose prefix is cached is computed in another order
    answers = [
        engine.generate(input_ids=[list(prompt)], sampling_params=GREEDY, return_logprob=True)[0] for prompt in prompts
    ]
    return [_output(answer) for answer in answers]


def output_difference(before: Sequence[Output], after: Sequence[Output]) -> float:
    """Mean |difference| of the log-probs up to, and with, the first token that differs; in nats.

    The largest log-prob at a position is a continuous function of the weights, whichever of two tokens has it.
    """
    gaps = []
    for old, new in zip(before, after, strict=True):
        for (old_log_prob, old_token), (new_log_prob, new_token) in zip(old, new, strict=True):
            gaps.append(abs(old_log_prob - new_log_prob))
            if old_token != new_token:
                break
    return sum(gaps) / len(gaps)


def _output(answer: Any) -> Output:
    return [(float(entry[0]), int(entry[1])) for entry in answer["meta_info"]["output_token_logprobs"]]
