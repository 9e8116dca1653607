"""The warden as it is, over real processes."""

import json
import subprocess
import sys
from pathlib import Path

REPOSITORY = Path(__file__).resolve().parents[2]
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


def test_a_scheduler_that_lost_its_parent_cannot_end_whoever_adopted_it(tmp_path: Path) -> None:
    warden = [sys.executable, "-I", "-S", str(REPOSITORY / "harness/bisect/warden.py"), str(tmp_path / "result"), "30"]
    command = [sys.executable, "-c", COMMAND, ORPHAN, str(tmp_path / "spoken")]
    ended = subprocess.Popen([*warden, "--", *command], stdin=subprocess.PIPE)
    assert ended.wait(60) == 0
    assert ended.stdin is not None
    ended.stdin.close()
    assert json.loads((tmp_path / "result").read_text())["code"] == 7


def test_the_command_itself_can_be_quit(tmp_path: Path) -> None:
    warden = [sys.executable, "-I", "-S", str(REPOSITORY / "harness/bisect/warden.py"), str(tmp_path / "result"), "30"]
    command = [sys.executable, "-c", "import os, signal; os.kill(os.getpid(), signal.SIGQUIT)"]
    ended = subprocess.Popen([*warden, "--", *command], stdin=subprocess.PIPE)
    assert ended.wait(60) == 0
    assert ended.stdin is not None
    ended.stdin.close()
    assert json.loads((tmp_path / "result").read_text())["code"] == -3
