"""What is left alone for a night: it ends when it has answered, shows that it lives, and says where everything is."""

import random
import subprocess
import time
from pathlib import Path

import pytest

from harness.tools.bisection import verbs
from harness.tools.bisection.bisection import LINE_SECONDS, Progress
from harness.tools.bisection.question import Options
from harness.tools.bisection.state import Attempt, Record
from tests.tools.bisection.bisecting import Bench, bare_python
from tests.tools.bisection.test_confidence import Anything, Drawn, Silent, state_of

LOUD = "import moving\nfor i in range(400): print('line', i)\nmoving.work()\n"
LATER = "import atexit\natexit.register(lambda: print('later\\n' * 300))\n"


@pytest.fixture
def bench(tmp_path: Path) -> Bench:
    return Bench(tmp_path)


def test_it_ends_when_it_has_answered(bench: Bench, capsys: pytest.CaptureFixture[str]) -> None:
    """Both ends are good, while the environment of the candidate between them is still being made."""
    sites = bench.sites(["", "", ""])
    python = sites / "1.1" / "bin" / "python"
    python.parent.mkdir()
    python.write_text("#!/bin/sh\nexec sleep 40\n")
    python.chmod(0o755)
    asked = ["--python", bare_python(), "--package", "moving", "--environments", str(sites), "--dir", "found"]
    started = time.monotonic()
    run = bench.bisect(*asked, "--good", "1.0", "--bad", "1.2", "--", bench.script("import moving"))
    assert run.returncode == 2 and "is good as well" in run.stderr, run.stdout + run.stderr
    assert "it fails too rarely for --repeat 1" in run.stderr
    assert time.monotonic() - started < 35
    assert bench.state()["answer"]["kind"] == "refused"
    verbs.status(bench.folder / "found")
    assert "is good as well" in (said := capsys.readouterr().out) and "continue with" not in said


def test_the_lines_around_the_failure_and_where_its_log_is(bench: Bench) -> None:
    broken = f"{LATER}def work(): raise ValueError('in the middle')"
    run = bench.over_sites(["def work(): pass", broken], LOUD)
    assert run.returncode == 0, run.stdout + run.stderr
    report = bench.report()
    assert "ValueError: in the middle" in report.split("## First failure")[1].split("## ")[0]
    assert "runs/1.1/1/log.txt" in report and report.count("later") <= 10
    assert "1.1: running; its output is in " in run.stdout and "(--timeout)" in run.stdout
    verdict = next(line for line in run.stdout.splitlines() if "] BAD" in line)
    assert "runs/1.1/1/log.txt" in verdict


def test_status_of_one_that_runs(bench: Bench) -> None:
    sites = bench.sites(["", "code = 1"])
    asked = ["--python", bare_python(), "--package", "moving", "--environments", str(sites), "--dir", "found"]
    script = bench.script("import moving, time; time.sleep(60)")
    command = bench.command(*asked, "--good", "1.0", "--bad", "1.1", "--", script)
    process = subprocess.Popen(command, cwd=bench.folder, env=bench.variables(), stdout=subprocess.DEVNULL)
    while not bench.ran() and process.poll() is None:
        time.sleep(0.1)
    status = bench.bisect("status", "found").stdout
    process.kill()
    process.wait()
    assert (
        f"process {process.pid} is running it; its newest run is 1.0, since " in status
        and "continue with" not in status
    )


def test_a_sign_of_life_once_a_minute(capsys: pytest.CaptureFixture[str]) -> None:
    show = Progress()
    show.phase("1.2: running")
    assert capsys.readouterr().out == ""
    show._last_line -= LINE_SECONDS
    show.beat()
    show.beat()
    assert capsys.readouterr().out.count("1.2: running (") == 1


@pytest.mark.parametrize(
    ("timeout", "seconds", "limit"),
    [("auto", 100.0, 1000.0), ("auto", 1.0, 600.0), ("0", 9.0, 0.0), ("90s", 9.0, 90.0)],
)
def test_a_limit_follows_from_the_good_end(timeout: str, seconds: float, limit: float) -> None:
    state = state_of(Options(good="1.0", bad="1.9", package="moving", timeout=timeout))
    bisection = Drawn(state, Path("/nowhere"), Anything(), Silent(), 0, True)
    bisection.first_bad, bisection.rate, bisection.chance = 4, 1.0, random.Random(0)
    assert bisection._limit() == (0.0 if timeout == "auto" else limit)
    ran = Attempt(code=0, timed_out=False, seconds=seconds, verdict="good", log="")
    state.records.append(Record(name="1.0", verdict="good", reason="", attempts=[ran]))
    assert bisection._limit() == limit


KILLS = "import os; os.kill(os.getppid(), 9); import time; time.sleep(60)"


def test_a_candidate_that_kills_what_watches_it_is_skipped(bench: Bench) -> None:
    secret = "hf_" + "x" * 24
    run = bench.over_sites(["", KILLS, f"raise ValueError('{secret}')"], "import moving", "--probe", "none")
    assert run.returncode == 1, run.stdout + run.stderr
    assert "SKIP  1.1: it kills the process that watches it" in run.stdout and "cannot be used" not in run.stderr
    assert bench.ran().count("1.1") == 2
    found = bench.folder / "found"
    assert (
        secret not in run.stdout + bench.report() + (found / "report.html").read_text()
        and "[redacted " in bench.report()
    )
    assert [(found / name).stat().st_mode & 0o777 for name in (".", "runs/1.0/1")] == [0o700, 0o700]
    answer = bench.state()["answer"]
    assert answer["edges"] == [{"before": "1.0", "after": "1.2", "among": ["1.1", "1.2"]}]
    assert (answer["kind"], answer["exit_code"]) == ("set", 1)
    assert [each["verdict"] for each in bench.state()["records"]] == ["good", "bad", "skip"]


def test_judge_keeps_the_logs_of_the_last_time(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    root = tmp_path / "harness-bisect-judge"
    for command, code in (("true", 0), ("false", 1), ("false", 1)):
        assert verbs.judge_once(Options(repeat=2), [command]) == code
        logs = [line.split("; ")[1].rstrip(")") for line in capsys.readouterr().out.splitlines()]
        assert [Path(log) for log in logs] == sorted(root.glob("runs/*/log.txt"))
    assert root.stat().st_mode & 0o777 == 0o700
