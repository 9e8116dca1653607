"""Ranks of a real torchrun that are forked, side by side with those that torchrun starts itself."""

import json
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

import psutil
import pytest

from harness.config.layers import ConfigError
from harness.runtime.processes import is_alive
from harness.tools.forked_ranks import check_numbers, script_of

pytestmark = pytest.mark.slow

HERE = Path(__file__).parent
REPOSITORY = HERE.parents[2]
LAUNCHERS = {
    "forked": [str(HERE / "torchrun_with_cheap_imports.py")],
    "plain": ["-m", "torch.distributed.run"],
}
SECONDS = 180


class Run:
    """A torchrun of two ranks that run rank.py, and everything that it started."""

    def __init__(
        self,
        launcher: str,
        folder: Path,
        *words: str,
        options: tuple[str, ...] = (),
        variables: Mapping[str, str] | None = None,
    ) -> None:
        self.folder, self.log = folder, folder / "screen"
        with self.log.open("w") as screen:
            self.process = subprocess.Popen(
                [
                    *[sys.executable, *LAUNCHERS[launcher], "--standalone", "--local-addr=127.0.0.1"],
                    *["--nproc-per-node=2", *options, str(HERE / "rank.py"), str(folder), *words],
                ],
                cwd=folder,
                env=os.environ | {"PYTHONPATH": str(REPOSITORY)} | (variables or {}),
                stdin=subprocess.DEVNULL,
                stdout=screen,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
        self.seen: set[psutil.Process] = set()

    def ranks(self) -> list[dict[str, Any]]:
        """What both ranks say, once they have said it."""
        self.wait_until(lambda: len(list(self.folder.glob("rank*.json"))) == 2)
        with suppress(psutil.NoSuchProcess):  # torchrun may have ended by now, and everything with it
            self.seen |= set(psutil.Process(self.process.pid).children(recursive=True))
        return [json.loads((self.folder / f"rank{rank}.json").read_text()) for rank in range(2)]

    def wait_until(self, holds: Callable[[], bool]) -> None:
        end = time.monotonic() + SECONDS
        while not holds():
            assert time.monotonic() < end, self.screen()
            time.sleep(0.02)

    def ended(self) -> int:
        """The exit code, once nothing is left of the run."""
        code = self.process.wait(SECONDS)
        self.wait_until(lambda: not any(map(is_alive, self.seen)))
        return code

    def screen(self) -> str:
        return self.log.read_text()


Start = Callable[..., Run]


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Start]:
    runs: list[Run] = []

    def start_run(launcher: str, *words: str, **named: Any) -> Run:
        folder = tmp_path / launcher
        folder.mkdir()
        runs.append(Run(launcher, folder, *words, **named))
        return runs[-1]

    yield start_run
    for run in runs:
        with suppress(ProcessLookupError):
            run.process.kill()
        for process in run.seen:
            with suppress(psutil.NoSuchProcess):
                process.kill()
        run.process.wait()


def test_a_forked_rank_is_what_torchrun_starts_and_writes_where_it_is_told(start: Start) -> None:
    seen = {}
    for launcher in LAUNCHERS:
        to_files = ("--redirects=3", "--tee=0:2", "--log-dir=logs")
        run = start(launcher, "", "a word", "\udcff", options=to_files)
        seen[launcher] = run.ranks()
        assert run.ended() == 0
        for number, rank in enumerate(seen[launcher]):
            assert rank.pop("parent") == run.process.pid and rank["leads"] and rank["local"] == str(number)
            assert rank.pop("argv")[1:] == ["", "a word", "\udcff"]
            assert rank.pop("folder") == str(run.folder)
            assert rank.pop("forked") == (launcher == "forked") and rank["shown as Python"]
            for name, text in (("stdout.log", "out"), ("stderr.log", "error")):
                [file] = (run.folder / "logs").glob(f"*/attempt_0/{number}/{name}")
                assert f"{text} of rank {number}" in file.read_text().splitlines()
        assert "error of rank 0" in run.screen() and "out of rank" not in run.screen()
    assert seen["forked"] == seen["plain"]


@pytest.mark.parametrize(
    ("word", "options", "code", "how"),
    [
        ("exit3", ("--max-restarts=1",), 3, "ended with exit code 3"),
        ("kill", (), 1, "was killed by SIGKILL"),
        ("raise", (), 1, "ended with exit code 1"),
    ],
)
def test_torchrun_reports_how_a_rank_ended_and_ends_the_other(
    start: Start, word: str, options: tuple[str, ...], code: int, how: str
) -> None:
    run = start("forked", "wait", word, options=options)
    assert run.ended() == code
    screen = run.screen()
    assert re.fullmatch(rf"FAILED: rank 1 \(pid \d+\) {how}", screen.splitlines()[-1])
    assert screen.count("out of rank 1") == 1 + len(options), "it is started again as torchrun is told"
    if word == "raise":
        trace = screen[screen.index("Traceback (most recent call last):") :].splitlines()
        assert trace[1].endswith("in <module>") and f'"{HERE}/rank.py"' in trace[1]
        assert "ArithmeticError: planted on rank 1" in trace


def test_a_signal_to_torchrun_ends_all_ranks(start: Start) -> None:
    run = start("forked", "wait")
    run.ranks()
    run.process.send_signal(signal.SIGTERM)
    assert run.ended() == 128 + signal.SIGTERM
    assert run.screen().splitlines()[-1].startswith("the run was interrupted by ")


def test_a_signal_to_the_whole_group_ends_all(start: Start) -> None:
    """As Ctrl-C does."""
    run = start("forked", "wait")
    run.ranks()
    os.killpg(run.process.pid, signal.SIGINT)
    assert run.ended() == 130
    # Of the ranks, to which torchrun passes it on. They may write at once, so that both stand on one line.
    assert run.screen().count("KeyboardInterrupt") == 2


def test_an_import_that_fails_is_left_to_the_ranks(start: Start, tmp_path: Path) -> None:
    (tmp_path / "broken.py").write_text("raise RuntimeError('planted')")
    run = start("forked", "return", variables={"CHEAP_IMPORTS": "broken", "PYTHONPATH": f"{tmp_path}:{REPOSITORY}"})
    assert [rank["forked"] for rank in run.ranks()] == [False, False]
    assert run.ended() == 0
    assert "planted" not in run.screen() and "Traceback" not in run.screen()


def test_a_rank_whose_variables_differ_is_started_and_it_is_said_why(start: Start, tmp_path: Path) -> None:
    (tmp_path / "reads_rank.py").write_text("import os; os.environ.get('RANK')")
    path = f"{tmp_path}:{REPOSITORY}"
    run = start("forked", "return", variables={"CHEAP_IMPORTS": "reads_rank", "PYTHONPATH": path})
    assert [rank["forked"] for rank in run.ranks()] == [False, False]
    assert run.ended() == 0
    assert "local rank 1 starts as torchrun starts it: RANK was unset during the imports" in run.screen()


def test_a_wrong_number_of_ranks_is_one_sentence() -> None:
    done = subprocess.run(
        [sys.executable, LAUNCHERS["forked"][0], "--nproc-per-node=two", str(HERE / "rank.py")],
        env=os.environ | {"PYTHONPATH": str(REPOSITORY)},
        capture_output=True,
        text=True,
        timeout=SECONDS,
    )
    assert done.returncode == 2
    assert done.stderr.splitlines()[-1].startswith("error: torchrun: ") and "Traceback" not in done.stderr


def test_only_a_script_is_forked() -> None:
    python = sys.executable
    assert script_of((python, "-u", "run.py", "word")) == ("run.py", "word")
    assert script_of((python, "-u", "-m", "module")) == ()
    assert script_of(("numactl", python, "-u", "run.py")) == ()
    assert script_of((python, "-u")) == () and script_of(("./program",)) == ()


def test_help_says_what_it_is_before_anything_is_imported() -> None:
    done = subprocess.run(
        [sys.executable, "-X", "importtime", "launch/torchrun.py", "--help"],
        cwd=REPOSITORY,
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0 and "launch/torchrun.py --nproc-per-node=2" in done.stdout
    assert "torch" not in {line.rpartition("|")[2].strip() for line in done.stderr.splitlines()}


@pytest.mark.parametrize("words", [["--nproc-per-node=two"], ["--nproc_per_node", "0"], ["--nnodes=1:x"], ["--nnodes"]])
def test_a_number_that_torchrun_cannot_read_is_found_before_it_starts(words: list[str]) -> None:
    with pytest.raises(ConfigError, match="must be a number of"):
        check_numbers([*words, "launch/ppo.py"])
    check_numbers(["--nproc-per-node=gpu", "--nnodes", "1:2", "launch/ppo.py", "--nnodes", "none"])
