"""Faults on purpose, as a config and the command line say them: KIND@PHASE[:rank][:step]."""

import difflib
import re
from dataclasses import dataclass

from harness.runtime.phases import MEET, PHASES, RUN, STEP_PHASES

ANYWHERE = ("exception", "kill", "stop", "hang", "slow", "oom", "full-disk")
"""Kinds that need nothing of a phase but a process in it."""
AT = {
    "nan-gradient": ("update_actor", "update_critic"),
    "nan-weight": ("resume_weights", "sync"),
    "wrong-shape": ("sync",),
    "dropped-bucket": ("sync",),
    "lost-message": ("sync",),
}
"""Kinds that need what a phase works with, and these phases."""
KINDS = (*ANYWHERE, *AT)

_FAULT = re.compile(r"(?P<kind>[^@:]+)@(?P<phase>[^@:]+)(?::(?P<rank>\d*))?(?::(?P<step>\d+))?")


@dataclass(frozen=True, kw_only=True, slots=True)
class Fault:
    """One thing to go wrong, once."""

    kind: str
    phase: str
    rank: int = 0
    step: int | None = None
    """None: whenever the phase comes first."""

    def __str__(self) -> str:
        return f"{self.kind}@{self.phase}:{self.rank}" + ("" if self.step is None else f":{self.step}")

    def matches(self, phase: str, step: int | None) -> bool:
        """Whether this phase is meant."""
        return phase == self.phase and self.step in (None, step)


def parse_fault(text: str) -> Fault:
    """Raises ValueError whose message ends a sentence that begins with key and value."""
    match = _FAULT.fullmatch(text)
    if not match:
        raise ValueError("write KIND@PHASE, KIND@PHASE:RANK or KIND@PHASE:RANK:STEP, such as kill@sync:1:2")
    kind, phase = match["kind"], match["phase"]
    if kind not in KINDS:
        raise ValueError(f"there is no kind {kind}; {_nearest(kind, KINDS, 'kinds')}")
    if phase not in PHASES:
        raise ValueError(f"there is no phase {phase}; {_nearest(phase, PHASES, 'phases')}")
    if phase not in AT.get(kind, PHASES):
        raise ValueError(f"{kind} has nothing to act on in {phase}; it can be at {' or '.join(AT[kind])}")
    if kind == "full-disk" and phase == MEET:
        raise ValueError("ranks that have not met have no run directory whose disk could be full; use a later phase")
    step = match["step"]
    if step is not None and phase not in STEP_PHASES:
        raise ValueError(f"{phase} belongs to no step; leave the step out")
    return Fault(kind=kind, phase=phase, rank=int(match["rank"] or 0), step=None if step is None else int(step))


def check_faults(texts: tuple[str, ...], world_size: int, steps: int, transport: str) -> None:
    """Raises ValueError whose message is (text, end of a sentence) for the first that cannot work."""
    for text in texts:
        try:
            fault = parse_fault(text)
            if fault.rank >= world_size:
                raise ValueError(f"the mesh has the ranks 0 to {world_size - 1}")
            # The last update is synced, and rolled out with, once more.
            if fault.step is not None and fault.step > steps:
                raise ValueError(f"run.steps = {steps}, so the last step that anything is in is {steps}")
            if fault.kind == "lost-message" and transport != "stream":
                raise ValueError(f'weights.transport = "{transport}" sends no messages of its own; use "stream"')
        except ValueError as error:
            raise ValueError(text, str(error)) from error


def _nearest(name: str, names: tuple[str, ...], what: str) -> str:
    match = difflib.get_close_matches(name, names, n=1)
    return (
        f"the nearest is {match[0]}" if match else f"the {what} are {', '.join(each for each in names if each != RUN)}"
    )
