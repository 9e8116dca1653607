"""The engine on a checkpoint that the trainer saved: SGLang's own loader as the reference for what a sync left."""

import shutil
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch.distributed as dist

from harness.cluster.world import World, all_gather
from harness.config.layers import ConfigError
from harness.rollout.verl_engine import VerlEngine
from harness.weights.snapshot import Snapshot, changed_names, snapshot_weights
from harness.weights.sync import WeightSync
from harness.weights.worker.model_state import DERIVED

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
        self.sync.save(self.folder, self.source, self.world.rank)
        dist.barrier()

    def load(self) -> None:
        """Let the engine load what was saved, and delete it once every rank is done."""
        self.sync.engine.update_weights_from_disk(str(self.folder))
        dist.barrier()
        if self.world.rank == 0:
            shutil.rmtree(self.folder, ignore_errors=True)

    def suspects(self) -> list[str]:
        """Return the engine tensors that are not what the trainer's checkpoint makes of them, with checkpoint names.

        Changes what the engine holds. Empty where this sglang has no custom weight loaders.
        """
        before = snapshot_weights(self.sync.engine)
        self.save()
        self.load()
        return self.changed_tensors(before)

    def changed_tensors(self, before: Snapshot) -> list[str]:
        """Return the engine's tensors, of all ranks, that changed since a snapshot, each with its checkpoint names."""
        mine = changed_names(before, snapshot_weights(self.sync.engine))
        return [self.describe_tensor(name) for name in sorted({name for each in all_gather(mine) for name in each})]

    def describe_tensor(self, engine_name: str) -> str:
        """Return an engine's name of a tensor with the checkpoint tensors that it is made of: SGLang fuses some."""
        known = [tensor.name for tensor in self.sync.layout]
        if engine_name in known:
            return engine_name
        parts = dict.fromkeys(part for each in self.sync.coverage for part in each.filled.get(engine_name, ()))
        module, _, attribute = engine_name.rpartition(".")  # what the engine derives, it derives from its module's
        names = list(parts) or [name for name in known if name.startswith(f"{module}.{DERIVED.get(attribute, '')}")]
        shown = [*names[:4], *([f"{len(names) - 4} more"] if len(names) > 4 else [])]
        return f"{engine_name} ({', '.join(shown)})" if shown else engine_name


def check_shared(folder: Path, world: World, key: str) -> None:
    """Raise ConfigError, on every rank, when a host does not see what rank 0 writes; key names the setting. Collective."""
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
            f"{key} must be a folder that all hosts share, got {folder}: as rank 0 sees it, it is not there on"
            f" {', '.join(blind)}."
        )


def greedy_outputs(engine: VerlEngine, prompts: Sequence[Sequence[int]]) -> list[Output]:
    """Return the greedy responses, one prompt a call: neither timing nor a neighbour in the batch can change them.

    A collective call of the engine's ranks; the same on each.
    """
    engine.flush_cache()  # a prompt whose prefix is cached is computed in another order
    answers = [
        engine.generate(input_ids=[list(prompt)], sampling_params=GREEDY, return_logprob=True)[0] for prompt in prompts
    ]
    return [
        [(float(entry[0]), int(entry[1])) for entry in answer["meta_info"]["output_token_logprobs"]]
        for answer in answers
    ]


def output_difference(before: Sequence[Output], after: Sequence[Output]) -> float:
    """Return the mean |difference| of the log-probs up to, and with, the first token that differs; in nats.

    The largest log-prob at a position is a continuous function of the weights, whichever of two tokens has it.
    """
    gaps = []
    for old, new in zip(before, after, strict=True):
        for (old_log_prob, old_token), (new_log_prob, new_token) in zip(old, new, strict=True):
            gaps.append(abs(old_log_prob - new_log_prob))
            if old_token != new_token:
                break
    return sum(gaps) / len(gaps)
