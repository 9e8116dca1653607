"""The parts of the sync job that print, and the mistakes that launch/sync.py must find before anything heavy."""

import json
import resource
import subprocess
from contextlib import nullcontext
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from harness.config.schema import Config, Weights
from harness.runtime.observer import RunContext
from harness.tools.sync import job
from harness.tools.sync.job import BenchRow, as_table
from harness.weights.verify import WeightsDidNotArrive
from tests.end_to_end.launching import run_script

CPU_SECONDS = 3.0
LIMIT = BenchRow(way="all-gather", seconds=0.038, fastest=0.037, nbytes=2 * 10**9)


def row(way: str, **more: Any) -> BenchRow:
    values: dict[str, Any] = {"way": way, "seconds": 1.0, "fastest": 0.9} | more
    return replace(LIMIT, **values)


def test_the_table_has_a_line_for_each_way_and_blanks_for_what_was_not_measured() -> None:
    sync: Any = SimpleNamespace(nbytes=2 * 10**9, layout=range(339), buckets=range(30))
    pull = row("pull", first=1.25, copy=0.5, extra_bytes=31 << 20, sent_bytes=7_000_000)
    text = as_table([LIMIT, pull, row("bucket", first=2.0, extra_bytes=300 << 20)], sync)
    assert "2.000 GB, 339 tensors, 30 buckets" in text
    lines = {line.split()[1]: line.split() for line in text.splitlines() if len(line.split()) > 3}
    headings = [word for word in lines["way"] if word.isalpha()]
    assert headings == ["way", "seconds", "fastest", "first", "copy", "MiB", "MB"]
    figures = {way: [word for word in words if word[0].isdigit()] for way, words in lines.items()}
    assert figures["all-gather"] == ["0.0380", "0.0370", "52.6"]
    assert figures["pull"] == ["1.0000", "0.9000", "1.2500", "0.5000", "2.0", "31", "7.0"]
    assert figures["bucket"] == ["1.0000", "0.9000", "2.0000", "2.0", "300"]


@dataclass
class FakeSync:
    """In place of WeightSync: what it was asked to do, in order."""

    engine: Any
    model: Any
    weights: Weights
    folder: Path
    dtype: torch.dtype
    nbytes = 2_000_000
    layout, buckets, live = range(27), range(3), ("live",)

    def __post_init__(self) -> None:
        self.transport_name, self.link = self.weights.transport, None

    def push(self) -> None:
        DONE.append(f"push by {self.transport_name}")

    def close(self) -> None:
        DONE.append("close")


DONE: list[str] = []


@pytest.fixture
def run(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Any:
    """A run on fakes: no engine, no ranks."""
    DONE.clear()
    engine = SimpleNamespace(shutdown=lambda: DONE.append("shutdown"))
    fakes = {
        "make_engine_and_model": lambda run: (engine, None),
        "WeightSync": FakeSync,
        "choose_transport": lambda config, api, device: (config.weights.transport, "asked"),
        "perturb": lambda live, seed: DONE.append(f"perturb {seed}"),
        "weight_differences": lambda sync: [],
        "unreadable": lambda link: ["one.weight"],
        "all_gather_row": lambda sync, world, repeats: LIMIT,
        "transport_row": lambda sync, world, repeats: row(sync.transport_name, seconds=repeats * 0.019),
        "one_by_one_row": lambda sync, world, repeats: row("one tensor a call"),
    }
    for name, fake in fakes.items():
        monkeypatch.setattr(job, name, fake)
    monkeypatch.setattr(job.sglang_api, "probe", lambda: None)
    console = SimpleNamespace(show=lambda text: DONE.append(text.split()[0]))
    observer = SimpleNamespace(built=lambda name, part: None)
    events: Any = SimpleNamespace(
        say=DONE.append, observer=observer, console=console, phase=lambda *_, **__: nullcontext()
    )
    world: Any = SimpleNamespace(rank=0, device_type="cpu")
    return RunContext(config=Config(), world=world, dims=None, events=events, folder=tmp_path, launched=0.0)  # type: ignore[arg-type]


def sync_job(**changes: Any) -> job.SyncJob:
    return job.SyncJob(**{"bench": False, "syncs": 2, "repeats": 1, "one_by_one": False, "json": "", **changes})


def test_each_transport_is_verified_and_only_the_last_verdict_is_returned(run: RunContext) -> None:
    verdict = sync_job(transports=("pull", "disk"))(run)
    assert verdict.startswith("PASSED: 2 syncs of 2.0 MB in 27 tensors by disk")
    assert "not read back: one.weight" in verdict
    steps = [each for each in DONE if each.startswith(("push", "perturb", "close", "shutdown", "PASSED"))]
    assert steps[:5] == ["perturb 0", "push by pull", "perturb 1", "push by pull", "close"]
    assert steps[5:9] == ["perturb 0", "push by disk", "perturb 1", "push by disk"]
    assert steps[9:11] == ["close", "shutdown"] and "by pull" in steps[11]
    assert 'transport = "pull"' in (run.folder / "config.toml").read_text()


def test_the_first_difference_ends_the_job(run: RunContext, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(job, "weight_differences", lambda sync: ["lm_head.weight: 3 of 9 elements"])
    with pytest.raises(WeightsDidNotArrive, match=r"sync 0: 1 tensors are not what was sent: lm_head\.weight"):
        sync_job(transports=("tensor",))(run)


def test_a_bench_turns_verification_off_and_writes_one_table_of_all_transports(run: RunContext, tmp_path: Path) -> None:
    file = tmp_path / "rows.json"
    verdict = sync_job(bench=True, transports=("pull", "bucket"), one_by_one=True, json=str(file))(run)
    assert verdict.endswith("27 tensors and 3 buckets; pull 0.0190 s, 0.50 of its all-gather (0.0380 s)")
    rows = json.loads(file.read_text())
    assert [each["way"] for each in rows] == ["all-gather", "pull", "bucket", "one tensor a call"]
    assert rows[0] == asdict(LIMIT)
    settings = (run.folder / "config.toml").read_text()
    assert 'verify = "off"' in settings and 'transport = "pull"' in settings
    assert [each for each in DONE if each in ("close", "shutdown", "0.002")] == ["close", "close", "shutdown", "0.002"]


def test_a_bench_of_one_transport_may_leave_one_tensor_a_call_out(run: RunContext, tmp_path: Path) -> None:
    file = tmp_path / "rows.json"
    sync_job(bench=True, transports=("tensor",), json=str(file))(run)
    assert [each["way"] for each in json.loads(file.read_text())] == ["all-gather", "tensor"]


def launch(*words: str, **environment: str) -> tuple[subprocess.CompletedProcess[str], float]:
    """Return what it did, and its seconds of CPU, which other work on the machine does not change much."""
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    done = run_script("launch/sync.py", *words, **environment)
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    return done, after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        (["--syncs", "0"], "--syncs = 0 and --repeats = 5 must each be at least 1."),
        (["--bench", "--repeats", "-1"], "--syncs = 3 and --repeats = -1 must each be at least 1."),
        (["--synks", "3"], "--synks (command line) is not an option; the nearest is --syncs."),
        (["--weights.bukket_size_mib", "1"], "weights.bukket_size_mib (command line) is not a key; the nearest is weights.bucket_size_mib."),
        (["--weights.transport", "pigeon"], 'weights.transport (command line) must be one of "auto", "pull", "tensor", "bucket", "distributed", "disk", got "pigeon".'),
        (["nowhere.toml"], "nowhere.toml is not a file; give the path of a TOML file, such as configs/cpu/quickstart.toml."),
    ],
)  # fmt: skip
def test_a_mistake_exits_2_with_one_sentence_at_once(words: list[str], sentence: str) -> None:
    done, seconds = launch("configs/cpu/quickstart.toml", *words)
    assert (done.returncode, done.stdout, done.stderr.count("\n")) == (2, "", 1)
    assert done.stderr.startswith(f"error: {sentence}")
    assert seconds < CPU_SECONDS


def test_only_rank_0_says_it() -> None:
    done, _ = launch("--syncs", "0", RANK="1")
    assert (done.returncode, done.stderr, done.stdout) == (2, "", "")


@pytest.mark.parametrize("words", [["--syncs", "many"], ["--transports", "pigeon"], ["--repeats"]])
def test_a_value_of_the_wrong_kind_exits_2_and_names_the_option(words: list[str]) -> None:
    done, seconds = launch("configs/cpu/quickstart.toml", *words)
    assert done.returncode == 2 and words[0] in done.stdout + done.stderr
    assert seconds < CPU_SECONDS


@pytest.mark.parametrize("words", [["--dry-run"], ["--check"], ["--dry-run", "--nnodes", "2"]], ids=" ".join)
def test_an_option_of_launch_ppo_is_refused(words: list[str]) -> None:
    done, seconds = launch("configs/cpu/quickstart.toml", *words)
    assert (done.returncode, done.stdout) == (2, "")
    said = "--dry-run, --check and what belongs to them are options of launch/ppo.py; leave them out."
    assert done.stderr == f"error: {said}\n"
    assert seconds < CPU_SECONDS
