"""The traceback behind a line of a log, and whether two failures have one cause as far as words and places show."""

import re
from collections.abc import Iterator
from dataclasses import dataclass, field
from difflib import SequenceMatcher

from packaging.utils import canonicalize_name

from harness.tools.bisection.state import Attempt
from harness.tools.diagnose.log_lines import parse_line, raw_lines

_OPENS = "Traceback (most recent call last)"
_OPENS_CRASH = "(most recent call first)"  # faulthandler's
_FRAME = re.compile(r'\s*File "([^"]+)", line \d+,? in (\S+)')
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
_NAMED = ("ImportError", "ModuleNotFoundError", "AttributeError", "NameError")
"""Classes whose message is a name that does not vary: fp4 for fp8 is another failure."""
_COMMON_FUNCTIONS = ("<module>", "__init__", "__call__", "forward", "main", "run", "wrapper", "_wrapper", "<lambda>")
_ALIKE, _SPECIFIC_WORDS = 0.75, 3


@dataclass(slots=True)
class LogTrace:
    """One traceback of a log, between the numbers of its first and last line (0 if the log ends before)."""

    begins: int
    source: str
    is_crash: bool
    ends: int = 0
    exception: str = ""
    frames: list[tuple[str, str]] = field(default_factory=list)
    """File and function of each call, the deepest last."""

    def inside(self, package: str) -> list[tuple[str, str]]:
        """Return the frames in the package's own code, the deepest first."""
        module = module_of(package)
        return [each for each in self.frames[::-1] if f"/{module}/" in each[0] or each[0].endswith(f"/{module}.py")]

    def place(self, package: str) -> str:
        """Return FILE:FUNCTION of the deepest frame in the package's own code, else of the deepest one; "" without any."""
        frames = self.inside(package) or self.frames[::-1]
        return f"{relative_file(frames[0][0], package)}:{frames[0][1]}" if frames else ""

    def shows_import(self, package: str) -> bool:
        """Return whether the package was imported: its functions ran, and no module of it was being imported."""
        frames = self.inside(package)
        return bool(frames) and all(function != "<module>" for _, function in frames)


def trace_at(file: str, number: int) -> LogTrace | None:
    """Return the traceback around a line of a log, or a few lines from it. Raises OSError."""
    above = None
    for trace in _traces(file):
        if trace.begins > number + _NEAR_LINES:
            break
        if trace.begins >= number or trace.ends >= number or not trace.ends:
            return trace
        above = trace
    return above if above and number - above.ends <= _NEAR_LINES else None


def module_of(package: str) -> str:
    """Return the name under which a package is imported, as far as its own name shows."""
    normal = canonicalize_name(package)
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
    opened: dict[str, LogTrace] = {}
    for number, raw in raw_lines(file):
        if not opened and b"(most recent call" not in raw:
            continue
        line = parse_line(file, 0, number, raw)
        if _OPENS in line.text or _OPENS_CRASH in line.text:
            if unended := opened.pop(line.source, None):
                yield unended
            opened[line.source] = LogTrace(number, line.source, _OPENS_CRASH in line.text)
        elif trace := opened.get(line.source) if line.source else next(reversed(opened.values()), None):
            if found := _FRAME.match(line.text):
                trace.frames.insert(0 if trace.is_crash else len(trace.frames), (found[1], found[2]))
            elif (
                line.text[:1] not in _WITHIN
                or (trace.is_crash and not line.text)
                or number - trace.begins > _LONGEST_LINES
            ):
                trace.ends, trace.exception = number, "" if trace.is_crash else line.text
                yield opened.pop(trace.source)
    yield from opened.values()


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


def cause_of(made: Attempt) -> Cause:
    if made.timed_out:
        return Cause("hang")
    match = _EXCEPTION.search(made.failure)
    kind = match[1] if match else f"exit code {made.code}"
    message = made.failure[match.end() :] if match else made.failure
    plain = re.sub(r"['\"`]", " ", _VARIABLE.sub("#", message))
    shape = tuple(word.rstrip(".") for word in _WORD.findall(plain))
    quoted = _QUOTED.findall(message)
    names = frozenset(quoted if kind in _NAMED else (_VARIABLE.sub("#", name) for name in quoted)) - {"#"}
    return Cause(kind, shape, names, made.place, made.slug)


def same_cause(one: Cause, other: Cause) -> bool:
    """Return whether the message is the same, numbers and paths aside, from the same place, or rephrased in that place.

    If a place is not known, the message decides.
    """
    specific = min(len(one.shape), len(other.shape)) >= _SPECIFIC_WORDS
    return _same_message(one, other, specific) and _same_place(one, other, specific)


def pattern_for(wanted: Attempt, other: Attempt) -> str:
    """Return a value of --match that finds the one failure and not the other; "" if their words are the same."""
    parts = re.split(
        r"[^\w .,:/=-]", _VARIABLE.sub("#", wanted.failure)
    )  # no sign means more to a shell or an expression
    own = [part.strip() for part in parts if part.strip(" .,:") not in other.failure]
    return wanted.slug or max(own, key=len, default="")


def _same_message(one: Cause, other: Cause, specific: bool) -> bool:
    if one.slug and one.slug == other.slug:
        return True
    if one.kind == other.kind and one.names != other.names:
        return False
    if one.shape == other.shape and (one.kind == other.kind or specific):
        return True
    return bool(one.place) and one.place == other.place and specific and _is_rephrased(one, other)


def _is_rephrased(one: Cause, other: Cause) -> bool:
    """Return whether most words are shared: of both messages, or of the shorter one where they name the same things."""
    here, there = ([word.casefold() for word in each.shape] for each in (one, other))
    matching = SequenceMatcher(None, here, there, autojunk=False).get_matching_blocks()
    shared, lengths = sum(block.size for block in matching), (len(here), len(there))
    names_the_same = one.kind == other.kind and bool(one.names) and one.names == other.names
    return shared >= _ALIKE * (min(lengths) if names_the_same else sum(lengths) / 2)


def _same_place(one: Cause, other: Cause, specific: bool) -> bool:
    if not one.place or not other.place or one.place == other.place:
        return True
    function, there = (cause.place.rpartition(":")[2] for cause in (one, other))
    return function == there and specific and function not in _COMMON_FUNCTIONS  # it moved to another file
