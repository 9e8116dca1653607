"""What the engine computes: its log-probs of its own responses, compared with the trainer's of the same tokens."""

from dataclasses import dataclass
from typing import Any

import torch
import transformers

from harness.config.schema import Config
from harness.trainer.batch import Batch
from harness.weights.log_probs import LARGEST_BASELINE, LogProbDifference
from harness.weights.presync_checks import first_of
from harness.weights.verification.checked_run import CheckedRun
from harness.weights.verification.held import HeldWeights
from harness.weights.verification.refusals import NoBaseline, WeightsDidNotArrive, WrongRoutingRecord
from harness.weights.verification.routing_record import wrong_routing_record
from harness.weights.verification.second_look import Scored
from harness.weights.verification.tolerance import Tolerance


@dataclass(kw_only=True, slots=True)
class LogProbChecks:
    """The checks of what the engine computes. Every method is a collective call of all ranks."""

    run: CheckedRun
    tolerance: Tolerance
    held: HeldWeights
    """Asked for suspects after a failure."""
    agreed: int = 0
    """How many rollouts agreed so far."""

    def set_baseline(self, scored: Scored) -> None:
        """Keep the difference on the model's own checkpoint. Raise NoBaseline if rounding does not explain it.

        The engine's memory is released.
        """
        run, tolerance, precision = self.run, self.tolerance, self.run.precision
        tolerance.baseline = difference = scored.difference()
        tolerance.measure_rounding(scored, difference)
        allowed = tolerance.allowed
        run.events.fact("log_prob_baseline", **difference.metrics(), allowed=allowed.mean)
        costs = f" ({precision.of_engine} against {precision.computed}; bytes show arrival)" * precision.is_quantized
        run.events.say(
            f"unchanged weights: the log-probs of engine and trainer differ by {difference.mean:.1e} on average{costs};"
            f" {tolerance.sentence()}"
        )
        largest = LARGEST_BASELINE[precision.of_engine]
        wrong = [] if precision.is_quantized else allowed.violations(difference)
        if wrong or not difference.mean <= largest:
            look = self._describe_second_look(scored)
            off = wrong[0] if wrong else f"{difference.mean:.2e} in the mean (at most {largest:g} makes sense)"
            raise NoBaseline(
                f"before the first update, on the checkpoint that SGLang itself loaded from {run.source}, the engine's log-probs"
                f" are off by {off}. That is more than rounding: {tolerance.sentence()}. {look[0].upper()}{look[1:]}."
                f" {settings_that_matter(run.config)}; launch/mismatch.py with this config looks for the cause"
                f" ({self._versions})"
            )

    def check_routing(self, batch: Batch, own: torch.Tensor, used: torch.Tensor, differing: torch.Tensor) -> None:
        """log_probs: raise WrongRoutingRecord if the engine's log-probs contradict its record of experts
        (routing_record.py).
        """
        if self.run.reaches("log_probs"):
            engines, mask = batch.require("rollout_log_probs"), batch.response_mask
            if wrong := wrong_routing_record(self.run.precision.of_engine, engines, own, used, differing, mask):
                raise WrongRoutingRecord(wrong)

    def check(self, difference: LogProbDifference, scored: Scored) -> None:
        """log_probs: raise WeightsDidNotArrive, with what a second look shows, if the engine's log-probs are not the
        trainer's.

        scored: what the difference was computed from.
        """
        run = self.run
        run.events.fact("log_prob_difference", step=run.events.step, **difference.metrics())
        if not run.reaches("log_probs"):
            return
        if violations := self.tolerance.violations(difference, scored):
            raise WeightsDidNotArrive(
                f"{run.when}: the engine's log-probs are off by {', '.join(violations)}; largest {difference.largest:.2e};"
                f" {self._find_suspects(scored)}"
            )
        self.agreed += 1

    # After a failure

    def _find_suspects(self, scored: Scored) -> str:
        """Return what a second look at the same tokens shows, and which tensors of the engine differ from the
        trainer's.
        """
        sync = self.run.sync
        if not sync.engine.can_ask:
            return "tensors cannot be read back from this engine"
        with self.run.events.phase("find_suspects", "the weights to be synced again and read back"):
            look = self._describe_second_look(scored)
            try:
                if not sync.engine.has_memory_saver:  # else the look has synced them
                    sync.update_engine()  # the same sync goes wrong the same way
                listed = first_of(self.held.differences())
            except Exception as error:  # it must not hide the failure that was found first
                listed = f"unknown, as the search for them failed ({type(error).__name__}: {error})"
        return f"engine tensors that differ from the trainer's: {listed}; {look}"

    def _describe_second_look(self, scored: Scored) -> str:
        """Return what engine and trainer compute for the same tokens now, in a sentence."""
        run, step = self.run, self.run.events.step
        try:
            run.memory.resume_weights()
            if run.sync.engine.has_memory_saver:  # a released engine has lost its weights
                if step is None:  # of the baseline
                    run.load_own_checkpoint()
                else:
                    run.sync.update_engine()
            run.memory.resume_kv_cache()
            look = scored.look_again(run.sync.engine)
        except Exception as error:  # it must not hide the failure that was found first
            return f"a second look at the same tokens failed ({type(error).__name__}: {error})"
        earlier = ""
        if step is not None and (self.agreed or self.tolerance.baseline):
            earlier = "in the rollouts before" if self.agreed else "on the checkpoint that SGLang itself loaded"
        config = run.config.rollout
        return look.sentence(self.tolerance.allowed, config.temperature, config.routing == "replay", earlier)

    @property
    def _versions(self) -> str:
        """The model's type and the versions of both sides, by which a known difference can be recognized."""
        sync = self.run.sync
        model: Any = sync.sent.model
        return f"{model.config.model_type}, sglang {sync.engine.version}, transformers {transformers.__version__}"


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
