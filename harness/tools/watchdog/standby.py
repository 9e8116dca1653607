"""The watchdog's standby: `python -m harness.tools.watchdog.standby SETTINGS`, as guard.py starts it.

It starts the watchdog and hears from it once a second what the run has on this host. It ends with it; but where the
watchdog is killed, stopped or hangs, it ends all of that in its place, and tells it.
"""

import json
import os
import select
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import replace
from typing import Any

LARGEST = 1 << 20
"""Bytes of what the watchdog says at once."""
TICK_SECONDS = 1.0
QUICK_SECONDS = 0.05
STOPPED_BEATS, SILENT_BEATS = 5, 60
"""How many beats a watchdog that is stopped, and one that is not, may miss."""
ENDED_SECONDS = 5.0


def main(settings: dict[str, Any]) -> None:
    """Detach from the rank that started this, and stand by."""
    if os.fork():
        os._exit(0)
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)  # meant for the run
    line, other = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    line.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, LARGEST)
    listener, *hosts = settings["sockets"]
    passed = [listener, other.fileno(), *hosts]
    command = [
        sys.executable,
        "-m",
        "harness.tools.watchdog.watchdog_process",
        json.dumps(settings | {"sockets": passed}),
    ]
    watchdog = subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, pass_fds=passed)
    for each in (listener, *hosts):
        os.close(each)
    other.close()
    _stand_by(settings, watchdog, line)
    os._exit(0)  # whatever a thread of ours waits for


def _stand_by(settings: dict[str, Any], watchdog: "subprocess.Popen[bytes]", line: socket.socket) -> None:
    """Until the watchdog has ended; then do what it left undone."""
    # Only now, aside of the watchdog's own start.
    import psutil

    from harness.tools.watchdog.launcher import Launcher
    from harness.tools.watchdog.processes import said_status
    from harness.tools.watchdog.silence import Silence
    from harness.tools.watchdog.snapshot import Snapshot

    launcher = Launcher(psutil.Process(settings["launcher"]), settings["is_torchrun"])
    silence = Silence(watchdog.pid, STOPPED_BEATS, SILENT_BEATS)
    last, wrong = Snapshot(), ""
    poll = select.poll()
    poll.register(line, select.POLLIN)
    while not wrong:
        if not poll.poll(TICK_SECONDS * 1000):
            wrong = silence.miss()
        elif data := line.recv(LARGEST):
            last = Snapshot.from_line(data)
            silence.heard()
        else:
            break  # it has ended, or is about to
    if wrong:
        watchdog.kill()
    code = _code(watchdog)
    if code == 0:
        return
    if not wrong:
        wrong = said_status(-code if code < 0 else code << 8).removesuffix(", without a word")
    _end_in_its_place(settings, f"(pid {watchdog.pid}) {wrong}", last, launcher)


def _code(watchdog: "subprocess.Popen[bytes]") -> int:
    try:
        return watchdog.wait(ENDED_SECONDS)
    except subprocess.TimeoutExpired:
        watchdog.kill()
        return watchdog.wait()


def _end_in_its_place(settings: dict[str, Any], detail: str, last: Any, launcher: Any) -> None:
    """End what the watchdog spoke of last, and tell it."""
    from harness.runtime.processes import is_alive
    from harness.tools.watchdog.ending import Ending
    from harness.tools.watchdog.failure import Failure, Place
    from harness.tools.watchdog.telling import View
    from harness.tools.watchdog.verdict import Verdict, stderr_of

    host, places = settings["host"], {rank: place for rank, (_, place) in last.ranks.items()}
    ending = Ending(settings["name"], host, launcher, _wait)
    ending.shared.ours.update(last.shared)
    ending.shared.pids.update(last.started)
    processes = last.processes()
    ranks = {pid: process for pid, process in processes.items() if pid in {pid for pid, _ in last.ranks.values()}}
    ending.descendants.known.update({pid: each for pid, each in processes.items() if pid not in ranks})
    first = min(last.ranks, default=None)
    place = places[first] if first is not None else Place()
    own = Failure(kind="watchdog", time=time.time(), host=host, ranks=tuple(sorted(last.ranks)), place=place)
    view = View(now=time.time(), world_size=settings["world_size"], places=places, hosts=dict.fromkeys(places, host))
    verdict = Verdict(host, last.folder, [*last.failures, replace(own, detail=detail)], view)
    verdict.explanation.begin()
    screen = stderr_of(launcher.pid)
    ending.end_and_tell(verdict, screen, ranks.values(), lambda: not any(map(is_alive, ranks.values())))
    if last.folder and 0 in last.ranks:
        ending.report(last.folder)


def _wait(until: Callable[[], bool], seconds: float) -> None:
    """Until it is so, or this time has passed."""
    given_up = time.monotonic() + seconds
    while not until() and time.monotonic() < given_up:
        time.sleep(QUICK_SECONDS)


if __name__ == "__main__":
    main(json.loads(sys.argv[1]))
