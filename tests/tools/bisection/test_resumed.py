"""A bisect that is resumed goes on with the Python that it began with."""

import json
import subprocess
import sys
import sysconfig
from pathlib import Path

import pytest

from harness.config.mistakes import ConfigError
from harness.tools.bisection.state import STATE, load_state
from tests.tools.bisection.bisecting import SCRIPT, Bench


def test_a_resumed_bisect_keeps_its_python(tmp_path: Path) -> None:
    """Whatever Python resumes it, candidates run with the first one, while it is what it was."""
    other = tmp_path / "other"
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", str(other)], check=True)
    [site] = other.glob("lib/python3*/site-packages")
    (site / "shared.pth").write_text(sysconfig.get_path("purelib"))
    bench = Bench(tmp_path, {"PATH": "/usr/bin:/bin"})  # this Python has no uv, and needs none
    bench.sites(["code = 0", "code = 0", "code = 1", "code = 1"])
    asked = ["--package", "moving", "--environments", "sites", "--good", "1.0", "--bad", "1.3", "--dir", "found"]
    script = bench.script(
        "import moving, os, sys\nprint(sys.executable)\nsys.exit(moving.code if os.path.exists('calm') else 200)"
    )
    run = bench.bisect(*asked, "--", script)
    assert run.returncode == 4 and "exit code 200" in run.stderr and "--resume" in run.stderr
    (tmp_path / "calm").touch()
    state = tmp_path / "found" / "state.json"
    kept = json.loads(state.read_text())
    assert kept["python"] == sys.executable

    def resume() -> subprocess.CompletedProcess[str]:
        command = [str(other / "bin" / "python"), str(SCRIPT), "--resume", "found"]
        return subprocess.run(command, cwd=tmp_path, env=bench.variables(), capture_output=True, text=True)

    state.write_text(json.dumps(kept | {"python": "/nowhere/python"}))
    run = resume()
    assert run.returncode == 2 and "/nowhere/python does not start: No such file" in run.stderr, run.stdout + run.stderr
    state.write_text(json.dumps(kept))
    run = resume()
    assert run.returncode == 0 and "first bad release is 1.2;" in run.stdout, run.stdout + run.stderr
    logs = [file.read_text() for file in (tmp_path / "found" / "runs").glob("*/*/log.txt")]
    assert set(logs) == {f"{sys.executable}\n"}


@pytest.mark.parametrize("mode", [0o777, 0o770])
def test_a_state_that_others_could_have_written_is_not_run(tmp_path: Path, mode: int) -> None:
    (tmp_path / STATE).write_text("{}")
    tmp_path.chmod(mode)
    with pytest.raises(ConfigError, match="a folder of yours that nobody else can write to"):
        load_state(tmp_path)
