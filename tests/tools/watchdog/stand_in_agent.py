"""A stand-in for torchrun: starts ranks of stand_in_rank.py on one "host", and ends all of them at the first that
fails.

Arguments: a JSON object with host, ranks, world_size, folder, heartbeat_timeout, phase_timeouts, and orders:
rank -> a line of words for stand_in_rank.py. With "hangs", it stays when its ranks are gone, whatever it is told.
"""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path


def main() -> int:
    said = json.loads(sys.argv[1])
    if said.get("hangs"):
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
    children = []
    for local_rank, rank in enumerate(said["ranks"]):
        environment = os.environ | {"LOCAL_RANK": str(local_rank), "RANK": str(rank), "TORCHELASTIC_RUN_ID": "test"}
        script = str(Path(__file__).with_name("stand_in_rank.py"))
        children.append(subprocess.Popen([sys.executable, script, sys.argv[1]], env=environment))
    code = 0
    while any(child.poll() is None for child in children) or said.get("hangs"):
        codes = [child.poll() for child in children]
        if any(codes) and not code:
            code = 1
            for child in children:
                child.terminate()
        time.sleep(0.1)  # as torchrun looks
    return code


if __name__ == "__main__":
    sys.exit(main())
