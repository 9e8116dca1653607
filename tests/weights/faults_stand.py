"""What the fault programs share: two torchrun ranks with a real engine in CPU mode and a sharded trainer, and how a
case is run on them: once with its fault, once without, each time followed by a healthy sync.

A case is a function (stand, broken) -> sentences. With broken = False it does the same thing without the fault, and
must have nothing to say.
"""

import json
import os
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from harness.cluster.mesh import ParallelDims, build_meshes
from harness.cluster.world import Launch, World, all_gather, open_world
from harness.config import schema
from harness.rollout.verl_engine import VerlEngine
from harness.tools.tiny_models import save_tiny_model
from harness.tools.verification.fingerprint import FingerprintComparison, compare_fingerprints
from harness.tools.verification.perturb import perturb
from harness.tools.verification.readback import weight_differences
from harness.tools.verification.snapshot import snapshot_weights
from harness.trainer.actor import token_log_probs
from harness.trainer.batch import from_sequences, scatter_responses
from harness.trainer.model import load_causal_lm, named_tensors
from harness.weights.gather import plan_buckets
from harness.weights.log_probs import Allowed, log_prob_difference
from harness.weights.names import CheckpointTensor
from harness.weights.presync_checks import coverage_problems
from harness.weights.sync import WeightSync
from tests.weights.faults_in_scheduler import LINGER, REPLAN, SKIP

BUCKET_BYTES = 150_000
PROMPTS = [[5 + (7 * row + 3 * at) % 300 for at in range(24)] for row in range(4)]

Case = Callable[["Stand", bool], list[str]]
Named = Callable[[Any], Iterable[tuple[str, torch.Tensor]]]
Layout = Callable[[Any, Mapping[str, torch.Tensor]], Any]


@dataclass
class Stand:
    """One rank's part of engine and trainer."""

    world: World
    mesh: DeviceMesh
    folder: Path
    engine: VerlEngine
    model: Any
    sync: WeightSync = field(init=False)
    """The healthy one."""
    changes: int = 0

    def __post_init__(self) -> None:
        self.sync = self.make_sync()

    def make_sync(
        self,
        *,
        names: Named | None = None,
        layout: Layout | None = None,
        model: Any = None,
        verify: Any = "bytes",
        transport: Any = "pull",
    ) -> WeightSync:
        """A sync of the stand's model in several buckets; names and layout replace what harness.weights.sync calls."""
        with patching({"harness.weights.sync.named_tensors": names, "harness.weights.sync.checkpoint_layout": layout}):
            config = schema.Weights(verify=verify, transport=transport)
            sync = WeightSync(self.engine, model or self.model, config, self.folder / "run")
        sync.buckets = plan_buckets(sync.layout, sync.live, BUCKET_BYTES)
        return sync

    @contextmanager
    def syncing(self, **replaced: Any) -> Iterator[WeightSync]:
        """make_sync, for a while in the place of the healthy one: a scheduler has one plan at a time."""
        sync = self.make_sync(**replaced)
        try:
            yield sync
        finally:
            sync.close()
            self.sync.link.trace()

    def change(self) -> None:
        """Change every element of the trainer's weights."""
        self.changes += 1
        perturb(dict(named_tensors(self.model)), seed=self.changes)

    def seen(self, sync: WeightSync | None = None) -> list[str]:
        """What readback and log-probs say of what the engine holds now."""
        return [*weight_differences(sync or self.sync), *self.log_prob_violations()]

    def compared(self, sync: WeightSync | None = None) -> FingerprintComparison:
        """What fingerprints, which the default level takes, say of what the engine holds now."""
        asked = sync or self.sync
        if not asked.link.coverage:
            asked.link.trace()
        return compare_fingerprints(asked)

    def log_prob_violations(self) -> list[str]:
        """The engine's log-probs of its own responses to PROMPTS against the trainer's."""
        answers = self.engine.generate(
            input_ids=PROMPTS, sampling_params={"max_new_tokens": 8, "ignore_eos": True}, return_logprob=True
        )
        entries = [answer["meta_info"]["output_token_logprobs"] for answer in answers]
        batch = from_sequences(PROMPTS, [[entry[1] for entry in row] for row in entries], pad_id=0)
        theirs = scatter_responses([[entry[0] for entry in row] for row in entries], batch)
        with torch.no_grad():
            ours, _ = token_log_probs(self.model, batch, temperature=1.0)
        found = log_prob_difference(theirs, ours, batch.response_mask)
        return [f"log-probs: {phrase}" for phrase in Allowed.of("float32", None).violations(found)]

    def pushed(self, sync: WeightSync) -> list[str]:
        """Change all weights, push; what readback and log-probs then say."""
        self.change()
        sync.push()
        return self.seen(sync)

    def refused(self, **replaced: Any) -> list[str]:
        """What such a sync raises, then all the problems of which it names the first, then what of the engine
        was touched; where it raises nothing, what is seen after the push."""
        if not self.sync.link.coverage:
            self.sync.link.trace()  # the first one zeroes what is padding, as a load does
        before = snapshot_weights(self.engine)
        found: list[str] = []
        with raising() as raised, self.syncing(**replaced) as sync:
            sync.link.trace()
            found += coverage_problems(sync.link.groups, sync.link.coverage)
            found += self.pushed(sync)
        after = snapshot_weights(self.engine) if raised else before
        touched = all_gather([name for name in {*before, *after} if before.get(name) != after.get(name)])
        return [*raised, *found, *(f"touched: {name}" for name in sorted({name for each in touched for name in each}))]

    def hook(self, path: str, text: str) -> None:
        """Break every scheduler, or mend it: see faults_in_scheduler.py. Done in each when the next is asked of it."""
        self.engine.update_weights_from_tensor([(text, torch.zeros(1))], load_format=path)
        self.engine.disconnect()


@contextmanager
def raising() -> Iterator[list[str]]:
    """Catch an exception and keep its text; the texts of all ranks, each once. A collective call."""
    raised: list[str] = []
    mine = ""
    try:
        yield raised
    except Exception as error:
        mine = f"{type(error).__name__}: {error}"
    raised += dict.fromkeys(text for text in all_gather(mine) if text)


@contextmanager
def patching(replaced: Mapping[str, Any]) -> Iterator[None]:
    """unittest.mock.patch for each path whose value is not None."""
    with ExitStack() as stack:
        for path, value in replaced.items():
            if value is not None:
                stack.enter_context(patch(path, value))
        yield


def live_layout(
    model: Any, live: Mapping[str, torch.Tensor], dtype: torch.dtype | None = None
) -> tuple[CheckpointTensor, ...]:
    """Return live names as they are, as trainers sent them before transformers 5 fused experts in memory.

    dtype: as checkpoint_layout takes it; these models are float32 throughout.
    """
    return tuple(
        CheckpointTensor(
            name=name,
            live_name=name,
            shape=tuple(tensor.shape),
            stride=tuple(torch.empty(tensor.shape, device="meta").stride()),
            offset=0,
            dtype=tensor.dtype,
        )
        for name, tensor in live.items()
    )


def rename_live(change: Callable[[dict[str, torch.Tensor]], None]) -> Named:
    """named_tensors, with the dict of names changed in place."""

    def names(model: Any) -> Iterable[tuple[str, torch.Tensor]]:
        live = dict(named_tensors(model))
        change(live)
        return live.items()

    return names


def two_hundred_updates(stand: Stand) -> list[str]:
    """A healthy program: each update read back, and the log-probs of the last."""
    found = []
    for _ in range(200):
        stand.change()
        stand.sync.push()
        found += weight_differences(stand.sync)
    return [*found, *stand.log_prob_violations()]


def timed(steps: Mapping[str, Callable[[], list[str]]]) -> dict[str, Any]:
    """What each step said, or raised, and what all took; also on the console, for a program that dies."""
    began = time.monotonic()
    outcome: dict[str, Any] = {}
    for name, step in steps.items():
        outcome[name] = []
        with raising() as raised:
            outcome[name] += step()
        outcome[name] += raised
    outcome["seconds"] = round(time.monotonic() - began, 1)
    if dist.get_rank() == 0:
        print(json.dumps(outcome), flush=True)
    return outcome


def run(
    folder: Path,
    name: str,
    cases: Sequence[Case],
    healthy: Sequence[Callable[[Stand], list[str]]] = (),
    shape: Mapping[str, Any] | None = None,
) -> None:
    """A program on the tiny model called `name`: rank 0 writes what each case said into folder/seen.json."""
    started = time.monotonic()
    seen: dict[str, Any] = {}
    with open_world(Launch.from_environment(os.environ), torch.device("cpu"), 300) as world:
        if world.rank == 0:
            save_tiny_model(name, folder / "model", 0, overrides=shape, texts=["hello, the quick brown fox"])
        dist.barrier()
        meshes = build_meshes(ParallelDims(dp=1, tp=2, pp=1), "cpu")
        engine = VerlEngine(
            meshes.engines["tp"],
            log_dir=folder / "engine",
            model_path=str(folder / "model"),
            load_format="dummy",
            device="cpu",
            dtype="float32",
            skip_tokenizer_init=True,
            random_seed=0,
            custom_weight_loader=[LINGER, SKIP, REPLAN],
        )
        model = load_causal_lm(str(folder / "model"), torch.float32, torch.device("cpu"), meshes.fsdp)
        stand = Stand(world, meshes.fsdp, folder, engine, model)
        seen["seconds to start"] = round(time.monotonic() - started, 1)
        seen["names"] = [tensor.name for tensor in stand.sync.layout]
        for check in healthy:
            seen[check.__name__] = timed({"control": lambda check=check: check(stand)})
        for case in cases:
            steps = {
                "fault": lambda case=case: case(stand, True),
                "after fault": lambda: stand.pushed(stand.sync),
                "control": lambda case=case: case(stand, False),
                "after control": lambda: stand.pushed(stand.sync),
            }
            seen[case.__name__] = timed(steps)
        stand.sync.close()
        engine.shutdown()
        seen["seconds"] = round(time.monotonic() - started, 1)
        if world.rank == 0:
            (folder / "seen.json").write_text(json.dumps(seen, indent=1))
