"""What the updates of a model moved, and why nothing if nothing moved: a step that leaves the weights as they were
shows little.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import torch
from torch import nn

from harness.config.schema import Config
from harness.metrics import Metrics
from harness.trainer.model import named_tensors
from harness.weights.verification.trainer_sums import as_computed, tensor_sums


@dataclass(kw_only=True, slots=True)
class WeightChanges:
    """The tensors of one model that each step moved, in the dtype in which the model computes and its weights are
    sent.
    """

    role: str
    """actor or critic."""
    model: nn.Module
    config: Config
    moved: dict[int, int] = field(default_factory=dict)
    """Step -> how many tensors its updates moved."""
    still: dict[int, str] = field(default_factory=dict)
    """Step -> why the model learned nothing in it."""
    _sums: dict[str, int] = field(default_factory=dict)

    def begin(self) -> None:
        """Note the weights before the first update of a run. A collective call of all ranks, as `finish` is."""
        self._sums = self._sums or self._fingerprints()

    def finish(self, index: int, metrics: Metrics) -> Metrics:
        """Compare with the weights before the step's updates; return how many tensors moved. metrics: of the
        updates.
        """
        before, self._sums = self._sums, self._fingerprints()
        self.moved[index] = sum(before[name] != now for name, now in self._sums.items())
        if why := why_nothing_learned(self.role, self.config, self.moved[index], metrics):
            self.still[index] = why
        return {"moved_tensors": float(self.moved[index]), "tensors": float(len(self._sums))}

    def skip(self, index: int) -> None:
        """Note that a step makes no update, because it belongs to critic_warmup."""
        self.moved[index], self.still[index] = 0, "critic_warmup"

    def line(self, index: int) -> str:
        """Return what the step's line says of a model that learned nothing in it; "" if it learned."""
        why = self.still.get(index)
        return f"{self.role} {'got no gradient' if self.moved[index] else 'did not move'} ({why})" if why else ""

    def verdict(self) -> str:
        """Return one phrase on all steps."""
        if not self.moved:
            return f"no update of the {self.role} was left to make"
        learned = [count for index, count in self.moved.items() if index not in self.still]
        steps, tensors = len(self.moved), f"{len(self._sums)} tensors"
        least, most = (min(learned), max(learned)) if learned else (0, 0)
        counts = f"{most}" if least == most else f"{least} to {most}"
        if not self.still:
            return f"every step moved the {self.role} ({counts} of its {tensors})"
        reasons = "; ".join(f"{_steps(which)}: {why}" for why, which in _by_reason(self.still).items())
        if not learned:
            what = "LEARNED NOTHING" if any(self.moved.values()) else "DID NOT MOVE"
            return f"the {self.role.upper()} {what} ({reasons})"
        return f"{len(learned)} of {steps} steps moved the {self.role} ({counts} of its {tensors}); not {reasons}"

    def _fingerprints(self) -> dict[str, int]:
        compute = getattr(torch, self.config.model.dtype)
        return tensor_sums(as_computed(dict(named_tensors(self.model)), compute))


def why_nothing_learned(role: str, config: Config, moved: int, metrics: Metrics) -> str:
    """Return why the updates with these metrics, that moved so many tensors, taught a model nothing; "" if they did."""
    if metrics["grad_norm"] == 0:
        if role == "critic":
            return "its loss has no gradient"
        return "every advantage is 0" if config.algorithm.has_critic else "no group's rewards differ"
    if moved:
        return ""
    if metrics["learning_rate"] == 0:
        return "learning rate 0"
    return (
        f"the updates are too small for {config.model.dtype}: learning rate {metrics['learning_rate']:.1g},"
        f" gradient norm {metrics['grad_norm']:.1g}"
    )


def _by_reason(still: Mapping[int, str]) -> dict[str, list[int]]:
    found: dict[str, list[int]] = {}
    for index, why in still.items():
        found.setdefault(why, []).append(index)
    return found


def _steps(which: Sequence[int]) -> str:
    """Return "step 3", or "steps 0 to 2" for steps that follow each other, or "4 steps from 0 to 9"."""
    if len(which) == 1:
        return f"step {which[0]}"
    follow = which[-1] - which[0] + 1 == len(which)
    return f"steps {which[0]} to {which[-1]}" if follow else f"{len(which)} steps from {which[0]} to {which[-1]}"
