"""What each process of a host does when a deadline has passed: Python and native stacks, idle processes, GPU memory.

py-spy reads all threads of any process of this user, stopped or not. If it is missing, or the kernel does not permit it,
a rank's own faulthandler writes what it can, on a signal, into memory that the watchdog reads.
"""

import faulthandler
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import psutil

from harness.runtime.processes import name_and_pid, stat_fields

DUMP_SIGNAL = signal.SIGUSR2
PYSPY_SECONDS = 5.0  # for all stacks of a host together
HANDLER_SECONDS = 0.5
SAMPLE_SECONDS = 1.0  # an idle process does nothing for so long
SHOWN_FRAMES, SHOWN_PROCESSES = 4, 8
_QUERIES = (
    ["--query-gpu=index,uuid,memory.used,memory.total,utilization.gpu", "--format=csv"],
    ["--query-compute-apps=gpu_uuid,pid,process_name,used_memory", "--format=csv"],
)
_FRAME = re.compile(r"^\s+(?P<function>\S.*?) \((?P<file>[^()]*?\.py|<[^()]*>):(?P<line>\d+)\)$", re.MULTILINE)
_HANDLER_FRAME = re.compile(r'^  File "(?P<file>[^"]+)", line (?P<line>\d+) in (?P<function>.*)$', re.MULTILINE)
# A collective in torch's Python and native names, or a wait for a GPU that may be in one.
_WAITS = re.compile(
    r"torch/distributed/(?!run\.py|launcher|elastic)\S*\.py|\bc10d::\w*Work\w*::wait|\bgloo::|\bnccl|\bncclComm|"
    r"cuda(?:Stream|Device|Event)Synchronize",
)
_WRAPPERS = ("c10d_logger.py", "contextlib.py", "_contextlib.py")
_PACKAGES = re.compile(r"(?:^|[/(])(?:torch|harness|sglang)/")
_HELPERS = ("resource_tracker", "forkserver")  # of multiprocessing: they wait for their parent as long as it is alive


@dataclass(frozen=True, kw_only=True, slots=True)
class StackRequest:
    """A process whose stack is wanted."""

    name: str  # rank1, or scheduler-1234
    pid: int
    handler: int | None = None  # its descriptor of the memory into which its faulthandler writes, if it has one


@dataclass(frozen=True, kw_only=True, slots=True)
class Stack:
    """The stacks of one process."""

    name: str
    text: str
    frames: tuple[str, ...]  # of the main thread in Python, innermost first
    waits: bool  # whether the main thread is in a collective, or waits for its GPU


def offer_own_stack() -> int:
    """Make this process write its stacks into memory on DUMP_SIGNAL; return the descriptor of that memory."""
    memory = os.memfd_create("stacks")
    faulthandler.register(DUMP_SIGNAL, file=memory, all_threads=True, chain=False)
    return memory


def take_stacks(requests: Sequence[StackRequest]) -> list[Stack]:
    """Return the stacks of all, taken in parallel, within PYSPY_SECONDS and a moment."""
    until = time.monotonic() + PYSPY_SECONDS
    texts = _by_pyspy(requests, ["--native"], until)
    missing = [each for each in requests if not texts.get(each.name)]
    texts |= _by_pyspy(missing, ["--nonblocking"], min(until, time.monotonic() + PYSPY_SECONDS / 2))
    missing = [each for each in missing if not texts.get(each.name)]
    return [_parse(name, text) for name, text in (texts | _by_handler(missing)).items()]


def describe_stacks(stacks: Mapping[int, Stack]) -> list[str]:
    """Return a line for each rank that says where its main thread is."""
    lines = []
    for rank, stack in sorted(stacks.items()):
        # Frames of Python's own library show only that something waits, not what.
        inner = [frame for frame in stack.frames[1:] if _PACKAGES.search(frame)]
        at = " < ".join([*stack.frames[:1], *(inner or stack.frames[1:])][:SHOWN_FRAMES])
        text = f" {'waits' if stack.waits else 'was'} in {at}" if at else ": its stack could not be read"
        lines.append(f"rank {rank}{text}")
    return lines


def pyspy_command() -> list[str]:
    """Return what runs py-spy, beside this Python or on PATH; [] if there is none."""
    beside = Path(sys.executable).with_name("py-spy")
    tool = str(beside) if beside.exists() else shutil.which("py-spy")
    return [tool, "dump"] if tool else []


def _by_pyspy(requests: Sequence[StackRequest], options: list[str], until: float) -> dict[str, str]:
    if not (command := pyspy_command()):
        return {}
    pipes = {"stdin": subprocess.DEVNULL, "stdout": subprocess.PIPE, "stderr": subprocess.DEVNULL}
    running = {
        each.name: subprocess.Popen([*command, "--pid", str(each.pid), *options], **pipes)  # type: ignore[call-overload]
        for each in requests
    }
    texts = {}
    for name, process in running.items():
        with suppress(subprocess.TimeoutExpired):
            output, _ = process.communicate(timeout=max(0.1, until - time.monotonic()))
            if process.returncode == 0:
                texts[name] = output.decode(errors="replace")
        process.kill()
    return texts


def _by_handler(requests: Sequence[StackRequest]) -> dict[str, str]:
    """Return what ranks write of themselves; a stopped process writes nothing until it continues."""
    able = [each for each in requests if each.handler is not None]
    for each in able:
        with suppress(OSError):
            os.kill(each.pid, DUMP_SIGNAL)
    if able:
        time.sleep(HANDLER_SECONDS)
    texts = {each.name: "" for each in requests}
    for each in able:
        with suppress(OSError):
            texts[each.name] = Path(f"/proc/{each.pid}/fd/{each.handler}").read_text(errors="replace")
    return texts


def _parse(name: str, text: str) -> Stack:
    main = _main_thread(text)
    matches = list(_FRAME.finditer(main)) or list(_HANDLER_FRAME.finditer(main))
    matches = [match for match in matches if not match["file"].endswith(_WRAPPERS)]
    frames = tuple(f"{match['function']} ({_short(match['file'])}:{match['line']})" for match in matches)
    ours = (index for index, frame in enumerate(frames) if "harness/" in frame or "torch/" not in frame)
    inner = next((matches[index].start() for index in ours), len(main))
    return Stack(name=name, text=text, frames=frames, waits=_WAITS.search(main[:inner]) is not None)


def _main_thread(text: str) -> str:
    """Return the part of the main thread, which py-spy names; faulthandler writes it last."""
    for part in re.split(r"^(?=Thread )", text, flags=re.MULTILINE):
        if '"MainThread"' in part.partition("\n")[0]:
            return part
    return re.split(r"^(?=(?:Current thread|Thread) 0x)", text, flags=re.MULTILINE)[-1]


def _short(file: str) -> str:
    """Return a path that begins with the file's package, or else with its name."""
    package = re.search(r"(?:^|/)((?:torch|harness|sglang)/.*)$", file)
    return package[1] if package else file.rpartition("/")[2] if file.startswith("/") else file


def idle_processes(processes: Mapping[int, psutil.Process]) -> list[int]:
    """Return the pids of those that do nothing for SAMPLE_SECONDS. Call it before take_stacks, which wakes them."""
    before = {pid: work for pid in processes if (work := _work(pid))}
    time.sleep(SAMPLE_SECONDS)
    return [pid for pid, work in before.items() if _work(pid) == work and not _is_helper(processes[pid])]


def describe_idle(pids: Sequence[int], processes: Mapping[int, psutil.Process], stacks: Iterable[Stack]) -> list[str]:
    """Return a line that names the idle processes, and where each of them is."""
    frames = {stack.name.rpartition("-")[2]: stack.frames for stack in stacks}
    described = []
    for pid in pids[:SHOWN_PROCESSES]:
        sleeps = stat_fields(pid)[:1] == ["D"]
        state = ", in uninterruptible sleep: a disk or a driver does not answer," if sleeps else ""
        at = " < ".join(frames.get(str(pid), ())[:2])
        described.append(f"{name_and_pid(processes[pid])}{state}" + (f" in {at}" if at else ""))
    if len(pids) > SHOWN_PROCESSES:
        described.append(f"and {len(pids) - SHOWN_PROCESSES} more")
    return [f"did not move for {SAMPLE_SECONDS:g} s: {'; '.join(described)}"] if pids else []


def _work(pid: int) -> tuple[int, ...]:
    """Return its CPU time and the context switches of each thread; nothing once it has ended."""
    numbers: list[int] = []
    with suppress(OSError, ValueError):  # a thread, or all of it, has just ended
        numbers += map(int, stat_fields(pid)[11:13])
        for thread in sorted(Path(f"/proc/{pid}/task").iterdir()):
            lines = (thread / "status").read_text(encoding="utf-8", errors="replace").splitlines()
            numbers += [int(line.split()[1]) for line in lines if "ctxt_switches" in line]
    return tuple(numbers)


def _is_helper(process: psutil.Process) -> bool:
    with suppress(psutil.Error):
        return any(helper in word for word in process.cmdline() for helper in _HELPERS)
    return False


def gpu_memory() -> str:
    """Return nvidia-smi's report on GPUs and on the processes that use them; "" if there is none."""
    tool = shutil.which("nvidia-smi")
    if tool is None:
        return ""
    outputs = []
    for query in _QUERIES:
        with suppress(subprocess.TimeoutExpired, OSError):  # a GPU whose driver hangs
            outputs.append(subprocess.run([tool, *query], capture_output=True, text=True, timeout=2).stdout)
    return "\n".join(outputs)
