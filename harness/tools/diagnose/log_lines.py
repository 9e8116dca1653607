"""The lines of any log, without colours: of plain, gzipped and UTF-16 files, of JSON lines, and of run directories."""

import codecs
import gzip
import json
import sys
import zlib
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import IO, Any, cast

from harness.runtime.tracebacks import LogLine, log_line, without_colours

STDIN = "-"
GZIP = b"\x1f\x8b"
HEAD_BYTES = 1024
LONGEST_LINE = 1 << 16  # bytes; a longer line is read in pieces
LARGEST_JSON = 1 << 23  # bytes of a .json file that is read as one value; of a larger one each line is read as text
_LOG_SUFFIXES = (".log", ".txt", ".out", ".err", ".jsonl", ".gz")
_FAILURE_KEYS = (
    "error", "traceback", "detail", "text", "said", "message", "msg", "log", "exception", "exc_info", "stack",
)  # fmt: skip
"""Keys whose values in JSON lines, ours and others', describe a failure."""
_OF_OUR_EVENTS = {"event", "rank", "host", "time"}
"""Every line of a run's events has all of these. "event" alone is not enough: structlog calls its message that."""


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
            found = [str(file) for kind in (*first, logs) for file in kind if file.is_file()]  # no pipe, no device
            if not found:
                raise ValueError(f"folder {path} must hold a log: *{', *'.join(_LOG_SUFFIXES)} or failure*.json.")
            files += found
        elif path == STDIN or folder.exists():  # a file, or a pipe, as of <(kubectl logs ...)
            files.append(path)
        else:
            raise ValueError(f"{path} does not exist; give logs, run directories, or - for standard input.")
    return list(dict.fromkeys(files))


def check_readable(files: Sequence[str]) -> None:
    """Raise ValueError for an empty or a binary file, about which no answer would mean anything."""
    for file in files:
        name = "standard input" if file == STDIN else file
        if file == STDIN:
            head = cast(Any, sys.stdin.buffer).peek(HEAD_BYTES)[:HEAD_BYTES]
        elif Path(file).is_file():  # of a pipe, what is read here would be lost
            with Path(file).open("rb") as stream:
                head = stream.read(HEAD_BYTES)
        else:
            continue
        if not head:
            raise ValueError(f"{name} is empty; give a log.")
        if b"\0" in head and not head.startswith(GZIP) and _encoding_of(head) is None:
            raise ValueError(f"{name} is a binary file; give a log.")


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
        if texts or (isinstance(value, dict) and value.keys() >= _OF_OUR_EVENTS):
            yield from ((number, uncoloured(line.encode(errors="replace"))) for line in texts)
        else:
            for offset, line in enumerate(chunk.splitlines()):
                yield from ((number + offset, uncoloured(part)) for part in line.split(b"\\n"))


def uncoloured(raw: bytes) -> bytes:
    """Return the line without terminal escapes: they would hide words from the search."""
    if b"\x1b" in raw or b"[" in raw:
        return without_colours(raw.decode("latin-1")).encode("latin-1")
    return raw


def lines_of(path: str) -> Iterator[LogLine]:
    """Yield the lines of a file, with their prefixes taken apart. Raise OSError."""
    return (log_line(number, raw.decode("utf-8", errors="replace"), path) for number, raw in raw_lines(path))


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
    if _or_nothing(stream.peek, 2).startswith(GZIP):
        stream = gzip.GzipFile(fileobj=stream)
    encoding = _encoding_of(_or_nothing(stream.peek, 2))
    return cast(IO[bytes], codecs.EncodedFile(stream, "utf-8", encoding, "replace") if encoding else stream)


def _encoding_of(head: bytes) -> str | None:
    """Return UTF-16 if the first bytes say so; None for UTF-8 and whatever is like it."""
    if head[:2] in (codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE):
        return "utf-16"
    return "utf-16-le" if head[1:2] == b"\0" else "utf-16-be" if head[:1] == b"\0" else None


def _or_nothing(read: Callable[[int], bytes], size: int) -> bytes:
    """Return what is read, or nothing at the end of a gzip file that is cut off or damaged."""
    try:
        return read(size)
    except (EOFError, zlib.error, gzip.BadGzipFile):
        return b""
