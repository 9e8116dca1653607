"""What is known so far, on disk after every verdict: one JSON file, replaced as a whole, beside logs and resolutions."""

import fcntl
import json
import os
import re
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from datetime import datetime
from pathlib import Path
from typing import IO, Any

from harness.tools.bisection.candidates import Candidate
from harness.tools.bisection.causes import Cause, cause_from
from harness.tools.bisection.question import Question, WrongQuestion
from harness.tools.bisection.search import Verdict
from harness.tools.bisection.store import write_json

FORMAT = 1
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
    unwatched: bool = False
    """Its supervisor was killed meanwhile, so that its end is not known."""
    imported: bool = False
    """Its traceback shows that the package could be imported."""
    value: float | None = None

    @property
    def cause(self) -> Cause:
        return cause_from(self.failure, code=self.code, timed_out=self.timed_out, place=self.place, slug=self.slug)


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
    created: str = ""
    script: str = ""
    """sha256 of the script, so that a resumed bisect can tell whether it changed."""
    wall_seconds: float = 0.0
    """Of all its processes, from the first resolution on."""
    resolved: bool = False
    resolving_seconds: float = 0.0
    """Of wall_seconds, before the first run."""
    installs: dict[str, float] = field(default_factory=dict)
    """Candidate -> seconds that making its environment took."""
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
        decided = [index for index, found in self.verdicts.items() if found in ("good", "bad")]
        if not decided:
            return None
        return min(decided) if (verdict == "good") != self.question.options.find_fix else max(decided)

    def record(self, index: int) -> Record:
        name = self.candidates[index].name
        return next(record for record in self.records if record.name == name)

    def save(self, folder: Path) -> None:
        """Write it, all or nothing. Raises OSError."""
        write_json(folder / STATE, asdict(self) | {"format": FORMAT})


def load_state(folder: Path) -> State:
    try:
        values = json.loads((folder / STATE).read_text(encoding="utf-8"))
    except (FileNotFoundError, NotADirectoryError) as error:
        raise WrongQuestion(f"{folder} holds no bisect: it has no {STATE}.") from error
    except json.JSONDecodeError as error:
        raise WrongQuestion(f"{folder / STATE} is not JSON: {error}.") from error
    if values.pop("format", None) != FORMAT:
        raise WrongQuestion(f"{folder / STATE} was written by another version of this program; start anew.")
    records = [
        Record(**{**each, "attempts": [Attempt(**made) for made in each["attempts"]], "paths": tuple(each["paths"])})
        for each in values.pop("records")
    ]
    candidates = [Candidate(**each) for each in values.pop("candidates")]
    question = Question.from_dict(values.pop("question"))
    return State(question=question, candidates=candidates, records=records, **values)


def lock_folder(folder: Path) -> IO[str]:
    """Lock it until the file is closed, here and wherever it was inherited. Raises WrongQuestion if another bisect has it."""
    folder.parent.mkdir(parents=True, exist_ok=True)
    folder.mkdir(FOLDER_MODE, exist_ok=True)
    if (folder / STATE).exists() or not any(folder.iterdir()):  # a folder with other things in it keeps its mode
        folder.chmod(FOLDER_MODE)
    file = (folder / LOCK).open("a+")
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        file.seek(0)
        owner = file.read().strip()
        if owner.isdecimal() and Path(f"/proc/{owner}").exists():
            raise WrongQuestion(f"{folder} is in use by the bisect of process {owner}.") from None
        fcntl.flock(file, fcntl.LOCK_EX)  # what a killed bisect started is about to end
    file.seek(0)
    file.truncate()
    file.write(str(os.getpid()))
    file.flush()
    return file


def owner_of(folder: Path) -> int | None:
    try:
        with (folder / LOCK).open("r") as file:
            fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        owner = (folder / LOCK).read_text().strip()
        return int(owner) if owner.isdecimal() else None
    except OSError:
        return None
    return None


def new_folder(parent: Path, package: str) -> Path:
    stamp = f"{datetime.now():%Y%m%d-%H%M%S}-{re.sub(r'[^A-Za-z0-9]+', '-', package)}"
    names = [stamp, *(f"{stamp}-{number}" for number in range(2, 100))]
    return next(parent / name for name in names if not (parent / name).exists())


def latest_folder(parent: Path, digest: str | None = None) -> Path:
    """Return that of the newest bisect, of that question if one is given. Raises WrongQuestion."""
    files = sorted(parent.glob(f"*/{STATE}"), key=lambda file: file.stat().st_mtime, reverse=True)
    for file in files:
        if digest is None or load_state(file.parent).question.digest() == digest:
            return file.parent
    raise WrongQuestion(
        f"{parent} holds no bisect{' of this question' if digest else ''}; give its folder, or start one."
    )
