"""Verification: the checks around every sync of a run, at the level that weights.verify sets.

Each level also does what the levels before it do:

    off        measure the difference of log-probs, and fail on nothing
    log_probs  before each sync, overwrite what it is to fill (poison); after it, and again after the rollout, compare 64-bit
               fingerprints of what the engine holds with the trainer's; compare the log-probs of the engine's responses
    bytes      read every element back after each sync; the first sync must leave what SGLang itself loads from disk
    full       before each sync, sync changed weights, compare the log-probs of engine and trainer on them, and compare the
               engine with a reload from disk

An engine that cannot be asked what it holds (one behind HTTP) has no fingerprints and cannot be read back. Then only
log-probs are compared, and the verdict says so.
"""

import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import torch
import torch.distributed as dist
import transformers
from torch import nn

from harness.cluster.world import World, all_gather
from harness.config.model_rules import EXPERTS
from harness.config.precision import Precision
from harness.config.schema import Config
from harness.rollout.memory_stages import MemoryStages
from harness.rollout.served_models import DRAFT, STALE_DRAFT
from harness.rollout.sglang_api.prefix_cache import cached_prefix_tokens
from harness.runtime.events import EventLog
from harness.seeds import seed_of
from harness.trainer.batch import Batch
from harness.weights.log_probs import (
    FACTOR,
    FLOOR,
    LARGEST_BASELINE,
    Allowed,
    LogProbDifference,
)
from harness.weights.presync_checks import first_of
from harness.weights.sync import WeightSync
from harness.weights.tensor_view import loses_precision
from harness.weights.verification.computed import fingerprints_of_forward
from harness.weights.verification.fingerprint import (
    FingerprintComparison,
    TrainerSums,
    compare_fingerprints,
    trainer_sums,
)
from harness.weights.verification.kept_copies import STALE_COPY, describe_stale_copies
from harness.weights.verification.perturb import perturb
from harness.weights.verification.readback import read_back
from harness.weights.verification.rehearsal import ReloadComparison, compare_with_reload
from harness.weights.verification.reload import ReloadFindings, load_again
from harness.weights.verification.routing_record import wrong_routing_record
from harness.weights.verification.second_look import Scored
from harness.weights.verification.snapshot import Snapshot, changed_tensors, snapshot_weights
from harness.weights.verification.summary import mismatch_of_precisions, report_section, verdict_phrase
from harness.weights.worker.coverage import LoadCoverage
from harness.weights.worker.kept_copies import find_copies

Generate = Callable[[], Batch]
"""Return the engine's responses to the step's prompts, with its log-probs of them."""
Score = Callable[[Batch], Scored]
"""Return a batch with the trainer's log-probs of it."""
Level = Literal["off", "log_probs", "bytes", "full"]
LEVELS: tuple[Level, ...] = ("off", "log_probs", "bytes", "full")


class WeightsDidNotArrive(RuntimeError):
    """The engine computes with other weights than the trainer holds."""


class WrongRoutingRecord(RuntimeError):
    """The experts that the engine says tokens took are not those that it computed with."""


class NoBaseline(RuntimeError):
    """Engine and trainer are further apart on the same weights than rounding explains: a difference after a sync would prove nothing."""


@dataclass(kw_only=True, slots=True)
class Verification:
    """All checks of a run's syncs on one rank. What asks the engine or loads weights is a collective call of all ranks."""

    config: Config
    world: World
    events: EventLog
    memory: MemoryStages
    sync: WeightSync
    source: Path
    """The folder that the engine loads: the model's own, or its quantized copy."""
    prompts: Sequence[Sequence[int]]
    """Token ids, for reloads."""
    baseline: LogProbDifference | None = None
    rounding: LogProbDifference | None = None
    """How far the trainer is from itself in float32, or, for an engine that holds tensors in a narrower dtype, in that one."""
    narrower: Mapping[str, torch.dtype] = field(default_factory=dict)
    """float32: the tensors that the engine holds in a narrower dtype by its class, if they were needed to explain a difference."""
    agreed: int = 0
    """How many rollouts agreed so far."""
    why_no_baseline: str = ""
    own_checkpoint: Snapshot | None = None
    """bytes: what SGLang itself loaded from the model's own checkpoint, until a sync has matched it."""
    sums: TrainerSums | None = None
    """Fingerprints of what the last sync sent, and of the trainer's model at that time."""
    others: dict[int, dict[str, int]] = field(default_factory=dict)
    """Engine rank -> fingerprints of what no sync fills, as they were before the first one."""
    after_sync: dict[int, dict[str, int]] = field(default_factory=dict)
    """The same after the last sync, and of what the loader derives."""
    compared: FingerprintComparison | None = None
    """The last comparison of fingerprints."""
    reloaded: ReloadFindings = field(default_factory=ReloadFindings)
    """What loading again showed of what fingerprints do not compare."""
    last_saved: Path | None = None
    """Where `save_last` wrote the last sync's weights, until `check_last` has compared them."""
    reloaded_last: bool = False
    """A reload of the last sync's weights from disk changed nothing."""
    not_covered: dict[str, None] = field(default_factory=dict)
    """Sentences on what no sync's checks covered."""

    @property
    def level(self) -> Level:
        """The level of the checks that are made: weights.verify, or less if the engine cannot be asked what it holds."""
        asked = self.config.weights.verify
        return "log_probs" if asked in ("bytes", "full") and not self.sync.engine.can_ask else asked

    def reaches(self, level: Level) -> bool:
        """Return whether the checks of `level` are made."""
        return LEVELS.index(self.level) >= LEVELS.index(level)

    @property
    def allowed(self) -> Allowed:
        """The differences of log-probs that pass. In half precision that is known when the first ones were compared."""
        if quantized := self.precision.quantized:
            return Allowed.of_quantized(quantized, self.baseline)
        return Allowed.of(self.rounding, has_experts=self.has_experts)

    @property
    def has_experts(self) -> bool:
        """Whether the model is a mixture of experts."""
        model: Any = self.sync.sent.model
        fields = model.config.get_text_config()
        return any(getattr(fields, name, None) for name in EXPERTS.split())

    @property
    def precision(self) -> Precision:
        """In what the weights are sent, and computed with."""
        return self.config.model.precision

    # Before the first step

    def load_baseline(self) -> bool:
        """Have the engine, whether its memory is released or not, load the model's own checkpoint from disk.

        Return False if no baseline is wanted (level off) or none can be taken; the console says why.
        """
        self.why_no_baseline = self._why_no_baseline()
        if self.why_no_baseline:
            if self.reaches("log_probs"):
                then = "what passes is measured on the first rollout"
                if self.precision.is_quantized or self.config.model.dtype == "float32":
                    then = f"up to {self.allowed.mean:.2g} passes"
                self.events.say(f"no baseline of the log-prob difference, as {self.why_no_baseline}: {then}")
            return False
        if self.config.engine.initial_weights == "dummy":
            self.memory.resume_weights()
            self.memory.resume_kv_cache()
            self.sync.restore_scales()
            self.sync.engine.update_weights_from_disk(str(self.source))
        if self.sync.engine.can_ask:
            self.sync.loader.trace_once()
            self.others = self.sync.loader.other_tensors()
        if self.reaches("bytes"):
            self.own_checkpoint = snapshot_weights(self.sync.engine)
        return True

    def _why_no_baseline(self) -> str:
        if not self.reaches("log_probs"):
            return "it is not wanted at level off"
        if self.config.model.weights == "random":
            return "random weights are in no checkpoint"
        if self.config.engine.initial_weights == "checkpoint":
            return ""
        engine = self.sync.engine
        if not engine.can_ask:
            return "this engine's weights cannot be overwritten after it, and a tensor that a sync leaves out would not show"
        # Every scheduler reads the path that its engine's head gives; a hub id is no path on any host.
        path = Path(engine.group.broadcast(str(self.source)))
        seen = all_gather((self.world.host, path.exists()))
        blind = sorted({host for host, found in seen if not found})
        return f"the model's folder is not on {', '.join(blind)}" if blind and any(found for _, found in seen) else ""

    def set_baseline(self, scored: Scored) -> None:
        """Keep the difference on the model's own checkpoint. Raise NoBaseline if rounding does not explain it.

        A collective call of all ranks; the engine's memory is released.
        """
        self.baseline = difference = scored.difference()
        self.measure_rounding(scored, difference)
        allowed = self.allowed
        self.events.fact("log_prob_baseline", **difference.metrics(), allowed=allowed.mean)
        costs = (
            f" ({self.precision.of_engine} against {self.config.model.dtype}; bytes show arrival)"
            if self.precision.is_quantized
            else ""
        )
        self.events.say(
            f"unchanged weights: the log-probs of engine and trainer differ by {difference.mean:.1e} on average{costs};"
            f" {self.what_passes()}"
        )
        largest = LARGEST_BASELINE[self.precision.of_engine]
        wrong = [] if self.precision.is_quantized else allowed.violations(difference)
        if wrong or not difference.mean <= largest:
            look = self.describe_second_look(scored)
            off = wrong[0] if wrong else f"{difference.mean:.2e} in the mean (at most {largest:g} makes sense)"
            raise NoBaseline(
                f"before the first update, on the checkpoint that SGLang itself loaded from {self.source}, the engine's log-probs"
                f" are off by {off}. That is more than rounding: {self.what_passes()}. {look[0].upper()}{look[1:]}."
                f" {settings_that_matter(self.config)}; launch/mismatch.py with this config looks for the cause"
                f" ({self.versions})"
            )

    def measure_rounding(self, scored: Scored, difference: LogProbDifference) -> None:
        """Measure how far the trainer's own rounding takes its log-probs, in half precision.

        In float32 it rounds nothing. But if its difference from the engine is more than that, and the engine's class holds some
        tensors in a narrower dtype, the engine is allowed what the trainer would lose in that dtype.
        """
        if self.precision.is_quantized or not self.reaches("log_probs"):
            return
        dtype = torch.float32
        if self.config.model.dtype == "float32":
            self.narrower = self._narrower_tensors() if self.allowed.violations(difference) else {}
            if not self.narrower:
                return
            dtype = min(self.narrower.values(), key=lambda each: each.itemsize)
        self.rounding = scored.rounding(dtype)
        self.events.fact("trainer_rounding", **self.rounding.metrics(), allowed=self.allowed.mean)

    def _narrower_tensors(self) -> dict[str, torch.dtype]:
        """Return the checkpoint tensors that the engine holds in a narrower dtype than its other parameters."""
        if not self.sync.engine.can_ask:
            return {}
        if not self.sync.loader.coverage:  # before the first sync, which traces too
            self.memory.resume_weights()
            self.sync.loader.trace()
            self.memory.release_all()
        return narrower_tensors(self.sync.loader.coverage)

    def what_passes(self) -> str:
        """Return a phrase on which differences pass, and why."""
        mean = self.allowed.mean
        if self.precision.is_quantized:
            return f"after a sync they may differ by up to {mean:.2g}"
        if self.rounding is None:
            return f"the trainer rounds nothing in float32, and up to {mean:.2g} passes"
        if self.narrower:
            names = first_of([f"{name} in {str(held).removeprefix('torch.')}" for name, held in self.narrower.items()])
            own = f"the engine's class holds {names}, and the trainer's rounding in that dtype is {self.rounding.mean:.1e}"
        else:
            own = f"the trainer's own rounding in {self.config.model.dtype} is {self.rounding.mean:.1e}"
        if not self.has_experts:
            return f"{own}; up to {FACTOR:g} times that passes, {mean:.2g} in the mean"
        return (
            f"{own}; up to {FACTOR:g} times that passes for the three quarters of the tokens that differ least, {self.allowed.bulk:.2g},"
            f" and {mean:.2g} in the mean, as a router may choose another expert"
        )

    # Around a sync

    def poison(self) -> None:
        """log_probs: before a sync, overwrite in the engine what it is to fill, so that whatever it does not bring shows."""
        if self.reaches("log_probs") and self.sync.engine.can_ask:
            with self.timed("poison", "the engine to overwrite its weights"):
                left = self.sync.loader.poison(self.events.step or 0)
            everyone = dict.fromkeys(name for names in all_gather(left) for name in names)
            self.not_covered |= {
                f"{name} is of a dtype that cannot be overwritten before a sync": None for name in everyone
            }

    def rehearse(self, generate: Generate, score: Score) -> None:
        """full: before a sync, rehearse it with changed weights, onto poison."""
        if self.reaches("full"):
            self.poison()
            self._sync_changed_weights(generate, score)

    def _sync_changed_weights(self, generate: Generate, score: Score) -> None:
        """Sync changed weights onto the poison, read them back, compare log-probs on them, and compare with a reload from disk.

        So a tensor that no sync brings shows even if the update left it as it was, and so does a reload that differs. What the
        engine has copied of older weights, in whatever form, and computes with shows in the log-probs, at any learning rate: the
        changed weights are far from them. That holds for what the trainer never moves too, but not for the draft model, which
        decides no log-prob.
        """
        sync, seed, folder = self.sync, seed_of(self.config.run.seed, self.events.step or 0), self.make_reload_folder()
        tensors = sync.sent.held_tensors()
        with self.timed("perturb"):
            perturb(tensors, seed)
        try:
            with self.timed("push", "all ranks to sync changed weights"):
                sync.update_engine()
            self.check_bytes("a sync of changed weights")
            with self.timed("save", "rank 0 to write the changed weights to disk"):
                sync.save(folder, self.source)
                dist.barrier()
            with self.timed("generate", "the engine's responses with changed weights"):
                self.memory.resume_kv_cache()
                batch = generate()
            self.find_copies()
            with self.timed("reload", "the engine to reload the changed weights from disk, for comparison"):
                found = compare_with_reload(self.sync.loader, self.prompts, folder)
            self.memory.release_all()  # the trainer computes without the engine's memory beside it, as in a step
            self.refuse_reload(found)
            usual = self.rounding
            with self.timed("changed_log_probs", "the trainer's log-probs with changed weights"):
                scored = score(batch)
                difference = scored.difference()
                if self.allowed.violations(difference):  # these weights may round otherwise
                    self.measure_rounding(scored, difference)
            self.check_changed_log_probs(difference)
            self.rounding = usual
        finally:
            with self.timed("perturb"):
                perturb(tensors, seed)
        self.memory.resume_weights()

    def check_changed_log_probs(self, difference: LogProbDifference) -> None:
        """full: raise WeightsDidNotArrive if the engine's log-probs on changed weights, which it holds, are not the trainer's."""
        self.events.fact("changed_log_prob_difference", step=self.events.step, **difference.metrics())
        if violations := self.allowed.violations(difference):
            raise WeightsDidNotArrive(
                f"{self.when}: on changed weights, which the engine holds as they were sent, its log-probs are off by"
                f" {', '.join(violations)}; largest {difference.largest:.2e}: {self._why_changed_differ}"
            )

    @property
    def _why_changed_differ(self) -> str:
        if self.baseline is None:  # they may never have been the same
            return "engine and trainer compute differently, or the engine computes with a copy of old weights"
        return (
            f"it computed the same as the trainer on the model's own checkpoint, so it still computes with something that it made"
            f" of old weights; a copy that no update reaches is suspected ({STALE_COPY})"
        )

    def make_reload_folder(self) -> Path:
        """Make the folder where weights are written for a reload: a new one, as other runs may use the same weights.folder."""
        made = ""
        if self.world.rank == 0:
            made = tempfile.mkdtemp(prefix=f"{self.events.path.parents[1].name}-reload-", dir=self.sync.folder)
        return Path(all_gather(made)[0])

    @property
    def reloads_last(self) -> bool:
        """Whether the last sync is compared with a reload: log-probs of an engine in another precision do not show it."""
        return self.reaches("bytes") and self.precision.is_quantized

    def save_last(self) -> None:
        """After the last sync, if `reloads_last`: write what was sent, as the engine loads it."""
        if self.reloads_last and self.events.step == self.config.run.steps:
            with self.timed("save", "rank 0 to write the quantized weights to disk"):
                self.last_saved = self.make_reload_folder()
                self.sync.save(self.last_saved, self.source)
                dist.barrier()

    def check_last(self) -> None:
        """Then, once the engine can generate: raise WeightsDidNotArrive if a reload of that changes what it holds or computes."""
        if self.last_saved:
            with self.timed("reload", "the engine to reload the quantized weights from disk, for comparison"):
                self.refuse_reload(compare_with_reload(self.sync.loader, self.prompts, self.last_saved))
            self.last_saved, self.reloaded_last = None, True

    def refuse_reload(self, found: ReloadComparison) -> None:
        """Raise WeightsDidNotArrive if a reload of the same weights changed anything."""
        what = f"{self.when}: a reload of the same weights from disk changed"
        refuse(found.changed, f"{what} what the engine holds")
        # How far the engine's precision takes it from the trainer says nothing about the engine and itself.
        bound = 0.0 if self.is_exact else self.own_bound
        if not (found.same_outputs if self.is_exact else found.apart <= bound):
            raise WeightsDidNotArrive(f"{what} greedy log-probs by {found.apart:.2e} on average (allowed {bound:.2g})")

    @property
    def own_bound(self) -> float:
        """How far the outputs of an engine may be apart on the same weights, if it is not deterministic."""
        return FLOOR[self.config.model.dtype] if self.rounding is None else self.allowed.mean

    @property
    def is_exact(self) -> bool:
        """Whether the engine answers the same, bit for bit, as long as its weights stay the same.

        On a CPU it does, but not with DP attention: there single decode steps vary from one answer to the next by the rounding of
        the dtype, without a reload between (3e-09 in the mean in float32, up to 2e-04 in bfloat16). Prefill does not vary. Why is
        not known; it is not which rank serves the prompt.
        """
        arguments = self.config.engine.args
        is_split = arguments.get("enable_dp_attention") or (arguments.get("attn_dp_size") or 1) > 1
        on_cpu = self.world.device_type == "cpu" and not is_split
        return on_cpu or bool(arguments.get("enable_deterministic_inference"))

    def check_arrival(self) -> None:
        """After a sync: raise WeightsDidNotArrive, naming checkpoint tensors, if the engine holds other weights."""
        self.check_fingerprints()
        self.check_bytes("the sync")
        self.check_first_sync()

    def check_fingerprints(self) -> None:
        """log_probs: raise WeightsDidNotArrive unless the engine holds every tensor that can be followed."""
        if not self.reaches("log_probs"):
            return
        after = f"{self.when}: after the sync the engine"
        with self.timed("fingerprints", "the fingerprints of what trainer and schedulers hold"):
            self.sums = trainer_sums(self.sync)
            refuse(self.sums.sent_otherwise, f"{self.when}: the sync sent other values than the trainer's model holds")
            if not self.sync.engine.can_ask:
                return
            with self.sync.engine.weight_update():  # one session for all
                self.compared = compare_fingerprints(self.sync.weights, self.sync.loader, self.sums.sent)
                self.reloaded = load_again(self.sync.weights, self.sync.loader, self.compared.left)
                wrong = self.compared.wrong and (self.differences() or self.compared.wrong)
                self.after_sync = self.sync.loader.other_tensors(derived=True)
                self.others = self.others or self.sync.loader.other_tensors()
                cached = self.cached_prefixes()
        self.not_covered |= dict.fromkeys([*self.reloaded.not_covered, *self.sync.unfilled])
        others = changed(self.others, self.after_sync)
        refuse(wrong or self.reloaded.wrong, f"{after} holds other weights")
        refuse(others, f"{after} has changed what no sync fills")
        refuse(cached, f"{after} has a prefix cache that is not empty (cache-not-flushed)")

    def cached_prefixes(self) -> list[str]:
        """Return one sentence for each scheduler whose prefix cache has keys and values of older weights."""
        everyone = all_gather(self.sync.engine.ask(cached_prefix_tokens))
        if None in everyone:
            self.not_covered["whether the prefix cache is empty after a sync: this SGLang's cannot be found"] = None
        return [f"{tokens} tokens in that of rank {rank}" for rank, tokens in enumerate(everyone) if tokens]

    def check_bytes(self, what: str) -> None:
        """bytes: raise WeightsDidNotArrive unless the engine holds what was sent."""
        if self.reaches("bytes"):
            with self.timed("readback", "every tensor to be read back from the engine"):
                wrong = self.differences()
            refuse(wrong, f"{self.when}: after {what} the engine holds other weights")

    def check_first_sync(self) -> None:
        """bytes: raise WeightsDidNotArrive unless the first sync, of unchanged weights, leaves what SGLang itself loaded.

        The only check that does not trust our names: two experts swapped in them would be read back swapped.
        """
        if self.own_checkpoint is not None:
            with self.timed("first_sync", "the engine's weights, to compare them with its own load from disk"):
                wrong = changed_tensors(self.sync.loader, self.own_checkpoint)
            self.own_checkpoint = None
            source = f"it loaded itself from {self.source}"
            refuse(wrong, f"{self.when}: after the first sync the engine holds other weights than {source}")

    # After a rollout

    def check_held(self) -> None:
        """log_probs: raise WeightsDidNotArrive unless the engine, once it has answered, holds what the sync brought.

        An update that is applied late, or taken back, shows here and not right after the sync.
        """
        if self.reaches("log_probs") and self.sync.engine.can_ask and self.sums:
            self.sync.engine.flush_cache()  # SGLang must be idle
            waiting = "the schedulers' fingerprints of what they hold after the rollout"
            with self.timed("held", waiting), self.sync.engine.weight_update():
                found = compare_fingerprints(self.sync.weights, self.sync.loader, self.sums.sent)
                now = self.sync.loader.other_tensors(derived=True)
            what = f"{self.when}: after the rollout the engine"
            refuse(found.wrong, f"{what} holds other weights than the sync brought")
            refuse(changed(self.after_sync, now), f"{what} has changed what no sync fills, or what is derived")

    @contextmanager
    def check_computed(self, model: nn.Module) -> Iterator[None]:
        """log_probs: raise WeightsDidNotArrive if the model's forward pass in this block uses other weights than it holds."""
        if not (self.reaches("log_probs") and self.sums):
            yield
            return
        with fingerprints_of_forward(model) as computed:
            yield
        held = self.sums.held
        wrong = all_gather([name for name, found in computed.items() if found != held[name]])
        refuse(
            list(dict.fromkeys(name for each in wrong for name in each)),
            f"{self.when}: the trainer's forward pass computes with other weights than its parameters hold",
        )

    def find_copies(self) -> None:
        """log_probs: before the engine releases its memory, note the copies of its weights that it made to compute with.

        Raise WeightsDidNotArrive, naming it, if one that was noted before is not what its weight is now.
        """
        if self.reaches("log_probs") and self.sync.engine.can_ask:
            with self.timed("copies"):
                stale = describe_stale_copies(self.sync.engine)
                self.sync.engine.ask(find_copies)
            refuse(
                stale,
                f"{self.when}: the engine has generated with old weights beside those that it holds ({STALE_COPY})",
            )

    def check_routing(self, batch: Batch, own: torch.Tensor, used: torch.Tensor, differing: torch.Tensor) -> None:
        """log_probs: raise WrongRoutingRecord if the engine's log-probs contradict its record of experts (routing_record.py)."""
        if self.reaches("log_probs"):
            engines, mask = batch.require("rollout_log_probs"), batch.response_mask
            if wrong := wrong_routing_record(self.precision.of_engine, engines, own, used, differing, mask):
                raise WrongRoutingRecord(wrong)

    def check_log_probs(self, difference: LogProbDifference, scored: Scored) -> None:
        """log_probs: raise WeightsDidNotArrive, with what a second look shows, if the engine's log-probs are not the trainer's.

        scored: what the difference was computed from.
        """
        self.events.fact("log_prob_difference", step=self.events.step, **difference.metrics())
        if not self.reaches("log_probs"):
            return
        # Without a baseline, and where weights have moved so far that rounding has grown, these tokens have the last word.
        if (self.rounding is None and not self.baseline) or self.allowed.violations(difference):
            self.measure_rounding(scored, difference)
        if violations := self.allowed.violations(difference):
            raise WeightsDidNotArrive(
                f"{self.when}: the engine's log-probs are off by {', '.join(violations)}; largest {difference.largest:.2e};"
                f" {self.find_suspects(scored)}"
            )
        self.agreed += 1

    def find_suspects(self, scored: Scored) -> str:
        """Return what a second look at the same tokens shows, and which tensors of the engine differ from the trainer's."""
        if not self.sync.engine.can_ask:
            return "tensors cannot be read back from this engine"
        with self.events.phase("find_suspects", "the weights to be synced again and read back"):
            look = self.describe_second_look(scored)
            try:
                if not self.sync.engine.has_memory_saver:  # else the look has synced them
                    self.sync.update_engine()  # the same sync goes wrong the same way
                listed = first_of(self.differences())
            except Exception as error:  # it must not hide the failure that was found first
                listed = f"unknown, as the search for them failed ({type(error).__name__}: {error})"
        return f"engine tensors that differ from the trainer's: {listed}; {look}"

    def describe_second_look(self, scored: Scored) -> str:
        """Return what engine and trainer compute for the same tokens now, in a sentence."""
        try:
            self.memory.resume_weights()
            if self.sync.engine.has_memory_saver:  # a released engine has lost its weights
                if self.events.step is None:  # of the baseline
                    self.sync.restore_scales()
                    self.sync.engine.update_weights_from_disk(str(self.source))
                else:
                    self.sync.update_engine()
            self.memory.resume_kv_cache()
            look = scored.look_again(self.sync.engine)
        except Exception as error:  # it must not hide the failure that was found first
            return f"a second look at the same tokens failed ({type(error).__name__}: {error})"
        earlier = ""
        if self.events.step is not None and (self.agreed or self.baseline):
            earlier = "in the rollouts before" if self.agreed else "on the checkpoint that SGLang itself loaded"
        config = self.config.rollout
        return look.sentence(self.allowed, config.temperature, config.routing == "replay", earlier)

    @property
    def versions(self) -> str:
        """The model's type and the versions of both sides, by which a known difference can be recognized."""
        model: Any = self.sync.sent.model
        return f"{model.config.model_type}, sglang {self.sync.engine.version}, transformers {transformers.__version__}"

    def differences(self) -> Sequence[str]:
        """Return one sentence for each tensor that the engine does not hold as the trainer does."""
        return read_back(self.sync.weights, self.sync.loader).differences

    # What a run reports

    def sync_metrics(self) -> dict[str, float]:
        """Return how many tensors the last sync sent and how they were compared, for metrics.jsonl."""
        if not self.compared:
            return {}
        return {
            "sync_tensors": self.compared.tensors,
            "sync_tensors_compared": self.compared.compared,
            "sync_tensors_derived": self.reloaded.derived,
        }

    def verdict(self, rollouts: Sequence[Mapping[str, float]]) -> str:
        """Return the verdict's phrase on the syncs before these rollouts, given their metrics; log the report's section."""
        mismatch = mismatch_of_precisions(
            self.precision,
            rollouts,
            self.baseline,
            self.is_exact if self.reloaded_last else None,
        )
        lines = report_section(
            level=self.level,
            mismatch=mismatch,
            asked=self.config.weights.verify,
            can_ask=self.sync.engine.can_ask,
            rollouts=rollouts,
            baseline=self.baseline,
            why_no_baseline=self.why_no_baseline,
            allowed=self.allowed,
            is_exact=self.is_exact,
            not_covered=list(self.not_covered),
            seconds=self.events.seconds,
        )
        self.events.fact("verification", lines=lines)
        asked, can_ask = self.config.weights.verify, self.sync.engine.can_ask
        return verdict_phrase(self.level, asked, can_ask, rollouts, self.allowed, list(self.not_covered), mismatch)

    def timed(self, part: str, waiting_for: str = "") -> AbstractContextManager[None]:
        """Return the phase verify_<part> of the event log."""
        return self.events.phase(f"verify_{part}", waiting_for)

    @property
    def when(self) -> str:
        """The step that the run is in, for a sentence."""
        return "on the model's own checkpoint" if self.events.step is None else f"step {self.events.step}"


def changed(before: Mapping[int, Mapping[str, int]], now: Mapping[int, Mapping[str, int]]) -> list[str]:
    """Return one sentence for each tensor of an engine whose fingerprint is another one now. A collective call of all ranks.

    before, now: engine rank -> fingerprints by name. One that is not there any more is left out: SGLang has replaced it.
    """
    ranks: dict[str, list[str]] = {}
    for rank, known in before.items():
        for name, fingerprint in known.items():
            if now[rank].get(name, fingerprint) != fingerprint:
                ranks.setdefault(name, []).append(str(rank))
    everyone = all_gather([f"{name} on engine rank {', '.join(on)}" for name, on in ranks.items()])
    return list(dict.fromkeys(sentence for each in everyone for sentence in each))


def settings_that_matter(config: Config) -> str:
    """Return which of the config's settings can make engine and trainer differ."""
    settings = {
        f"rollout.temperature = {config.rollout.temperature:g}": config.rollout.temperature != 1,
        'rollout.routing = "replay"': config.rollout.routing == "replay",
        "model.packed": config.model.packed,
        f'model.attention = "{config.model.attention}"': config.model.attention != "auto",
        'engine.preset = "sglang"': config.engine.preset == "sglang",
        f"parallel.tp = {config.parallel.tp}": config.parallel.tp > 1,
        f"parallel.pp = {config.parallel.pp}": config.parallel.pp > 1,
    } | {f"engine.args.{name}": True for name in config.engine.args}
    named = [name for name, counts in settings.items() if counts]
    return f"Settings that could do it: {', '.join(named)}" if named else "No setting of this config could do it"


def narrower_tensors(coverage: Sequence[LoadCoverage]) -> dict[str, torch.dtype]:
    """Return the checkpoint tensors that a scheduler holds in a narrower dtype than its other parameters, and that dtype."""
    return {
        copy.source.name: copy.held
        for each in coverage
        for copies in each.copies
        for copy in copies
        if each.dtype and copy.held.is_floating_point and loses_precision(each.dtype, copy.held)
    }


def refuse(wrong: Sequence[str], sentence: str) -> None:
    """Raise WeightsDidNotArrive if anything is wrong. It names the known failure if only the engine's draft model is."""
    if wrong:
        if all(each.startswith((f"{DRAFT}:", f"{DRAFT}.")) for each in wrong):
            sentence += f", in its {DRAFT} model alone ({STALE_DRAFT})"
        raise WeightsDidNotArrive(f"{sentence}: {first_of(wrong)}")
