"""A bisect that is killed again and again, with real installs, ends as one that was not."""

import random
import signal
import subprocess
import time
from itertools import pairwise
from pathlib import Path

import psutil
import pytest

from harness.runtime.processes import is_alive
from tests.tools.bisection.bisecting import Bench, bare_python
from tests.tools.bisection.wheels import make_wheel

RELEASES, FIRST_BAD = 60, 41
SCRIPT = "import moving, time\nassert len(moving.parts()) == 40, 'half an install'\ntime.sleep(0.3)\nif moving.bad: raise ValueError('sync')"


def wheels(folder: Path) -> None:
    """Releases of many files each, so that an install takes a moment."""
    code = "import pathlib\ndef parts(): return list(pathlib.Path(__file__).parent.glob('part*.py'))\n"
    for minor in range(RELEASES):
        files = {f"moving/part{number}.py": "#" * 20000 for number in range(40)}
        files["moving/__init__.py"] = f"{code}bad = {minor >= FIRST_BAD}\n"
        make_wheel(folder, "moving", f"1.{minor}", files)


@pytest.mark.long
def test_killed_at_random_moments(tmp_path: Path) -> None:
    bench, chance, kills = Bench(tmp_path), random.Random(2), 20
    wheels(tmp_path / "wheels")
    bench.environment["UV_CACHE_DIR"] = str(tmp_path / "uv")
    words = ["--package", "moving", "--wheels", "wheels", "--dir", "found"]
    command = bench.command(*words, "--good", "1.0", "--bad", f"1.{RELEASES - 1}", "--", bench.script(SCRIPT))
    judged: list[str] = []
    done = 0
    for _ in range(kills):
        process = subprocess.Popen(
            command, cwd=tmp_path, env=bench.variables(), stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
        )
        time.sleep(chance.uniform(0.2, 3.0))
        done += process.poll() is None
        process.kill()
        process.communicate()
        if (tmp_path / "found" / "state.json").exists():
            command = bench.command("--resume", "found")
            now = [record["name"] for record in bench.state()["records"]]
            assert now[: len(judged)] == judged  # nothing that was written is lost
            # Nothing runs twice after its verdict: whatever ran since is new, the one being killed at most once more.
            judged = now
    run = bench.bisect(*command[2:])
    assert run.returncode == 0, run.stdout + run.stderr
    assert f"The first bad release is 1.{FIRST_BAD}; the last good one is 1.{FIRST_BAD - 1}." in run.stdout
    records = [record["name"] for record in bench.state()["records"]]
    assert len(records) == len(set(records))
    assert all("half an install" not in record["reason"] for record in bench.state()["records"])
    ran = bench.ran()
    for earlier, later in pairwise(records):
        last = len(ran) - 1 - ran[::-1].index(earlier)
        assert last < ran.index(later), f"{earlier} ran again after {later} did"
    assert done >= kills // 2


@pytest.mark.parametrize("how", [signal.SIGINT, signal.SIGKILL])
def test_what_a_candidate_has_passed_is_kept(tmp_path: Path, how: signal.Signals) -> None:
    """Stopped in its third run of three, it is run once more and not three times."""
    bench, good, bad = Bench(tmp_path), "1.0", "1.1"
    sites = bench.sites(["code = 0", "code = 1"])
    script = (
        "import moving, pathlib, sys, time\nfolder = pathlib.Path(__file__).parent\n"
        "third = (folder / 'ran').read_text().split().count('1.0') == 3\n"
        "if third and not (folder / 'calm').exists(): (folder / 'third').touch(); time.sleep(600)\n"
        "sys.exit(moving.code)"
    )
    words = ["--package", "moving", "--environments", str(sites), "--python", bare_python(), "--dir", "found"]
    words += ["--repeat", "3", "--confirm", "0", "--good", good, "--bad", bad, "--", bench.script(script)]
    process = subprocess.Popen(
        bench.command(*words), cwd=tmp_path, env=bench.variables(), stdout=subprocess.PIPE, stderr=subprocess.STDOUT
    )
    deadline = time.monotonic() + 60
    while not (tmp_path / "third").exists():
        assert time.monotonic() < deadline
        time.sleep(0.05)
    process.send_signal(how)
    process.communicate(timeout=30)
    (tmp_path / "calm").touch()
    run = bench.bisect("--resume", "found")
    assert run.returncode in (0, 1) and "1.1; the last good one is 1.0." in run.stdout, run.stdout + run.stderr
    assert bench.ran() == [good] * 4 + [bad], "the run that it was in is made again, and no other"
    state = bench.state()
    assert [len(record["attempts"]) for record in state["records"]] == [3, 1] and not state["unfinished"]


@pytest.mark.slow
def test_interrupted_it_says_how_to_go_on_and_leaves_nothing(tmp_path: Path) -> None:
    bench = Bench(tmp_path)
    sites = bench.sites(["code = 0", "code = 0", "code = 1"])
    script = bench.script(
        "import moving, pathlib, subprocess, sys\nfolder = pathlib.Path(__file__).parent\n"
        "if not (folder / 'calm').exists():\n"
        "    sleeper = subprocess.Popen(['sleep', '1234.5'])\n"
        "    (folder / 'sleeper').write_text(f'{sleeper.pid}\\n')\n"
        "    sleeper.wait()\n"
        "sys.exit(moving.code)"
    )
    words = ["--package", "moving", "--environments", str(sites), "--python", bare_python(), "--dir", "found"]
    process = subprocess.Popen(
        bench.command(*words, "--good", "1.0", "--bad", "1.2", "--", script),
        cwd=tmp_path,
        env=bench.variables(),
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    deadline = time.monotonic() + 60
    note = tmp_path / "sleeper"
    while not (note.exists() and note.read_text().endswith("\n")):
        assert time.monotonic() < deadline and process.poll() is None, "the script has not started its child"
        time.sleep(0.05)
    sleeper = psutil.Process(int(note.read_text()))
    assert is_alive(sleeper)
    process.send_signal(signal.SIGINT)
    said = process.communicate(timeout=30)[1]
    assert process.returncode == 130 and f"--resume {tmp_path / 'found'}" in said
    assert not is_alive(sleeper)
    (tmp_path / "calm").touch()
    run = bench.bisect("--resume", "found")
    assert run.returncode == 0 and "The first bad release is 1.2" in run.stdout, run.stdout + run.stderr
