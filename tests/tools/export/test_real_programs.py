"""Repros that run: with real sglang, from a folder and an environment in which this package is not.

The ends are compared with those of the runs that they were made of: the catalogue's name and the exit code of the rank.
"""

import os
import re
import subprocess
import sys
from pathlib import Path
from signal import SIGKILL

import pytest

from harness.tools.diagnose.diagnose import diagnose
from tests.end_to_end.launching import QUICKSTART, REPOSITORY, run
from tests.weights.fp8_on_two_ranks import OVERRIDES

ROOT_CAUSE = re.compile(r"Root Cause.*?exitcode\s*:\s*(-?\d+)", re.DOTALL)


def slug_of(*files: Path) -> str | None:
    found = diagnose([str(file) for file in files]).finding
    return found.entry.slug if found else None


def exit_code(output: str, code: int) -> int:
    """That of the rank which torchrun says failed first."""
    found = ROOT_CAUSE.search(output)
    return int(found[1]) if found else code


def export(folder: Path, *words: str) -> Path:
    """The repro, in a folder of its own."""
    done = subprocess.run(
        [sys.executable, "launch/export.py", *words], cwd=REPOSITORY, capture_output=True, text=True, timeout=120
    )
    assert done.returncode == 0, done.stderr
    folder.mkdir()
    file = folder / "repro.py"
    file.write_text(done.stdout)
    return file


def run_repro(file: Path, *more: str, seconds: float = 500) -> tuple[int, Path]:
    """Run it by its own first command, without a way to this package; return exit code and output."""
    hidden = file.parent / "hidden"  # before the checkout that the environment knows of
    hidden.mkdir(exist_ok=True)
    (hidden / "harness.py").write_text("raise ImportError('a repro imports nothing of the harness')")
    environment = os.environ | {"PYTHONSAFEPATH": "1", "PYTHONPATH": str(hidden)}
    assert subprocess.run(
        [sys.executable, "-c", "import harness"], cwd=file.parent, env=environment, capture_output=True
    ).returncode
    # Its first command is the broken arm's, with a comment behind it.
    command = next(line for line in file.read_text().splitlines() if line.endswith("repro.py") or "repro.py  " in line)
    launcher, *words = [*command.partition("#")[0].split(), *more]
    log = file.with_suffix(".log")
    with log.open("w") as output:
        done = subprocess.run(
            [sys.executable, *(["-m", "torch.distributed.run"] if launcher == "torchrun" else []), *words],
            cwd=file.parent, env=environment, stdout=output, stderr=subprocess.STDOUT, timeout=seconds,
        )  # fmt: skip
    return exit_code(log.read_text(errors="replace"), done.returncode), log


@pytest.mark.long
def test_an_unknown_engine_argument_ends_a_repro_as_it_ends_a_run(tmp_path: Path) -> None:
    words = (QUICKSTART, "--engine.device", "cpu", "--engine.args.mem_fraction_statics", "0.1")
    code, log = run_repro(export(tmp_path / "elsewhere", *words))
    assert (code, slug_of(log)) == (2, "unknown-engine-argument"), log.read_text()


KILLED = ["--run.steps", "2", "--run.inject", "kill@sync:1:1"]


@pytest.mark.long
def test_a_repro_of_an_fp8_engine_ends_as_its_run_did_and_its_control_passes(tmp_path: Path) -> None:
    overrides = OVERRIDES["qwen3_moe"].items()
    sizes = [word for name, value in overrides for word in (f"--model.overrides.{name}", str(value))]
    fp8 = ["--model.name", "qwen3_moe", "--model.dtype", "bfloat16", "--model.rollout_precision", "fp8_block", *sizes]
    job = run(tmp_path / "run", 2, QUICKSTART, *KILLED, "--weights.transport", "tensor", *fp8)
    assert job.process.returncode == 1 and slug_of(job.log) == "injected-fault"
    repro = export(tmp_path / "elsewhere", str(job.folder))
    assert "known to launch/diagnose.py as injected-fault" in repro.read_text()
    log = check_arms(repro)
    assert "\nsglang: " in log, "what sglang.check_env prints"
    assert 1e-3 < worst_difference(log) < 0.3, "as far as FP8 is from bfloat16, and no further"


@pytest.mark.long
def test_a_repro_with_a_server_passes(tmp_path: Path) -> None:
    code, log = run_repro(export(tmp_path / "server", QUICKSTART, "--engine.device", "cpu", *KILLED[:2], "--server"))
    assert code == 0, log.read_text()[-4000:]
    assert worst_difference(log.read_text()) < 1e-5


def check_arms(repro: Path) -> str:
    """The broken arm is killed as it syncs, the control passes. Return what both print."""
    code, log = run_repro(repro)
    broken = log.read_text()
    assert code == -SIGKILL, broken[-4000:]  # torchrun tells how its rank ended
    assert slug_of(log) == "injected-fault", broken[-4000:]
    code, log = run_repro(repro, "--arm", "control")
    assert code == 0, log.read_text()[-4000:]
    return broken + log.read_text()


def worst_difference(log: str) -> float:
    found = re.search(r"PASSED: 3 of 3 steps; worst log-prob difference (\S+) nats", log)
    assert found, log[-4000:]
    return float(found[1])
