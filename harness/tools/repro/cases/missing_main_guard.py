"""A script without `if __name__ == "__main__":` dies in the child that it starts.

sglang.Engine starts schedulers by `spawn`: the child imports the script, and is about to start children too.
"""

import subprocess
import sys
import tempfile
from pathlib import Path

from harness.tools.repro.case import Case

CASE = Case(
    broken="the start stands at module level",
    healthy='it stands under if __name__ == "__main__":',
    signature=(r"An attempt has been made to start a new process before the", r"the scheduler died: exit code [1-9]"),
)
SCRIPT = """
import multiprocessing, sys

def scheduler():
    print("the scheduler is up", flush=True)

def start():
    child = multiprocessing.get_context("spawn").Process(target=scheduler)
    child.start()
    child.join()
    if child.exitcode:
        sys.exit(f"the scheduler died: exit code {child.exitcode}")

"""


def program(broken: bool) -> None:
    with tempfile.TemporaryDirectory() as folder:
        script = Path(folder) / "train.py"
        script.write_text(SCRIPT + ("start()\n" if broken else 'if __name__ == "__main__":\n    start()\n'))
        sys.exit(subprocess.run([sys.executable, str(script)]).returncode)
