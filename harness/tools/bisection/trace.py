"""The traceback that a failure's line belongs to: its exception, and the frames below it."""

import re
from collections.abc import Iterator
from dataclasses import dataclass, field

from harness.tools.diagnose.log_lines import LogLine, parse_line, raw_lines

_OPENS = "Traceback (most recent call last)"
_OPENS_CRASH = "(most recent call first)"  # faulthandler's
_FRAME = re.compile(r'\s*File "(?P<file>[^"]+)", line \d+,? in (?P<function>\S+)')
_WITHIN = ("", " ", "\t", "|", "+", "^")
"""With what a line of a traceback begins that is not its last."""
_INSTALLED = re.compile(r".*/(?:site-packages|dist-packages|lib/python3\.\d+)/(.+)")
_NEAR_LINES, _LONGEST_LINES = 5, 400
_MODULES = {"sglang-kernel": "sgl_kernel", "flashinfer-python": "flashinfer", "pyyaml": "yaml", "pillow": "PIL"}


@dataclass(frozen=True, slots=True)
class Frame:
    """One call. file: as the traceback has it."""

    file: str
    function: str


@dataclass(slots=True)
class Trace:
    """One traceback of a log."""

    begins: int
    """Line number of its heading."""
    ends: int = 0
    """Of its exception; 0 where the log ends before."""
    source: str = ""
    exception: str = ""
    """Its last line; "" where there is none."""
    frames: list[Frame] = field(default_factory=list)
    """The deepest call last."""
    _crash: bool = False

    def inside(self, package: str) -> list[Frame]:
        """Its frames in a package's own code."""
        module = module_of(package)
        return [frame for frame in self.frames if f"/{module}/" in frame.file or frame.file.endswith(f"/{module}.py")]

    def place(self, package: str) -> str:
        """FILE:FUNCTION of the deepest frame in the package's own code, else of the deepest one; "" without any."""
        frames = self.inside(package) or self.frames
        return f"{relative(frames[-1].file, package)}:{frames[-1].function}" if frames else ""

    def shows_import(self, package: str) -> bool:
        """Whether the package must have been imported: its functions ran, and no module of it was being imported."""
        frames = self.inside(package)
        return bool(frames) and all(frame.function != "<module>" for frame in frames)


def trace_at(line: LogLine) -> Trace | None:
    """The traceback around a line of a log, or a few lines from it; None where there is none. Raises OSError."""
    above = None
    for trace in _traces(line.file):
        if trace.begins > line.number + _NEAR_LINES:
            break
        if trace.begins >= line.number or trace.ends >= line.number or not trace.ends:
            return trace
        above = trace
    return above if above and line.number - above.ends <= _NEAR_LINES else None


def module_of(package: str) -> str:
    """Under which name a package is imported, as far as its own name says."""
    normal = re.sub(r"[-_.]+", "-", package).lower()
    return _MODULES.get(normal, normal.replace("-", "_"))


def relative(file: str, package: str) -> str:
    """A file as it is called in every environment: below the package's folder or the installed packages, else its name."""
    module = module_of(package)
    parts = file.split("/")
    if module in parts[:-1]:
        return "/".join(parts[len(parts) - 1 - parts[::-1].index(module) :])
    installed = _INSTALLED.fullmatch(file)
    return installed[1] if installed else parts[-1]


def _traces(file: str) -> Iterator[Trace]:
    """In the order in which they end."""
    opened: list[Trace] = []
    for number, raw in raw_lines(file):
        if not opened and b"(most recent call" not in raw:
            continue
        line = parse_line(file, 0, number, raw)
        if _OPENS in line.text or _OPENS_CRASH in line.text:
            yield from _closed(opened, line.source)
            opened.append(Trace(number, source=line.source, _crash=_OPENS_CRASH in line.text))
            continue
        trace = next((each for each in reversed(opened) if line.source in ("", each.source)), None)
        if trace is None:
            continue
        if found := _FRAME.match(line.text):
            frame = Frame(found["file"], found["function"])
            trace.frames.insert(0, frame) if trace._crash else trace.frames.append(frame)
        elif line.text[:1] not in _WITHIN or (trace._crash and not line.text) or number - trace.begins > _LONGEST_LINES:
            trace.ends, trace.exception = number, "" if trace._crash else line.text
            opened.remove(trace)
            yield trace
    yield from opened


def _closed(opened: list[Trace], source: str) -> Iterator[Trace]:
    """Those of a process that begins another one: theirs never ended."""
    for trace in [each for each in opened if each.source == source]:
        opened.remove(trace)
        yield trace
