"""Real processes under a real adopter."""

import subprocess
import sys
from pathlib import Path

REPOSITORY = Path(__file__).resolve().parents[3]
ADOPTER = """
import os, signal, subprocess, sys, time
from harness.tools.hosts import kernel

kernel.adopt_orphans()
subprocess.run([sys.executable, "-c", sys.argv[1]])
_, status = os.wait()  # the orphan's end
print("adopted", os.waitstatus_to_exitcode(status))
"""
PARENT = """
import os, signal, sys, time
if os.fork() == 0:
    parent = os.getppid()
    while os.getppid() == parent:
        time.sleep(0.01)
    os.kill(os.getppid(), signal.SIGQUIT)
    time.sleep(0.2)
    os._exit(5)
"""


def test_a_scheduler_that_lost_its_parent_cannot_end_whoever_adopted_it() -> None:
    words = [sys.executable, "-c", ADOPTER, PARENT]
    done = subprocess.run(words, cwd=REPOSITORY, capture_output=True, text=True, timeout=60)
    assert (done.returncode, done.stdout, done.stderr) == (0, "adopted 5\n", "")


def test_what_an_adopter_starts_can_be_quit() -> None:
    program = ADOPTER.partition("_, status")[0] + "sys.exit(0)\n"
    child = "import signal; assert signal.getsignal(signal.SIGQUIT) is signal.SIG_DFL"
    done = subprocess.run(
        [sys.executable, "-c", program, child], cwd=REPOSITORY, capture_output=True, text=True, timeout=60
    )
    assert (done.returncode, done.stderr) == (0, "")
