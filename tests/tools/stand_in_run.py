"""A stand-in for torchrun and launch/ppo.py, in tests of the search for memory fractions: passes up to a threshold of its
own for each way of resuming, fails above, hangs at --hang-at, and starts a child that would outlive it.

Arguments: FILE (the pids that ran are appended) AT_ONCE STAGED (thresholds) HANG_AT, then what the search appends.
"""

import subprocess
import sys
import time
from pathlib import Path

SLEEP = [sys.executable, "-c", "import signal, time; signal.signal(signal.SIGTERM, signal.SIG_IGN); time.sleep(600)"]


def main() -> int:
    file, at_once, staged, hang_at = sys.argv[1:5]
    options = dict(zip(sys.argv[5::2], sys.argv[6::2], strict=True))
    fraction, resume = float(options["--engine.args.mem_fraction_static"]), options["--memory.resume"]
    child = subprocess.Popen(SLEEP, start_new_session=True)
    with Path(file).open("a") as pids:
        pids.write(f"{child.pid}\n")
    Path(options["--run.dir"]).mkdir()
    time.sleep(0.1)
    if fraction >= float(hang_at):
        time.sleep(600)
    if fraction <= float(at_once if resume == "all" else staged):
        return 0
    engines = Path(options["--run.dir"]) / "engines"
    engines.mkdir()
    (engines / "engine-rank0.log").write_text("a line before\nCUresult error: 2 (out of memory)\nafter\n")
    print("a line before\nrank 0 FAILED: EngineFailed: an engine's process died\nafter")
    return 1


if __name__ == "__main__":
    sys.exit(main())
