"""Parse the faults of run.inject and --inject: KIND@PHASE[:rank][:step]."""

import re
from dataclasses import dataclass

from harness.config.layers import nearest
from harness.config.schema import Config
from harness.runtime.events import MEET, PHASES, STEP_PHASES

ANYWHERE = ("exception", "kill", "stop", "hang", "slow", "oom", "full-disk")
"""Kinds that can happen in any phase."""
AT = {
    "nan-gradient": ("update_actor", "update_critic"),
    "nan-weight": ("resume_weights", "sync"),
    "wrong-shape": ("sync",),
    "dropped-bucket": ("sync",),
    "lost-message": ("sync",),
}
"""Kinds that change what a phase works with -> the phases in which they can happen."""
KINDS = (*ANYWHERE, *AT)

_FAULT = re.compile(r"(?P<kind>[^@:]+)@(?P<phase>[^@:]+)(?::(?P<rank>\d*))?(?::(?P<step>\d+))?")


@dataclass(frozen=True, kw_only=True, slots=True)
class Fault:
    """One fault, which happens once. If step is None, it happens when the phase first begins."""

    kind: str
    phase: str
    rank: int = 0
    step: int | None = None

    def __str__(self) -> str:
        return f"{self.kind}@{self.phase}:{self.rank}" + ("" if self.step is None else f":{self.step}")

    def matches(self, phase: str, step: int | None) -> bool:
        """Return whether the fault happens in this phase."""
        return phase == self.phase and self.step in (None, step)


def parse_fault(text: str) -> Fault:
    """Read one fault. Raise ValueError; its message completes a sentence that begins with the key and its value."""
    match = _FAULT.fullmatch(text)
    if not match:
        raise ValueError("write KIND@PHASE, KIND@PHASE:RANK or KIND@PHASE:RANK:STEP, such as kill@sync:1:2")
    kind, phase, step = match["kind"], match["phase"], None if match["step"] is None else int(match["step"])
    check_place(kind, phase, step)
    return Fault(kind=kind, phase=phase, rank=int(match["rank"] or 0), step=step)


def check_place(kind: str, phase: str, step: int | None) -> None:
    """Raise ValueError, as parse_fault does, unless faults of this kind can happen there."""
    for what, name, names in (("kind", kind, KINDS), ("phase", phase, PHASES)):
        if name not in names:
            hint = nearest(name, names, f"the {what}s are {', '.join(names)}")
            raise ValueError(f"{name} is not a {what}; {hint}")
    if phase not in AT.get(kind, PHASES):
        raise ValueError(f"{kind} cannot happen in {phase}, only in {' or '.join(AT[kind])}")
    if kind == "full-disk" and phase == MEET:
        raise ValueError(
            "before the ranks have met there is no run directory, and no host knows another; use a later phase"
        )
    if step is not None and phase not in STEP_PHASES:
        raise ValueError(f"{phase} does not belong to a step; leave the step out")


def check_fault(text: str, config: Config) -> None:
    """Raise ValueError, as parse_fault does, for a fault that cannot happen in a run of this config."""
    fault, transport, steps = parse_fault(text), config.weights.transport, config.run.steps
    ranks = config.parallel.dp * config.parallel.tp * config.parallel.pp
    if fault.rank >= ranks:
        raise ValueError(f"the mesh has the ranks 0 to {ranks - 1}")
    if (fault.step or 0) > steps:  # the last update is synced, and rolled out with, once more
        raise ValueError(f"the steps are 0 to {steps - 1}, and {steps} is the final check")
    if fault.kind == "lost-message" and transport != "pull":
        raise ValueError(f'weights.transport = "{transport}" sends no such messages; use "pull"')
    if fault.phase == "update_critic" and not config.algorithm.has_critic:
        raise ValueError(f'algorithm.advantage = "{config.algorithm.advantage}" has no critic')
