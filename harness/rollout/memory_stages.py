"""Release and resume the engine's memory in stages, so that trainer and engine can share a GPU.

The weights are resumed first, and the KV cache only when it is needed: together they would not fit next to the copies
that the trainer gathers for a sync. CUDA graphs are resumed with the KV cache: no sync runs them. The order of the tags
is SGLang's own (scheduler_components/weight_updater.py): it releases KV cache, weights, graphs, and resumes graphs,
weights, KV cache. A call that returns proves nothing, so each one is measured by the free bytes of every rank's engine
GPU before and after.
"""

import ctypes
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Literal

import torch

from harness.rollout.engine import RolloutEngine
from harness.runtime import MIB

WEIGHTS, KV_CACHE, CUDA_GRAPH = "weights", "kv_cache", "cuda_graph"

SLACK_BYTES, SLACK_SHARE = 64 * MIB, 0.05
"""How far two moves of the same tags may differ, whichever is more: CUDA maps memory in pieces of 2 MiB."""
STABLE_SECONDS = 0.1
"""A move is over when the expected bytes have moved, or when nothing has moved for this long. To be within the slack is
not enough: once 122 GB of a KV cache of 129 had been freed when we looked, and the resume of all of it then seemed to
take too much."""
POLL_SECONDS = 0.01

Action = Literal["release", "resume"]
FreeBytes = Callable[[], int]
"""Return the free bytes of the GPU that this rank's engine rank runs on."""


class WrongStage(ValueError):
    """The caller released memory that is released, or resumed memory that is not.

    SGLang's scheduler would die of it.
    """


class MemoryDidNotMove(RuntimeError):
    """A release freed, or a resume took, the wrong number of bytes."""


def wrong_move(action: Action, tags: Sequence[str], rank: int, expected: int | None, moved: int) -> str:
    """Return what is wrong with the bytes that a release freed, or a resume took, on one rank's engine GPU; "" if
    nothing.

    expected: the least that a release of these tags has freed so far; None at the first one. A release may free more
    than that: SGLang also frees what torch's allocator kept for activations (on an H200 1.8 GB next to a KV cache of 59
    GB).
    """
    slack = max(int((expected or 0) * SLACK_SHARE), SLACK_BYTES)
    missing = (expected or moved) - moved
    if moved > 0 and missing <= slack and (action == "release" or -missing <= slack):
        return ""
    wanted = f"an earlier release freed {expected} (allowed difference {slack})"
    if expected is None:
        wanted = "must free more than 0: the memory saver did not hold them"
    done = "freed" if action == "release" else "took"
    only = "only " if missing > 0 else ""
    return f"{action} of {', '.join(tags)} on rank {rank} {done} {only}{moved} bytes of its engine's GPU, but {wanted}"


def gpu_free_bytes(device: int) -> FreeBytes:

    def read() -> int:
        torch.cuda.synchronize()
        return torch.cuda.mem_get_info(device)[0]

    read()  # makes a CUDA context (500 MiB) on a GPU that is not the trainer's, so that no stage counts it
    return read


@dataclass(slots=True)
class MemoryStages:
    """Tracks which memory of one engine is released. Every method is a collective call of the engine's ranks.

    Without the memory saver (on CPU, or turned off) release and resume do nothing, and the first one says so.
    """

    engine: RolloutEngine
    free_bytes: FreeBytes | None = None
    """Required with the memory saver."""
    resume_mode: Literal["staged", "all"] = "staged"
    holds_graphs: bool = False
    """Whether the memory saver holds the engine's CUDA graphs too (engine_settings.py)."""
    say: Callable[[str], None] = lambda _: None
    fact: Callable[..., None] = lambda name, **values: None
    """fact("memory_moved", **values) after each release and resume."""
    patience_seconds: float = 10.0
    """How long it may take until the bytes show on a rank: SGLang's call returns when TP rank 0's scheduler is done."""
    released: dict[str, int] = field(default_factory=dict)
    """Tag -> bytes: what is released now, and the least that its release freed on this rank."""
    _freed: dict[str, int] = field(default_factory=dict)
    _has_said: bool = False

    def release_all(self) -> None:
        """Free the KV cache, the weights and CUDA graphs, those that are not free yet. Raises WrongStage if all are."""
        stage = (KV_CACHE, WEIGHTS, *[CUDA_GRAPH] * self.holds_graphs)
        self.release(*([tag for tag in stage if tag not in self.released] or stage))

    def resume_weights(self) -> None:
        """Take the weights' memory back, with resume_mode = "all" everything. The next sync fills the weights."""
        self.free_trainer_cache()
        stage = (WEIGHTS,) if self.resume_mode == "staged" else (CUDA_GRAPH, WEIGHTS, KV_CACHE)
        self._resume_released(stage)

    def resume_kv_cache(self) -> None:
        """Free what the trainer's allocator has cached, on every rank; then take back the memory of KV cache and
        graphs.
        """
        self.free_trainer_cache()
        self._resume_released((CUDA_GRAPH, KV_CACHE))

    def release(self, *tags: str) -> None:
        """Free these tags, one after the other.

        Raise WrongStage for a tag that is released, and MemoryDidNotMove on every rank if one rank's GPU did not get
        the bytes back.
        """
        for tag in tags if self._is_possible("release", tags) else ():
            known = self._freed.get(tag)
            moved = self._measured("release", (tag,), known)
            self.released[tag] = self._freed[tag] = moved if known is None else min(moved, known)

    def resume(self, *tags: str) -> None:
        """Take these tags back in one call. Raises as `release` does."""
        if self._is_possible("resume", tags):
            self._measured("resume", tags, sum(self.released[tag] for tag in tags))
            for tag in tags:
                del self.released[tag]

    def free_trainer_cache(self) -> None:
        """Return cached but unused memory of this process to the GPU and to the host, on every rank."""
        if torch.cuda.is_initialized():
            torch.cuda.empty_cache()
        trim_heap()
        self.engine.group.barrier()

    def _is_possible(self, action: Action, tags: tuple[str, ...]) -> bool:
        """Return whether there is a memory saver. Raise WrongStage for tags that are already released, or resumed."""
        if not self.engine.has_memory_saver:
            if not self._has_said:
                self.say("no torch_memory_saver: release and resume are no-ops, the engine keeps its memory")
            self._has_said = True
            return False
        for tag in tags:
            if (tag in self.released) == (action == "release"):
                now, first = ("released", "resume") if action == "release" else ("resumed", "release")
                raise WrongStage(f"{action} of {', '.join(tags)}: {tag} is {now} already; {first} it first.")
        return True

    def _resume_released(self, stage: tuple[str, ...]) -> None:
        if tags := tuple(tag for tag in stage if tag in self.released):
            self.resume(*tags)

    def _measured(self, action: Action, tags: tuple[str, ...], expected: int | None) -> int:
        """Release or resume; return the bytes that moved on this rank.

        Raise MemoryDidNotMove on every rank if one is wrong.
        """
        assert self.free_bytes is not None, "with the memory saver, free_bytes is required"
        engine = self.engine
        engine.group.barrier()  # from here on no rank uses a GPU of this engine
        before = self.free_bytes()
        engine.group.barrier()  # every rank has read
        ask = engine.release_memory_occupation if action == "release" else engine.resume_memory_occupation
        ask(tags)
        moved, wrong = self._settled(action, tags, expected, self.free_bytes, before)
        problems = [each for each in engine.group.all_gather(wrong).values() if each]
        self.fact("memory_moved", action=action, tags=tags, expected=expected, moved=moved)
        if problems:
            others = f"; {len(problems) - 1} other ranks failed too" if len(problems) > 1 else ""
            raise MemoryDidNotMove(f"{problems[0]}{others}.")
        return moved

    def _settled(
        self, action: Action, tags: tuple[str, ...], expected: int | None, free_bytes: FreeBytes, before: int
    ) -> tuple[int, str]:
        """Return the bytes that have moved since `before` were free, and what is wrong with them.

        The driver may move them some time after SGLang's call has returned. So look until the right number has moved,
        or until a number that is not known to be right stays the same for STABLE_SECONDS, and for no longer than
        patience_seconds.
        """
        sign = 1 if action == "release" else -1
        started = changed = time.monotonic()
        last: int | None = None
        while True:
            now, moved = time.monotonic(), sign * (free_bytes() - before)
            if moved != last:
                last, changed = moved, now
            wrong = wrong_move(action, tags, self.engine.group.rank, expected, moved)
            complete = expected is not None and moved >= expected
            if not wrong and (complete or now - changed >= STABLE_SECONDS):
                return moved, ""
            if now - started >= self.patience_seconds:
                return moved, wrong
            time.sleep(POLL_SECONDS)


def trim_heap() -> None:
    """Return freed memory of this process to the host: glibc keeps it in fragments, more with every step."""
    if trim := getattr(ctypes.CDLL(None), "malloc_trim", None):  # only glibc has it
        trim(0)
