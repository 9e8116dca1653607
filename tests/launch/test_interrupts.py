"""Ctrl-C and SIGTERM in programs that are no ranks: a sentence is the last line, and nothing is left."""

import os
import pty
import select
import signal
import sys
import time
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import pytest

from tests.end_to_end.launching import QUICKSTART

REPOSITORY = Path(__file__).parents[2]
SECONDS = 120


class Terminal:
    """A program in a terminal of its own, where Ctrl-C reaches all processes in the foreground."""

    def __init__(self, tmp_path: Path, *words: str) -> None:
        self.folder = tmp_path / "temporary"
        self.folder.mkdir()
        self.screen = ""
        environment = os.environ | {"TMPDIR": str(self.folder), "HARNESS_VENV": "none"}
        self.pid, self.descriptor = pty.fork()
        if self.pid == 0:
            os.chdir(REPOSITORY)
            os.execve(sys.executable, [sys.executable, *words], environment)

    def read_until(self, text: str = "") -> str:
        """The screen, once the text is on it; without one, once the program has ended."""
        until = time.monotonic() + SECONDS
        while not text or text not in self.screen:
            assert time.monotonic() < until, self.screen
            if select.select([self.descriptor], [], [], 1.0)[0]:
                try:
                    self.screen += os.read(self.descriptor, 1 << 16).decode(errors="replace")
                except OSError:  # the terminal's last process has ended
                    assert not text, self.screen
                    return self.screen
        return self.screen

    def press_ctrl_c(self) -> None:
        os.write(self.descriptor, b"\x03")

    def end(self) -> tuple[int, list[str]]:
        """The exit code, and the lines of the screen."""
        screen = self.read_until()
        return os.waitstatus_to_exitcode(os.waitpid(self.pid, 0)[1]), screen.splitlines()


@pytest.fixture
def terminals() -> Iterator[list[Terminal]]:
    started: list[Terminal] = []
    yield started
    for each in started:
        with suppress(ProcessLookupError):
            os.kill(each.pid, signal.SIGKILL)


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_quickstart_while_it_imports(number: signal.Signals, tmp_path: Path, terminals: list[Terminal]) -> None:
    terminal = Terminal(tmp_path, "launch/quickstart.py", "--run.dir", str(tmp_path / "run"))
    terminals.append(terminal)
    terminal.read_until("importing torch")
    if number == signal.SIGINT:
        terminal.press_ctrl_c()
    else:
        os.kill(terminal.pid, number)
    code, lines = terminal.end()
    assert code == 128 + number
    assert number.name in lines[-1] and "while importing torch, transformers and SGLang" in lines[-1]
    assert not any("Traceback" in line for line in lines)
    assert list(terminal.folder.iterdir()) == [] and not (tmp_path / "run").exists()


def test_full_size_while_it_imports(tmp_path: Path, terminals: list[Terminal]) -> None:
    terminal = Terminal(tmp_path, "launch/full_size.py", "deepseek_v3", "--tp", "16")
    terminals.append(terminal)
    terminal.read_until("importing SGLang")
    terminal.press_ctrl_c()
    code, lines = terminal.end()
    assert code == 130 and "SIGINT" in lines[-1] and "Traceback" not in terminal.screen
    assert list(terminal.folder.iterdir()) == []


@pytest.mark.slow
def test_a_run_says_which_phase_was_interrupted_and_where_its_folder_is(
    tmp_path: Path, terminals: list[Terminal]
) -> None:
    words = ["--nproc-per-node=2", "--local-addr=127.0.0.1", "tests/tools/watchdog/phases_with_gloo.py", QUICKSTART]
    run = tmp_path / "run"
    terminal = Terminal(tmp_path, "launch/torchrun.py", *words, "--run.steps", "4000", "--run.dir", str(run))
    terminals.append(terminal)
    terminal.read_until("mesh dp=")
    while not any('"generate"' in file.read_text() for file in (run / "events").glob("*")):
        time.sleep(0.05)
    terminal.press_ctrl_c()
    code, lines = terminal.end()
    assert code == 130
    assert "SIGINT" in lines[-1] and " of step " in lines[-1] and str(run) in lines[-1]
    assert terminal.screen.count("FIRST FAILURE: ") == 1 and "Traceback" not in terminal.screen
    assert "SignalException" in next(run.glob("torchrun-*.log")).read_text()
    assert [each.name for each in terminal.folder.iterdir() if not each.name.startswith("torchinductor")] == []


FORKING = """
from harness.runtime import events
from harness.tools import interrupts
interrupts.end_by_sentence("the program")
import os, sys, tempfile, time
with tempfile.TemporaryDirectory(), events.working("the work"):
    if os.fork():
        print("ready", flush=True)
    while True:  # a signal that comes just before a long sleep begins does not cut it short
        time.sleep(0.05)
"""


def test_a_fork_is_quiet_and_what_is_open_is_closed(tmp_path: Path, terminals: list[Terminal]) -> None:
    terminal = Terminal(tmp_path, "-c", FORKING)
    terminals.append(terminal)
    terminal.read_until("ready")
    terminal.press_ctrl_c()
    code, lines = terminal.end()
    assert code == 130
    assert lines[-1] == "the program was interrupted by Ctrl-C (SIGINT) while the work"
    assert terminal.screen.count("interrupted") == 1 and "Traceback" not in terminal.screen
    assert list(terminal.folder.iterdir()) == []
