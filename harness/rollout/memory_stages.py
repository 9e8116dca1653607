"""Release and resume in stages, so that trainer and engine can share a GPU: weights first, the KV cache when it is needed.

Resumed with the weights, the KV cache would claim its memory while the trainer's gathered copies still hold it. A call
that returns proves nothing, so each one is measured: the free bytes of every rank's engine GPU before and after.
"""

import ctypes
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Literal

import torch

from harness.rollout.verl_engine import VerlEngine
from harness.runtime.units import MIB

WEIGHTS, KV_CACHE = "weights", "kv_cache"
ALL = "all"
"""The one tag where this sglang frees and takes all memory at once (before 0.4.8)."""

SLACK_BYTES, SLACK_SHARE = 64 * MIB, 0.05
STABLE_SECONDS = 0.1  # a first release has ended when the free bytes stay the same this long
POLL_SECONDS = 0.01

Action = Literal["release", "resume"]
FreeBytes = Callable[[], int]
"""Free bytes of the GPU that this rank's engine rank runs on."""


class WrongStage(ValueError):
    """A release of what is released, or a resume of what is resumed: sglang's scheduler would die of it."""


class MemoryDidNotMove(RuntimeError):
    """A release or resume moved other bytes than it should have."""


def wrong_move(action: Action, tags: Sequence[str], rank: int, expected: int | None, moved: int) -> str:
    """Return what is wrong with the bytes that a release freed, or a resume took, on one rank's engine GPU; '' if nothing.

    expected: the least that a release of the tags freed so far; None at the first one. 5% more or less are allowed, or
    64 MiB if that is more, and a release may free any more: with the tags sglang frees what torch's allocator kept for
    activations (on an H200 1.8 GB beside a KV cache of 59 GB). It keeps a copy of a model's buffers while the weights
    are gone, and CUDA maps memory in pieces of 2 MiB.
    """
    slack = max(int((expected or 0) * SLACK_SHARE), SLACK_BYTES)
    missing = (expected or moved) - moved
    if moved > 0 and missing <= slack and (action == "release" or -missing <= slack):
        return ""
    allowed = f"an earlier release freed {expected} (allowed difference {slack})"
    if expected is None:
        allowed = "must free more than 0: the memory saver did not hold them"
    done = "freed" if action == "release" else "took"
    return f"{action} of {', '.join(tags)} on rank {rank} {done} {moved} bytes of its engine's GPU, but {allowed}"


def gpu_free_bytes(device: int) -> FreeBytes:
    """Return what reads the free bytes of a visible GPU."""

    def read() -> int:
        torch.cuda.synchronize()
        return torch.cuda.mem_get_info(device)[0]

    read()  # on a GPU that is not the trainer's it makes a CUDA context: some 500 MiB that no stage then counts
    return read


@dataclass(slots=True)
class MemoryStages:
    """What of one engine is released. Every method is a collective call of the engine's ranks.

    Without the memory saver (on CPU, or turned off) release and resume are no-ops, and the first one says so.
    """

    engine: VerlEngine
    free_bytes: FreeBytes | None = None
    """Needed with the memory saver."""
    resume_mode: Literal["staged", "all"] = "staged"
    say: Callable[[str], None] = lambda _: None
    fact: Callable[..., None] = lambda name, **values: None
    """fact("memory_moved", **values) after each release and resume."""
    patience_seconds: float = 10.0
    """How long the bytes of a release or resume may take to show on a rank: only rank 0's scheduler answers for all."""
    released: dict[str, int] = field(default_factory=dict)
    """Tag -> the least that a release of it freed on this rank, in bytes."""
    _freed: dict[str, int] = field(default_factory=dict)
    _has_said: bool = False

    def release_all(self) -> None:
        """Free what of KV cache and weights is resumed; the contents are lost. Raises WrongStage if both are released."""
        stage = (KV_CACHE, WEIGHTS) if self._has_tags else (ALL,)
        self.release(*([tag for tag in stage if tag not in self.released] or stage))

    def resume_weights(self) -> None:
        """Take the weights' memory back, and with resume_mode = "all" the KV cache's; the next sync fills the weights."""
        self.free_trainer_cache()
        stage = (WEIGHTS,) if self.resume_mode == "staged" else (WEIGHTS, KV_CACHE)
        self._resume_released(stage if self._has_tags else (ALL,))

    def resume_kv_cache(self) -> None:
        """Free what the trainer's allocator keeps, on every rank, then take the KV cache's memory back."""
        self.free_trainer_cache()
        self._resume_released((KV_CACHE,))

    def release(self, *tags: str) -> None:
        """Free these tags, one after the other.

        Raise WrongStage for one that is released, MemoryDidNotMove on every rank of the engine where one rank's GPU did not
        get the bytes back.
        """
        for tag in tags if self._is_possible("release", tags) else ():
            known = self._freed.get(tag)
            moved = self._measured("release", (tag,), known)
            self.released[tag] = self._freed[tag] = moved if known is None else min(moved, known)

    def resume(self, *tags: str) -> None:
        """Take these tags back in one call; raise as `release`."""
        if self._is_possible("resume", tags):
            self._measured("resume", tags, sum(self.released[tag] for tag in tags))
            for tag in tags:
                del self.released[tag]

    def free_trainer_cache(self) -> None:
        """Give GPU and host what allocators of this process only keep for later, on every rank."""
        if torch.cuda.is_initialized():
            torch.cuda.empty_cache()
        trim_heap()
        self.engine.group.barrier()

    @property
    def _has_tags(self) -> bool:
        return self.engine.api.memory_tags is not None

    def _is_possible(self, action: Action, tags: tuple[str, ...]) -> bool:
        """Return whether there is a memory saver to ask. Raise WrongStage for tags that are released, or resumed, already."""
        if not self.engine.has_memory_saver:
            if not self._has_said:
                self.say("no torch_memory_saver: release and resume are no-ops, the engine keeps its memory")
            self._has_said = True
            return False
        for tag in tags:
            if (tag in self.released) == (action == "release"):
                now, first = ("released", "resume") if action == "release" else ("resumed", "release")
                raise WrongStage(f"{action} of {', '.join(tags)}: {tag} is {now}; {first} it before it is {now} again.")
        return True

    def _resume_released(self, stage: tuple[str, ...]) -> None:
        if tags := tuple(tag for tag in stage if tag in self.released):
            self.resume(*tags)

    def _measured(self, action: Action, tags: tuple[str, ...], expected: int | None) -> int:
        """Do it; the bytes that moved on this rank. Raises MemoryDidNotMove on every rank if one rank's are wrong."""
        assert self.free_bytes is not None, "with the memory saver the GPU must be read"
        engine = self.engine
        engine.group.barrier()  # no rank works on a GPU of this engine any more
        before = self.free_bytes()
        engine.group.barrier()  # every rank has read
        ask = engine.release_memory_occupation if action == "release" else engine.resume_memory_occupation
        ask(tags if self._has_tags else None)
        sign = 1 if action == "release" else -1
        started = changed = time.monotonic()
        last: int | None = None
        while True:  # until it is as expected, or stays the same, or patience ends
            now, moved = time.monotonic(), sign * (self.free_bytes() - before)
            if moved != last:
                last, changed = moved, now
            wrong = wrong_move(action, tags, engine.group.rank, expected, moved)
            is_stable = expected is not None or now - changed >= STABLE_SECONDS
            if (not wrong and is_stable) or now - started >= self.patience_seconds:
                break
            time.sleep(POLL_SECONDS)
        problems = [each for each in engine.group.all_gather(wrong).values() if each]
        self.fact("memory_moved", action=action, tags=tags, expected=expected, moved=moved)
        if problems:
            others = f"; {len(problems) - 1} other ranks failed too" if len(problems) > 1 else ""
            raise MemoryDidNotMove(f"{problems[0]}{others}.")
        return moved


def trim_heap() -> None:
    """Give what this process has freed back to the host: glibc keeps it, in fragments that grow with every step."""
    if trim := getattr(ctypes.CDLL(None), "malloc_trim", None):  # glibc's alone
        trim(0)
