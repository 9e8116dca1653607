"""A watchdog and its standby, two processes: `python -m harness.tools.watchdog.standby SETTINGS ...` (see client.py).

The standby forks the watchdog and gets a snapshot of the run from it once a second. It ends with the watchdog; but if that
is killed, stopped or hangs, it ends the run on this host in the watchdog's place, and reports that.
"""

import json
import os
import pickle
import select
import signal
import socket
import sys
import time
from collections.abc import Callable
from pathlib import Path

import psutil

from harness.runtime.processes import is_alive
from harness.tools.watchdog import channel
from harness.tools.watchdog.channel import WatchdogSettings
from harness.tools.watchdog.ending import HostCleanup, Snapshot, stderr_of
from harness.tools.watchdog.failures import Place, RunFailure
from harness.tools.watchdog.host_processes import NO_MESSAGE, STOPPED, describe_status, is_stopped
from harness.tools.watchdog.verdict import JobView, RunVerdict
from harness.tools.watchdog.watchdog import Watchdog

LARGEST_SNAPSHOT = 1 << 20  # bytes
TICK_SECONDS = 1.0
STOPPED_BEATS, SILENT_BEATS = 5, 60  # that a watchdog which is stopped, and any other, may miss


def main(words: list[str]) -> None:
    """Start the watchdog, and wait for its end. words: settings, the folder of the listener, descriptors of sockets."""
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)  # they are meant for the run, whose end is noticed
    settings = WatchdogSettings(**json.loads(words[0]))
    launcher = psutil.Process(settings.launcher)
    listener, *hosts = (socket.socket(fileno=int(each)) for each in words[2:])
    line, other = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    other.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, LARGEST_SNAPSHOT)
    if pid := os.fork():
        for each in (other, listener, *hosts):
            each.close()
        _stand_by(HostCleanup(settings, launcher, _wait), pid, line)
    else:
        line.close()
        hosts_socket = hosts[0] if hosts else None
        Watchdog(settings, launcher, listener, Path(words[1]), hosts_socket, standby=other).watch()
        if is_stopped(os.getppid()):  # otherwise the standby would stay
            os.kill(os.getppid(), signal.SIGKILL)
    channel.remove(Path(words[1]))
    os._exit(0)  # without waiting for threads


def _stand_by(end: HostCleanup, watchdog: int, line: socket.socket) -> None:
    """Wait until the watchdog has ended; then do what it left undone."""
    last, wrong, missed = Snapshot(), "", 0
    poll = select.poll()
    poll.register(line, select.POLLIN)
    while not wrong:
        # Missed beats count, not seconds: a standby that was itself stopped in the meantime missed none.
        if not poll.poll(TICK_SECONDS * 1000):
            missed += 1
            if missed >= STOPPED_BEATS and is_stopped(watchdog):
                wrong = STOPPED
            elif missed >= SILENT_BEATS:
                wrong = f"was silent for {missed} s"
        elif data := line.recv(LARGEST_SNAPSHOT):
            last, missed = pickle.loads(data), 0
        else:
            break  # it has ended
    if wrong:
        os.kill(watchdog, signal.SIGKILL)
    if status := os.waitpid(watchdog, 0)[1]:
        detail = f"(pid {watchdog}) {wrong or describe_status(status).removesuffix(NO_MESSAGE)}"
        _end_in_its_place(end, last, detail)


def _end_in_its_place(end: HostCleanup, last: Snapshot, detail: str) -> None:
    """End what the watchdog's last snapshot names, and report that."""
    host, places = end.settings.host, {rank: place for rank, (_, place) in last.ranks.items()}
    end.shared.ours |= last.shared
    end.shared.pids |= set(last.started)
    processes = last.processes()
    ranks = [processes.pop(pid) for pid, _ in last.ranks.values() if pid in processes]
    end.descendants.known = processes
    place = places[min(places)] if places else Place()
    now = time.time()
    failure = RunFailure(kind="watchdog", time=now, host=host, ranks=tuple(sorted(places)), place=place, detail=detail)
    view = JobView(now=now, world_size=end.settings.world_size, places=places, hosts=dict.fromkeys(places, host))
    verdict = RunVerdict(host, last.folder, [*last.failures, failure], view)
    end.end_and_report(verdict, stderr_of(end.launcher.pid), ranks, lambda: not any(map(is_alive, ranks)))
    if last.folder and 0 in last.ranks:
        end.write_reports(last.folder)


def _wait(until: Callable[[], bool], seconds: float) -> None:
    given_up = time.monotonic() + seconds
    while not until() and time.monotonic() < given_up:
        time.sleep(0.05)


if __name__ == "__main__":
    main(sys.argv[1:])
