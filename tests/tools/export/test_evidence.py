"""What an exported file says besides the program: sglang.check_env and the bisect's answer, by real processes."""

import json
import platform
import subprocess
import sys
from pathlib import Path

import pytest

from harness.config.mistakes import ConfigError
from harness.tools.export.evidence import bisect_answer, check_env, finished_bisect_of
from harness.tools.export.subject import read_subject
from tests.tools.bisection.bisecting import Bench
from tests.tools.report.fake_run import fake_run

REPOSITORY = Path(__file__).resolve().parents[3]
USE = "import moving\nif moving.broken: raise ValueError('the sync broke')"


@pytest.mark.long
def test_check_env_is_what_sglang_prints_and_says_where_the_run_was_different(tmp_path: Path) -> None:
    subject = read_subject([str(fake_run(tmp_path / "run", 2))])
    lines = check_env(subject)
    assert any(line.startswith("PyTorch: ") for line in lines) and any(line.startswith("sglang: ") for line in lines)
    assert lines[-1].startswith(f"(printed on {platform.node()}; the run was on host0 with ") and "0.5.20" in lines[-1]


@pytest.mark.long
def test_the_answer_of_a_bisect_is_in_the_file(tmp_path: Path) -> None:
    bench = Bench(tmp_path)
    assert bench.over_sites(["broken = False", "broken = True"], USE).returncode == 0
    answer = bisect_answer(tmp_path / "found")
    assert answer[0].startswith("python3 launch/bisect_versions.py --good 1.0 --bad 1.1 ")
    assert answer[1] == "The first bad release is 1.1; the last good one is 1.0."
    export = [sys.executable, str(REPOSITORY / "launch" / "export.py")]
    words = [str(REPOSITORY / "configs/cpu/quickstart.toml"), "--engine.device", "cpu"]
    done = subprocess.run([*export, *words, "--bisect", "found"], cwd=tmp_path, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert f"\n  {answer[1]}\n" in done.stdout
    for wrong, says in ((["elsewhere"], "there is no bisect in elsewhere"), ([], "--bisect needs the folder")):
        done = subprocess.run([*export, *words, "--bisect", *wrong], cwd=tmp_path, capture_output=True, text=True)
        assert done.returncode == 2 and says in done.stderr, done.stderr


def test_a_run_of_a_finished_bisect_finds_it(tmp_path: Path) -> None:
    run = tmp_path / "bisect" / "runs" / "0.5.20" / "1" / "run"
    run.mkdir(parents=True)
    (tmp_path / "bisect" / "state.json").write_text(json.dumps({}))
    assert finished_bisect_of(run) is None, "it has no answer yet"
    with pytest.raises(ConfigError):
        bisect_answer(tmp_path / "bisect")
    (tmp_path / "bisect" / "report.md").touch()
    assert finished_bisect_of(run) == tmp_path / "bisect"
    assert finished_bisect_of(tmp_path / "bisect") is None
    assert finished_bisect_of(Path("/")) is None
