"""The warden as it is, over real processes."""

import json
import subprocess
import sys
from pathlib import Path

WARDEN = Path(__file__).resolve().parents[2] / "harness" / "bisect" / "warden.py"
ORPHAN = """
import os, signal, sys, time
if os.fork() == 0:
    parent = os.getppid()
    while os.getppid() == parent:
        time.sleep(0.01)
    os.kill(os.getppid(), signal.SIGQUIT)  # as SGLang's scheduler, whose parent is whoever has adopted it
    open(sys.argv[1], "w").close()
    os._exit(0)
"""
COMMAND = """
import pathlib, subprocess, sys, time
subprocess.run([sys.executable, "-c", sys.argv[1], sys.argv[2]])
while not pathlib.Path(sys.argv[2]).exists():
    time.sleep(0.01)
sys.exit(7)
"""


def code_under_the_warden(folder: Path, *command: str) -> int:
    """The exit code in its result, of a command of this Python."""
    file = folder / "result"
    words = [sys.executable, "-I", "-S", str(WARDEN), str(file), "30", "--", sys.executable, "-c", *command]
    with subprocess.Popen(words, stdin=subprocess.PIPE) as warden:  # whose end of the pipe it holds until it is over
        assert warden.wait(60) == 0
    code: int = json.loads(file.read_text())["code"]
    return code


def test_a_scheduler_that_lost_its_parent_cannot_end_whoever_adopted_it(tmp_path: Path) -> None:
    assert code_under_the_warden(tmp_path, COMMAND, ORPHAN, str(tmp_path / "spoken")) == 7


def test_the_command_itself_can_be_quit(tmp_path: Path) -> None:
    assert code_under_the_warden(tmp_path, "import os, signal; os.kill(os.getpid(), signal.SIGQUIT)") == -3
