"""Trackers: what they are given, what is refused, and what fails."""

import importlib.util
import json
import sys
from collections.abc import Iterator, Mapping
from contextlib import suppress
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch.distributed as dist

from harness.config.layers import ConfigError
from harness.runtime.events import EventLog
from harness.tools import preflight
from harness.tools.command_line import parse
from harness.tools.trackers import trackers
from harness.tools.trackers.trackers import Tracker, TrackerWriter, check_trackers

ROWS: list[dict[str, Any]] = [
    {"kind": "step", "step": 0, "reward_mean": 0.25, "seconds/generate": 1.5, "memory/ranks_mib": {"sync": {}}},
    {"kind": "step", "step": 1, "reward_mean": 0.5, "seconds/generate": 1.25, "memory/ranks_mib": {"sync": {}}},
    {"kind": "final_check", "final/step": 2, "final/reward_mean": 0.75},
]


@pytest.fixture
def run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """What an observer of the only rank is given; no login, and no settings of this machine's user."""
    for name in ("WANDB_API_KEY", "WANDB_IDENTITY_TOKEN_FILE", "WANDB_MODE", "WANDB_BASE_URL", "WANDB_PROJECT"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("NETRC", str(tmp_path / "netrc"))
    for name in ("WANDB_CONFIG_DIR", "WANDB_CACHE_DIR", "WANDB_DATA_DIR"):
        monkeypatch.setenv(name, str(tmp_path / "own"))
    dist.init_process_group("gloo", init_method=f"file://{tmp_path}/store", rank=0, world_size=1)
    folder = tmp_path / "run-7"
    folder.mkdir()
    words = ["--engine.args.api_key", '"hunter2hunter2"', "--trackers.project", "quick", "--run.seed", "41"]
    events = EventLog(folder / "events" / "rank0.jsonl", 0, "here")
    world = SimpleNamespace(rank=0)
    yield SimpleNamespace(folder=folder, world=world, events=events, config=parse(words).config)
    events.close()
    dist.destroy_process_group()


def said(run: Any) -> list[str]:
    return [json.loads(line)["text"] for line in run.events.path.read_text().splitlines()]


def write(writer: TrackerWriter, run: Any) -> None:
    """As a run does it."""
    writer.resolved(run)
    for row in ROWS:
        writer.measured(row)
    writer.phase_begins("shutdown", None)
    writer.passed()


def test_tensorboard_has_each_number_at_its_step_and_the_config(run: Any) -> None:
    pytest.importorskip("tensorboard", reason="tensorboard is not installed")
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    write(TrackerWriter(["tensorboard"]), run)
    found = EventAccumulator(str(run.folder / "tensorboard"))
    found.Reload()
    assert [(each.step, each.value) for each in found.Scalars("reward_mean")] == [(0, 0.25), (1, 0.5)]
    assert [(each.step, each.value) for each in found.Scalars("final/reward_mean")] == [(2, 0.75)]
    assert "memory/ranks_mib" not in found.Tags()["scalars"] and "seconds/generate" in found.Tags()["scalars"]
    (config,) = found.Tensors("config/text_summary")
    shown = config.tensor_proto.string_val[0].decode()
    assert "seed = 41" in shown and "hunter2" not in shown
    assert f"tracker tensorboard: tensorboard --logdir {run.folder}/tensorboard" in said(run)


def test_wandb_without_a_login_is_offline_and_has_each_number_and_the_config(
    run: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On a stand-in for the package, whose files are its own."""
    asked, logged, ended = dict[str, Any](), list[tuple[int, Any]](), list[Any]()
    started = SimpleNamespace(
        url=None,
        dir=f"{run.folder}/wandb/files",
        log=lambda values, step: logged.append((step, values)),
        finish=lambda exit_code: ended.append(exit_code),
    )
    wandb = SimpleNamespace(
        api=SimpleNamespace(api_key=None),
        Settings=dict,
        init=lambda **given: asked.update(given) or started,
        teardown=lambda: ended.append("waited"),
    )
    monkeypatch.setitem(sys.modules, "wandb", wandb)  # type: ignore[arg-type]
    write(TrackerWriter(["wandb"]), run)
    assert (asked["project"], asked["name"], asked["mode"]) == ("quick", "run-7", "offline")
    assert asked["dir"] == str(run.folder) and asked["settings"]["console"] == "off"
    assert asked["config"]["run"]["seed"] == 41 and asked["config"]["engine"]["args"]["api_key"].startswith("[redacted")
    assert [step for step, _ in logged] == [0, 1, 2] and ended == [0, "waited"]
    assert logged[1][1]["reward_mean"] == 0.5 and "memory/ranks_mib" not in logged[1][1]
    assert f"tracker wandb: offline; wandb sync {run.folder}/wandb" in said(run)


def test_a_run_outlives_the_process_that_writes_for_wandb(run: Any) -> None:
    pytest.importorskip("wandb", reason="wandb is not installed")
    import psutil

    before, writer = {each.pid for each in psutil.Process().children()}, TrackerWriter(["wandb"])
    writer.resolved(run)
    started = [each for each in psutil.Process().children() if each.pid not in before]
    assert started, "wandb has a process of its own"
    for each in started:
        each.kill()
    psutil.wait_procs(started, timeout=10)
    for step in range(100):
        writer.measured({"kind": "step", "step": step, "reward_mean": 0.5})
    writer.phase_begins("shutdown", None)
    writer.passed()
    assert len([line for line in said(run) if line.startswith("warning: tracker wandb failed at step ")]) == 1
    with suppress(ConnectionError):
        importlib.import_module("wandb").teardown()  # which the end of this process would try, and print a traceback


class Recorder:
    """A tracker that remembers steps. It fails at the step `fails_at`, or as it closes if that is -1."""

    def __init__(self, fails_at: int | None = None) -> None:
        self.fails_at, self.steps, self.closed = fails_at, list[int](), False

    def open(self, run: Any) -> Tracker:
        return Tracker("nowhere", self.write, self.close)

    def write(self, values: Mapping[str, float], step: int) -> None:
        if step == self.fails_at:
            raise ConnectionError("the server\nis gone")
        self.steps.append(step)

    def close(self) -> None:
        self.closed = True
        if self.fails_at == -1:
            raise OSError("disk full")


@pytest.mark.parametrize(
    ("fails_at", "steps", "where"), [(1, [0], "at step 1"), (-1, [0, 1, 2], "at its end"), (None, [0, 1, 2], "")]
)
def test_a_tracker_that_fails_is_left_out_with_a_warning_and_the_others_go_on(
    run: Any, monkeypatch: pytest.MonkeyPatch, fails_at: int | None, steps: list[int], where: str
) -> None:
    first, second = Recorder(fails_at), Recorder()
    monkeypatch.setattr(trackers, "TRACKERS", {"tensorboard": first.open, "wandb": second.open})
    write(TrackerWriter(["tensorboard", "wandb"]), run)
    assert first.steps == steps and second.steps == [0, 1, 2] and second.closed
    warnings = [line for line in said(run) if line.startswith("warning: ")]
    assert len(warnings) == (1 if where else 0)
    assert all(f"tracker tensorboard failed {where}" in line and "metrics.jsonl" in line for line in warnings)


def test_a_tracker_that_does_not_start_ends_the_run_on_every_rank(run: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(run: Any) -> Tracker:
        raise PermissionError("401 from the\nserver")

    monkeypatch.setattr(trackers, "TRACKERS", {"wandb": refuse})
    with pytest.raises(
        ConfigError, match=r"tracker wandb cannot start \(PermissionError: 401 from the server\); leave it out"
    ):
        TrackerWriter(["wandb"]).resolved(run)


def test_ranks_other_than_0_start_nothing(run: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(trackers, "TRACKERS", {})
    run.world.rank = 1
    write(TrackerWriter(["wandb"]), run)


def config_of(*names: str) -> Any:
    return parse(["--trackers.names", ",".join(names)]).config


def test_a_folder_of_that_name_is_no_package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "wandb").mkdir()  # wandb makes one in the current folder
    monkeypatch.setattr(sys, "path", [str(tmp_path)])
    monkeypatch.delitem(sys.modules, "wandb", raising=False)
    importlib.invalidate_caches()
    with pytest.raises(ConfigError, match='trackers.names has "wandb", but .* has no package wandb; install it with'):
        check_trackers(config_of("wandb"))


def test_an_absent_package_ends_rank_0_with_2() -> None:
    """And only rank 0, which alone writes."""
    absent = [name for name in trackers.TRACKERS if importlib.util.find_spec(name) is None]
    if not absent:
        pytest.skip("all trackers are installed")
    config, mesh = config_of(absent[0]), {"WORLD_SIZE": "2", "LOCAL_RANK": "0"}
    with pytest.raises(ConfigError, match=f"has no package {absent[0]}"):
        preflight.check_rank(config, "launch/ppo.py", [], {"RANK": "0"} | mesh)
    preflight.check_rank(config, "launch/ppo.py", [], {"RANK": "1"} | mesh)
    assert preflight.main(["--trackers.names", absent[0]]) == 2
