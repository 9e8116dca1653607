"""The lines of any log in UTF-8, without colours: of plain and gzipped files, of JSON lines, and of run directories."""

import gzip
import io
import json
import sys
import zlib
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import IO, Any, cast

from harness.tools.diagnose.tracebacks import LogLine, log_line, without_colours

STDIN = "-"
GZIP = b"\x1f\x8b"
HEAD_BYTES = 1024
LONGEST_LINE = 1 << 16  # bytes; a longer line is read in pieces
LARGEST_JSON = 1 << 23  # bytes of a .json file that is read as one table; of a larger one each line is read as text
_LOG_SUFFIXES = (".log", ".txt", ".out", ".err", ".jsonl", ".gz")
_FAILURE_KEYS = (
    "error", "traceback", "detail", "text", "said", "message", "msg", "log", "exception", "exc_info", "stack",
)  # fmt: skip
"""Keys whose values in JSON lines, ours and others', describe a failure."""
INJECTED = "injected"
"""The event of a fault that the run was told to have."""
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
    """Raise ValueError for a file that is empty or is not text in UTF-8, about which no answer would mean anything."""
    for file in files:
        name = "standard input" if file == STDIN else file
        if file == STDIN:
            head = cast(Any, sys.stdin.buffer).peek(HEAD_BYTES)[:HEAD_BYTES]
            head = b"packed" if head.startswith(GZIP) else head
        elif Path(file).is_file():  # of a pipe, what is read here would be lost
            with _opened(file) as text:
                head = text.read(HEAD_BYTES)
        else:
            continue
        if not head:
            raise ValueError(f"{name} is empty; give a log.")
        if b"\0" in head.lstrip(b"\0"):
            raise ValueError(
                f"{name} is not text in UTF-8; unpack an archive, convert a text, such as with `iconv -f UTF-16 -t UTF-8`."
            )


def is_of_a_run(file: str) -> bool:
    """Return whether its place is that of a file in a run directory of this harness."""
    path = Path(file)
    return path.parent.name in ("events", "engines") or (path.suffix == ".json" and path.name.startswith("failure"))


def raw_lines(path: str) -> Iterator[tuple[int, bytes]]:
    """Yield number, from 1, and bytes (UTF-8, uncoloured) of each line of a file ("-": standard input). Raise OSError.

    A compressed file that is cut off or damaged, as after a killed job, is read as far as possible.
    """
    if path.removesuffix(".gz").endswith(".json") and Path(path).is_file():
        with _opened(path) as stream:
            texts = _failure_texts(_table_of(stream.read(LARGEST_JSON)))
        if texts:  # the file is one table, such as a watchdog's verdict
            yield from ((1, uncoloured(text.encode(errors="replace"))) for text in texts)
            return
    with _opened(path) as stream:
        for number, chunk in _pieces(stream):
            # Loggers and Docker write a table in each line of any file.
            is_table = chunk[:1] == b"{" and chunk.rstrip().endswith(b"}")
            yield from _lines_of_table(number, chunk) if is_table else [(number, uncoloured(chunk))]


def _lines_of_table(number: int, chunk: bytes) -> Iterator[tuple[int, bytes]]:
    """Yield what a JSON table in one line says of failures; the line as it is if it says nothing."""
    table = _table_of(chunk)
    texts = _failure_texts(table)
    if table.get("event") == INJECTED:
        texts.append(f"{INJECTED}: {table.get('fault')}")
    if texts or table.keys() >= _OF_OUR_EVENTS:
        yield from ((number, uncoloured(text.encode(errors="replace"))) for text in texts)
    else:
        yield number, uncoloured(chunk)


def _table_of(chunk: bytes) -> Mapping[str, Any]:
    """Parse a JSON object; return an empty one for any other text."""
    try:
        value = json.loads(chunk) if chunk.lstrip().startswith(b"{") else {}
    except (ValueError, RecursionError):
        return {}
    return value if isinstance(value, dict) else {}


def uncoloured(raw: bytes) -> bytes:
    """Return the line without terminal escapes: they would hide words from the search."""
    if b"\x1b" in raw or b"[" in raw:
        return without_colours(raw.decode("latin-1")).encode("latin-1")
    return raw


def lines_of(path: str) -> Iterator[LogLine]:
    """Yield the lines of a file, with their prefixes taken apart. Raise OSError."""
    return (log_line(number, raw.decode("utf-8", errors="replace"), path) for number, raw in raw_lines(path))


def _failure_texts(table: Mapping[str, Any]) -> list[str]:
    """Return the lines of the table's own texts about a failure, not of tables within it."""
    values = [value for key, value in table.items() if key in _FAILURE_KEYS]
    texts = [each for value in values for each in (value if isinstance(value, list) else [value])]
    return [line for text in texts if isinstance(text, str) for line in text.splitlines()]


def _pieces(stream: IO[bytes]) -> Iterator[tuple[int, bytes]]:
    """Yield number and bytes of each line; of a long line, of each piece."""
    number, begins = 0, True
    while raw := stream.readline(LONGEST_LINE):
        number += begins
        begins = raw.endswith(b"\n")
        yield number, raw if raw[0] else raw.lstrip(b"\0")  # a log that was cut while it was written begins with zeros


def _opened(path: str) -> IO[bytes]:
    """Open a stream, once and without seeking: it may be a pipe. Its content says whether it is packed."""
    stream: Any = sys.stdin.buffer if path == STDIN else Path(path).open("rb", buffering=1 << 20)  # noqa: SIM115
    if stream.peek(2).startswith(GZIP):
        stream = io.BufferedReader(_Unpacked(stream), 1 << 16)
    return cast(IO[bytes], stream)


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
