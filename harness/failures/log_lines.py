"""Lines of anyone's log: plain, gzipped, of a run directory; without colours and without the prefixes of launchers."""

import gzip
import json
import re
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import IO, Any, cast

LONGEST_LINE = 1 << 16
"""Bytes; a longer line is read in pieces of this size."""
STDIN = "-"
_LOG_SUFFIXES = (".log", ".txt", ".out", ".err", ".jsonl", ".gz")
_TOLD = ("error", "traceback", "detail", "text", "said", "message", "msg", "log", "exception", "exc_info", "stack")
"""Keys under which JSON lines, ours and others', tell of a failure."""

_ANSI = re.compile(r"\x1b\[[0-9;?]*[ -/]*[@-~]|\x1b?\[\d{1,2}(?:;\d+)*m")  # a pasted log has lost its escapes
_DAY, _CLOCK = r"\d{4}[-/]\d\d[-/]\d\d", r"\d\d:\d\d:\d\d"
_STAMP = re.compile(rf"({_DAY})[T ]({_CLOCK})(?:[.,](\d+))?")
# Each is taken off as often as one of them stands at the start. A group is a name of the process.
_PREFIXES = tuple(
    re.compile(text)
    for text in (
        r"\(([\w.:-]+ (?:pid|actor_id)=[\w:.]+(?:, (?:ip|node_id)=[\w.:]+)?)\)\s?",  # Ray
        r"\[((?i:rank|default|trainer|worker)_?\d+(?:\|\d+)?)\]:?\s?",  # torchrun
        r"\[\d+\] (?=[\[(])",  # numbered lines
        rf"\[{_DAY}[T ]{_CLOCK}(?:[.,]\d+)?Z?((?: [A-Z]{{2,5}}\d+)*)\]\s?",  # SGLang: TP, PP, DP, EP, MOE_DP
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
    whole = text = _ANSI.sub("", raw.decode("utf-8", errors="replace")).rstrip()
    stamp = _STAMP.search(text[:200])
    names: list[str] = []
    for _ in range(_MOST_PREFIXES):
        match = next((match for prefix in _PREFIXES if (match := prefix.match(text))), None)
        if match is None:
            break
        names += [name.strip() for name in match.groups() if name and name.strip()]
        text = text[match.end() :]
    return Line(file, index, number, whole, text, " ".join(names), _seconds(stamp) if stamp else None)


def raw_lines(path: str) -> Iterator[tuple[int, bytes]]:
    """Number, from 1, and bytes of each line of a file ("-": of standard input). Raises OSError."""
    if path.endswith((".jsonl", ".json")):
        yield from _told(Path(path))
        return
    number, begins = 0, True
    with _opened(path) as stream:
        while raw := stream.readline(LONGEST_LINE):
            number += begins
            begins = raw.endswith(b"\n")
            yield number, raw


def files_of(paths: Sequence[str]) -> list[str]:
    """The files to read, in the order in which a cause is looked for. Raises ValueError for one that is not there.

    Of a run directory: what its watchdogs wrote, its engines' logs, its ranks' events, then other logs.
    """
    files: list[str] = []
    for path in paths:
        folder = Path(path)
        if path == STDIN or folder.is_file():
            files.append(path)
        elif folder.is_dir():
            found = _of_folder(folder)
            if not found:
                raise ValueError(f"folder {path} holds no log: no *{', *'.join(_LOG_SUFFIXES)} and no failure*.json.")
            files += found
        else:
            raise ValueError(
                f"{path} is neither a file nor a folder; give logs, run directories, or - for standard input."
            )
    return list(dict.fromkeys(files))


def _of_folder(folder: Path) -> list[str]:
    kinds = (
        sorted(folder.glob("failure*.json")),
        sorted(folder.glob("engines/*.log*")),
        sorted(folder.glob("events/*.jsonl")),
        sorted(file for file in folder.rglob("*") if file.is_file() and file.name.endswith(_LOG_SUFFIXES)),
    )
    return [str(file) for kind in kinds for file in kind]


def _opened(path: str) -> IO[bytes]:
    if path == STDIN:
        return sys.stdin.buffer
    with open(path, "rb") as file:
        is_gzip = file.read(2) == b"\x1f\x8b"
    return cast(IO[bytes], gzip.open(path, "rb")) if is_gzip else open(path, "rb", buffering=1 << 20)


def _told(path: Path) -> Iterator[tuple[int, bytes]]:
    """What our events and verdicts tell of failures; any other JSON line as it is."""
    if path.suffix == ".json":
        text = path.read_text(encoding="utf-8", errors="replace")
        chunks = [(1, text)]
    else:
        chunks = list(enumerate(path.read_text(encoding="utf-8", errors="replace").splitlines(), 1))
    for number, chunk in chunks:
        try:
            value = json.loads(chunk)
        except ValueError:
            value = None
        told = [line for text in _strings(value) for line in text.splitlines()]
        if told or (isinstance(value, Mapping) and "event" in value):
            yield from ((number, line.encode()) for line in told)
        else:
            for offset, line in enumerate(chunk.splitlines()):
                yield number + offset, line.encode()


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
