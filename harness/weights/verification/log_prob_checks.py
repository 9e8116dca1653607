"""What the engine computes: its log-probs of its own responses, compared with the trainer's of the same tokens.

How far the two may be apart is Tolerance's; weights/log_probs.py has the statistics and the factors.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from types import MappingProxyType
from typing import Any

import torch
import transformers
from torch import Tensor

from harness.config.model_rules import EXPERTS
from harness.config.precision import EnginePrecision
from harness.config.schema import Config
from harness.trainer.actor import Actor, OldLogProbs, policy_log_probs
from harness.trainer.batch import Batch
from harness.trainer.rank_sums import all_sum
from harness.weights.log_probs import (
    FACTOR,
    FLOOR,
    LARGEST_BASELINE,
    Allowed,
    LogProbDifference,
    log_prob_difference,
    merge,
)
from harness.weights.presync_checks import first_of
from harness.weights.tensor_view import loses_precision
from harness.weights.traced.coverage import LoadCoverage
from harness.weights.verification.engine_weights import STALE_COPY
from harness.weights.verification.refusals import NoBaseline, WeightsDidNotArrive, WrongRoutingRecord
from harness.weights.verification.run_parts import RunParts

NOTHING: Mapping[str, str] = MappingProxyType({})


@dataclass(frozen=True, kw_only=True, slots=True)
class Scored:
    """Responses of the engine, with the trainer's log-probs of them. Every method is a collective call of all ranks."""

    batches: Sequence[Batch]
    """With rollout_log_probs."""
    trained: Sequence[Tensor]
    """As the run compares them, float [B, T]: at the sampling temperature, in a replay with the engine's experts."""
    actor: Actor

    def difference(self) -> LogProbDifference:
        """Return how far the engine's log-probs are from the trainer's."""
        return self._engine_apart_from(self.trained)

    def at_temperature_1(self) -> tuple[LogProbDifference, LogProbDifference]:
        """Return how far the engine's log-probs, and the trainer's own, are from the trainer's at temperature 1.

        The actor must be on the device.
        """
        plain = [policy_log_probs(self.actor, batch, temperature=1.0)[0] for batch in self.batches]
        return self._engine_apart_from(plain), self._apart(self.trained, plain)

    def rounding(self, dtype: torch.dtype) -> LogProbDifference:
        """Return how far the trainer's log-probs are from its own, computed in another dtype on the same values."""
        self.actor.optimizer.zero_grad()  # the memory of the gradients is enough for a second set of parameters
        second = self.actor.computing_in(dtype)
        with second.on_device():
            other = [second.log_probs(batch)[0] for batch in self.batches]
        return self._apart(other, self.trained)

    def _engine_apart_from(self, others: Sequence[Tensor]) -> LogProbDifference:
        return self._apart([batch.require("rollout_log_probs") for batch in self.batches], others)

    def _apart(self, some: Sequence[Tensor], others: Sequence[Tensor]) -> LogProbDifference:
        pairs = zip(some, others, self.batches, strict=True)
        return merge([log_prob_difference(one, other, batch.response_mask) for one, other, batch in pairs])


@dataclass(kw_only=True, slots=True)
class LogProbChecks:
    """The checks of what the engine computes. Every method is a collective call of all ranks, with the actor on the
    device.
    """

    run: RunParts
    tolerance: "Tolerance"

    def set_baseline(self, scored: Scored, stale: Mapping[str, str] = NOTHING) -> None:
        """Keep the difference on the model's own checkpoint. Raise NoBaseline if rounding does not explain it.

        stale: the copies of older weights that the engine holds; they are named then, and it is WeightsDidNotArrive.
        """
        run, tolerance, precision = self.run, self.tolerance, self.run.precision
        tolerance.baseline = difference = scored.difference()
        tolerance.measure_rounding(scored, difference)
        allowed = tolerance.allowed
        run.events.fact("log_prob_baseline", **difference.metrics(), allowed=allowed.mean)
        costs = f" ({precision.of_engine} against {precision.computed})" * precision.is_quantized
        run.events.say(
            f"unchanged weights: the log-probs of engine and trainer differ by {difference.mean:.1e} on average{costs};"
            f" {tolerance.sentence()}"
        )
        largest = LARGEST_BASELINE[precision.of_engine]
        wrong = [] if precision.is_quantized else allowed.violations(difference)
        if wrong or not difference.mean <= largest:
            off = wrong[0] if wrong else f"{difference.mean:.2e} in the mean (at most {largest:g} makes sense)"
            if stale:
                raise WeightsDidNotArrive(
                    f"{run.when}: the engine's log-probs are off by {off}: {_computes_with(stale)}"
                )
            raise NoBaseline(
                f"before the first update, on the checkpoint that SGLang itself loaded from {run.source}, the engine's log-probs"
                f" are off by {off}. That is more than rounding: {tolerance.sentence()}. {self._what_temperature_explains(scored)}"
                f"{settings_that_matter(run.config)}; {self._mismatch}"
            )

    def check_routing(self, batch: Batch, old: OldLogProbs) -> None:
        """Raise WrongRoutingRecord if the log-probs contradict the experts that the engine says it took."""
        if old.differing is None or not self.run.verifies:
            return
        wrong = wrong_routing_record(
            self.run.precision.of_engine,
            batch.require("rollout_log_probs"),
            old,
            batch.response_mask,
            replays=self.run.config.rollout.routing == "replay",
        )
        if wrong:
            raise WrongRoutingRecord(wrong)

    def check(self, scored: Scored) -> None:
        """Raise WeightsDidNotArrive if the engine's log-probs of a step's rollout are not the trainer's."""
        run, difference = self.run, scored.difference()
        run.events.fact("log_prob_difference", step=run.events.step, **difference.metrics())
        if not run.verifies:
            return
        if violations := self.tolerance.violations(difference, scored):
            held = (
                "by fingerprint it holds what was sent, and with changed weights it computed the same as the trainer"
                if run.compares_held
                else "what it holds cannot be asked; with changed weights it computed the same as the trainer"
            )
            raise WeightsDidNotArrive(
                f"{run.when}: the engine's log-probs are off by {', '.join(violations)}; largest {difference.largest:.2e};"
                f" {self._what_temperature_explains(scored)}{held}: the cause is unknown"
            )

    def check_rehearsed(self, scored: Scored, stale: Mapping[str, str]) -> None:
        """Raise WeightsDidNotArrive if the engine's log-probs on changed weights, which it holds, are not the trainer's.

        stale: the copies of older weights that the engine holds; they are named then.
        """
        run, difference = self.run, scored.difference()
        # The changed weights may round otherwise. That is measured, and forgotten: the run's own tolerance stays as it
        # is.
        violations = replace(self.tolerance).violations(difference, scored)
        run.events.fact("changed_log_prob_difference", **difference.metrics())
        if not violations:
            return
        off = f"{run.when}: with changed weights the engine's log-probs are off by {', '.join(violations)}; largest {difference.largest:.2e}"
        if stale:
            why = _computes_with(stale)
        elif self.tolerance.baseline is None:  # they may never have been the same
            temperature = self._what_temperature_explains(scored)
            why = f"{temperature}engine and trainer compute differently, or the engine computes with a copy of old weights; {self._mismatch}"
        elif run.compares_held:
            why = (
                "it holds them as they were sent, and computed the same as the trainer on the model's own checkpoint, so it still"
                f" computes with something that it made of old weights; a copy that no update reaches is suspected ({STALE_COPY})"
            )
        else:
            why = (
                "it computed the same as the trainer on the model's own checkpoint, so the sync did not bring all of them, or it"
                " computes with a copy of old ones"
            )
        raise WeightsDidNotArrive(f"{off}: {why}")

    def _what_temperature_explains(self, scored: Scored) -> str:
        """Return a sentence, if one side's log-probs are those at temperature 1 and the tokens were sampled at another.

        In a replay nothing is said: the trainer's experts differ too.
        """
        config = self.run.config.rollout
        if config.temperature == 1 or config.routing == "replay":
            return ""
        engine, trainer = scored.at_temperature_1()
        if trainer.mean <= FLOOR["float32"]:
            return (
                f"The trainer's log-probs are the same at temperature {config.temperature:g} and at 1: it does not apply the"
                " temperature. "
            )
        if self.tolerance.allowed.violations(engine):
            return ""
        return f"What the engine reported are log-probs at temperature 1, and they were sampled at {config.temperature:g}. "

    @property
    def _mismatch(self) -> str:
        """What to do next, with the versions of both sides, by which a known difference can be recognized."""
        sync = self.run.sync
        model: Any = sync.sent.model
        versions = f"{model.config.model_type}, sglang {sync.engine.version}, transformers {transformers.__version__}"
        return f"launch/mismatch.py with this config looks for the cause ({versions})"


def _computes_with(stale: Mapping[str, str]) -> str:
    return f"it computes with old weights beside those that it holds ({STALE_COPY}): {first_of(list(stale.values()))}"


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


CURE = 'set rollout.routing = "off" or use another release'


def wrong_routing_record(
    precision: EnginePrecision, engines: Tensor, old: OldLogProbs, mask: Tensor, *, replays: bool
) -> str:
    """Return what shows that the engine's record of experts cannot be true, or was not replayed; "" if nothing does.

    A collective call; the same on every rank. engines: its log-probs, [B, T], as those of `old`. mask: 1 at response
    tokens.

    Another expert moves a log-prob by far more than float32 rounds. So where the record names others, the log-probs of
    engine and trainer cannot agree, unless the record is wrong. And to take the same experts must move the trainer, and
    cannot take it further away.
    """
    assert old.differing is not None
    mask, own, used = mask.bool().cpu(), old.own.cpu().double(), old.log_probs.cpu().double()
    apart, replayed = ((engines.cpu().double() - each).abs() for each in (own, used))
    named = mask & (old.differing.cpu() > 0)
    own_sums = [
        mask.sum(),
        named.sum(),
        apart[mask].sum(),
        replayed[mask].sum(),
        apart[named].sum(),
        (used - own).abs()[mask].sum(),
    ]
    tokens, others, *sums, moved = all_sum(torch.stack([each.double() for each in own_sums])).tolist()
    before, after, there = (total / max(1, count) for total, count in zip(sums, (tokens, tokens, others), strict=True))
    wrong = f"the engine's record of experts is wrong, not what it computes; {CURE}"
    if replays and others and not moved:
        return (
            f"for {others:.0f} of {tokens:.0f} response tokens the engine took other experts than the trainer, and to replay them"
            ' moved no log-prob of the trainer: nothing was replayed (rollout.routing = "replay")'
        )
    if after > max(FLOOR[precision], FACTOR * before):
        return (
            f"the trainer's log-probs differ from the engine's by {before:.1e} on average, and by {after:.1e} with the experts that"
            f" the engine says it took (routing replay): {wrong}"
        )
    if precision == "float32" and others and there <= FLOOR[precision]:
        return (
            f"for {others:.0f} of {tokens:.0f} response tokens the engine's record names other experts than the trainer took, yet their"
            f" log-probs agree to {there:.1e}, and in float32 both cannot be true: {wrong}"
        )
    return ""


@dataclass(kw_only=True, slots=True)
class Tolerance:
    """How far the log-probs of engine and trainer may be apart in this run, and why.

    It is known once the first responses were compared; until then, only float32 sums are allowed to differ.
    """

    run: RunParts
    baseline: LogProbDifference | None = None
    """On the model's own checkpoint, if it was measured."""
    rounding: LogProbDifference | None = None
    """How far the trainer is from itself in float32, or, for an engine that holds tensors in a narrower dtype, in that
    one."""
    narrower: Mapping[str, torch.dtype] = field(default_factory=dict)
    """float32: the tensors that the engine holds in a narrower dtype by its class, if they were needed to explain a
    difference."""

    @property
    def allowed(self) -> Allowed:
        """The differences of log-probs that pass."""
        if quantized := self.run.precision.quantized:
            return Allowed.of_quantized(quantized, self.baseline)
        return Allowed.of(self.rounding, has_experts=self._has_experts)

    def violations(self, difference: LogProbDifference, scored: Scored) -> list[str]:
        """Return one phrase for each statistic of the difference that is too large. scored: what it was computed from.

        Without a baseline, and where weights have moved so far that rounding has grown, these tokens have the last
        word: the trainer's rounding is measured on them. A collective call of all ranks.
        """
        if (self.rounding is None and not self.baseline) or self.allowed.violations(difference):
            self.measure_rounding(scored, difference)
        return self.allowed.violations(difference)

    def measure_rounding(self, scored: Scored, difference: LogProbDifference) -> None:
        """Measure how far the trainer's own rounding takes its log-probs, in half precision.

        A collective call of all ranks.

        In float32 it rounds nothing. But if its difference from the engine is more than that, and the engine's class
        holds some tensors in a narrower dtype, the engine is allowed what the trainer would lose in that dtype.
        """
        run = self.run
        if run.precision.is_quantized or not run.verifies:
            return
        dtype = torch.float32
        if run.precision.computed == "float32":
            self.narrower = self._narrower_tensors() if self.allowed.violations(difference) else {}
            if not self.narrower:
                return
            dtype = min(self.narrower.values(), key=lambda each: each.itemsize)
        self.rounding = scored.rounding(dtype)
        run.events.fact("trainer_rounding", **self.rounding.metrics(), allowed=self.allowed.mean)

    def _narrower_tensors(self) -> dict[str, torch.dtype]:
        """Return the checkpoint tensors that the engine holds in a narrower dtype than its other parameters."""
        sync, memory = self.run.sync, self.run.memory
        if not sync.engine.can_ask:
            return {}
        if not sync.loader.coverage:  # before the first sync, which traces too
            memory.resume_weights()
            sync.loader.trace()
            memory.release_all()
        return narrower_tensors(sync.loader.coverage)

    @property
    def _has_experts(self) -> bool:
        """Whether the model is a mixture of experts."""
        model: Any = self.run.sync.sent.model
        fields = model.config.get_text_config()
        return any(getattr(fields, name, None) for name in EXPERTS.split())

    def sentence(self) -> str:
        """Return a phrase on which differences pass, and why."""
        mean = self.allowed.mean
        if self.run.precision.is_quantized:
            return f"after a sync they may differ by up to {mean:.2g}"
        if self.rounding is None:
            return f"the trainer rounds nothing in float32, and up to {mean:.2g} passes"
        if self.narrower:
            names = first_of([f"{name} in {str(held).removeprefix('torch.')}" for name, held in self.narrower.items()])
            own = f"the engine's class holds {names}, and the trainer's rounding in that dtype is {self.rounding.mean:.1e}"
        else:
            own = f"the trainer's own rounding in {self.run.precision.computed} is {self.rounding.mean:.1e}"
        if not self._has_experts:
            return f"{own}; up to {FACTOR:g} times that passes, {mean:.2g} in the mean"
        return (
            f"{own}; up to {FACTOR:g} times that passes for the three quarters of the tokens that differ least, {self.allowed.bulk:.2g},"
            f" and {mean:.2g} in the mean, as a router may choose another expert"
        )


def narrower_tensors(coverage: Sequence[LoadCoverage]) -> dict[str, torch.dtype]:
    """Return the checkpoint tensors that a scheduler holds in a narrower dtype than its other parameters, and that
    dtype.
    """
    return {
        copy.source.name: copy.held
        for each in coverage
        for copies in each.copies
        for copy in copies
        if each.dtype and copy.held.is_floating_point and loses_precision(each.dtype, copy.held)
    }
