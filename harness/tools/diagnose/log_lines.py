"""Lines of any log: plain, gzipped, UTF-16, or of a run directory; without colours and launchers' prefixes."""

import codecs
import gzip
import json
import re
import sys
import zlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import IO, Any, cast

STDIN = "-"
LONGEST_LINE = 1 << 16  # bytes; a longer line is read in pieces
LARGEST_JSON = 1 << 23  # bytes of a .json file that is read as one value; of a larger one each line is read as text
_LOG_SUFFIXES = (".log", ".txt", ".out", ".err", ".jsonl", ".gz")
_FAILURE_KEYS = (
    "error", "traceback", "detail", "text", "said", "message", "msg", "log", "exception", "exc_info", "stack",
)  # fmt: skip
"""Keys whose values in JSON lines, ours and others', describe a failure."""

_ESCAPES = re.compile(rb"\x1b\[[0-9;?]*[ -/]*[@-~]|\x1b\][^\x07\x1b]*(?:\x07|\x1b\\)|\x1b[()][A-Z0-9]")
_LOST_ESCAPES = re.compile(rb"\[\d{1,2}(?:;\d+)*m")  # a pasted log has lost its escape characters
_DAY, _CLOCK = r"\d{4}[-/]\d\d[-/]\d\d", r"\d\d:\d\d:\d\d"
_STAMP = re.compile(rf"({_DAY})[T ]({_CLOCK})(?:[.,](\d+))?")
# Each is removed as often as it stands at the start. A group is a name of the process.
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
class LogLine:
    """One line that is of interest."""

    file: str
    index: int  # of the file among those that are read, from 0
    number: int  # from 1
    whole: str  # without colours
    text: str  # without prefixes too
    source: str  # which process wrote it, as far as its prefixes say
    time: float | None  # seconds, of a stamp with a date; comparable among files of one clock

    @property
    def place(self) -> str:
        return f"{self.file}:{self.number}"


def parse_line(file: str, index: int, number: int, raw: bytes) -> LogLine:
    """Return a line with its prefixes taken apart."""
    whole = text = uncoloured(raw).decode("utf-8", errors="replace").rstrip()
    names: list[str] = []
    for _ in range(_MOST_PREFIXES):
        match = next((match for prefix in _PREFIXES if (match := prefix.match(text))), None)
        if match is None:
            break
        names += [name.strip() for name in match.groups() if name and name.strip()]
        text = text[match.end() :]
    return LogLine(file, index, number, whole, text, " ".join(names), _stamp_seconds(whole[:200]))


def _stamp_seconds(text: str) -> float | None:
    try:
        day, clock, fraction = stamp.groups() if (stamp := _STAMP.search(text)) else ("", "", "")
        return datetime.fromisoformat(f"{day.replace('/', '-')}T{clock}").timestamp() + float(f"0.{fraction or 0}")
    except ValueError:  # no stamp, or one of no day
        return None


def uncoloured(raw: bytes) -> bytes:
    """Return the line without terminal escapes, also those that lost their escape character in a paste."""
    raw = _ESCAPES.sub(b"", raw) if b"\x1b" in raw else raw
    return _LOST_ESCAPES.sub(b"", raw) if b"[" in raw else raw


def log_files(paths: Sequence[str]) -> list[str]:
    """Return the files to read, in the order in which a cause is looked for. Raise ValueError for one that is missing.

    Of a run directory: what its watchdogs wrote, its engines' logs, its ranks' events, then other logs.
    """
    files: list[str] = []
    for path in paths:
        folder = Path(path)
        if folder.is_dir():
            logs = sorted(file for file in folder.rglob("*") if file.is_file() and file.name.endswith(_LOG_SUFFIXES))
            first = [sorted(folder.glob(each)) for each in ("failure*.json", "engines/*.log*", "events/*.jsonl")]
            found = [str(file) for kind in (*first, logs) for file in kind]
            if not found:
                raise ValueError(f"folder {path} must hold a log: *{', *'.join(_LOG_SUFFIXES)} or failure*.json.")
            files += found
        elif path == STDIN or folder.exists():  # a file, or a pipe, as of <(kubectl logs ...)
            files.append(path)
        else:
            raise ValueError(f"{path} does not exist; give logs, run directories, or - for standard input.")
    return list(dict.fromkeys(files))


def is_of_a_run(file: str) -> bool:
    """Return whether its place is that of a file in a run directory of this harness."""
    path = Path(file)
    return path.parent.name in ("events", "engines") or (path.suffix == ".json" and path.name.startswith("failure"))


def raw_lines(path: str) -> Iterator[tuple[int, bytes]]:
    """Yield number, from 1, and bytes (UTF-8, uncoloured) of each line of a file ("-": standard input). Raise OSError.

    A compressed file that is cut off or damaged, as after a killed job, is read as far as possible.
    """
    if not path.endswith((".jsonl", ".json")):
        yield from _plain_lines(path)
        return
    whole = path.endswith(".json") and Path(path).stat().st_size <= LARGEST_JSON
    for number, chunk in [(1, Path(path).read_bytes())] if whole else _plain_lines(path):
        try:
            value = json.loads(chunk) if chunk.lstrip().startswith((b"{", b"[")) else None
            texts = [line for text in _failure_texts(value) for line in text.splitlines()]
        except (ValueError, RecursionError):  # not JSON: it is read as text
            value, texts = None, []
        if texts or (isinstance(value, dict) and "event" in value):
            yield from ((number, uncoloured(line.encode(errors="replace"))) for line in texts)
        else:
            for offset, line in enumerate(chunk.splitlines()):
                yield from ((number + offset, uncoloured(part)) for part in line.split(b"\\n"))


def _failure_texts(value: Any, key: str = "") -> Iterator[str]:
    if isinstance(value, str) and key in _FAILURE_KEYS:
        yield value
    elif isinstance(value, dict | list):
        for inner, each in value.items() if isinstance(value, dict) else ((key, each) for each in value):
            yield from _failure_texts(each, inner)


def _plain_lines(path: str) -> Iterator[tuple[int, bytes]]:
    number, begins = 0, True
    with _opened(path) as stream:
        while raw := _or_nothing(stream.readline, LONGEST_LINE):
            number += begins
            begins = raw.endswith(b"\n")
            yield number, uncoloured(raw)


def _opened(path: str) -> IO[bytes]:
    """Open a stream of UTF-8, once and without seeking: it may be a pipe."""
    stream: Any = sys.stdin.buffer if path == STDIN else Path(path).open("rb", buffering=1 << 20)  # noqa: SIM115
    if _or_nothing(stream.peek, 2).startswith(b"\x1f\x8b"):
        stream = gzip.GzipFile(fileobj=stream)
    head = _or_nothing(stream.peek, 2)[:2]
    unmarked = "utf-16-le" if head[1:] == b"\0" else "utf-16-be" if head[:1] == b"\0" else ""
    encoding = "utf-16" if head in (codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE) else unmarked
    return cast(IO[bytes], codecs.EncodedFile(stream, "utf-8", encoding, "replace") if encoding else stream)


def _or_nothing(read: Callable[[int], bytes], size: int) -> bytes:
    """Return what is read, or nothing at the end of a gzip file that is cut off or damaged."""
    try:
        return read(size)
    except (EOFError, zlib.error):
        return b""
