"""The watchdog's process: `python -m harness.failures.watchdog_process SETTINGS`, as guard.py starts it."""

import json
import os
import signal
import socket
import sys
from typing import Any

import psutil

from harness.failures.watchdog import Watchdog


def main(settings: dict[str, Any]) -> None:
    """Be nobody's child, and watch. settings: as guard.py gives them."""
    if os.fork():
        os._exit(0)
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)  # meant for the run; its end is noticed, and is ours
    doors = [socket.socket(fileno=each) for each in settings.pop("sockets")]
    launcher = psutil.Process(settings.pop("launcher"))
    Watchdog(
        ranks_door=doors[0], hosts_door=doors[1] if len(doors) > 1 else None, launcher=launcher, **settings
    ).watch()


if __name__ == "__main__":
    main(json.loads(sys.argv[1]))
