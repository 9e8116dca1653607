"""rank.py FOLDER [WHAT [WHAT OF RANK 1]]: say what this rank is in FOLDER/rank0.json, then end in the way that is asked
for."""

import json
import os
import signal
import sys
import time
from pathlib import Path

RANK = int(os.environ["RANK"])


class Known:
    """A class that only this script knows."""


def planted() -> None:
    raise ArithmeticError(f"planted on rank {RANK}")


if __name__ == "__main__":
    import pickle

    folder, *words = sys.argv[1:]
    what = {
        "argv": sys.argv[1:],
        "argv[0]": sys.argv[0],
        "path[0]": sys.path[0],
        "file": __file__,
        "names": sorted(globals().keys() - {"folder", "words", "what", "pickle", "__annotations__", "__cached__"}),
        "package": __package__,
        "spec": __spec__,
        "pickles": type(pickle.loads(pickle.dumps(Known()))) is Known,
        "leads": os.getsid(0) == os.getpid() == os.getpgrp(),
        "folder": os.getcwd(),
        "local": os.environ["LOCAL_RANK"],
        "OMP_NUM_THREADS": os.environ.get("OMP_NUM_THREADS"),
        "blocked": sorted(signal.pthread_sigmask(signal.SIG_BLOCK, ())),
        "writes at once": sys.stdout.write_through,  # type: ignore[union-attr]
        "shown as Python": Path("/proc/self/cmdline").read_bytes().startswith(sys.executable.encode()),
        "name": Path("/proc/self/comm").read_text(),
        "forked": "harness.runtime.fork_server" in sys.modules,
        "parent": os.getppid(),
    }
    Path(folder, f"part{RANK}").write_text(json.dumps(what))
    Path(folder, f"part{RANK}").rename(Path(folder, f"rank{RANK}.json"))
    print(f"out of rank {RANK}")
    print(f"error of rank {RANK}", file=sys.stderr)
    word = (words or ["return"])[min(RANK, len(words) - 1)] if words else "return"
    if word == "wait":
        time.sleep(600)
    if word == "raise":
        planted()
    if word == "kill":
        os.kill(os.getpid(), signal.SIGKILL)
    if word.startswith("exit"):
        sys.exit(int(word[4:]))
