"""A stand-in for a rank, without torch: speaks to its watchdog through the real WatchdogObserver, and does as it is
told.

Ranks meet through files in a folder. Orders are words: begin:PHASE:STEP, end:PHASE, meet (all ranks), child (start a
process that would outlive us, and so would its file in /dev/shm), scratch (make the folder for temporary files),
raise:TEXT, kill:SIGNAL, exit:CODE, wait:SECONDS, until:NAME (until the folder has this file), flush (until the other
hosts have been told where we are), hang, bye.
"""

import dataclasses
import json
import os
import pickle
import subprocess
import sys
import time
from pathlib import Path

from harness.runtime import files
from harness.tools.watchdog.channel import WatchdogSettings
from harness.tools.watchdog.client import OpenPhases, WatchdogObserver

CHILD = """
import mmap, signal, sys, time
signal.signal(signal.SIGTERM, signal.SIG_IGN)
with open(sys.argv[1], "wb+") as file:
    file.truncate(4096)
    memory = mmap.mmap(file.fileno(), 4096)
    time.sleep(600)
"""


def meet(client: WatchdogObserver, folder: Path, world_size: int, address: str, run_folder: Path) -> None:
    """Gather the addresses of all ranks' watchdogs, as all_gather would."""
    part = folder / f"address-{client.own.rank}.part"
    part.write_bytes(pickle.dumps(dataclasses.replace(client.own, address=address)))
    part.rename(folder / f"address-{client.own.rank}")
    files = [folder / f"address-{rank}" for rank in range(world_size)]
    while not all(file.exists() for file in files):
        time.sleep(0.01)
    client.meet([pickle.loads(file.read_bytes()) for file in files], run_folder, client.own.host)


def main() -> None:
    said, rank = json.loads(sys.argv[1]), int(os.environ["RANK"])
    folder, phase_timeouts = Path(said["folder"]), said.get("phase_timeouts", {})
    client = WatchdogObserver()
    settings = WatchdogSettings(
        host=said["host"],
        world_size=said["world_size"],
        local_world_size=len(said["ranks"]),
        heartbeat_timeout=said.get("heartbeat_timeout", 2.5),
        stopped_seconds=60.0,
    )
    client.connect(rank, int(os.environ["LOCAL_RANK"]), OpenPhases(phase_timeouts, 600.0), settings)
    for word in said["orders"][str(rank)].split():
        name, _, argument = word.partition(":")
        if name == "begin":
            phase, step = argument.split(":")
            client.phase_begins(phase, int(step))
        elif name == "end":
            client.phase_ends(argument)
        elif name == "meet":
            run_folder = Path(said.get("run_folder", folder))
            meet(client, folder, said["world_size"], said.get("address", "127.0.0.1"), run_folder)
        elif name == "child":
            words = [sys.executable, "-S", "-c", CHILD, f"/dev/shm/{os.environ['HARNESS_TEST_JOB']}-{rank}"]
            child = subprocess.Popen(words, start_new_session=True)
            (folder / f"child-{rank}").write_text(str(child.pid))
        elif name == "scratch":
            (folder / f"scratch-{rank}").write_text(str(files.enter_run_folder(client.own.watchdog)))
        elif name == "raise":
            client.failed(argument.replace("_", " "))
            os._exit(1)
        elif name == "kill":
            os.kill(os.getpid(), int(argument))
        elif name == "exit":
            os._exit(int(argument))
        elif name == "flush":
            client.flush()
        elif name == "wait":
            time.sleep(float(argument))
        elif name == "until":
            while not (folder / argument).exists():
                time.sleep(0.01)
        elif name == "hang":
            (folder / f"hangs-{rank}").touch()
            time.sleep(600)
        elif name == "bye":
            client.finished(int(argument or 0))
            os._exit(int(argument or 0))


if __name__ == "__main__":
    main()
