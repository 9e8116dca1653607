"""What is known so far, on disk after every verdict: one JSON file, replaced as a whole, beside logs and resolutions."""

import fcntl
import json
import os
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import IO, Any

import msgspec

from harness.tools.bisection.candidates import Candidate
from harness.tools.bisection.question import Question, WrongQuestion
from harness.tools.bisection.search import DECIDED, Verdict
from harness.tools.bisection.store import write_json

STATE, LOCK = "state.json", "lock"
FOLDER_MODE = 0o700
"""Of folders with the output of runs."""


@dataclass(kw_only=True)
class Attempt:
    """One run of the command."""

    code: int
    """Negative for a signal."""
    timed_out: bool
    seconds: float
    verdict: Verdict
    log: str
    """Relative to the bisect's folder."""
    reason: str = ""
    failure: str = ""
    """The line of the log that shows its first failure."""
    slug: str = ""
    """Of the known failure that it is, by launch/diagnose.py."""
    place: str = ""
    """FILE:FUNCTION, the deepest of the moved package in its traceback; "" without a traceback."""
    line: int = 0
    """Number of that line in the log; 0 if it is in another file."""
    may_pass: bool = False
    """The machine may be at fault, or its supervisor was killed: it is run again before it counts."""
    imported: bool = False
    """Its traceback shows that the package could be imported."""
    value: float | None = None


@dataclass(kw_only=True)
class Record:
    """One candidate's verdict."""

    name: str
    verdict: Verdict
    reason: str
    attempts: list[Attempt] = field(default_factory=list)
    waited_seconds: float = 0.0
    """For its environment, while nothing ran."""
    freeze: Mapping[str, str] = field(default_factory=dict)
    python: str = ""
    paths: tuple[str, ...] = ()
    replayed: bool = False
    """Not run in this bisect, but taken from a log."""

    @property
    def seconds(self) -> float:
        return sum(attempt.seconds for attempt in self.attempts)

    @property
    def decisive(self) -> Attempt | None:
        """Return the attempt that made the verdict: the first with it."""
        return next((each for each in self.attempts if each.verdict == self.verdict), None)


@dataclass(kw_only=True)
class State:
    """All of a bisect."""

    question: Question
    candidates: list[Candidate]
    closed: dict[str, str] = field(default_factory=dict)
    """Candidates that cannot be run here -> the sentence that says why."""
    records: list[Record] = field(default_factory=list)
    wall_seconds: float = 0.0
    """Of all its processes, from the first resolution on."""
    resolved: bool = False
    resolving_seconds: float = 0.0
    """Of wall_seconds, before the first run."""
    answer: dict[str, Any] = field(default_factory=dict)
    """For programs, as answer.as_dict returns it; empty until there is one."""

    def index(self, name: str) -> int:
        return next(i for i, each in enumerate(self.candidates) if each.name == name)

    @property
    def verdicts(self) -> dict[int, Verdict]:
        position = {each.name: i for i, each in enumerate(self.candidates)}
        return {position[record.name]: record.verdict for record in self.records}

    @property
    def closed_indices(self) -> set[int]:
        return {i for i, each in enumerate(self.candidates) if each.name in self.closed}

    def end(self, verdict: Verdict) -> int | None:
        """Return the good or the bad end: the outermost candidate that was decided."""
        outermost = min if (verdict == "good") != self.question.options.find_fix else max
        return outermost((index for index, found in self.verdicts.items() if found in DECIDED), default=None)

    def record(self, index: int) -> Record:
        name = self.candidates[index].name
        return next(record for record in self.records if record.name == name)

    def save(self, folder: Path) -> None:
        """Write it, all or nothing. Raises OSError."""
        write_json(folder / STATE, asdict(self))


def load_state(folder: Path) -> State:
    try:
        return msgspec.convert(json.loads((folder / STATE).read_text(encoding="utf-8")), State)
    except (FileNotFoundError, NotADirectoryError) as error:
        raise WrongQuestion(f"{folder} holds no bisect: it has no {STATE}.") from error
    except (json.JSONDecodeError, msgspec.ValidationError) as error:
        raise WrongQuestion(f"{folder / STATE} is of another version of this program, or cut: {error}.") from error


def lock_folder(folder: Path) -> IO[str]:
    """Lock it until the file is closed, here and wherever it was inherited. Raises WrongQuestion if another bisect has it."""
    folder.parent.mkdir(parents=True, exist_ok=True)
    folder.mkdir(FOLDER_MODE, exist_ok=True)
    file = (folder / LOCK).open("a+")
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        if (owner := owner_of(folder)) and Path(f"/proc/{owner}").exists():
            raise WrongQuestion(f"{folder} is in use by the bisect of process {owner}.") from None
        fcntl.flock(file, fcntl.LOCK_EX)  # what a killed bisect started is about to end
    file.truncate(0)
    file.write(str(os.getpid()))
    file.flush()
    return file


def owner_of(folder: Path) -> int | None:
    """Return the process that has locked the folder."""
    with suppress(OSError), (folder / LOCK).open() as file:
        try:
            fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
        except BlockingIOError:
            return int(file.read() or 0) or None
    return None


def latest_folder(parent: Path) -> Path:
    files = sorted(parent.glob(f"*/{STATE}"), key=lambda file: file.stat().st_mtime)
    if not files:
        raise WrongQuestion(f"{parent} holds no bisect; give its folder, or start one.")
    return files[-1].parent
