"""What the processes of a host are doing when a deadline has passed: Python and native stacks, GPU memory.

py-spy reads all threads of any process of this user, stopped or not. If it is missing, or the kernel does not permit
it, a rank's own faulthandler writes what it can, on a signal, into memory that the watchdog reads.
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
PYSPY_SECONDS = 5.0  # for all stacks of a host together
HANDLER_SECONDS = 0.5
SHOWN_FRAMES = 4
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
_WAITS_IN_A_STORE = "of_all (harness/cluster/network.py:"
"""The frame of a rank that waits for what all others write to torch's store, as the ranks meet: in native code
alone."""
_WRAPPERS = ("c10d_logger.py", "contextlib.py", "_contextlib.py")
_PACKAGES = re.compile(r"(?:^|[/(])(?:torch|harness|sglang)/")


@dataclass(kw_only=True, slots=True)
class Stack:
    """The stacks of one process, empty until they are taken."""

    name: str  # rank1, or scheduler-1234
    pid: int
    handler: int | None = None  # its descriptor of the memory into which its faulthandler writes, if it has one
    text: str = ""
    frames: tuple[str, ...] = ()  # of the main thread in Python, innermost first
    waits: bool = False  # whether the main thread waits for other ranks, or for its GPU

    def parse(self, text: str) -> None:
        """Read what py-spy or faulthandler wrote."""
        main = _main_thread(text)
        matches = list(_FRAME.finditer(main)) or list(_HANDLER_FRAME.finditer(main))
        matches = [match for match in matches if not match["file"].endswith(_WRAPPERS)]
        self.text = text
        self.frames = tuple(f"{match['function']} ({_short(match['file'])}:{match['line']})" for match in matches)
        ours = (index for index, frame in enumerate(self.frames) if "harness/" in frame or "torch/" not in frame)
        inner = next((matches[index].start() for index in ours), len(main))
        in_store = bool(self.frames) and self.frames[0].startswith(_WAITS_IN_A_STORE)
        self.waits = in_store or _WAITS.search(main[:inner]) is not None


def offer_own_stack() -> int:
    """Make this process write its stacks into memory on DUMP_SIGNAL; return the descriptor of that memory."""
    memory = os.memfd_create("stacks")
    faulthandler.register(DUMP_SIGNAL, file=memory, all_threads=True, chain=False)
    return memory


def take_stacks(stacks: Sequence[Stack]) -> None:
    """Take the stacks of all, in parallel, within PYSPY_SECONDS and a moment."""
    until = time.monotonic() + PYSPY_SECONDS
    _by_pyspy(stacks, ["--native"], until)
    _by_pyspy(stacks, ["--nonblocking"], min(until, time.monotonic() + PYSPY_SECONDS / 2))
    _by_handler([each for each in stacks if not each.text and each.handler is not None])


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


def _by_pyspy(stacks: Sequence[Stack], options: list[str], until: float) -> None:
    beside = Path(sys.executable).with_name("py-spy")
    if not (tool := str(beside) if beside.exists() else shutil.which("py-spy")):
        return
    running = [
        (
            each,
            subprocess.Popen(
                [tool, "dump", "--pid", str(each.pid), *options], stdout=subprocess.PIPE, stderr=subprocess.DEVNULL
            ),
        )
        for each in stacks
        if not each.text
    ]
    for stack, process in running:
        with suppress(subprocess.TimeoutExpired):
            output, _ = process.communicate(timeout=max(0.1, until - time.monotonic()))
            if process.returncode == 0:
                stack.parse(output.decode(errors="replace"))
        process.kill()


def _by_handler(stacks: Sequence[Stack]) -> None:
    """Read what ranks write of themselves; a stopped process writes nothing until it continues."""
    for each in stacks:
        with suppress(OSError):
            os.kill(each.pid, DUMP_SIGNAL)
    time.sleep(HANDLER_SECONDS if stacks else 0)
    for each in stacks:
        with suppress(OSError):
            each.parse(Path(f"/proc/{each.pid}/fd/{each.handler}").read_text(errors="replace"))


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


def gpu_memory() -> str:
    """Return nvidia-smi's report on GPUs and on the processes that use them; "" if there is none."""
    outputs, tool = [], shutil.which("nvidia-smi")
    for query in _QUERIES if tool else ():
        with suppress(subprocess.TimeoutExpired, OSError):  # a GPU whose driver hangs
            outputs.append(subprocess.run([str(tool), *query], capture_output=True, text=True, timeout=2).stdout)
    return "\n".join(outputs)
