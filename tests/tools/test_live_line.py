"""The live line: on a terminal alone, and below lines that stay as they are."""

import io
import os
import pty
import re
import select
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from harness.runtime.events import Console, EventLog
from harness.runtime.observer import Observers
from harness.tools import live_line
from harness.tools.command_line import parse
from harness.tools.live_line import ERASE, LinesAbove, LiveLine


def run_on(stream: Any, folder: Path, rank: int = 0) -> tuple[LiveLine, EventLog]:
    line = LiveLine()
    console = Console(stream, launched=time.time()) if rank == 0 else None
    log = EventLog(folder / "rank0.jsonl", rank, "here", console, observer=Observers([line]))
    run: Any = SimpleNamespace(events=log, config=parse(["--run.steps", "4"]).config)
    line.met(run)
    return line, log


def test_a_terminal_shows_step_phase_seconds_reward_and_throughput(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(live_line, "REFRESH_SECONDS", 0.02)
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setenv("COLUMNS", "100")
    master, slave = pty.openpty()
    line, log = run_on(os.fdopen(slave, "w"), tmp_path)
    line.measured({"kind": "step", "step": 1, "reward_mean": 0.125, "tokens_per_second/step": 1234.5})
    with log.phase("run"), log.phase("update_actor", 2):
        end = time.monotonic() + 30
        while line.above and "update_actor" not in line.above.line and time.monotonic() < end:
            time.sleep(0.01)
        log.say("a line of the console")
    line.passed()
    log.close()
    shown = ""
    while select.select([master], [], [], 1.0)[0]:  # a terminal hands on what is written piece by piece
        shown += os.read(master, 1 << 16).decode()
    drawn = r"step 2 \(3 of 4\)  update_actor \d+ s  reward 0\.125  1,234 tokens/s\r"
    assert re.search(re.escape(ERASE) + drawn, shown), shown
    (said,) = [each for each in shown.split("\n") if "a line of the console" in each]
    alone = said.removesuffix("\r").rpartition(ERASE)[2]
    assert alone.startswith("[") and alone.endswith("s] a line of the console"), "nothing else on its line"
    assert shown.endswith(ERASE), "nothing stays behind"
    assert "\x1b[?25l" not in shown, "the cursor stays"


def test_a_log_gets_plain_lines_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(live_line, "REFRESH_SECONDS", 0.01)
    stream = io.StringIO()
    line, log = run_on(stream, tmp_path)
    with log.phase("sync", 0):
        log.say("hello")
        time.sleep(0.05)
    line.passed()
    log.close()
    assert stream.getvalue().count("\n") == 1 and "\x1b" not in stream.getvalue() and "\r" not in stream.getvalue()
    run_on(stream, tmp_path, rank=1)


def test_a_line_is_cut_where_the_terminal_ends_and_a_failure_erases_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "12")
    stream = io.StringIO()
    above = LinesAbove(stream)
    above.show("0123456789abcdef")
    assert stream.getvalue() == f"{ERASE}0123456789a\r"
    line = LiveLine(above=above)
    line.failed("ValueError", "")
    assert stream.getvalue().endswith(ERASE)


def test_the_place_of_phases_outside_steps_and_of_the_final_check() -> None:
    line = LiveLine(steps=2)
    line.phase_begins("start_engine", None)
    assert line.text() == "start_engine 0 s"
    line.phase_ends("start_engine", None)
    assert line.text() == ""
    line.phase_begins("sync", 2)
    line.phase_begins("verify_fingerprints", 2)
    assert line.text() == "final check  verify_fingerprints 0 s"
