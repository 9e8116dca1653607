"""The search as a pure function, and its runs with a stand-in for torchrun."""

import math
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest
from hypothesis import given
from hypothesis import strategies as st

from harness.tools.memory_search import (
    MemorySearch,
    candidates,
    first_error,
    largest_passing,
)

REPOSITORY = Path(__file__).resolve().parents[2]
STAND_IN = [sys.executable, str(Path(__file__).with_name("stand_in_run.py"))]
RANGES = st.tuples(st.floats(0.01, 0.5), st.floats(0.5, 0.99), st.floats(0.001, 0.2))


@given(bounds=RANGES, threshold=st.floats(0, 1))
def test_the_largest_that_passes_is_found_in_few_trials(bounds: tuple[float, float, float], threshold: float) -> None:
    tried: list[float] = []

    def passes(fraction: float) -> bool:
        tried.append(fraction)
        return fraction <= threshold

    fractions = candidates(*bounds)
    expected = max((fraction for fraction in fractions if fraction <= threshold), default=None)
    assert largest_passing(passes, fractions) == expected
    assert len(tried) == len(set(tried)) <= 3 + math.log2(len(fractions))


@given(bounds=RANGES, data=st.data())
def test_whatever_passes_it_ends_at_one_that_did(bounds: tuple[float, float, float], data: st.DataObject) -> None:
    answers: dict[float, bool] = {}

    def passes(fraction: float) -> bool:
        assert fraction not in answers
        return answers.setdefault(fraction, data.draw(st.booleans()))

    fractions = candidates(*bounds)
    found = largest_passing(passes, fractions)
    if found is None:
        assert answers == {fractions[0]: False}
    else:
        above = fractions.index(found) + 1
        assert answers[found] and (above == len(fractions) or not answers[fractions[above]])


@pytest.mark.parametrize("bounds", [(0, 0.9, 0.02), (0.5, 0.4, 0.02), (0.4, 1.0, 0.02), (0.4, 0.9, 0.0)])
def test_a_range_that_makes_no_sense_is_refused(bounds: tuple[float, float, float]) -> None:
    with pytest.raises(ValueError, match="--low|--resolution"):
        candidates(*bounds)


def gone(file: Path) -> bool:
    """Whether none of the processes in the file lives."""
    pids = [int(line) for line in file.read_text().split()]
    assert pids
    return not any(psutil.pid_exists(pid) and psutil.Process(pid).status() != psutil.STATUS_ZOMBIE for pid in pids)


@pytest.mark.long
def test_both_ways_are_searched_by_real_runs_that_leave_nothing(tmp_path: Path) -> None:
    file = tmp_path / "pids"
    said: list[str] = []
    search = MemorySearch(
        command=[*STAND_IN, str(file), "0.55", "0.85", "2"],
        timeout_seconds=60,
        folder=tmp_path,
        say=said.append,
    )
    found = search.find(candidates(0.4, 0.9, 0.1), ("all", "staged"))
    assert found == {"all": 0.5, "staged": 0.8}
    assert gone(file)
    assert said[1::2] == [str(trial) for trial in search.trials]
    failed = [outcome for outcome in search.trials if not outcome.passed]
    assert failed and all(outcome.reason == "CUresult error: 2 (out of memory)" for outcome in failed)


def test_a_run_that_hangs_is_ended_and_has_failed(tmp_path: Path) -> None:
    file = tmp_path / "pids"
    search = MemorySearch(command=[*STAND_IN, str(file), "0.9", "0.9", "0"], timeout_seconds=1, folder=tmp_path)
    assert not search.passes("staged", 0.4)
    assert search.trials[0].reason == "no end after 1 s" and "failed: no end after 1 s" in str(search.trials[0])
    assert gone(file)


@pytest.mark.parametrize("number", [pytest.param(signal.SIGINT, marks=pytest.mark.long), signal.SIGTERM])
def test_a_search_that_is_interrupted_leaves_nothing(tmp_path: Path, number: signal.Signals) -> None:
    file = tmp_path / "pids"
    script = tmp_path / "search.py"
    script.write_text(
        "import signal, sys\n"
        "from pathlib import Path\n"
        "from harness.tools.memory_search import MemorySearch\n"
        "signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))\n"
        "signal.signal(signal.SIGINT, signal.default_int_handler)\n"
        f"command = {[*STAND_IN, str(file), '1', '1', '0']!r}\n"
        f'MemorySearch(command=command, timeout_seconds=300, folder=Path({str(tmp_path)!r})).find([0.4, 0.9], ["all"])\n'
    )
    process = subprocess.Popen(
        [sys.executable, str(script)], env=os.environ | {"PYTHONPATH": str(REPOSITORY)}, stderr=subprocess.DEVNULL
    )
    end = time.monotonic() + 60
    while not (file.exists() and file.read_text()):
        assert time.monotonic() < end
        time.sleep(0.1)
    process.send_signal(number)
    assert process.wait(60) != 0
    assert gone(file)


@pytest.mark.parametrize(
    ("log", "line"),
    [
        (
            "a\n  error: x\nb\ntorch.OutOfMemoryError: CUDA out of memory.",
            "torch.OutOfMemoryError: CUDA out of memory.",
        ),
        ("a\nValueError: first\nrank 0 FAILED: second", "rank 0 FAILED: second"),
        ("a\nValueError: first\nKeyError: second", "ValueError: first"),
        ("nothing to see", ""),
    ],
)
def test_the_first_line_that_says_why(log: str, line: str) -> None:
    assert first_error(log) == line


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        ([], "error: there is no config to try"),
        (["--low", "2", "--", "configs/gpu/memory_7b.toml"], "--low 2 --high 0.95"),
        pytest.param(
            ["--", "configs/gpu/memory_7b.toml", "--actor.lr", "1"],
            "error: actor.lr (command line) is not a key",
            marks=pytest.mark.long,
        ),
        (["--lwo", "0.3", "--", "configs/gpu/memory_7b.toml"], "--lwo (command line) is not an option"),
    ],
)
def test_a_mistake_exits_2(words: list[str], sentence: str) -> None:
    done = subprocess.run(
        [sys.executable, "launch/memory.py", *words], cwd=REPOSITORY, capture_output=True, text=True, timeout=60
    )
    assert done.returncode == 2 and sentence in done.stderr
    assert "Traceback" not in done.stderr


def test_without_a_gpu_nothing_is_searched() -> None:
    words = ["launch/memory.py", "--", "configs/gpu/memory_7b.toml"]
    environment = os.environ | {"CUDA_VISIBLE_DEVICES": ""}
    done = subprocess.run([sys.executable, *words], cwd=REPOSITORY, env=environment, capture_output=True, text=True)
    assert done.returncode == 125 and done.stdout == ""
    assert done.stderr.startswith("error: CUDA_VISIBLE_DEVICES = '' hides every GPU")
