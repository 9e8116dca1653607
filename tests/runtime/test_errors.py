import json
import os
import subprocess
import sys
import time
from pathlib import Path

import pytest

from harness.runtime import errors
from harness.runtime.errors import report_user_error, say, tell_torchrun

REPOSITORY = Path(__file__).resolve().parents[2]


def test_rank_0_says_one_sentence_at_once(capfd: pytest.CaptureFixture[str]) -> None:
    started = time.monotonic()
    assert report_user_error(ValueError("run.steps = 0: it must be at least 1"), rank=0) == 2
    assert time.monotonic() - started < errors.SPEAK_FIRST_SECONDS / 2
    assert capfd.readouterr() == ("", "error: run.steps = 0: it must be at least 1\n")


def test_other_ranks_let_rank_0_speak_first(capfd: pytest.CaptureFixture[str]) -> None:
    started = time.monotonic()
    assert report_user_error(ValueError("no"), rank=1) == 2
    assert time.monotonic() - started >= errors.SPEAK_FIRST_SECONDS
    assert capfd.readouterr() == ("", "")


def test_a_rank_that_may_be_alone_speaks_after_rank_0_and_no_secret_is_said(
    capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(errors, "SPEAK_FIRST_SECONDS", 0.1)
    assert report_user_error(ValueError("no"), rank=3, alone=True) == 2
    assert capfd.readouterr() == ("", "error on rank 3: no\n")
    report_user_error(ValueError('got "https://bob:hunter2@host/d" and api_key=sk-0123456789abcdefgh'), rank=0)
    said = capfd.readouterr().err
    assert "@host/d" in said and "hunter2" not in said and "0123456789" not in said


def test_it_is_said_again_once_the_launcher_has_ended() -> None:
    """A real process stands for torchrun; its last line must not be the last on the screen."""
    rank = "from harness.runtime.errors import report_user_error; raise SystemExit(report_user_error(ValueError('no'), rank=0))"
    launcher = f"""
import os, subprocess, sys, time
ranks = os.environ | {{"LOCAL_RANK": "0", "TORCHELASTIC_RUN_ID": "x"}}
assert subprocess.run([sys.executable, "-c", {rank!r}], env=ranks).returncode == 2
time.sleep(0.3)
print("report", file=sys.stderr, flush=True)
"""
    clean = {name: value for name, value in os.environ.items() if name != "LOCAL_RANK"}
    done = subprocess.run([sys.executable, "-c", launcher], env=clean, capture_output=True, text=True, timeout=60)
    assert done.stderr.splitlines() == ["error: no", "report", "error: no"]


LAUNCHER = """
import os, subprocess, sys
# As torchrun does: a variable for the rank alone. The shell above has a LOCAL_RANK from somewhere else.
rank = [sys.executable, "-c", "from harness.runtime.errors import launcher_pid; print(launcher_pid())"]
wrapper = [sys.executable, "-c", "import subprocess, sys; subprocess.run(sys.argv[1:], check=True)", *rank]
print(os.getpid(), flush=True)
subprocess.run(wrapper, env=os.environ | {"LOCAL_RANK": "0", **({"TORCHELASTIC_RUN_ID": "1"} if len(sys.argv) > 1 else {})})
"""


@pytest.mark.parametrize(("arguments", "exported"), [(["torchrun"], {"LOCAL_RANK": "0"}), (["torchrun"], {}), ([], {})])
def test_the_launcher_is_found_above_a_wrapper_whatever_its_shell_exports(
    arguments: list[str], exported: dict[str, str]
) -> None:
    environment = {name: value for name, value in os.environ.items() if name != "LOCAL_RANK"} | exported
    command = [sys.executable, "-c", LAUNCHER, *arguments]
    done = subprocess.run(
        command, env=environment, cwd=REPOSITORY, capture_output=True, text=True, check=True, timeout=60
    )
    launcher, found = done.stdout.split()
    assert found == launcher


def test_what_no_other_program_takes_is_said_in_escapes(capfd: pytest.CaptureFixture[str]) -> None:
    say("half \ud83d, nothing \0, whole \U0001f600\n")
    assert capfd.readouterr().err == "half \\ud83d, nothing \\0, whole \U0001f600\n"


def test_the_report_of_torchrun_shows_the_error(tmp_path: Path) -> None:
    script = tmp_path / "rank.py"
    script.write_text(
        "from harness.runtime.errors import report_user_error\nraise SystemExit(report_user_error(ValueError('no'), rank=0))\n"
    )
    words = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=1", str(script)]
    done = subprocess.run(words, capture_output=True, text=True, timeout=120)
    report = done.stderr.partition("Root Cause")[2]
    assert "error: no" in report and "error_file: <N/A>" not in report


def test_torchrun_never_finds_half_an_error_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Not even of a rank that is killed while it writes: torchrun would end by its own JSONDecodeError."""
    monkeypatch.setenv("TORCHELASTIC_ERROR_FILE", str(tmp_path / "error.json"))
    begun: list[Path] = []

    def begin(file: Path, *_: object, **__: object) -> None:
        file.touch()
        begun.append(file)
        raise KeyboardInterrupt

    with monkeypatch.context() as killed, pytest.raises(KeyboardInterrupt):
        killed.setattr(Path, "write_text", begin)
        tell_torchrun("RuntimeError: no")
    assert begun and not (tmp_path / "error.json").exists()
    tell_torchrun("RuntimeError: no", "Traceback")
    assert json.loads((tmp_path / "error.json").read_text())["message"]["message"] == "RuntimeError: no"
