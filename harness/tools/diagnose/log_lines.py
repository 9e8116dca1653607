"""Lines of anyone's log: plain, gzipped, UTF-16, of a run directory; without colours and without the prefixes of launchers."""

import gzip
import io
import json
import re
import sys
import zlib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import IO, Any, cast

LONGEST_LINE = 1 << 16
"""Bytes; a longer line is read in pieces of this size."""
STDIN = "-"
LARGEST_JSON = 1 << 23
"""Bytes of a .json file that is read as one value; of a larger one each line is read as text."""
PEEKED_BYTES = 4096
_LOG_SUFFIXES = (".log", ".txt", ".out", ".err", ".jsonl", ".gz")
_TOLD = ("error", "traceback", "detail", "text", "said", "message", "msg", "log", "exception", "exc_info", "stack")
"""Keys under which JSON lines, ours and others', tell of a failure."""

_ESCAPES = re.compile(rb"\x1b\[[0-9;?]*[ -/]*[@-~]|\x1b\][^\x07\x1b]*(?:\x07|\x1b\\)|\x1b[()][A-Z0-9]")
_LOST_ESCAPES = re.compile(rb"\[\d{1,2}(?:;\d+)*m")  # a pasted log has lost its escape characters
_DAY, _CLOCK = r"\d{4}[-/]\d\d[-/]\d\d", r"\d\d:\d\d:\d\d"
_STAMP = re.compile(rf"({_DAY})[T ]({_CLOCK})(?:[.,](\d+))?")
# Each is taken off as often as one of them stands at the start. A group is a name of the process.
_PREFIXES = tuple(
    re.compile(text)
    for text in (
        r"\(([\w.:-]+ (?:pid|actor_id)=[\w:.]+(?:, (?:ip|node_id)=[\w.:]+)?)\)\s?",  # Ray
        r"\[((?i:rank|default|trainer|worker)_?\d+(?:\|\d+)?)\]:?\s?",  # torchrun
        r"\[\d+\] (?=[\[(])",  # numbered lines
        rf"\[(?:{_DAY}[T ])?{_CLOCK}(?:[.,]\d+)?Z?((?: [A-Z]{{2,5}}\d+)*)\]\s?",  # SGLang: TP, PP, DP, EP, MOE_DP
        rf"\[?{_DAY}[T ]{_CLOCK}(?:[.,]\d+)?(?:Z| ?[+-]\d\d:?\d\d)?\]?(?: (?:stdout|stderr) [FP])?\s*[|:-]?\s",  # any, Kubernetes
        rf"{_CLOCK}(?:[.,]\d+)?\s",
        r"\[[EWIFT]\d{3,4} \d\d:\d\d:\d\d\.\d+ [^\]]*\]\s?",  # torch, glog
        r"[EWIF]\d{3,4} \d\d:\d\d:\d\d\.\d+\s+\d+ [^\]]*\]\s?",
        r"(?:ERROR|WARNING|INFO|DEBUG|CRITICAL)(?: \d\d-\d\d \d\d:\d\d:\d\d)?(?: \d+)?(?: -+)? \[[^\]]*\]:?\s",  # vLLM, torch
        r"((?:host|node|worker|rank|pod)?[-_]?\d+)(?::\s|\s?\|\s)",  # srun --label, pdsh, compose
        r"([\w.-]+-\d+)(?::\s|\s+\|\s)",
        r"(?:ERROR|CRITICAL|FATAL):[\w.]*:(?=\S)",  # logging.basicConfig
        r"(?:ERROR|WARNING|INFO|DEBUG|CRITICAL)\s+(?=\d{4}-\d\d-\d\d[T ])",
        r"\[ *\d+\.\d s\] ",  # our console
        r"(rank \d+) FAILED: ",
        r">>>? ",
        r"E   (?=\s*\w)",  # pytest
    )
)
_MOST_PREFIXES = 6


@dataclass(frozen=True, slots=True)
class Line:
    """One line that is of interest."""

    file: str
    index: int
    """Of the file among those that are read, from 0."""
    number: int
    """From 1."""
    whole: str
    """Without colours."""
    text: str
    """Without prefixes too."""
    source: str
    """Which process wrote it, as far as its prefixes say; "" where they do not."""
    time: float | None
    """Seconds, of a stamp with a date; comparable among files of one clock."""

    @property
    def place(self) -> str:
        """As an editor opens it."""
        return f"{self.file}:{self.number}"


def read(file: str, index: int, number: int, raw: bytes) -> Line:
    """A line without its prefixes."""
    whole = text = uncoloured(raw).decode("utf-8", errors="replace").rstrip()
    stamp = _STAMP.search(text[:200])
    names: list[str] = []
    for _ in range(_MOST_PREFIXES):
        match = next((match for prefix in _PREFIXES if (match := prefix.match(text))), None)
        if match is None:
            break
        names += [name.strip() for name in match.groups() if name and name.strip()]
        text = text[match.end() :]
    return Line(file, index, number, whole, text, " ".join(names), _seconds(stamp) if stamp else None)


def uncoloured(raw: bytes) -> bytes:
    """The line without terminal escapes, also those that lost their escape character when they were pasted."""
    if b"\x1b" in raw:
        raw = _ESCAPES.sub(b"", raw)
    return _LOST_ESCAPES.sub(b"", raw) if b"[" in raw else raw


def raw_lines(path: str) -> Iterator[tuple[int, bytes]]:
    """Number, from 1, and bytes (UTF-8, uncoloured) of each line of a file ("-": of standard input). Raises OSError.

    A compressed file that is cut off or damaged, as of a killed job, is read as far as it can be.
    """
    if path.endswith((".jsonl", ".json")):
        yield from _told(Path(path))
    else:
        yield from _lines(path)


def _lines(path: str) -> Iterator[tuple[int, bytes]]:
    number, begins = 0, True
    with _opened(path) as stream:
        while raw := _next(stream):
            number += begins
            begins = raw.endswith(b"\n")
            yield number, uncoloured(raw)


def _next(stream: IO[bytes]) -> bytes:
    try:
        return stream.readline(LONGEST_LINE)
    except (EOFError, zlib.error):  # gzip's words for a file without its end
        return b""


def files_of(paths: Sequence[str]) -> list[str]:
    """The files to read, in the order in which a cause is looked for. Raises ValueError for one that is not there.

    Of a run directory: what its watchdogs wrote, its engines' logs, its ranks' events, then other logs.
    """
    files: list[str] = []
    for path in paths:
        folder = Path(path)
        if folder.is_dir():
            found = _of_folder(folder)
            if not found:
                raise ValueError(f"folder {path} holds no log: no *{', *'.join(_LOG_SUFFIXES)} and no failure*.json.")
            files += found
        elif path == STDIN or folder.exists():  # a file, or a pipe, as of <(kubectl logs ...)
            files.append(path)
        else:
            raise ValueError(f"{path} does not exist; give logs, run directories, or - for standard input.")
    return list(dict.fromkeys(files))


def is_of_a_run(file: str) -> bool:
    """Whether its place says that it is of a run directory of this harness."""
    path = Path(file)
    return path.parent.name in ("events", "engines") or (path.suffix == ".json" and path.name.startswith("failure"))


def _of_folder(folder: Path) -> list[str]:
    kinds = (
        sorted(folder.glob("failure*.json")),
        sorted(folder.glob("engines/*.log*")),
        sorted(folder.glob("events/*.jsonl")),
        sorted(file for file in folder.rglob("*") if file.is_file() and file.name.endswith(_LOG_SUFFIXES)),
    )
    return [str(file) for kind in kinds for file in kind]


def _opened(path: str) -> IO[bytes]:
    """A stream of UTF-8. It is opened once and never sought: it may be a pipe."""
    plain = _bytes_of(path)
    is_gzip = _peeked(plain).startswith(b"\x1f\x8b")
    stream = cast(IO[bytes], gzip.GzipFile(fileobj=plain)) if is_gzip else plain
    encoding = _utf16(_peeked(stream))
    return cast(IO[bytes], _Recoded(stream, encoding)) if encoding else stream


def _bytes_of(path: str) -> IO[bytes]:
    return sys.stdin.buffer if path == STDIN else open(path, "rb", buffering=1 << 20)


def _peeked(stream: IO[bytes]) -> bytes:
    try:
        return cast(io.BufferedReader, stream).peek(PEEKED_BYTES)[:PEEKED_BYTES]
    except (EOFError, zlib.error):
        return b""


def _utf16(head: bytes) -> str:
    """The name of the encoding, by its mark or by where the zero bytes of ASCII text are; "" for any other."""
    if head.startswith((b"\xff\xfe", b"\xfe\xff")) and head.count(0) > len(head) // 4:
        return "utf-16"
    zeros = {"utf-16-be": head[0::2].count(0), "utf-16-le": head[1::2].count(0)}
    few, many = sorted(zeros, key=lambda name: zeros[name])
    return many if zeros[many] > 0.8 * (len(head) // 2) and zeros[few] < 0.1 * len(head) else ""


class _Recoded(io.TextIOWrapper):
    """Lines of a stream in another encoding, as UTF-8."""

    def __init__(self, stream: IO[bytes], encoding: str) -> None:
        super().__init__(stream, encoding=encoding, errors="replace", newline="\n")

    def readline(self, size: int = -1, /) -> bytes:  # type: ignore[override]
        return super().readline(size).encode("utf-8", errors="replace")


def _told(path: Path) -> Iterator[tuple[int, bytes]]:
    """What our events and verdicts tell of failures; any other JSON line as it is."""
    if path.suffix == ".json" and path.is_file() and path.stat().st_size <= LARGEST_JSON:
        chunks: Iterable[tuple[int, bytes]] = [(1, path.read_bytes())]
    else:
        chunks = _lines(str(path))
    for number, chunk in chunks:
        try:
            value = json.loads(chunk) if chunk.lstrip().startswith((b"{", b"[")) else None
            told = [line for text in _strings(value) for line in text.splitlines()]
        except (ValueError, RecursionError):  # not JSON: it is read as text
            value, told = None, []
        if told or (isinstance(value, Mapping) and "event" in value):
            yield from ((number, uncoloured(line.encode(errors="replace"))) for line in told)
        else:
            for offset, line in enumerate(chunk.splitlines()):
                yield from ((number + offset, uncoloured(part)) for part in line.split(b"\\n"))


def _strings(value: Any, key: str = "") -> Iterator[str]:
    if isinstance(value, str) and key in _TOLD:
        yield value
    elif isinstance(value, Mapping):
        for inner, each in value.items():
            yield from _strings(each, inner)
    elif isinstance(value, list):
        for each in value:
            yield from _strings(each, key)


def _seconds(stamp: re.Match[str]) -> float | None:
    day, clock, fraction = stamp.groups()
    try:
        whole = datetime.fromisoformat(f"{day.replace('/', '-')}T{clock}").timestamp()
    except ValueError:
        return None
    return whole + (float(f"0.{fraction}") if fraction else 0.0)
