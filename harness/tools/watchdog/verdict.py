"""A host's verdict on a run that failed, with its evidence: stacks of all processes, GPU memory, and the known cause.

The watchdog prints it, and keeps it in the run directory as failure-HOST.json, stacks-HOST-*.txt and gpus-HOST.txt.

py-spy reads the stacks of any process of this user, stopped or not. If it is missing, or the kernel does not permit it,
a rank's own faulthandler writes what it can, on a signal, into memory that the watchdog reads.
"""

import faulthandler
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from concurrent.futures import Future
from contextlib import suppress
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

import psutil

from harness.runtime import redact
from harness.runtime.errors import launch_folder, report_of
from harness.runtime.failure import Failure
from harness.runtime.files import replace_file
from harness.runtime.processes import in_background
from harness.tools.diagnose.diagnose import OF_A_RUN, diagnose
from harness.tools.diagnose.diagnosis_text import in_brief
from harness.tools.diagnose.tracebacks import first_cause, log_lines, tracebacks_in
from harness.tools.hosts.phase_gate import HOST_FAULTS
from harness.tools.watchdog.failures import ERROR_LENGTH, JobView, first_failure, report_lines, sentence, trace_end

DUMP_SIGNAL = signal.SIGUSR2
PYSPY_SECONDS = 5.0  # for all stacks of a host together
HANDLER_SECONDS = 0.5
SHOWN_FRAMES = 4
KINDS_WITH_A_TEXT = ("exception", "echo", "died", "deadline", "stopped")
INJECTED = "injected-fault"
"""The catalogue's entry for what --inject has caused."""
READ_BYTES = 64 << 20  # of one engine's log, from its start: the first failure counts

Explanation = tuple[list[str], Failure]
"""Lines, and the failure with its whole error, as its rank has written it, and its slug."""

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
"""What py-spy shows of a rank that waits in torch's store for the other ranks: the wait itself is in native code."""
_WRAPPERS = ("c10d_logger.py", "contextlib.py", "_contextlib.py")
_PACKAGES = re.compile(r"(?:^|[/(])(?:torch|harness|sglang)/")


@dataclass(kw_only=True, slots=True)
class _Stack:
    """The stacks of one process, empty until they are taken."""

    name: str  # rank1, or scheduler-1234
    pid: int
    rank: int | None = None
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


def _take_stacks(stacks: Sequence[_Stack]) -> None:
    """Take the stacks of all, in parallel, within PYSPY_SECONDS and a moment."""
    until = time.monotonic() + PYSPY_SECONDS
    _by_pyspy(stacks, "--native", until)  # which cannot read a process that is stopped
    _by_pyspy(stacks, "--nonblocking", min(until, time.monotonic() + PYSPY_SECONDS / 2))
    _by_handler([each for each in stacks if not each.text and each.handler is not None])


def _by_pyspy(stacks: Sequence[_Stack], option: str, until: float) -> None:
    beside = Path(sys.executable).with_name("py-spy")
    if not (tool := str(beside) if beside.exists() else shutil.which("py-spy")):
        return
    wanted = {each.pid: each for each in stacks if not each.text}
    words = {pid: [tool, "dump", "--pid", str(pid), option] for pid in wanted}
    running = {pid: subprocess.Popen(words[pid], stdout=subprocess.PIPE, stderr=subprocess.DEVNULL) for pid in wanted}
    for pid, process in running.items():
        with suppress(subprocess.TimeoutExpired):
            output, _ = process.communicate(timeout=max(0.1, until - time.monotonic()))
            if process.returncode == 0:
                wanted[pid].parse(output.decode(errors="replace"))
        process.kill()


def _by_handler(stacks: Sequence[_Stack]) -> None:
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


def _describe_stacks(stacks: Mapping[int, _Stack]) -> list[str]:
    """Return a line for each rank that says where its main thread is."""
    lines = []
    for rank, stack in sorted(stacks.items()):
        # Frames of Python's own library show only that something waits, not what.
        inner = [frame for frame in stack.frames[1:] if _PACKAGES.search(frame)]
        at = " < ".join([*stack.frames[:1], *(inner or stack.frames[1:])][:SHOWN_FRAMES])
        text = f" {'waits' if stack.waits else 'was'} in {at}" if at else ": its stack could not be read"
        lines.append(f"rank {rank}{text}")
    return lines


def _gpu_memory() -> str:
    """Return nvidia-smi's report on GPUs and on the processes that use them; "" if there is none."""
    outputs, tool = [], shutil.which("nvidia-smi")
    for query in _QUERIES if tool else ():
        with suppress(subprocess.TimeoutExpired, OSError):  # a GPU whose driver hangs
            outputs.append(subprocess.run([str(tool), *query], capture_output=True, text=True, timeout=2).stdout)
    return "\n".join(outputs)


@dataclass(slots=True)
class RunVerdict:
    """What one host knows of a run that failed; whatever may block is done on threads."""

    launcher: str  # name of its files in the run directory (World.launcher)
    folder: Path | None  # the run directory; None before the ranks have met
    failures: list[Failure]
    view: JobView
    explanation: "Future[Explanation]" = field(init=False)
    _stacks: list[_Stack] = field(default_factory=list)
    _gpus: str = ""

    def __post_init__(self) -> None:
        cause, folder = self.cause, self.folder
        self.explanation = in_background(lambda: explain(cause, folder), "explanation")  # a disk may hang

    @property
    def cause(self) -> Failure:
        return first_failure(self.failures)

    def begin_to_collect(
        self, ranks: Mapping[int, tuple[int, int | None]], descendants: Mapping[int, psutil.Process]
    ) -> "Future[None]":
        """Take the stacks of ranks and of what they started, and look at the GPUs, on a thread.

        ranks: rank -> its pid, and what offer_own_stack() returned there.
        """
        stacks = [
            _Stack(name=f"rank{rank}", pid=pid, rank=rank, handler=handler) for rank, (pid, handler) in ranks.items()
        ]

        def collect() -> None:
            for pid, process in descendants.items():
                with suppress(psutil.NoSuchProcess):
                    name = re.sub(r"\W+", "-", process.name()).strip("-")
                    stacks.append(_Stack(name=f"{name}-{pid}", pid=pid))
            _take_stacks(stacks)
            self._gpus, self._stacks = _gpu_memory(), stacks

        return in_background(collect, "stacks")

    def text(self, reporter: str) -> str:
        """Return all that is known now, for the screen."""
        return "\n".join([*self.lines(), f"  reported by {reporter}; terminating the remaining processes"]) + "\n"

    def lines(self) -> list[str]:
        """Return the verdict without its last line."""
        ranks = {stack.rank: stack for stack in self._stacks if stack.rank is not None}
        view = replace(self.view, waiting={rank: stack.waits for rank, stack in ranks.items() if stack.frames})
        explanation = _describe_stacks(ranks)
        if self._stacks and self.folder:
            explanation.append(f"all stacks: {self.folder}/stacks-{self.launcher}-*.txt")
        lines = report_lines(self.failures, view, [*explanation, *self._explained()[0]])
        if not self.folder:
            return lines
        # With its store on a lost host torchrun may be killed before it writes one.
        has_report = launch_folder() and self.cause.kind != "lost"
        kept = f"; torchrun's own report: {report_of(self.folder, self.launcher).name}" if has_report else ""
        return [*lines, f"  run directory: {self.folder}{kept}"]

    def in_a_line(self) -> str:
        """Return what happened, for below torchrun's report."""
        where = f"; run directory: {self.folder}" if self.folder else ""
        return f"first failure, see above: {sentence(self.cause, self.view)}{where}\n"

    def keep(self) -> None:
        """Write it to the run directory; block as long as the folder does."""
        if not self.folder:
            return
        first = self._explained()[1]
        kept: dict[str, Any] = {"host": self.launcher, "code": first.code, "said": self.lines(), "first": asdict(first)}
        kept["failures"] = [asdict(each) for each in self.failures]
        files = {f"failure-{self.launcher}.json": json.dumps(redact.values(kept), indent=1)}
        files |= {f"stacks-{self.launcher}-{stack.name}.txt": redact.text(stack.text) for stack in self._stacks}
        files |= {f"gpus-{self.launcher}.txt": self._gpus} if self._gpus else {}
        with suppress(OSError):  # a full disk, or a folder on a lost host: the screen has it
            for name, text in files.items():
                replace_file(self.folder / name, text)

    def _explained(self) -> Explanation:
        if not self.explanation.done():
            return [], self.cause
        error = self.explanation.exception()
        return ([f"no explanation: {error}"], self.cause) if error else self.explanation.result()


def explain(failure: Failure, folder: Path | None) -> Explanation:
    """Return the scheduler's traceback if a scheduler raised it, and the catalogue's cause and fix. Raise OSError.

    A run that was told to fail says so first.
    """
    logs = sorted(folder.glob("engines/*.log")) if folder else []
    injected = _injected(folder, failure)
    lines = [f"the run was told to fail: {', '.join(injected)} was injected"] if injected else []
    if failure.kind in ("exception", "echo", "died"):
        lines += _scheduler_trace(failure, logs)
    if failure.kind not in KINDS_WITH_A_TEXT:
        return lines, replace(failure, slug=INJECTED if injected else "")
    whole = _as_written(failure, folder)
    text = os.memfd_create("failure")  # not a file: the disk may be full
    try:
        os.write(text, "\n".join([*whole.traceback, whole.error, ""]).encode())
        found = diagnose([f"/proc/self/fd/{text}", *map(str, logs)], OF_A_RUN)
    finally:
        os.close(text)
    if found.finding and found.finding.is_known:
        return lines + in_brief(found), replace(whole, slug=found.finding.entry.slug)
    return (lines, replace(whole, slug=INJECTED)) if injected else (lines + in_brief(found), whole)


def _as_written(failure: Failure, folder: Path | None) -> Failure:
    """Return it with the whole error and traceback of its rank's events: those that a watchdog is told are cut."""
    log = folder / f"events/rank{failure.ranks[0]}.jsonl" if folder else Path()
    if failure.kind not in ("exception", "echo") or not log.is_file():
        return failure
    for event in _events(log, "failed"):
        error = " ".join(event["error"].split())
        if error.startswith(failure.error[:ERROR_LENGTH]):
            return replace(failure, error=error, traceback=tuple(event["traceback"].splitlines()))
    return failure


def _injected(folder: Path | None, failure: Failure) -> list[str]:
    """Return the faults that were injected, as the ranks' events say, and of a lost host those of launch/hosts.py.

    `slow` is left out: it makes no rank fail.
    """
    logs = sorted(folder.glob("events/rank*.jsonl")) if folder else []
    faults = [event["fault"] for log in logs for event in _events(log, "injected")]
    if failure.kind == "lost" and (of_hosts := os.environ.get(HOST_FAULTS)):
        faults.append(of_hosts)
    return [fault for fault in faults if not fault.startswith("slow@")]


def _events(log: Path, name: str) -> list[dict[str, Any]]:
    """Return a rank's events of this name. A killed rank may leave half a line."""
    lines = [line for line in log.read_text(errors="replace").splitlines() if f'"event": "{name}"' in line]
    return [json.loads(line) for line in lines if line.endswith("}")]


def _scheduler_trace(failure: Failure, logs: Sequence[Path]) -> list[str]:
    """Return the traceback in an engine's log of the error that the failure names, or else the log's first one.

    Nothing if the rank itself raised that error, since its traceback is printed.
    """
    if failure.traceback and failure.traceback[-1].removesuffix("...") in failure.error:
        return []
    if not ("engine process" in failure.error or "EngineFailed" in failure.error):
        return []
    for log in [log for log in logs if log.name in failure.error] or logs:
        with log.open("rb") as stream:
            text = stream.read(READ_BYTES).decode(errors="replace")
        found = [each for each in tracebacks_in(log_lines(text)) if not (each.is_crash or each.is_ignored)]
        named = (each for each in found if each.exception and each.exception in failure.error)
        if shown := next(named, first_cause(found)):
            return [f"{log.name} has:", *(f"| {line}" for line in trace_end("\n".join(shown.lines)))]
    return []
