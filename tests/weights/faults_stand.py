"""What the fault programs share: two torchrun ranks with a real engine in CPU mode and a sharded trainer, and how a
case is run on them: once with its fault, once without, each time followed by a healthy sync.

A case is a function (stand, broken) -> sentences. With broken = False it does the same thing without the fault, and
must have nothing to say.
"""

import json
import math
import os
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from itertools import chain
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

from harness.cluster.mesh import ParallelDims, build_meshes
from harness.cluster.world import Launch, World, all_gather, open_world
from harness.rollout.verl_engine import VerlEngine
from harness.task.tiny_models import save_tiny_model
from harness.tools.sync.read_back import read_back
from harness.trainer.actor import token_log_probs
from harness.trainer.batch import from_sequences, scatter_responses
from harness.trainer.model import load_causal_lm, named_tensors
from harness.weights.gather import full_tensor
from harness.weights.log_probs import Allowed, log_prob_difference
from harness.weights.names import checkpoint_layout
from harness.weights.presync_checks import coverage_problems
from harness.weights.sent_model import SentModel
from harness.weights.sync import WeightSync
from harness.weights.tensor_view import TensorView
from harness.weights.verification.comparison import FingerprintComparison, compare_fingerprints, load_again
from harness.weights.verification.perturb import perturb
from harness.weights.worker.kept_trace import fingerprint_everything
from tests.weights.faults_in_scheduler import KEEP, LINGER, REPLAN, SKIP, SPOIL

BUCKET_BYTES = 150_000
PROMPTS = [[5 + (7 * row + 3 * at) % 300 for at in range(24)] for row in range(4)]

Case = Callable[["Stand", bool], list[str]]
Named = Callable[[Any], Iterable[tuple[str, torch.Tensor]]]
Layout = Callable[[Any, Mapping[str, torch.Tensor]], Any]


@dataclass
class Stand:
    """A real engine and a sharded trainer, as one rank has them."""

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
        check: bool = True,
        transport: Any = "pull",
    ) -> WeightSync:
        """A sync of the stand's model in several buckets. names, layout: in place of what a CheckpointConverter
        calls."""
        model = model or self.model
        converter = Faulty(model, names or named_tensors, layout or checkpoint_layout)
        folder = self.folder / "run"
        sync = WeightSync(self.engine, SentModel(model, converter), transport=transport, folder=folder, check=check)
        sync.weights.bucket_bytes = BUCKET_BYTES
        return sync

    @contextmanager
    def syncing(self, **replaced: Any) -> Iterator[WeightSync]:
        """Use make_sync in place of the healthy sync in this block: a scheduler has one plan at a time."""
        sync = self.make_sync(**replaced)
        try:
            yield sync
        finally:
            sync.close()
            self.sync.loader.trace()
            self.sync.close()  # its next pull plans anew

    def change(self) -> None:
        """Change every element of the trainer's weights."""
        self.changes += 1
        perturb(dict(named_tensors(self.model)), seed=self.changes)

    def seen(self, sync: WeightSync | None = None) -> list[str]:
        """What readback and log-probs say of what the engine holds now."""
        sync = sync or self.sync
        return [*read_back(sync.weights, sync.loader).differences, *self.log_prob_violations()]

    def held(self) -> dict[str, int]:
        """Fingerprints of all that the scheduler next to this rank holds."""
        with self.engine.weight_update():
            return self.engine.ask(fingerprint_everything).sums

    def reloaded(self) -> list[str]:
        """What loading again, which the default level does for what no fingerprint shows, says of what the engine
        holds."""
        left = self.compared().left
        found = load_again(self.sync.weights, self.sync.loader, left)
        return [*(f"reloaded: {sentence}" for sentence in found.wrong), *found.not_covered]

    def caught(self, sync: WeightSync) -> list[str]:
        """What the default level says of what the engine holds now."""
        compared = compare_fingerprints(sync.weights, sync.loader)
        again = load_again(sync.weights, sync.loader, compared.left)
        return [*compared.wrong, *again.wrong, *again.not_covered]

    def compared(self, sync: WeightSync | None = None) -> FingerprintComparison:
        """What fingerprints, which the default level takes, say of what the engine holds now."""
        asked = sync or self.sync
        return compare_fingerprints(asked.weights, asked.loader)

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
        return [f"log-probs: {phrase}" for phrase in Allowed.of(None).violations(found)]

    def synced(self, sync: WeightSync) -> list[str]:
        """Change all weights, sync; what readback and log-probs then say."""
        self.change()
        sync.update_engine()
        return self.seen(sync)

    def refused(self, **replaced: Any) -> list[str]:
        """Return what such a sync raises, then all problems that it could have named, then the engine's tensors that it
        did touch. If it raises nothing: what is seen after the sync."""
        self.sync.loader.trace_once()  # the first trace derives what a load derives
        before = self.held()
        found: list[str] = []
        with raising() as raised, self.syncing(**replaced) as sync:
            sync.loader.trace()
            found += map(str, coverage_problems(sync.loader.groups, sync.loader.coverage))
            found += self.synced(sync)
        after = self.held() if raised else before
        touched = all_gather([name for name in {*before, *after} if before.get(name) != after.get(name)])
        return [*raised, *found, *(f"touched: {name}" for name in sorted({name for each in touched for name in each}))]

    def hook(self, path: str, text: str) -> None:
        """Break every scheduler, or repair it; see faults_in_scheduler.py.

        The next ask waits until each has done it.
        """
        self.engine.update_weights_from_tensor([(text, torch.zeros(1))], load_format=path)
        self.engine.disconnect()


@dataclass
class Faulty:
    """A Converter made of two functions, either of which may be wrong."""

    model: Any
    names: Named
    layout_of: Layout

    def __post_init__(self) -> None:
        self.given = dict(self.names(self.model))

    def layout(self) -> Any:
        return self.layout_of(self.model, self.given)

    def tensors(self) -> dict[str, torch.Tensor]:
        return self.given


def update_one_by_one(sync: WeightSync) -> None:
    """Gather every tensor alone and call the engine for it, as the VerlEngine of sglang and verl did.

    It loses tensors that fuse on arrival.
    """
    with sync.engine.weight_update():
        for of, tensor in sync.weights.tensors.items():
            views = [view for view in sync.weights.layout if view.of == of]
            whole = full_tensor(tensor, views[0].dtype)
            for view in views:
                named = [(view.name, view.in_memory(whole).contiguous())]
                sync.engine.update_weights_from_tensor(named, flush_cache=False)
    sync.engine.flush_cache()


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
) -> tuple[TensorView, ...]:
    """Return live names as they are, as trainers sent them before transformers 5 fused experts in memory.

    dtype: as checkpoint_layout takes it; these models are float32 throughout.
    """
    return tuple(
        TensorView(
            name=name,
            of=name,
            shape=tuple(tensor.shape),
            stride=tuple(torch.empty(tensor.shape, device="meta").stride()),
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


def no_shard_is_padding(stand: Stand) -> list[str]:
    """Name each parameter of which some scheduler holds padding: a fault in what is sharded would not show there."""
    stand.change()
    stand.sync.update_engine()
    found = []
    for each in stand.sync.loader.coverage:
        copied = Counter[str]()
        for copy in chain(*each.copies):
            copied[copy.into] += math.prod(copy.source.shape)
        found += [
            f"{name}: {copied[name]} of {size} elements on rank {each.rank}"
            for name, (_, size) in each.missing.items()
            if copied[name] != size
        ]
    return found


def no_bit_is_missed(stand: Stand) -> list[str]:
    """Name what the default level does not catch: a bit in a tensor of an engine, a sync that left one of the trainer's
    out.

    Each tensor of each scheduler, derived ones included; and each tensor of the trainer, with three transports.
    """
    missed = []
    for transport in ("bucket", "pull", "tensor"):
        with stand.syncing(transport=transport) as sync:
            stand.change()
            sync.update_engine()
            missed += [f"{transport}, healthy: {text}" for text in stand.caught(sync)]
            for name, tensor in sync.weights.tensors.items():
                with one_bit_changed(tensor):
                    missed += [] if stand.caught(sync) else [f"{transport}: {name} left out"]
            missed += [f"{transport}, healthy again: {text}" for text in stand.caught(sync)]
    for rank, names in enumerate(all_gather(sorted(stand.held()))):
        for name in [name for name in names if "rotary" not in name and "cos_sin" not in name]:
            stand.hook(SPOIL, f"{rank} {name}")
            missed += [] if stand.caught(stand.sync) else [f"{name} of rank {rank}"]
            stand.hook(SPOIL, f"{rank} {name}")
    return missed


@contextmanager
def one_bit_changed(tensor: torch.Tensor) -> Iterator[None]:
    """Flip a bit of the first element of each rank's part of the tensor in this block."""
    part = (tensor.to_local() if isinstance(tensor, DTensor) else tensor).detach().view(-1)[:1].view(torch.int32)
    part.bitwise_xor_(1)
    try:
        yield
    finally:
        part.bitwise_xor_(1)


def two_hundred_updates(stand: Stand) -> list[str]:
    """Read back each of 200 healthy updates, and compare the log-probs after the last."""
    found = []
    for _ in range(200):
        stand.change()
        stand.sync.update_engine()
        found += read_back(stand.sync.weights, stand.sync.loader).differences
    return [*found, *stand.log_prob_violations()]


def timed(steps: Mapping[str, Callable[[], list[str]]]) -> dict[str, Any]:
    """Return what each step said or raised, and the seconds of all. Print it too, in case the program dies later."""
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
    """Run the cases on the tiny model called `name`. Rank 0 writes what each case said into folder/seen.json."""
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
            custom_weight_loader=[KEEP, LINGER, SKIP, SPOIL, REPLAN],
        )
        model = load_causal_lm(str(folder / "model"), torch.float32, torch.device("cpu"), meshes.fsdp)
        stand = Stand(world, meshes.fsdp, folder, engine, model)
        seen["seconds to start"] = round(time.monotonic() - started, 1)
        seen["names"] = [tensor.name for tensor in stand.sync.weights.layout]
        for check in healthy:
            seen[check.__name__] = timed({"control": lambda check=check: check(stand)})
        for case in cases:
            steps = {
                "fault": lambda case=case: case(stand, True),
                "after fault": lambda: stand.synced(stand.sync),
                "control": lambda case=case: case(stand, False),
                "after control": lambda: stand.synced(stand.sync),
            }
            seen[case.__name__] = timed(steps)
        stand.sync.close()
        engine.shutdown()
        seen["seconds"] = round(time.monotonic() - started, 1)
        if world.rank == 0:
            (folder / "seen.json").write_text(json.dumps(seen, indent=1))
