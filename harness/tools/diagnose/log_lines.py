"""The lines of any log, without colours: of plain and gzipped files, in UTF-8, UTF-16 and UTF-32, of JSON lines, and of run directories."""

import codecs
import gzip
import io
import json
import re
import sys
import zlib
from collections.abc import Iterator, Sequence
from itertools import chain, repeat
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
_LEVEL_KEYS = ("level", "levelname", "severity", "log_level")
_LEVELS = {
    "ERROR": "ERROR", "ERR": "ERROR", "FATAL": "CRITICAL", "CRITICAL": "CRITICAL", "PANIC": "CRITICAL",
    "WARNING": "WARNING", "WARN": "WARNING", "INFO": "INFO", "DEBUG": "DEBUG",
}  # fmt: skip
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
            packed = head = cast(Any, sys.stdin.buffer).peek(HEAD_BYTES)[:HEAD_BYTES]
        elif Path(file).is_file():  # of a pipe, what is read here would be lost
            with Path(file).open("rb") as stream, _opened(file) as text:
                packed, head = stream.read(HEAD_BYTES), text.read(HEAD_BYTES)
        else:
            continue
        if not head:
            raise ValueError(f"{name} is empty; give a log.")
        # A packed archive of logs has zeros too, and can be read.
        if b"\0" in head.lstrip(b"\0") and not packed.startswith(GZIP) and _encoding_of(packed) is None:
            raise ValueError(f"{name} is a binary file; give a log.")


def is_of_a_run(file: str) -> bool:
    """Return whether its place is that of a file in a run directory of this harness."""
    path = Path(file)
    return path.parent.name in ("events", "engines") or (path.suffix == ".json" and path.name.startswith("failure"))


def raw_lines(path: str) -> Iterator[tuple[int, bytes]]:
    """Yield number, from 1, and bytes (UTF-8, uncoloured) of each line of a file ("-": standard input). Raise OSError.

    A compressed file that is cut off or damaged, as after a killed job, is read as far as possible.
    """
    name = path.removesuffix(".gz")
    is_json = name.endswith((".jsonl", ".json"))
    with _opened(path) as stream:
        for number, chunk in _values(stream) if name.endswith(".json") else _pieces(stream):
            # Loggers and Docker write a table in each line of any file.
            if is_json or (chunk[:1] == b"{" and chunk.rstrip().endswith(b"}")):
                yield from _lines_of_json(number, chunk)
            else:
                yield number, uncoloured(chunk)


def _values(stream: IO[bytes]) -> Iterator[tuple[int, bytes]]:
    """Yield number and bytes of the one JSON value that a file has; of each line if it has more, or is large."""
    start = stream.read(LARGEST_JSON + 1)
    if len(start) <= LARGEST_JSON and _json_of(start) is not None:
        yield 1, start
    else:
        yield from _pieces(cast(IO[bytes], io.BufferedReader(_Chain(start, stream))))


def _lines_of_json(number: int, chunk: bytes) -> Iterator[tuple[int, bytes]]:
    """Yield what a JSON value that begins at this line says of failures; the text as it is if it is no JSON."""
    value = _json_of(chunk)
    texts = [each for text in _failure_texts(value) for each in text.splitlines()]
    if texts or (isinstance(value, dict) and value.keys() >= _OF_OUR_EVENTS):
        for prefix, text in zip(chain([_prefix_of(value)], repeat("")), texts, strict=False):
            yield number, uncoloured(f"{prefix}{text}".encode(errors="replace"))
    else:
        for offset, line in enumerate(chunk.splitlines()):
            yield from ((number + offset, uncoloured(part)) for part in line.split(b"\\n"))


def _prefix_of(value: Any) -> str:
    """Return logger and level of a row as hydra writes them, a prefix that every reader of log lines knows; "" without."""
    given = value if isinstance(value, dict) else {}
    level = next((found for key in _LEVEL_KEYS if (found := _LEVELS.get(str(given.get(key)).upper()))), "")
    logger = next((str(given[key]) for key in ("logger", "name", "logger_name") if given.get(key)), "log")
    return f"[{re.sub(r'[^0-9A-Za-z_.]', '_', logger)}][{level}] - " if level else ""


def _json_of(chunk: bytes) -> Any:
    """Parse a JSON object or list; return None for any other text."""
    try:
        return json.loads(chunk) if chunk.lstrip().startswith((b"{", b"[")) else None
    except (ValueError, RecursionError):
        return None


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


def _pieces(stream: IO[bytes]) -> Iterator[tuple[int, bytes]]:
    """Yield number and bytes of each line; of a long line, of each piece."""
    number, begins = 0, True
    while raw := stream.readline(LONGEST_LINE):
        number += begins
        begins = raw.endswith(b"\n")
        yield number, raw if raw[0] else raw.lstrip(b"\0")  # a log that was cut while it was written begins with zeros


def _opened(path: str) -> IO[bytes]:
    """Open a stream of UTF-8, once and without seeking: it may be a pipe. Its content says how it is packed and encoded."""
    stream: Any = sys.stdin.buffer if path == STDIN else Path(path).open("rb", buffering=1 << 20)  # noqa: SIM115
    if stream.peek(2).startswith(GZIP):
        stream = io.BufferedReader(_Unpacked(stream), 1 << 16)
    encoding = _encoding_of(stream.peek(HEAD_BYTES)[:HEAD_BYTES])
    if encoding is None:
        return cast(IO[bytes], stream)
    text = io.TextIOWrapper(stream, encoding, errors="replace", newline="\n")
    return cast(IO[bytes], io.BufferedReader(_Encoded(text), 1 << 16))


class _Unpacked(io.RawIOBase):
    """What a gzip file holds; one that is cut off or damaged ends there."""

    def __init__(self, packed: IO[bytes]) -> None:
        self._packed, self._stream = packed, gzip.GzipFile(fileobj=packed)

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int:
        try:
            found = self._stream.read1(len(buffer))
        except (EOFError, zlib.error, gzip.BadGzipFile):
            return 0
        buffer[: len(found)] = found
        return len(found)

    def close(self) -> None:
        self._packed.close()
        super().close()


class _Encoded(io.RawIOBase):
    """A text in UTF-8."""

    def __init__(self, text: io.TextIOWrapper) -> None:
        self._text = text

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int:
        found = self._text.read(len(buffer) // 4).encode(errors="replace")  # four bytes are the longest character
        buffer[: len(found)] = found
        return len(found)

    def close(self) -> None:
        self._text.close()
        super().close()


class _Chain(io.RawIOBase):
    """A stream whose beginning was already read: first that beginning, then the rest."""

    def __init__(self, start: bytes, rest: IO[bytes]) -> None:
        self._start, self._rest = io.BytesIO(start), rest

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int:
        found = self._start.read(len(buffer)) or self._rest.read(len(buffer))
        buffer[: len(found)] = found
        return len(found)


_BOMS = {
    codecs.BOM_UTF8: "utf-8-sig", codecs.BOM_UTF32_LE: "utf-32", codecs.BOM_UTF32_BE: "utf-32",
    codecs.BOM_UTF16_LE: "utf-16", codecs.BOM_UTF16_BE: "utf-16",
}  # fmt: skip
"""How a text begins -> its encoding. The first that fits counts."""
_WIDE = {"utf-32-le": (4, 0), "utf-32-be": (4, 3), "utf-16-le": (2, 0), "utf-16-be": (2, 1)}
"""Encoding -> bytes of a character, and which of them an English letter has; the others are zero. The first that fits counts."""


def _encoding_of(head: bytes) -> str | None:
    """Return UTF-16 or UTF-32 if the first bytes say so; None for UTF-8 and whatever is like it."""
    for mark, name in _BOMS.items():
        if head.startswith(mark):
            return name
    for name, (width, at) in _WIDE.items():
        places = [head[each::width] for each in range(width)]
        letters = places.pop(at)
        zeros = min(each.count(0) / max(1, len(each)) for each in places)
        if letters and zeros > 0.5 and letters.count(0) < 0.1 * len(letters):
            return name
    return None
