"""The watchdog's process: `python -m harness.tools.watchdog.watchdog_process SETTINGS`, as standby.py starts it."""

import json
import os
import signal
import socket
import sys
from pathlib import Path
from typing import Any

import psutil

from harness.runtime.processes import is_stopped
from harness.tools.watchdog.launcher import Launcher
from harness.tools.watchdog.rank_listener import RankListener
from harness.tools.watchdog.watchdog import Watchdog


def main(settings: dict[str, Any]) -> None:
    """Watch. settings: as standby.py gives them."""
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)  # meant for the run; its end is noticed, and is ours
    listener, standby, *hosts = (socket.socket(fileno=each) for each in settings.pop("sockets"))
    launcher = Launcher(psutil.Process(settings.pop("launcher")), settings.pop("is_torchrun"))
    Watchdog(
        listener=RankListener(
            listener,
            Path(settings.pop("socket_folder")),
            launcher,
            settings.pop("world_size"),
            settings.pop("local_world_size"),
        ),
        standby=standby,
        hosts_door=hosts[0] if hosts else None,
        launcher=launcher,
        **settings,
    ).watch()
    if is_stopped(os.getppid()):  # it would stay for ever
        os.kill(os.getppid(), signal.SIGKILL)
    os._exit(0)  # whatever a thread of ours waits for


if __name__ == "__main__":
    main(json.loads(sys.argv[1]))
