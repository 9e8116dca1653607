"""Commands run under supervisor.py: to their end or a deadline, and nothing of them left, whatever happens to this process."""

import json
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from harness.tools.bisection.store import Pause

SUPERVISOR = Path(__file__).with_name("supervisor.py")


class WatcherKilled(Pause):
    """The supervisor ended before its command did: the command killed it, or the kernel did for want of memory."""


@dataclass(frozen=True, slots=True)
class Ended:
    """How a command ended. code: negative for a signal."""

    code: int
    timed_out: bool
    seconds: float


def run(
    command: Sequence[str],
    log: Path,
    *,
    environment: Mapping[str, str] | None = None,
    folder: str | None = None,
    limit: float = 0.0,
    inherit: Sequence[int] = (),
    beat: Callable[[], None] | None = None,
) -> Ended:
    """Run it with its output in `log`. limit: seconds, 0 for none; inherit: descriptors of locks, held until all of it has
    ended; beat: called twice a second. A KeyboardInterrupt ends the command too. Raises WatcherKilled, OSError."""
    result = log.with_suffix(".ended")
    result.unlink(missing_ok=True)
    words = [sys.executable, "-I", "-S", str(SUPERVISOR), str(result), str(limit), "--", *command]
    with log.open("wb") as output:
        process = subprocess.Popen(
            words,
            stdin=subprocess.PIPE,
            stdout=output,
            stderr=output,
            env=environment,
            cwd=folder,
            pass_fds=tuple(inherit),
        )
        assert process.stdin is not None
        try:
            while True:
                try:
                    process.wait(0.5 if beat else None)
                    break
                except subprocess.TimeoutExpired:
                    if beat:
                        beat()
        finally:
            process.stdin.close()  # the supervisor kills what still runs, and ends
            process.wait()
    if not result.exists():
        raise WatcherKilled(f"the process that watched over {command[0]} was killed.")
    told = json.loads(result.read_text())
    result.unlink()
    return Ended(told["code"], told["timed_out"], told["seconds"])
