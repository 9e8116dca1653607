"""All that a bisect knows, in one JSON file next to the logs of the runs.

It is replaced as a whole after every verdict.
"""

import fcntl
import json
import os
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import IO

import msgspec

from harness.config.mistakes import ConfigError
from harness.config.run_folder import FOLDER_MODE
from harness.runtime.files import is_own_folder, replace_file
from harness.tools.bisection.question import Question
from harness.tools.trial.environment import Environment
from harness.tools.trial.indexes import Candidate
from harness.tools.trial.trial import Outcome, Verdict

STATE, LOCK = "state.json", "lock"


@dataclass(kw_only=True)
class Record:
    """One candidate's verdict."""

    name: str
    verdict: Verdict
    reason: str
    environment: Environment
    imported: str = ""
    """Which file its Python imports as the package: a clause. Empty if it was not run."""
    attempts: list[Outcome] = field(default_factory=list)
    """Empty if it cannot be installed."""

    @property
    def seconds(self) -> float:
        return sum(attempt.seconds for attempt in self.attempts)

    @property
    def decisive(self) -> Outcome | None:
        """Return the first attempt with the candidate's own verdict."""
        return next((each for each in self.attempts if each.verdict == self.verdict), None)


@dataclass(kw_only=True)
class State:
    """All that a bisect knows: its question, its candidates, and their verdicts so far."""

    question: Question
    candidates: list[Candidate]
    python: str = ""
    """The interpreter with which the bisect began, and with which it goes on; "" before its first run."""
    records: list[Record] = field(default_factory=list)
    unfinished: dict[str, list[Outcome]] = field(default_factory=dict)
    """Runs of a candidate that has no verdict yet, by its name: with --repeat it takes several."""
    reverted: Record | None = None
    """Of a bisect over commits that found one: the newer end without that commit."""
    control: Record | None = None
    """The newer end itself, run again. None unless `reverted` ended as the older end did."""

    def index(self, name: str) -> int:
        return next(i for i, each in enumerate(self.candidates) if each.name == name)

    @property
    def verdicts(self) -> dict[int, Verdict]:
        position = {each.name: i for i, each in enumerate(self.candidates)}
        return {position[record.name]: record.verdict for record in self.records}

    @property
    def good_end(self) -> int:
        return len(self.candidates) - 1 if self.question.options.find_fix else 0

    @property
    def bad_end(self) -> int:
        return 0 if self.question.options.find_fix else len(self.candidates) - 1

    def record(self, index: int) -> Record:
        name = self.candidates[index].name
        return next(record for record in self.records if record.name == name)

    def save(self, folder: Path) -> None:
        """Write it, all or nothing. Raises OSError."""
        replace_file(folder / STATE, json.dumps(asdict(self), indent=1))


def load_state(folder: Path) -> State:
    """Return the state of the bisect in a folder. Raises ConfigError, also if others can write to the folder.

    It holds the command that is run, and the interpreters that run it.
    """
    if (folder / STATE).exists() and not is_own_folder(folder.absolute()):
        raise ConfigError(
            f"{folder} must be a folder of yours that nobody else can write to, because its {STATE} says what is run; if you"
            " trust it, copy it with `cp -r` and run `chmod 700` on the copy."
        )
    try:
        return msgspec.convert(json.loads((folder / STATE).read_text(encoding="utf-8")), State)
    except (FileNotFoundError, NotADirectoryError) as error:
        raise ConfigError(f"there is no bisect in {folder}: it has no {STATE}.") from error
    except (ValueError, RecursionError, msgspec.ValidationError) as error:
        raise ConfigError(
            f"{folder / STATE} was cut off, or another version of this program wrote it: {error}."
        ) from error


def lock_folder(folder: Path) -> IO[str]:
    """Lock it until every process that has inherited the file closes it.

    Raises ConfigError if another bisect has it, or the folder cannot be written.
    """
    try:
        folder.parent.mkdir(parents=True, exist_ok=True)
        folder.mkdir(FOLDER_MODE, exist_ok=True)
        file = (folder / LOCK).open("a+")
    except OSError as error:
        raise ConfigError(f"the folder {folder} cannot be written: {error.strerror}.") from error
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        file.seek(0)
        owner = file.read()
        if owner and Path(f"/proc/{owner}").exists():
            raise ConfigError(f"{folder} is in use by the bisect of process {owner}.") from None
        fcntl.flock(file, fcntl.LOCK_EX)  # a killed bisect had it, and the run that it started is about to end
    file.truncate(0)
    file.write(str(os.getpid()))
    file.flush()
    return file


def latest_folder(parent: Path) -> Path:
    """Return the folder of the newest bisect. Raises ConfigError if there is none."""
    files = sorted(parent.glob(f"*/{STATE}"), key=lambda file: file.stat().st_mtime)
    if not files:
        raise ConfigError(f"there is no bisect in {parent}; give its folder, or start one.")
    return files[-1].parent
