"""Verification of syncs at the level that weights.verify sets; each level does all that those below it do.

off: only the metrics. log_probs: log-probs against a baseline, and fingerprints of all that the engine holds. bytes: all of
it read back after every sync. full: a rehearsal before every sync, of changed weights onto a sentinel fill.
"""

import math
import shutil
from collections.abc import Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from pathlib import Path

import torch.distributed as dist

from harness.cluster.world import World, all_gather
from harness.config.layers import ConfigError
from harness.config.schema import Config
from harness.rollout.memory_stages import MemoryStages
from harness.rollout.sglang_api import SGLangApi
from harness.rollout.verl_engine import VerlEngine
from harness.runtime.events import EventLog
from harness.weights.fingerprint import FingerprintComparison, compare_fingerprints
from harness.weights.log_probs import LARGEST_BASELINE, Allowed, LogProbDifference
from harness.weights.perturb import perturb
from harness.weights.readback import weight_differences
from harness.weights.snapshot import Snapshot, changed_tensors, fill_with_sentinel, snapshot_weights
from harness.weights.sync import WeightSync

LEVELS = ("off", "log_probs", "bytes", "full")
NAMED = 8
"""How many tensors a message names."""
MOVEMENT_MARGIN = 2.0
"""The next responses move by 0.7 to 1.5 times what `movement` says (qwen2, deepseek_v3; float32, bfloat16)."""


GREEDY = {"temperature": 0.0, "max_new_tokens": 8, "ignore_eos": True}
Output = list[tuple[float, int]]
"""(log-prob, token) of one greedy response."""


class WeightsDidNotArrive(RuntimeError):
    """The engine computes with other weights than the trainer holds."""


class NoBaseline(RuntimeError):
    """Engine and trainer compute differently on the same weights: a difference after a sync would prove nothing."""


def check_level(config: Config, api: SGLangApi) -> None:
    """Raise ConfigError where this sglang lacks what weights.verify needs."""
    level = config.weights.verify
    if level in ("bytes", "full") and not api.custom_weight_loader:
        raise ConfigError(
            f'weights.verify = "{level}": reading weights back needs custom weight loaders (sglang >= 0.4.8), found'
            f' {api.version}; use "log_probs".'
        )


@dataclass(kw_only=True, slots=True)
class Verification:
    """All checks of a run's syncs on one rank. Every method is a collective call of all ranks."""

    config: Config
    world: World
    events: EventLog
    memory: MemoryStages
    sync: WeightSync
    source: Path
    """The model's own folder."""
    checkpoints: Path
    """full: where the trainer's weights are saved for a reload; all hosts see it."""
    prompts: Sequence[Sequence[int]]
    """Token ids; their greedy responses are compared before and after a reload."""
    baseline: LogProbDifference | None = None
    why_no_baseline: str = ""
    own_checkpoint: Snapshot | None = None
    """bytes: what SGLang itself loaded from the model's own checkpoint, until a sync has matched it."""
    sentinel_next: bool = False
    """The engine holds right weights that no sync brought: a tensor that the next sync omits would not show."""
    compared: FingerprintComparison | None = None
    movement: float = field(init=False)
    """Mean |difference| of log-probs, in nats, between what the engine held before the last sync and what it was sent: what
    a sync that does nothing would leave them off by. Infinite where the engine held garbage."""

    def __post_init__(self) -> None:
        self.movement = math.inf if self.config.engine.initial_weights == "dummy" else 0.0

    def reaches(self, level: str) -> bool:
        """Return whether weights.verify is at least `level`."""
        return LEVELS.index(self.config.weights.verify) >= LEVELS.index(level)

    @property
    def allowed(self) -> Allowed:
        """What the log-prob statistics may be."""
        return Allowed.of(self.config.model.dtype, self.baseline)

    @property
    def is_exact(self) -> bool:
        """Whether the same weights give the same outputs bit for bit."""
        on_cpu = self.sync.engine.device_type == "cpu"
        return on_cpu or bool(self.config.engine.args.get("enable_deterministic_inference"))

    def load_baseline(self) -> bool:
        """Bring the engine, resumed or released as it started, onto the model's own checkpoint, by SGLang's disk loader.

        Return False where none is wanted (level off), or none can be taken; the console says why.
        """
        self.why_no_baseline = self._why_no_baseline()
        if self.why_no_baseline:
            if self.reaches("log_probs"):
                allowed = f"allowed is {self.allowed.mean:.2g}"
                self.events.say(f"no baseline of the log-prob difference ({self.why_no_baseline}): {allowed}")
            return False
        if self.config.engine.initial_weights == "dummy":
            self.memory.resume_weights()
            self.memory.resume_kv_cache()
            self.sync.engine.update_weights_from_disk(str(self.source))
            self.sentinel_next = True
        if self.reaches("bytes"):
            self.own_checkpoint = snapshot_weights(self.sync.engine)
        return True

    def _why_no_baseline(self) -> str:
        if not self.reaches("log_probs"):
            return "not wanted at level off"
        if self.config.model.weights == "random":
            return "random weights are in no checkpoint"
        if self.config.engine.initial_weights == "checkpoint":
            return ""
        engine = self.sync.engine
        if not engine.api.custom_weight_loader:
            return f"sglang {engine.api.version} cannot be filled after it, and a lost tensor would not show"
        # Every scheduler reads the path that its engine's head gives; a hub id is no path on any host.
        path = Path(engine.on_head(lambda _: str(self.source)))
        seen = all_gather((self.world.host, path.exists()))
        blind = sorted({host for host, found in seen if not found})
        return f"the model's folder is not on {', '.join(blind)}" if blind and any(found for _, found in seen) else ""

    def set_baseline(self, difference: LogProbDifference) -> None:
        """Keep the difference on the model's own checkpoint. Raise NoBaseline if it is too large."""
        self.baseline = difference
        self.events.fact("log_prob_baseline", **difference.metrics(), allowed=self.allowed.mean)
        self.events.say(
            f"baseline on the model's own checkpoint: log-prob difference {difference.mean:.1e} in the mean,"
            f" so that {self.allowed.mean:.2g} is allowed"
        )
        if not difference.mean <= LARGEST_BASELINE:
            raise NoBaseline(
                f"before the first update, on the checkpoint that SGLang itself loaded from {self.source}, the"
                f" engine's log-probs are off by {difference.mean:.2e} in the mean (at most {LARGEST_BASELINE:g} makes"
                " sense): SGLang and transformers do not compute the same model."
            )

    def rehearse(self, index: int) -> None:
        """full: sync changed weights onto a sentinel fill, read them back and compare with a reload from disk.

        The engine's weights are resumed, and of no use until the next sync; in between the KV cache is resumed too. Below
        full: only the sentinel fill that a baseline asks for.
        """
        if self.sentinel_next or self.reaches("full"):
            with self.timed("sentinel", index, "the engine to fill its weights with garbage"):
                fill_with_sentinel(self.sync.engine, f"{self.config.run.seed}/{index}")
            self.sentinel_next = False
        if not self.reaches("full"):
            return
        seed = self.config.run.seed * 1_000_003 + index
        with self.timed("perturb", index):
            perturb(self.sync.live, seed)
        try:
            with self.timed("push", index, "all ranks to sync changed weights onto sentinel"):
                self.sync.push()
            self.check_bytes(index, "a sync of changed weights onto sentinel")
            with self.timed("save", index, "rank 0 to write the changed weights to disk"):
                self.sync.save(self.checkpoints, self.source, self.world.rank)
                dist.barrier()
        finally:
            with self.timed("perturb", index):
                perturb(self.sync.live, seed)
        with self.timed("reload", index, "the engine to reload the changed weights from disk, for comparison"):
            self._check_reload(index)

    def _check_reload(self, index: int) -> None:
        engine = self.sync.engine
        self.memory.resume_kv_cache()
        first, before = greedy_outputs(engine, self.prompts), snapshot_weights(engine)
        engine.update_weights_from_disk(str(self.checkpoints))
        dist.barrier()
        if self.world.rank == 0:
            shutil.rmtree(self.checkpoints, ignore_errors=True)
        wrong, second = changed_tensors(self.sync, before), greedy_outputs(engine, self.prompts)
        self.memory.release_all()
        self.memory.resume_weights()
        what = f"step {index}: a reload of the same weights from disk changed"
        _refuse(wrong, f"{what} what the engine holds")
        same = all(all_gather(first == second))
        apart, bound = max(all_gather(output_difference(first, second))), self.allowed.mean
        if not (same if self.is_exact else apart <= bound):
            allowed = "not a bit" if self.is_exact else f"{bound:.2g}"
            raise WeightsDidNotArrive(f"{what} greedy log-probs by {apart:.2e} in the mean ({allowed} is allowed)")

    def check_fingerprints(self, index: int) -> None:
        """log_probs: raise WeightsDidNotArrive, naming checkpoint tensors, unless the engine holds what can be followed."""
        if self.reaches("log_probs") and self.sync.engine.api.custom_weight_loader:
            with self.timed("fingerprints", index, "the schedulers' fingerprints of what they hold"):
                self.compared = compare_fingerprints(self.sync)
                wrong = self.compared.wrong and (weight_differences(self.sync) or self.compared.wrong)
            _refuse(wrong, f"step {index}: after the sync the engine holds other weights")

    def check_bytes(self, index: int, what: str = "the sync") -> None:
        """bytes: raise WeightsDidNotArrive, naming checkpoint tensors, unless the engine holds what was sent."""
        if self.reaches("bytes"):
            with self.timed("readback", index, "every tensor to be read back from the engine"):
                wrong = weight_differences(self.sync)
            _refuse(wrong, f"step {index}: after {what} the engine holds other weights")

    def check_first_sync(self, index: int) -> None:
        """bytes: raise WeightsDidNotArrive unless the first sync, of unchanged weights, leaves what SGLang itself loaded.

        The only check that does not trust our names: two experts swapped in them would be read back swapped.
        """
        if self.own_checkpoint is not None:
            with self.timed("first_sync", index, "the engine's weights, to compare them with its own load from disk"):
                wrong = changed_tensors(self.sync, self.own_checkpoint)
            self.own_checkpoint = None
            source = f"it loaded itself from {self.source}"
            _refuse(wrong, f"step {index}: after the first sync the engine holds other weights than {source}")

    def check_log_probs(self, index: int, difference: LogProbDifference) -> None:
        """log_probs: raise WeightsDidNotArrive, naming suspects, when the engine's log-probs are not the trainer's."""
        self.events.fact("log_prob_difference", step=index, **difference.metrics())
        violations = self.allowed.violations(difference)
        if not violations or not self.reaches("log_probs"):
            return
        try:
            listed = self.find_suspects(index)
        except Exception as error:  # it must not hide what was found before it
            listed = f"unknown, as the search for them failed ({type(error).__name__}: {error})"
        raise WeightsDidNotArrive(
            f"step {index}: the engine's log-probs are off by {', '.join(violations)}; largest {difference.largest:.2e};"
            f" engine tensors that differ from the trainer's: {listed}"
        )

    def find_suspects(self, index: int) -> str:
        """Return the first tensors that the engine does not hold as the trainer does, or "none found"."""
        with self.events.phase("find_suspects", index, "the weights to be synced again, and read back"):
            self.memory.resume_weights()
            self.sync.push()  # what a released engine held is gone; the same sync goes wrong the same way
            return _some(weight_differences(self.sync))

    def sync_metrics(self) -> dict[str, float]:
        """Return what is known of the last sync, whose checks all passed, for metrics.jsonl.

        sync_proven_by_log_probs: 1 where `movement` is so far above what is allowed that a sync that did nothing would fail.
        """
        metrics = {"sync_movement": self.movement} if math.isfinite(self.movement) else {}
        if self.reaches("log_probs"):
            metrics["sync_proven_by_log_probs"] = float(self.movement > MOVEMENT_MARGIN * self.allowed.mean)
        if self.compared:
            metrics |= {"sync_tensors": self.compared.tensors, "sync_tensors_compared": self.compared.compared}
        return metrics

    def timed(self, part: str, index: int | None = None, waiting_for: str = "") -> AbstractContextManager[None]:
        """Return the phase verify_<part> of the event log."""
        return self.events.phase(f"verify_{part}", index, waiting_for)


def _refuse(wrong: Sequence[str], sentence: str) -> None:
    if wrong:
        raise WeightsDidNotArrive(f"{sentence}: {_some(wrong)}")


def _some(names: Sequence[str]) -> str:
    """Return the first names and the number of the others, or "none found"."""
    more = [f"and {len(names) - NAMED} more"] if len(names) > NAMED else []
    return "; ".join([*names[:NAMED], *more]) or "none found"


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
