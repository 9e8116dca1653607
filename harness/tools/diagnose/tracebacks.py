"""Read tracebacks in a log, whoever wrote it.

The log may be shared by many processes, whose lines then alternate. What tells them apart is the prefix that a launcher
or a logger puts before each line ("[rank0]: ", "(WorkerDict pid=12) ", "[2026-11-20 22:04:42 TP1] "). Some loggers put
it before the first line of a traceback only, so a line without a prefix continues the traceback that was opened last.

    for found in tracebacks_in(log_lines(text)):
        print(found.process, found.exception, found.frames[-1:])
"""

import builtins
import math
import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field, replace

MOST_LINES_BETWEEN = 400
"""A traceback that no line has continued for so long was cut off."""
FRAME_INDENT = 2
_LINES_AFTER_IGNORED = 20  # so many lines after "Exception ignored in" its traceback begins, at most

_ESCAPES = re.compile(r"\x1b\[[0-9;?]*[ -/]*[@-~]|\x1b\][^\x07\x1b]*(?:\x07|\x1b\\)|\x1b[()][A-Z0-9]")
_LOST_ESCAPES = re.compile(r"\[\d{1,2}(?:;\d+)*m")  # what a colour looks like after copy and paste
_DAY, _CLOCK = r"\d{4}[-/]\d\d[-/]\d\d", r"\d\d:\d\d:\d\d"
# Each is removed as often as it stands at the start. A group holds the name of the process.
_PREFIX = re.compile(
    "|".join(
        (
            r"\(([\w.:\[\]=()-]+(?: \w+=\w+)? (?:pid|actor_id)=[\w:.]+(?:, (?:ip|node_id)=[\w:.]+)?)\)\s?",  # Ray, vLLM
            r"\((raylet(?:, ip=[\w:.]+)?)\)\s",
            r"\[((?i:rank|default|trainer|worker)_?\d+(?:\|\d+)?)\]:?\s?",  # torchrun
            r"\[\d+\] (?=[\[(])",  # numbered lines
            r"\d{13}\t(?=\d{4}-)",  # CloudWatch
            r"\[(?:\d+,)?(\d+)\](?:<std(?:out|err)>)?:\s?",  # older torchrun, mpirun
            rf"\[{_DAY} {_CLOCK},\d+ [EWIF] \d+ \d+\] (?:\(\w+\) )?[\w.]+:\d+: ",  # Ray's own C++
            rf"\[(?:{_DAY}[T ]|\d\d-\d\d )?{_CLOCK}(?:[.,]\d+)?Z?((?: [A-Z_]{{2,9}}\d+)*)\]\s?",  # SGLang: TP, PP, DP, EP, MOE_DP
            rf"\[?{_DAY}[T ]{_CLOCK}(?:[.,]\d+)?(?:Z| ?[+-]\d\d:?\d\d)?\]?(?: (?:stdout|stderr) [FP])?(?:\s*[|:-])?\s",  # Kubernetes
            rf"{_CLOCK}(?:[.,]\d+)?\s",
            r"\[[EWIFT]\d{3,4} \d\d:\d\d:\d\d\.\d+ [^\]]*\]\s?",  # torch, glog
            r"[EWIF]\d{3,4} \d\d:\d\d:\d\d\.\d+\s+\d+ [^\]]*\]\s?",
            r"(?:ERROR|WARNING|INFO|DEBUG|CRITICAL)(?: \d\d-\d\d \d\d:\d\d:\d\d)?(?: \d+)?(?: -+)? \[[^\]]*\]:?\s",  # vLLM, torch
            r"(?:ERROR|WARNING|INFO|DEBUG|CRITICAL) \d\d-\d\d \d\d:\d\d:\d\d [\w./-]+\.py:\d+\]\s",  # older vLLM
            r"(?:ERROR|WARNING|INFO|DEBUG|CRITICAL)\s+\| [\w.:<>-]+ - ",  # loguru
            r"(?:ERROR|WARNING|INFO|DEBUG|CRITICAL) [\w./-]+\.py:\d+ -- ",  # Ray's own
            r"\[[\w.]+\]\[(?:ERROR|WARNING|INFO|DEBUG|CRITICAL)\] - ",  # hydra
            r"(?:ERROR|CRITICAL|FATAL):?\s+(?=(?:\w+\.)*[A-Z]\w*(?:Error|Exception)\b)",
            r"[\w.]+ - (?:ERROR|WARNING|INFO|DEBUG|CRITICAL) - ",
            r"\[(?:ERROR|WARNING|INFO|DEBUG|CRITICAL)\](?: \[[^\]]*\])*:?\s",  # DeepSpeed
            r"((?:host|node|worker|rank|pod)?[-_]?\d+)(?::\s|\s?\|\s)",  # srun --label, pdsh, compose
            r"([\w.-]+-\d+)(?::\s|\s+\|\s)",
            r"(?:ERROR|CRITICAL|FATAL):[\w.]*:(?=\S)",  # logging.basicConfig
            r"(?:ERROR|WARNING|INFO|DEBUG|CRITICAL)\s+(?=\d{4}-\d\d-\d\d[T ])",
            r"\[ *\d+\.\d s\] ",  # the console of this harness
            r"(rank \d+) FAILED: ",
            r">>>? ",
            r"E   (?=\s*\w)",  # pytest
        )
    )
)
_MOST_PREFIXES = 6

_MARGIN = re.compile(r" +(?:\| ?|\+ (?=Exception Group ))")  # of the lines of an exception group

HEADER = "Traceback (most recent call last)"  # an exception group's header holds it too
_IGNORED = re.compile(r"Exception ignored (?:in|on|while)\b")
_FRAME = re.compile(r'\s*File "([^"]+)"(?:, line (\d+)(?:,? in (\S+))?)?')
_MARKER = re.compile(r"[\s~^]*$|\s*\[Previous line repeated")
_CRASH = re.compile(r"Fatal Python error: |terminate called after throwing an instance of ")
_STACK = re.compile(r"(Current t|T)hread 0x[0-9a-f]+ .*\(most recent call first\)")
_END_OF_CRASH = ("Extension modules:", "Aborted", "Segmentation fault")
_LAST_LINE = re.compile(r"((?:[A-Za-z_]\w*\.)*[A-Za-z_]\w*)(?:\(\w+\))?(:(?:\s.*)?)?(?: \[repeated \d+x.*)?$")
_CLASS_OF_ERROR = re.compile(
    r"(?:(?:Error|Exception)(?:_\w+)?|ExceptionGroup|Interrupt|Exit|Failure|Failed|Refused|Died|Expired)$"
)
_NAME = re.compile(
    r"(?:[A-Za-z_]\w*\.)*(_*[A-Z]\w*(?:(?:Error|Exception)(?:_\w+)?|ExceptionGroup|Interrupt|Exit|Failure|Failed|Refused"
    r"|Arrive|Died|Expired)|Exception|StopIteration|StopAsyncIteration)(?=\(|:|$| \[repeated )"
)
_RESOURCE_TRACKER = "multiprocessing/resource_tracker.py"
_GROUP = re.compile(r"\(\d+ sub-exceptions?\)$")


@dataclass(frozen=True, slots=True)
class LogLine:
    """One line of a log."""

    number: int
    """Place in the file, from 1."""
    whole: str
    """The line without colours."""
    text: str
    """The line without colours and prefixes."""
    process: str
    """What the prefixes say of the process that wrote it, such as "TP1" or "WorkerDict pid=12"; "" without any."""
    file: str = ""

    @property
    def place(self) -> str:
        return f"{self.file}:{self.number}"


@dataclass(frozen=True, slots=True)
class Frame:
    """One call of a traceback."""

    file: str
    line: int
    function: str
    source: str = ""
    """The line of code, if the traceback shows it."""


@dataclass(slots=True)
class Traceback:
    """One traceback, or the death of a process below Python."""

    process: str
    """The prefix of its first line; see LogLine.process."""
    first: LogLine
    last: LogLine | None = None
    """The line with the exception; None if the log ends before it, or if Python only printed a stack."""
    exception: str = ""
    """The line that names the exception: its class and the first line of its message."""
    frames: list[Frame] = field(default_factory=list)
    """Calls, the deepest last; of a crash those of the thread that crashed."""
    lines: list[str] = field(default_factory=list)
    """Its own lines, without those of other processes in between; all but the first without prefixes."""
    has_header: bool = True
    """False if the log shows only the frames, as in a quotation."""
    is_crash: bool = False
    """Whether the process died below Python, which leaves no exception."""
    is_ignored: bool = False
    """Whether Python ignored it ("Exception ignored in"), as it does in destructors. It ended nothing."""

    @property
    def begins(self) -> int:
        """The number of its first line."""
        return self.first.number

    @property
    def ends(self) -> int:
        """The number of the line with the exception; 0 without one."""
        return self.last.number if self.last else 0


def log_lines(text: str) -> Iterator[LogLine]:
    """Yield the lines of a text."""
    return (log_line(number, line) for number, line in enumerate(text.splitlines(), start=1))


def log_line(number: int, line: str, file: str = "") -> LogLine:
    """Return a line with its colours removed and its prefixes taken apart."""
    whole = text = without_colours(line).rstrip()
    names: list[str] = []
    for _ in range(_MOST_PREFIXES):
        if text[:1] in ("", " ", "\t"):  # the lines of a traceback, for the most part
            break
        match = _PREFIX.match(text)
        if match is None:
            break
        names += [name.strip() for name in match.groups() if name and name.strip()]
        text = text[match.end() :]
    if margin := _MARGIN.match(text):
        text = text[margin.end() :]
    return LogLine(number, whole, text, " ".join(names), file)


def without_colours(line: str) -> str:
    """Return the line without terminal escapes, also those that lost their escape character in a paste."""
    line = _ESCAPES.sub("", line) if "\x1b" in line else line
    return _LOST_ESCAPES.sub("", line) if "[" in line else line


def tracebacks_in(lines: Iterable[LogLine]) -> Iterator[Traceback]:
    """Yield the tracebacks of one log in the order in which they end; the cause of a chain comes before its effect."""
    reader = TracebackReader()
    for line in lines:
        yield from reader.read(line)
    yield from reader.close()


def first_cause(found: Iterable[Traceback]) -> Traceback | None:
    """Return the first exception or crash that may have ended a process, an exception group only if there is nothing
    else.
    """
    named = [each for each in found if each.exception and not each.is_ignored and not _is_of_resource_tracker(each)]
    return min(named, key=lambda each: (bool(_GROUP.search(each.exception)), each.ends), default=None)


def _is_of_resource_tracker(found: Traceback) -> bool:
    """Return whether multiprocessing's resource tracker printed it, which then goes on: KeyError for a name it
    lacks.
    """
    return (
        bool(found.frames) and found.frames[-1].file.endswith(_RESOURCE_TRACKER) and found.frames[-1].function == "main"
    )


def exception_name(line: str) -> str:
    """Return the class name of the exception that a line tells, without its module; "" if it tells none."""
    match = _NAME.match(line)
    return match[1] if match else ""


def _is_exception(text: str) -> bool:
    """Return whether a line begins with the class of an exception, unlike "Loading: 50%"."""
    match = _LAST_LINE.match(text)
    if match is None:
        return False
    name, last = match[1], match[1].rpartition(".")[2]
    if last.endswith("Warning"):
        return False
    own = getattr(builtins, name, None)
    is_own = isinstance(own, type) and issubclass(own, BaseException)
    is_dotted_class = last != name and last[:1].isupper() and not last.isupper()
    return is_own or is_dotted_class or bool(_CLASS_OF_ERROR.search(last))


@dataclass(slots=True, eq=False)
class _Open:
    """A traceback whose exception has not come yet."""

    found: Traceback
    latest: int  # number of its latest line
    later: str | None = None  # the prefix of the lines after its first one, once there is such a line
    in_crashed_thread: bool = False  # whether the lines are frames of the thread that crashed
    indent: int = 0  # spaces that a logger put before each line

    def goes_on_with(self, line: LogLine) -> bool:
        return self.found.process.startswith(line.process) if self.later is None else self.later == line.process


class TracebackReader:
    """Finds tracebacks line by line. Callers may skip lines while is_waiting is False, if no traceback begins there."""

    def __init__(self) -> None:
        self._open: list[_Open] = []  # the latest last
        self._ignored: dict[str, int] = {}  # by process, number of the line that says that Python ignored an exception
        self.owner: Traceback | None = None
        """The traceback to which the latest line belongs for sure."""

    @property
    def is_waiting(self) -> bool:
        """Whether the next line may belong to a traceback that an earlier line began."""
        return bool(self._open)

    def read(self, line: LogLine) -> list[Traceback]:
        """Return the tracebacks that end with this line, or that are known by now to have ended before it."""
        self.owner = None
        ended = [self._end(each) for each in list(self._open) if line.number - each.latest > MOST_LINES_BETWEEN]
        current = next((each for each in reversed(self._open) if each.goes_on_with(line)), None)
        if HEADER in line.text or _CRASH.match(line.text):
            ended += [self._end(current)] if current else []
            self._begin(line)
        elif current and current.found.is_crash:
            ended += self._go_on_after_crash(current, line)
        elif current:
            ended += self._go_on(current, line)
        elif _STACK.match(line.text):
            self._begin(line)
        elif _FRAME.match(line.text):
            self._go_on(self._begin(line, has_header=False), line)
        elif _IGNORED.search(line.text):
            self._ignored[line.process] = line.number
        return ended

    def close(self) -> list[Traceback]:
        """Return the tracebacks that the log's end cut off."""
        return [self._end(each) for each in list(self._open)]

    def _begin(self, line: LogLine, has_header: bool = True) -> _Open:
        text, is_stack = line.text, bool(_STACK.match(line.text))
        ignored_at = self._ignored.pop(line.process, -math.inf)
        is_ignored = line.number - ignored_at <= _LINES_AFTER_IGNORED
        found = Traceback(line.process, line, has_header=has_header, is_ignored=is_ignored)
        if _CRASH.match(text):
            found.last, found.exception = line, text
        found.is_crash = is_stack or found.last is not None
        if has_header:
            found.lines.append(line.whole)
        indent = len(text) - len(text.lstrip()) - (0 if has_header else FRAME_INDENT)
        self.owner = found
        self._open.append(_Open(found, line.number, in_crashed_thread=is_stack, indent=max(0, indent)))
        return self._open[-1]

    def _go_on(self, current: _Open, line: LogLine) -> list[Traceback]:
        """Add a line to its traceback, unless another process wrote it. Return the traceback if the line ends it."""
        found, text = current.found, line.text
        if not text[: current.indent].strip():
            text = text[current.indent :]
        is_last = _is_exception(text)
        if frame := _FRAME.match(text):
            found.frames.append(_frame(frame))
        elif text[:1] in ("", " ", "\t"):
            if found.frames and not found.frames[-1].source and not _MARKER.match(text):
                found.frames[-1] = replace(found.frames[-1], source=text.strip())
        elif is_last:
            found.last, found.exception = line, text
        else:
            return []
        found.lines.append(text)
        self.owner = found
        current.latest, current.later = line.number, line.process
        return [self._end(current)] if is_last else []

    def _go_on_after_crash(self, current: _Open, line: LogLine) -> list[Traceback]:
        """Keep the frames of the thread that crashed, which Python prints with the deepest first."""
        found, text = current.found, line.text
        self.owner = found if text else None
        if stack := _STACK.match(text):
            current.in_crashed_thread = stack[1].startswith("Current") or not found.frames
            found.frames = [] if current.in_crashed_thread else found.frames
        elif frame := _FRAME.match(text):
            if current.in_crashed_thread:
                found.frames.insert(0, _frame(frame))
            current.latest = line.number
        elif not text:
            current.in_crashed_thread = False
        else:
            self.owner = None
            return [self._end(current)] if text.startswith(_END_OF_CRASH) else []
        return []

    def _end(self, current: _Open) -> Traceback:
        self._open.remove(current)
        return current.found


def _frame(match: re.Match[str]) -> Frame:
    return Frame(match[1], int(match[2] or 0), match[3] or "")
