"""What is known so far, on disk after every verdict: one JSON file, replaced as a whole, beside logs and resolutions."""

import fcntl
import json
import os
import re
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, field
from datetime import datetime
from pathlib import Path
from typing import IO, Any

from harness.tools.bisection.candidates import Candidate
from harness.tools.bisection.question import Question, WrongQuestion
from harness.tools.bisection.search import Verdict
from harness.tools.bisection.store import write_json

FORMAT = 1
STATE, LOCK = "state.json", "lock"
FOLDER_MODE = 0o700
"""Of folders with the output of runs."""


@dataclass(kw_only=True)
class Attempt:
    """One run of the command. code: negative for a signal."""

    code: int
    timed_out: bool
    seconds: float
    verdict: Verdict
    log: str
    """Relative to the bisect's folder."""
    reason: str = ""
    """One sentence."""
    failure: str = ""
    """The line of the log that shows its first failure."""
    slug: str = ""
    """Of the known failure that it is, by launch/diagnose.py."""
    place: str = ""
    """FILE:FUNCTION, the deepest of the moved package in its traceback; "" where there is no traceback."""
    line: int = 0
    """Number of that line in the log; 0 where it is in another file."""
    unwatched: bool = False
    """The process that watched it was killed meanwhile, so that its end is not known."""
    imported: bool = False
    """Its traceback shows that the package could be imported."""
    value: float | None = None
    """Of --metric."""


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
    """Package -> version."""
    python: str = ""
    paths: tuple[str, ...] = ()
    replayed: bool = False
    """It was not run in this bisect, but taken from a log."""

    @property
    def seconds(self) -> float:
        """Of its runs."""
        return sum(attempt.seconds for attempt in self.attempts)

    @property
    def decisive(self) -> Attempt | None:
        """The attempt that made the verdict: the first of it."""
        return next((each for each in self.attempts if each.verdict == self.verdict), None)


@dataclass(kw_only=True)
class State:
    """All of a bisect."""

    question: Question
    candidates: list[Candidate]
    closed: dict[str, str] = field(default_factory=dict)
    """Candidates that cannot be run here -> the sentence that says why."""
    records: list[Record] = field(default_factory=list)
    """In the order of their verdicts."""
    created: str = ""
    script: str = ""
    """sha256 of the script, so that a resumed bisect knows whether it is the same one."""
    wall_seconds: float = 0.0
    """Of the sessions so far, from the first resolution on."""
    resolved: bool = False
    """Every candidate was looked at."""
    resolving_seconds: float = 0.0
    """Of wall_seconds, before the first run: all candidates resolved."""
    installs: dict[str, float] = field(default_factory=dict)
    """Candidate -> seconds that making its environment took."""

    answer: dict[str, Any] = field(default_factory=dict)
    """As summary.py has it, for programs; empty until there is one."""

    def index(self, name: str) -> int:
        """Where a candidate stands."""
        return next(i for i, each in enumerate(self.candidates) if each.name == name)

    @property
    def verdicts(self) -> dict[int, Verdict]:
        position = {each.name: i for i, each in enumerate(self.candidates)}
        return {position[record.name]: record.verdict for record in self.records}

    @property
    def closed_indices(self) -> set[int]:
        return {i for i, each in enumerate(self.candidates) if each.name in self.closed}

    def end(self, verdict: Verdict) -> int | None:
        """The good or the bad end, as far out as one was judged: what lies beyond it cannot be."""
        decided = [index for index, found in self.verdicts.items() if found in ("good", "bad")]
        if not decided:
            return None
        return min(decided) if (verdict == "good") != self.question.options.find_fix else max(decided)

    def record(self, index: int) -> Record:
        """Of a candidate that has a verdict."""
        name = self.candidates[index].name
        return next(record for record in self.records if record.name == name)

    def save(self, folder: Path) -> None:
        """Raises OSError."""
        told = asdict(self) | {"format": FORMAT, "question": self.question.as_dict()}
        write_json(folder / STATE, told)


def load(folder: Path) -> State:
    """Raises WrongQuestion where there is no bisect."""
    try:
        told = json.loads((folder / STATE).read_text(encoding="utf-8"))
    except (FileNotFoundError, NotADirectoryError) as error:
        raise WrongQuestion(f"{folder} holds no bisect: it has no {STATE}.") from error
    except json.JSONDecodeError as error:
        raise WrongQuestion(f"{folder / STATE} is not JSON: {error}.") from error
    if told.pop("format", None) != FORMAT:
        raise WrongQuestion(f"{folder / STATE} was written by another version of this program; start anew.")
    return State(
        **told
        | {
            "question": Question.of(told["question"]),
            "candidates": [Candidate(**each) for each in told["candidates"]],
            "records": [_record(each) for each in told["records"]],
        }
    )


def _record(told: Mapping[str, Any]) -> Record:
    attempts = [Attempt(**each) for each in told["attempts"]]
    return Record(**{**told, "attempts": attempts, "paths": tuple(told["paths"])})


def lock(folder: Path) -> IO[str]:
    """Held until it is closed, here and by whatever inherited it. Raises WrongQuestion while another bisect runs in it."""
    _make_private(folder)
    file = (folder / LOCK).open("a+")
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        file.seek(0)
        owner = file.read().strip()
        if owner.isdecimal() and Path(f"/proc/{owner}").exists():
            raise WrongQuestion(f"{folder} is in use by the bisect of process {owner}.") from None
        fcntl.flock(file, fcntl.LOCK_EX)  # what a killed bisect started is about to be gone
    file.seek(0)
    file.truncate()
    file.write(str(os.getpid()))
    file.flush()
    return file


def _make_private(folder: Path) -> None:
    """It holds the environment and the output of runs. One that holds other things besides keeps its mode. Raises OSError."""
    folder.parent.mkdir(parents=True, exist_ok=True)
    folder.mkdir(FOLDER_MODE, exist_ok=True)
    if (folder / STATE).exists() or not any(folder.iterdir()):
        folder.chmod(FOLDER_MODE)


def owner(folder: Path) -> int | None:
    """The process whose bisect runs in a folder now; None where none does."""
    try:
        with (folder / LOCK).open("r") as file:
            fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        told = (folder / LOCK).read_text().strip()
        return int(told) if told.isdecimal() else None
    except OSError:
        return None
    return None


def new_folder(parent: Path, package: str) -> Path:
    """bisects/DATE-TIME-PACKAGE, not yet there."""
    stamp = f"{datetime.now():%Y%m%d-%H%M%S}-{re.sub(r'[^A-Za-z0-9]+', '-', package)}"
    names = [stamp, *(f"{stamp}-{number}" for number in range(2, 100))]
    return next(parent / name for name in names if not (parent / name).exists())


def latest(parent: Path, digest: str | None = None) -> Path:
    """The newest bisect, of that question where one is given. Raises WrongQuestion."""
    for folder in sorted(_bisects(parent), key=lambda each: (each / STATE).stat().st_mtime, reverse=True):
        if digest is None or load(folder).question.digest() == digest:
            return folder
    raise WrongQuestion(
        f"{parent} holds no bisect{' of this question' if digest else ''}; give its folder, or start one."
    )


def _bisects(parent: Path) -> Iterable[Path]:
    return [each.parent for each in parent.glob(f"*/{STATE}")]
