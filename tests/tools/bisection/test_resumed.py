"""A bisect that is resumed goes on with the Python that it began with."""

import json
import subprocess
import sys
import sysconfig
from pathlib import Path

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
    assert bench.bisect(*asked, "--", script).returncode == 4
    (tmp_path / "calm").touch()
    state = tmp_path / "found" / "state.json"
    kept = json.loads(state.read_text())
    version = ".".join(map(str, sys.version_info[:3]))
    assert (kept["python"], kept["python_version"]) == (sys.executable, version)

    def resume() -> subprocess.CompletedProcess[str]:
        command = [str(other / "bin" / "python"), str(SCRIPT), "--resume", "found"]
        return subprocess.run(command, cwd=tmp_path, env=bench.variables(), capture_output=True, text=True)

    for change, sentence in (
        (
            {"python_version": "3.99.1"},
            f"began with Python 3.99.1 of {sys.executable}, which is now {version}; start a new",
        ),
        (
            {"python": "/nowhere/python"},
            "/nowhere/python does not start: No such file or directory; start a new bisect",
        ),
    ):
        state.write_text(json.dumps(kept | change))
        run = resume()
        assert run.returncode == 2 and sentence in run.stderr and run.stderr.count("\n") == 1, run.stdout + run.stderr
    state.write_text(json.dumps(kept))
    run = resume()
    assert run.returncode == 0 and "first bad release is 1.2;" in run.stdout, run.stdout + run.stderr
    logs = [file.read_text() for file in (tmp_path / "found" / "runs").glob("*/*/log.txt")]
    assert set(logs) == {f"{sys.executable}\n"}
