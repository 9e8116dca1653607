"""Which processes of an engine do not move: no thread of theirs runs while their rank waits for them."""

import time
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path

import psutil

from harness.runtime.processes import name_and_pid, stat_fields
from harness.tools.watchdog.stacks import Stack

SAMPLE_SECONDS = 1.0
SHOWN = 8
_STATE, _TICKS = 0, slice(11, 13)
_UNINTERRUPTIBLE = "D"
_HELPERS = ("resource_tracker", "forkserver")
"""Of multiprocessing, which wait for their parent as long as it lives."""


def still(processes: Mapping[int, psutil.Process]) -> list[int]:
    """Return the pids of those that do nothing for SAMPLE_SECONDS; before anything looks at their stacks, which wakes them."""
    before = {pid: done for pid in processes if (done := _done(pid))}
    time.sleep(SAMPLE_SECONDS)
    return [pid for pid, done in before.items() if _done(pid) == done and not _helps(processes[pid])]


def said_still(pids: Sequence[int], processes: Mapping[int, psutil.Process], stacks: Iterable[Stack]) -> list[str]:
    """Return a line that names them, and where each of them is."""
    frames = {stack.name.rpartition("-")[2]: stack.frames for stack in stacks}
    named = [_described(processes[pid], frames.get(str(pid), ())) for pid in pids[:SHOWN]]
    more = [f"and {len(pids) - SHOWN} more"] if len(pids) > SHOWN else []
    return [f"did not move for {SAMPLE_SECONDS:g} s: {'; '.join([*named, *more])}"] if pids else []


def _done(pid: int) -> tuple[int, ...]:
    """CPU time of the process, and how often each of its threads left a core; none where it has ended."""
    numbers: list[int] = []
    with suppress(OSError, ValueError):  # a thread, or all of it, has just ended
        numbers += map(int, stat_fields(pid)[_TICKS])
        for thread in sorted(Path(f"/proc/{pid}/task").iterdir()):
            lines = (thread / "status").read_text(encoding="utf-8", errors="replace").splitlines()
            numbers += [int(line.split()[1]) for line in lines if "ctxt_switches" in line]
    return tuple(numbers)


def _helps(process: psutil.Process) -> bool:
    with suppress(psutil.Error):
        return any(helper in word for word in process.cmdline() for helper in _HELPERS)
    return False


def _described(process: psutil.Process, frames: Sequence[str]) -> str:
    sleeps = stat_fields(process.pid)[_STATE : _STATE + 1] == [_UNINTERRUPTIBLE]
    state = ", in uninterruptible sleep: a disk or a driver does not answer," if sleeps else ""
    return f"{name_and_pid(process)}{state}" + (f" in {' < '.join(frames[:2])}" if frames else "")
