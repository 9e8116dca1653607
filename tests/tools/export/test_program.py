"""Repros as text and as modules. Whether they run is in test_real_programs.py."""

import importlib.util
import json
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from harness.config.layers import ConfigError
from harness.tools.export.program import literal, missing_tensors, planted_fault, render
from harness.tools.export.subject import RunEnd, Subject, behind, read_subject
from tests.tools.report.fake_run import fake_run

REPOSITORY = Path(__file__).resolve().parents[3]
CONFIGS = sorted(str(file.relative_to(REPOSITORY)) for file in (REPOSITORY / "configs").glob("*/*.toml"))
PHASES = ("meet", "start_engine", "build_trainer", "sync", "generate", "old_log_probs", "update_actor", "shutdown")
FAILED = RunEnd(
    code=1, verdict=("FIRST FAILURE: rank 1 failed",), kind="exception", ranks=(1,), phase="advantages", step=1,
    error="MyError: a 'quoted'\nmessage", traceback=("Traceback:", '  File "/a/b/c.py", line 1, in f', "MyError"),
)  # fmt: skip
LOST = RunEnd(
    code=1, verdict=("FIRST FAILURE: x",), kind="exception", ranks=(0,), phase="find_suspects", step=0,
    error="WeightsDidNotArrive: step 0: off by 8.68e-01 in the mean; largest 3.94e+00; engine tensors that differ from the"
    " trainer's: model.layers.1.mlp.gate_up_proj.weight (model.layers.1.mlp.gate_proj.weight,"
    " model.layers.1.mlp.up_proj.weight); model.norm.weight; and 3 more",
)  # fmt: skip


def check(files: Path) -> None:
    """What a maintainer's linter would say, and Python."""
    rules = ("--select", "E,F,I,B,UP,SIM,RUF", "--ignore", "E501", "--line-length", "120", "--target-version", "py311")
    done = subprocess.run(
        [sys.executable, "-m", "ruff", "check", "--isolated", "--output-format", "concise", *rules, str(files)],
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stdout
    for file in files.glob("*.py"):
        text = file.read_text(encoding="ascii")
        compile(text, str(file), "exec")
        assert "harness" not in text.split("import faulthandler")[1]


def subject_of(*words: str) -> Subject:
    return read_subject(words)


def test_every_config_on_both_devices_with_and_without_a_failure_is_a_clean_short_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(REPOSITORY)
    for config in CONFIGS:
        for device in ("cpu", "cuda"):
            for name, seen in {"new": None, "failed": FAILED, "lost": LOST}.items():
                text = render(replace(subject_of(config, "--engine.device", device), seen=seen))
                (tmp_path / f"{Path(config).stem}_{device}_{name}.py").write_text(text)
    many = "configs/multinode/deepseek_v3_671b.toml"
    (tmp_path / "hosts.py").write_text(render(replace(subject_of(many, "--nnodes", "64"), seen=FAILED)))
    check(tmp_path)


@pytest.mark.parametrize(
    "words",
    [
        ("--model.name", "deepseek_v3"),
        ("--model.name", "moonlight", "--weights.transport", "bucket"),
        ("--model.name", "qwen3_moe", "--weights.transport", "disk"),
        ("--weights.verify", "off", "--run.phase_timeouts.sync", "5"),
        ("--parallel.tp", "2", "--parallel.pp", "2"),
        ("--model.name", "some/model"),
    ],
)
def test_other_choices_make_clean_files_too(
    words: tuple[str, ...], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(REPOSITORY)
    for device in ("cpu", "cuda"):
        subject = subject_of("configs/cpu/quickstart.toml", "--engine.device", device, *words)
        assert ("'copy_all_layer_kv_cache_cpu'," in render(subject)) == (device == "cpu"), "the names of the stand-in"
        (tmp_path / f"{device}.py").write_text(render(subject))
        (tmp_path / f"{device}_lost.py").write_text(render(replace(subject, seen=LOST)))
    check(tmp_path)


def test_a_run_of_64_ranks_says_where_it_ran_and_what_was_seen(tmp_path: Path) -> None:
    folder = fake_run(tmp_path / "run", 64)
    text = render(read_subject([str(folder), "--run.phase_timeouts.update_critic", "7"]), "some-slug")
    assert "'update_actor': 7" in text, "the timeout of the phase in whose place it is"
    assert text.startswith(
        "# torchrun --nnodes=8 --nproc-per-node=8 --rdzv-backend=c10d --rdzv-endpoint=HOST0:29400 repro.py\n"
    )
    assert "known as some-slug" in text and "exit code 124" in text and "NCCL_CUMEM_ENABLE=1" in text
    assert "RANK in (60,) and (name, step) == ('update_actor', 1):" in text and "time.sleep(" in text


def test_lost_tensors_are_those_that_the_run_named() -> None:
    named = {"model.layers.1.mlp.gate_proj.weight", "model.layers.1.mlp.up_proj.weight", "model.norm.weight"}
    assert named == {*missing_tensors(LOST)} - {"model.layers.1.mlp.gate_up_proj.weight"}
    assert planted_fault(LOST, PHASES) is None
    assert missing_tensors(replace(LOST, error="WeightsDidNotArrive: ... the trainer's: none found")) == ()


@pytest.mark.parametrize(
    ("changed", "statement"),
    [
        ({}, "raise type('MyError', (RuntimeError,), {})(\"a 'quoted'\\nmessage\")"),
        ({"error": "ValueError: x"}, "raise ValueError('x')"),
        ({"kind": "died", "error": "was killed by SIGSEGV"}, "os.kill(os.getpid(), signal.SIGSEGV)"),
        ({"kind": "died", "error": "ended with exit code 3, without a word"}, "leave(3)"),
        ({"kind": "stopped", "error": "", "code": 124}, "os.kill(os.getpid(), signal.SIGSTOP)"),
        ({"kind": "launcher", "error": "(pid 7) is gone"}, "os.kill(os.getppid(), signal.SIGKILL)"),
        ({"kind": "told", "error": "(pid 7) got SIGINT, as from Ctrl-C"}, "os.kill(os.getppid(), signal.SIGINT)"),
        (
            {"kind": "stopped", "error": "engine process sglang::scheduler_TP1 (pid 7)", "code": 124},
            '[each.suspend() for each in __import__("psutil").Process().children(recursive=True)'
            " if each.name() == 'sglang::scheduler_TP1']",
        ),
        ({"kind": "deadline", "error": "", "code": 124}, "time.sleep(1000000000)"),
        ({"error": "ConfigError: no.", "code": 2}, "leave(2, 'error: no.' + chr(10))"),
    ],
)
def test_what_the_run_s_own_code_did_is_planted(changed: dict[str, Any], statement: str) -> None:
    plant = planted_fault(replace(FAILED, **changed), PHASES)
    assert plant and (plant.statement, plant.ranks, plant.phase, plant.step) == (statement, (1,), "update_actor", 1)


@pytest.mark.parametrize(
    "changed",
    [
        {"code": 0},
        {"code": None},
        {"kind": "watchdog", "error": "(pid 7) was killed by SIGKILL"},
        {"error": "EngineRefused: update_weights_from_tensor: the engine refused: no"},
        {"error": "KeyError: 'x'", "traceback": ('  File "/venv/site-packages/sglang/srt/x.py", line 1, in f',)},
        {"error": "ConfigError: engine.args.x: sglang 0.5.20 has no such engine argument.", "code": 2},
    ],
)
def test_what_the_engine_does_by_itself_is_not_planted(changed: dict[str, Any]) -> None:
    assert planted_fault(replace(FAILED, **changed), PHASES) is None


@pytest.mark.parametrize(
    ("phase", "planted"),
    [
        ("inputs", "meet"),
        ("verify_push", "sync"),
        ("first_release", "build_trainer"),
        ("release", "old_log_probs"),
        ("", "meet"),
    ],
)
def test_a_phase_that_the_repro_has_not_is_met_where_it_would_be(phase: str, planted: str) -> None:
    plant = planted_fault(replace(FAILED, phase=phase), PHASES)
    assert plant and plant.phase == planted
    assert (plant.step is None) == (planted in ("meet", "build_trainer"))


def test_the_rank_behind_is_the_one_with_fewest_phases() -> None:
    def event(rank: int, kind: str, phase: str) -> dict[str, Any]:
        return {"rank": rank, "event": kind, "phase": phase, "step": 0}

    both = [event(rank, kind, "sync") for rank in (0, 1) for kind in ("phase_start", "phase_end")]
    assert behind([*both, event(0, "phase_start", "generate")]) == ((1,), ("sync", 0))
    assert behind([*both, *(event(rank, "phase_start", "generate") for rank in (0, 1))]) == ((0, 1), ("generate", 0))
    assert behind([]) is None
    assert behind([event(0, "phase_start", "run")]) == ((0,), ("", None))


def program_of(folder: Path, *words: str, seen: RunEnd | None = None) -> Any:
    """Return a repro as a module, as an engine's process imports it."""
    # For a GPU: the stand-ins of the CPU mode would stay in this process.
    words = (str(REPOSITORY / "configs/cpu/quickstart.toml"), "--engine.device", "cuda", *words)
    subject = replace(subject_of(*words), seen=seen)
    file = folder / "repro.py"
    file.write_text(render(subject))
    spec = importlib.util.spec_from_file_location("repro", file)
    assert spec and spec.loader
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture
def program(tmp_path: Path) -> Any:
    return program_of(tmp_path, "--run.phase_timeouts.sync", "0.3")


def test_an_update_changes_every_element_of_every_tensor(program: Any) -> None:
    model = torch.nn.Sequential(torch.nn.Linear(64, 64), torch.nn.BatchNorm1d(64, track_running_stats=False))
    with torch.no_grad():
        for tensor in model.parameters():
            tensor.fill_(1.0)
    program.change(model, seed=1)
    assert all(set(tensor.unique().tolist()) == {7 / 8, 9 / 8} for tensor in model.parameters())


def test_a_phase_that_takes_too_long_ends_the_rank_with_124(
    program: Any, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    ends: list[tuple[int, str]] = []
    monkeypatch.setattr(program, "leave", lambda *end: ends.append(end))
    program.phase("sync", 1)
    program.watch()
    assert ends == [(124, "rank 0 FAILED: its timeout passed in sync of step 1\n")]
    printed = capfd.readouterr()
    assert printed.out == "sync of step 1\n" and "most recent call first" in printed.err


@pytest.mark.parametrize(("master", "begins"), [("127.0.0.1", "127.0.0.1:"), ("::1", "[::1]:")])
def test_an_ipv6_address_has_brackets(master: str, begins: str, program: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MASTER_ADDR", master)
    assert program.free_address().startswith(begins)


def test_the_control_arm_leaves_the_fault_out(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    program = program_of(tmp_path, seen=replace(FAILED, ranks=(0,), error="ValueError: x"))
    with pytest.raises(ValueError, match="x"):
        program.phase("update_actor", 1)
    monkeypatch.setattr(program, "ARM", "control")
    program.phase("update_actor", 1)


def test_literals_are_python_and_not_long() -> None:
    value = {"a": 1.5, "b": [1, None], "c": {"d": 'say "x"', "e": True}} | {f"name_{each}": each for each in range(30)}
    text = literal(value, "value")
    assert eval(text) == value and max(map(len, text.splitlines())) <= 120


def test_what_is_no_run_is_a_mistake(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="is not a run directory: it has no environment"):
        (tmp_path / "config.toml").touch()
        read_subject([str(tmp_path)])
    (tmp_path / "environment.json").write_text(json.dumps([]))
    with pytest.raises(ConfigError, match="it has no rank"):
        read_subject([str(tmp_path)])
