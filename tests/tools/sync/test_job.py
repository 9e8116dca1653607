"""The parts of the sync job that print, and the mistakes that launch/sync.py must find before anything heavy."""

import subprocess
import time
from types import SimpleNamespace
from typing import Any

import pytest

from harness.tools.sync.job import BenchRow, as_table, breakdown
from tests.end_to_end.launching import run_script

SECONDS = 3.0
PARTS = {"feed": 0.7, "fill": 0.3, "wait": 0.2, "scheduler_load": 0.4, "scheduler_wait": 0.1}


def row(parts: dict[str, float], seconds: float = 1.0, peak: int | None = None) -> BenchRow:
    return BenchRow("transport stream", seconds, 0.9, 2 * 10**9, parts, peak)


def test_the_breakdown_is_of_the_parts_that_were_measured() -> None:
    assert list(breakdown(row(PARTS)).values()) == pytest.approx([0.3, 0.3, 0.4, 0.2, 0.1])


def test_a_transport_without_parts_has_no_breakdown_and_none_is_negative() -> None:
    assert breakdown(row({})) == {}
    assert next(iter(breakdown(row(PARTS, seconds=0.1)).values())) == 0.0


def test_the_table_has_a_line_for_each_way_and_each_part() -> None:
    sync: Any = SimpleNamespace(nbytes=2 * 10**9, layout=range(339), buckets=range(30))
    limit = BenchRow("all-gather of the same bytes", 0.038, 0.037, 2 * 10**9, {}, None)
    text = as_table([limit, row(PARTS, peak=300 << 20)], sync)
    assert "2.000 GB, 339 tensors, 30 buckets" in text
    lines = {
        name: line.split() for line in text.splitlines() for name in (limit.way, "transport stream") if name in line
    }
    assert [word for word in lines[limit.way] if word[0].isdigit()] == ["0.0380", "0.0370", "52.6"]
    assert [word for word in lines["transport stream"] if word[0].isdigit()] == ["1.0000", "0.9000", "2.0", "300"]
    assert sum(line.endswith(" s") for line in text.splitlines()) == 5


def launch(*words: str, **environment: str) -> tuple[subprocess.CompletedProcess[str], float]:
    started = time.monotonic()
    done = run_script("launch/sync.py", *words, **environment)
    return done, time.monotonic() - started


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        (["--syncs", "0"], "--syncs = 0 and --repeats = 5 must each be at least 1."),
        (["--bench", "--repeats", "-1"], "--syncs = 3 and --repeats = -1 must each be at least 1."),
        (["--synks", "3"], "--synks (command line) is not an option; config keys are written --section.key VALUE."),
        (["--weights.bukket_size_mib", "1"], "weights.bukket_size_mib (command line) is not a key; the nearest is weights.bucket_size_mib."),
        (["--weights.transport", "pigeon"], 'weights.transport (command line) must be one of "auto", "stream", "tensor", "bucket", "distributed", "disk", got "pigeon".'),
        (["nowhere.toml"], "nowhere.toml is not a file; give the path of a TOML file, such as configs/cpu/quickstart.toml."),
    ],
)  # fmt: skip
def test_a_mistake_exits_2_with_one_sentence_at_once(words: list[str], sentence: str) -> None:
    done, seconds = launch("configs/cpu/quickstart.toml", *words)
    assert (done.returncode, done.stderr, done.stdout) == (2, f"error: {sentence}\n", "")
    assert seconds < SECONDS


def test_only_rank_0_says_it() -> None:
    done, _ = launch("--syncs", "0", RANK="1")
    assert (done.returncode, done.stderr, done.stdout) == (2, "", "")


@pytest.mark.parametrize("words", [["--syncs", "many"], ["--transports", "pigeon"], ["--repeats"]])
def test_a_value_of_the_wrong_kind_exits_2_and_names_the_option(words: list[str]) -> None:
    done, seconds = launch("configs/cpu/quickstart.toml", *words)
    assert done.returncode == 2 and words[0] in done.stdout + done.stderr
    assert seconds < SECONDS


@pytest.mark.parametrize("words", [["--dry-run"], ["--check"], ["--dry-run", "--nnodes", "2"]], ids=" ".join)
def test_an_option_of_launch_ppo_is_refused(words: list[str]) -> None:
    done, seconds = launch("configs/cpu/quickstart.toml", *words)
    assert (done.returncode, done.stdout) == (2, "")
    said = "--dry-run, --check and what belongs to them are options of launch/ppo.py; leave them out."
    assert done.stderr == f"error: {said}\n"
    assert seconds < SECONDS
