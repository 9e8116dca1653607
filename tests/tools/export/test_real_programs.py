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


@pytest.mark.long
def test_a_repro_of_an_fp8_engine_quantizes_and_passes(tmp_path: Path) -> None:
    overrides = OVERRIDES["qwen3_moe"].items()
    sizes = [word for name, value in overrides for word in (f"--model.overrides.{name}", str(value))]
    fp8 = ["--model.name", "qwen3_moe", "--model.dtype", "bfloat16", "--model.rollout_precision", "fp8_block"]
    config = [QUICKSTART, "--engine.device", "cpu", "--run.steps", "1", "--weights.transport", "tensor"]
    code, log = run_repro(export(tmp_path / "elsewhere", *config, *fp8, *sizes))
    assert code == 0, log.read_text()[-4000:]
    found = re.search(r"PASSED: 2 of 2 steps; worst log-prob difference (\S+) nats", log.read_text())
    assert found and 1e-3 < float(found[1]) < 0.3, "as far as FP8 is from bfloat16, and no further"


@pytest.mark.long
def test_a_repro_ends_as_its_run_did(tmp_path: Path) -> None:
    job = run(tmp_path / "run", 2, QUICKSTART, "--run.inject", "kill@sync:1:1")
    assert slug_of(job.log) == "injected-fault"
    repro_code, repro_log = run_repro(export(tmp_path / "elsewhere", str(job.folder)))
    assert job.process.returncode == 1
    assert repro_code == -SIGKILL, repro_log.read_text()[-4000:]  # torchrun tells how its rank ended
    assert "known to launch/diagnose.py as injected-fault" in repro_log.with_suffix(".py").read_text()
    assert slug_of(repro_log) == "injected-fault", repro_log.read_text()[-4000:]
    assert "\nsglang: " in repro_log.read_text(), "what sglang.check_env prints"
    control_code, control_log = run_repro(repro_log.with_suffix(".py"), "--arm", "control")
    assert control_code == 0 and "PASSED: 4 of 4 steps" in control_log.read_text(), control_log.read_text()[-4000:]
    server = export(tmp_path / "server", str(job.folder), "--server")
    server_code, server_log = run_repro(server)
    assert server_code == -SIGKILL, server_log.read_text()[-4000:]
    assert slug_of(server_log) == "injected-fault", server_log.read_text()[-4000:]
    control_code, control_log = run_repro(server, "--arm", "control")
    assert control_code == 0 and "PASSED: 4 of 4 steps" in control_log.read_text(), control_log.read_text()[-4000:]
