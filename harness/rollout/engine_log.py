"""The log that the processes of one engine share, and what it tells of a failure."""

from collections.abc import Collection
from dataclasses import dataclass
from multiprocessing.process import BaseProcess
from pathlib import Path

from harness.rollout.errors import EngineFailed
from harness.rollout.processes import first_error, killed_by

ENDING_SIGNALS = ("SIGKILL", "SIGTERM")
"""They end a process from outside: it has no last word, and an error in the log, which all share, is a consequence."""


@dataclass(slots=True)
class EngineLog:
    """The file, and how much of it an engine survived."""

    path: Path
    survived: int = 0
    """Bytes that were there when the engine last answered a call: no error in them is what it died of."""

    def answered(self) -> None:
        """The engine has answered a call."""
        self.survived = self.path.stat().st_size

    def start_failure(self, error: Exception, started: Collection[BaseProcess]) -> str:
        """Return why the engine did not start: the exception, save where a process of the engine failed, of which the log
        tells. started: the processes of the engine."""
        ended = [process for process in started if process.exitcode is not None]
        failed = any(killed_by(process) not in ENDING_SIGNALS for process in ended)
        told = self._error() if failed or isinstance(error, ChildProcessError) else ""
        return f"{told or described(error)} (whole log: {self.path})"

    def death(self, name: str, pid: int, signal_name: str) -> str:
        """Return what is known of the end of a process of the engine; signal_name as ChildWatch gives it."""
        how = f" of {signal_name}" if signal_name else ""
        if signal_name not in ENDING_SIGNALS:
            how += f": {self._error() or 'its log tells of no error'}"
        return f"engine process {name} (pid {pid}) died{how} (whole log: {self.path})"

    def _error(self) -> str:
        return first_error(self.path.read_bytes()[self.survived :].decode(errors="replace"))


def described(error: BaseException) -> str:
    """Return an exception in one line, as others are shown it."""
    return str(error) if isinstance(error, EngineFailed) else f"{type(error).__name__}: {error}"
