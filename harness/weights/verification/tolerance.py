"""Tolerance: how far the log-probs of engine and trainer may be apart in this run, and why (log_probs.py has the
factors).
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from harness.config.model_rules import EXPERTS
from harness.weights.log_probs import FACTOR, Allowed, LogProbDifference
from harness.weights.presync_checks import first_of
from harness.weights.tensor_view import loses_precision
from harness.weights.traced.coverage import LoadCoverage
from harness.weights.verification.checked_run import CheckedRun
from harness.weights.verification.second_look import Scored


@dataclass(kw_only=True, slots=True)
class Tolerance:
    """What passes.

    It is known once the first responses were compared; until then, only float32 sums are allowed to differ.
    """

    run: CheckedRun
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
        if run.precision.is_quantized or not run.reaches("log_probs"):
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
