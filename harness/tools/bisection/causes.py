"""The traceback behind a line of a log, and whether two failures have one cause as far as words and places show."""

import re
from collections.abc import Iterator
from dataclasses import dataclass, field
from difflib import SequenceMatcher

from harness.tools.diagnose.log_lines import LogLine, parse_line, raw_lines

_OPENS = "Traceback (most recent call last)"
_OPENS_CRASH = "(most recent call first)"  # faulthandler's
_FRAME = re.compile(r'\s*File "(?P<file>[^"]+)", line \d+,? in (?P<function>\S+)')
_WITHIN = ("", " ", "\t", "|", "+", "^")
"""First characters of a traceback's lines, save its last."""
_INSTALLED = re.compile(r".*/(?:site-packages|dist-packages|lib/python3\.\d+)/(.+)")
_NEAR_LINES, _LONGEST_LINES = 5, 400
_MODULES = {"sglang-kernel": "sgl_kernel", "flashinfer-python": "flashinfer", "pyyaml": "yaml", "pillow": "PIL"}

_EXCEPTION = re.compile(
    r"(?:[\w.]*\.)?(\w+(?:Error|Exception|Interrupt|Warning|Exit|Failure|Refused|Failed|Died))\b(?:\s*[:(]|$)"
)
_VARIABLE = re.compile(
    r"(?:[A-Za-z]:)?(?:[\w.~-]*/)+[\w.~+-]*"  # a path
    r"|0x[0-9a-fA-F]+|\b[0-9a-fA-F]{8,}\b"
    r"|\btmp\w{6,}\b"
    r"|[\w.-]*\d[\w.-]*"  # a number, and whatever is spelled with one
)
_WORD = re.compile(r"[A-Za-z_][\w.]*|#")
_QUOTED = re.compile(r"(?<!\w)['\"`]([^'\"`]{1,80})['\"`](?!\w)")
_IMPORTS = frozenset({"ImportError", "ModuleNotFoundError"})
_NAMED = _IMPORTS | {"AttributeError", "NameError"}
"""Classes whose message is a name that does not vary: fp4 for fp8 is another failure."""
_COMMON_FUNCTIONS = frozenset(
    {"<module>", "__init__", "__call__", "forward", "main", "run", "wrapper", "_wrapper", "<lambda>"}
)
_ALIKE, _SPECIFIC_WORDS, _LEAST_LETTERS = 0.75, 3, 3


@dataclass(frozen=True, slots=True)
class Frame:
    """One call, with its file as the traceback names it."""

    file: str
    function: str


@dataclass(slots=True)
class LogTrace:
    """One traceback of a log, between the numbers of its first and last line (0 if the log ends before)."""

    begins: int
    ends: int = 0
    source: str = ""
    exception: str = ""
    frames: list[Frame] = field(default_factory=list)
    """The deepest call last."""
    is_crash: bool = False

    def inside(self, package: str) -> list[Frame]:
        module = module_of(package)
        return [frame for frame in self.frames if f"/{module}/" in frame.file or frame.file.endswith(f"/{module}.py")]

    def place(self, package: str) -> str:
        """Return FILE:FUNCTION of the deepest frame in the package's own code, else of the deepest one; "" without any."""
        frames = self.inside(package) or self.frames
        return f"{relative_file(frames[-1].file, package)}:{frames[-1].function}" if frames else ""

    def shows_import(self, package: str) -> bool:
        """Return whether the package was imported: its functions ran, and no module of it was being imported."""
        frames = self.inside(package)
        return bool(frames) and all(frame.function != "<module>" for frame in frames)


def trace_at(line: LogLine) -> LogTrace | None:
    """Return the traceback around a line of a log, or a few lines from it. Raises OSError."""
    above = None
    for trace in _traces(line.file):
        if trace.begins > line.number + _NEAR_LINES:
            break
        if trace.begins >= line.number or trace.ends >= line.number or not trace.ends:
            return trace
        above = trace
    return above if above and line.number - above.ends <= _NEAR_LINES else None


def normal_name(package: str) -> str:
    return re.sub(r"[-_.]+", "-", package).lower()


def module_of(package: str) -> str:
    """Return the name under which a package is imported, as far as its own name shows."""
    normal = normal_name(package)
    return _MODULES.get(normal, normal.replace("-", "_"))


def relative_file(file: str, package: str) -> str:
    """Return a file's name in every environment: below the package's folder or the installed packages, else its last part."""
    module, parts = module_of(package), file.split("/")
    if module in parts[:-1]:
        return "/".join(parts[len(parts) - 1 - parts[::-1].index(module) :])
    installed = _INSTALLED.fullmatch(file)
    return installed[1] if installed else parts[-1]


def _traces(file: str) -> Iterator[LogTrace]:
    """Yield tracebacks in the order in which they end; those of several processes may be interleaved."""
    opened: list[LogTrace] = []
    for number, raw in raw_lines(file):
        if not opened and b"(most recent call" not in raw:
            continue
        line = parse_line(file, 0, number, raw)
        if _OPENS in line.text or _OPENS_CRASH in line.text:
            for unended in [each for each in opened if each.source == line.source]:
                opened.remove(unended)
                yield unended
            opened.append(LogTrace(number, source=line.source, is_crash=_OPENS_CRASH in line.text))
            continue
        trace = next((each for each in reversed(opened) if line.source in ("", each.source)), None)
        if trace is None:
            continue
        if found := _FRAME.match(line.text):
            trace.frames.insert(0 if trace.is_crash else len(trace.frames), Frame(found["file"], found["function"]))
        elif (
            line.text[:1] not in _WITHIN or (trace.is_crash and not line.text) or number - trace.begins > _LONGEST_LINES
        ):
            trace.ends, trace.exception = number, "" if trace.is_crash else line.text
            opened.remove(trace)
            yield trace
    yield from opened


@dataclass(frozen=True, slots=True)
class Cause:
    """What two failures are compared by."""

    kind: str
    """The exception's class, else how the run ended: hang, an exit code."""
    shape: tuple[str, ...] = ()
    """The message's words; what varies from run to run is #."""
    names: frozenset[str] = frozenset()
    """What the message has in quotes."""
    place: str = ""
    """FILE:FUNCTION; "" if it is not known."""
    slug: str = ""
    """Of the known failure that it is."""


def cause_from(failure: str, *, code: int, timed_out: bool = False, place: str = "", slug: str = "") -> Cause:
    """Return the cause of a failed run. failure: the line of its log that shows it, if there is one."""
    if timed_out:
        return Cause("hang")
    match = _EXCEPTION.search(failure)
    kind = match[1] if match else f"exit code {code}"
    message = failure[match.end() :] if match else failure
    plain = re.sub(r"['\"`]", " ", _VARIABLE.sub("#", message))
    shape = tuple(word.rstrip(".") for word in _WORD.findall(plain))
    quoted = _QUOTED.findall(message)
    names = frozenset(quoted if kind in _NAMED else (_VARIABLE.sub("#", name) for name in quoted)) - {"#"}
    return Cause(kind, shape, names, place, slug)


def same_cause(one: Cause, other: Cause) -> bool:
    """Return whether the message is the same, numbers and paths aside, from the same place, or rephrased in that place.

    If a place is not known, the message decides.
    """
    return _same_message(one, other) and _same_place(one, other)


def differ_only_in_place(one: Cause, other: Cause) -> bool:
    """Return whether the message is the same, but comes from another function."""
    return _same_message(one, other) and not _same_place(one, other)


def literal_parts(text: str) -> Iterator[str]:
    """Yield stretches of words without what varies, and without what means more to a shell or a regular expression."""
    for part in re.split(r"[#'\"`\\$!()\[\]{}*+?|^<>]", _VARIABLE.sub("#", text)):
        if len(part.strip(" .,:;()[]")) > 3:
            yield part.strip()


def _same_message(one: Cause, other: Cause) -> bool:
    if one.slug and one.slug == other.slug:
        return True
    specific = min(len(one.shape), len(other.shape)) >= _SPECIFIC_WORDS
    if one.kind == other.kind and one.names != other.names:
        return False
    if one.shape == other.shape and (one.kind == other.kind or specific):
        return True
    if not one.place or one.place != other.place or not one.shape or not other.shape:
        return False
    if (
        one.kind != other.kind
        and not {one.kind, other.kind} <= _IMPORTS
        and (_quotes(one, other) or _quotes(other, one))
    ):
        return True
    return specific and SequenceMatcher(None, one.shape, other.shape, autojunk=False).ratio() >= _ALIKE


def _quotes(one: Cause, other: Cause) -> bool:
    """Return whether `other` quotes words of `one`: the same thing was missed, and another class reports it."""
    quoted = [{word for word in _WORD.findall(name) if len(word) >= _LEAST_LETTERS} for name in other.names]
    return any(words and words <= set(one.shape) for words in quoted)


def _same_place(one: Cause, other: Cause) -> bool:
    if not one.place or not other.place or one.place == other.place:
        return True
    functions = {cause.place.rpartition(":")[2] for cause in (one, other)}
    specific = min(len(one.shape), len(other.shape)) >= _SPECIFIC_WORDS
    return len(functions) == 1 and specific and not functions & _COMMON_FUNCTIONS  # it moved to another file
