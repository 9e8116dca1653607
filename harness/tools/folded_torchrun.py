"""torchrun with its own words kept off the screen: what is left to read is what the ranks and their watchdog say.

When a run fails, torchrun prints a report and a traceback, 50 to 150 lines. They go to torchrun-HOST.log in the run
directory. If the ranks never made a run directory, the last line says which rank ended and how. The ranks' own output
still goes to the screen at once. torchrun's folder for temporary files belongs to the launch and is removed with it.
"""

import io
import json
import logging
import os
import signal
import tempfile
import traceback
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, redirect_stderr, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from harness.config.run_folder import EVENTS
from harness.runtime import redact
from harness.runtime.errors import LAUNCH_FOLDER, MISTAKE, is_said, say, told_report, wait_until_free
from harness.runtime.events import RUN, Work, phase_of_step, working
from harness.tools.interrupts import TAKEN, Interrupted, say_interrupted

WATCHDOG_SECONDS = 25.0
"""How long to wait for the watchdog to kill leftover processes and write the reports."""
FAILED = 1


@dataclass(slots=True)
class Launch:
    """One torchrun of this process, and what it printed."""

    folder: Path
    """Private; see launch_folder."""
    starting: Work
    """What is done until the first rank runs. After that the ranks speak."""
    report: io.StringIO = field(default_factory=io.StringIO)
    _until_started: ExitStack = field(default_factory=ExitStack)

    @classmethod
    @contextmanager
    def open(cls, what: str) -> Iterator["Launch"]:
        """Make the folder that the ranks see. what: see starting."""
        with ExitStack() as stack, ExitStack() as until_started:
            make = tempfile.TemporaryDirectory(prefix="harness-launch-", ignore_cleanup_errors=True)
            folder = Path(stack.enter_context(make))
            os.environ[LAUNCH_FOLDER] = str(folder)
            starting = until_started.enter_context(working(what, importing=True))
            yield cls(folder, starting, _until_started=until_started)

    def imports(self) -> AbstractContextManager[Any]:
        """Have what torch logs go to the report: its handlers keep the stream that they were made with.

        Standard error itself stays as it is, since torchrun passes on what the ranks write (--tee).
        """
        for logger in [logging.getLogger(name) for name in logging.root.manager.loggerDict if name.startswith("torch")]:
            for handler in logger.handlers:
                if isinstance(handler, logging.StreamHandler):
                    handler.setStream(self.report)
        return redirect_stderr(self.report)

    def started(self) -> None:
        """Note that a rank runs."""
        self._until_started.close()
        self.starting.what = "its ranks ran"

    def run(self, torchrun: Callable[[list[str]], None], words: Sequence[str]) -> int:
        """Call torchrun with its command line; return the exit code once the watchdog of this host has ended too."""
        from torch.distributed.elastic.multiprocessing.api import SignalException
        from torch.distributed.elastic.multiprocessing.errors import ChildFailedError

        handlers = {number: signal.getsignal(number) for number in TAKEN}  # which torchrun replaces
        code, number, last = 0, 0, ""
        try:
            torchrun(["--log-dir", str(self.folder / "torchrun"), *words])
        except Interrupted:  # before a rank was started
            raise
        except SystemExit as end:  # its command line is wrong, or --help
            return end.code if isinstance(end.code, int) else MISTAKE
        except SignalException as error:
            traceback.print_exc(file=self.report)
            number = int(error.sigval)
            code = 128 + number
        except ChildFailedError as error:
            traceback.print_exc(file=self.report)
            code, last = _how_it_ended(error)
        except ValueError as error:  # a value on its command line
            code, last = MISTAKE, f"error: torchrun: {error}"
        except Exception as error:
            code, last = FAILED, f"{traceback.format_exc()}FAILED: torchrun: {type(error).__name__}: {error}"
        for each, handler in handlers.items():
            signal.signal(each, handler)
        wait_until_free(self.folder, WATCHDOG_SECONDS)
        self._close(number, last)
        return code

    def _close(self, number: int, last: str) -> None:
        """Keep torchrun's report, and say what nobody has said. number: of the signal that came."""
        file, text = told_report(self.folder), self.report.getvalue()
        if file and text:
            with suppress(OSError):  # a full disk
                file.write_text(redact.text(text), encoding="utf-8")
        if is_said(self.folder):
            return
        if number:
            phase = file and _last_phase(file.parent)
            doing = f" in {phase}" if phase else f" while {self.starting.what}"
            say_interrupted("the run", number, doing, file and file.parent)
        elif last:
            say(f"{last}; torchrun's own report: {file}\n" if file else f"{last}\n")


def _how_it_ended(error: Any) -> tuple[int, str]:
    """Return an exit code and a sentence for the rank that torch's ChildFailedError says failed first.

    The code is that rank's own, or 1 if a signal killed it.
    """
    rank, failure = error.get_first_failure()
    who = f"FAILED: rank {rank} (pid {failure.pid})"
    if failure.exitcode < 0:
        return FAILED, f"{who} was killed by {failure.signal_name()}"
    return failure.exitcode, f"{who} ended with exit code {failure.exitcode}"


def _last_phase(run: Path) -> str:
    """Return the phase of the first rank of this host that began last, "" if there is none."""
    files = sorted((run / EVENTS).glob("rank*.jsonl"))
    lines = files[0].read_text(errors="replace").splitlines() if files else []
    for line in reversed(lines):
        if '"phase_start"' in line and line.endswith("}") and (event := json.loads(line))["phase"] != RUN:
            return phase_of_step(event["phase"], event["step"])
    return ""
