"""Where every process of a host is when a deadline has passed: Python's and native stacks, and what its GPUs hold.

py-spy sees all threads of any process of ours, stopped or not, natively too; where it is missing, or the kernel does not
let it look, a rank's own faulthandler writes what it can, by a signal, into memory that the watchdog reads.
"""

import faulthandler
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

DUMP_SIGNAL = signal.SIGUSR2
LOOK_SECONDS = 5.0
"""For all stacks of a host together."""
HANDLER_SECONDS = 0.5
FRAMES = 4
"""Of a main thread that are shown."""
_QUERIES = (
    ["--query-gpu=index,uuid,memory.used,memory.total,utilization.gpu", "--format=csv"],
    ["--query-compute-apps=gpu_uuid,pid,process_name,used_memory", "--format=csv"],
)

_FRAME = re.compile(r"^\s+(?P<function>\S.*?) \((?P<file>[^()]*?\.py|<[^()]*>):(?P<line>\d+)\)$", re.MULTILINE)
_HANDLER_FRAME = re.compile(r'^  File "(?P<file>[^"]+)", line (?P<line>\d+) in (?P<function>.*)$', re.MULTILINE)
# A collective, in torch's own words for it, Python's and native; or a GPU that may be in one.
_WAITS = re.compile(
    r"torch/distributed/(?!run\.py|launcher|elastic)\S*\.py|\bc10d::\w*Work\w*::wait|\bgloo::|\bnccl|\bncclComm|"
    r"cuda(?:Stream|Device|Event)Synchronize",
)

_WRAPPERS = ("c10d_logger.py", "contextlib.py", "_contextlib.py")


@dataclass(frozen=True, kw_only=True, slots=True)
class Asked:
    """A process whose stack is wanted."""

    name: str
    """rank1, or rank1-scheduler-1234."""
    pid: int
    handler: int | None = None
    """Its descriptor of the memory into which its faulthandler writes; None where it has none."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Stack:
    """What was seen of one."""

    name: str
    text: str
    frames: tuple[str, ...]
    """Of the main thread in Python, innermost first."""
    waits: bool
    """The main thread is in a collective, or waits for its GPU."""


def offer_own_stack() -> int:
    """On DUMP_SIGNAL this process writes its threads' stacks into memory; returns the descriptor of that."""
    memory = os.memfd_create("stacks")
    faulthandler.register(DUMP_SIGNAL, file=memory, all_threads=True, chain=False)
    return memory


def look(asked: Sequence[Asked]) -> list[Stack]:
    """The stacks of all, taken side by side, within LOOK_SECONDS and a moment."""
    until = time.monotonic() + LOOK_SECONDS
    texts = _by_pyspy(asked, ["--native"], until)
    missing = [each for each in asked if not texts.get(each.name)]
    texts |= _by_pyspy(missing, ["--nonblocking"], min(until, time.monotonic() + LOOK_SECONDS / 2))
    missing = [each for each in missing if not texts.get(each.name)]
    return [_stack(name, text) for name, text in (texts | _by_handler(missing)).items()]


def gpu_memory() -> str:
    """What nvidia-smi says of GPUs and of who holds them; "" where there is none."""
    tool = shutil.which("nvidia-smi")
    if tool is None:
        return ""
    said = []
    for query in _QUERIES:
        with suppress(subprocess.TimeoutExpired, OSError):  # a GPU that hangs its driver is a way to fail
            said.append(subprocess.run([tool, *query], capture_output=True, text=True, timeout=2).stdout)
    return "\n".join(said)


def _by_pyspy(asked: Sequence[Asked], options: list[str], until: float) -> dict[str, str]:
    beside = Path(sys.executable).with_name("py-spy")
    tool = str(beside) if beside.exists() else shutil.which("py-spy")
    if tool is None:
        return {}
    running: dict[str, subprocess.Popen[bytes]] = {
        each.name: subprocess.Popen(
            [tool, "dump", "--pid", str(each.pid), *options],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
        )
        for each in asked
    }
    texts = {}
    for name, process in running.items():
        with suppress(subprocess.TimeoutExpired):
            said, _ = process.communicate(timeout=max(0.1, until - time.monotonic()))
            if process.returncode == 0:
                texts[name] = said.decode(errors="replace")
        process.kill()
    return texts


def _by_handler(asked: Sequence[Asked]) -> dict[str, str]:
    """Not of a stopped process, which obeys no signal until it goes on."""
    able = [each for each in asked if each.handler is not None]
    for each in able:
        with suppress(OSError):
            os.kill(each.pid, DUMP_SIGNAL)
    if able:
        time.sleep(HANDLER_SECONDS)
    texts = {each.name: "" for each in asked}
    for each in able:
        with suppress(OSError):
            texts[each.name] = Path(f"/proc/{each.pid}/fd/{each.handler}").read_text(errors="replace")
    return texts


def _stack(name: str, text: str) -> Stack:
    main = _main_thread(text)
    matches = list(_FRAME.finditer(main)) or list(_HANDLER_FRAME.finditer(main))
    matches = [match for match in matches if not match["file"].endswith(_WRAPPERS)]
    frames = tuple(f"{match['function']} ({_short(match['file'])}:{match['line']})" for match in matches)
    ours = next(
        (index for index, frame in enumerate(frames) if "harness/" in frame or "torch/" not in frame), len(frames)
    )
    inner = matches[ours].start() if ours < len(matches) else len(main)
    return Stack(name=name, text=text, frames=frames, waits=_WAITS.search(main[:inner]) is not None)


def _main_thread(text: str) -> str:
    """The main thread's part: py-spy names it; for faulthandler it is the last."""
    for part in re.split(r"^(?=Thread )", text, flags=re.MULTILINE):
        if '"MainThread"' in part.partition("\n")[0]:
            return part
    return re.split(r"^(?=(?:Current thread|Thread) 0x)", text, flags=re.MULTILINE)[-1]


def _short(file: str) -> str:
    """A file from its package on."""
    package = re.search(r"(?:^|/)((?:torch|harness|sglang)/.*)$", file)
    return package[1] if package else file.rpartition("/")[2] if file.startswith("/") else file


def said(stacks: Mapping[int, Stack]) -> list[str]:
    """A line for each rank: where its main thread is."""
    lines = []
    for rank, stack in sorted(stacks.items()):
        # Python's own library tells only that something waits, not who.
        inner = [frame for frame in stack.frames[1:] if re.search(r"\((?:torch|harness|sglang)/", frame)]
        at = " < ".join([*stack.frames[:1], *(inner or stack.frames[1:])][:FRAMES]) or "its stack could not be read"
        lines.append(
            f"rank {rank} {'waits' if stack.waits else 'was'} in {at}" if stack.frames else f"rank {rank}: {at}"
        )
    return lines
