"""The watchdog's standby, in a process of its own: `python -m harness.tools.watchdog.standby SETTINGS` (see client.py).

It starts the watchdog and gets a snapshot of the run from it once a second. It ends with the watchdog; but if that is
killed, stopped or hangs, it ends the run on this host in the watchdog's place, and reports that.
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
from typing import Any

LARGEST_SNAPSHOT = 1 << 20  # bytes
TICK_SECONDS = 1.0
QUICK_SECONDS = 0.05
STOPPED_BEATS, SILENT_BEATS = 5, 60  # that a watchdog which is stopped, and any other, may miss
ENDED_SECONDS = 5.0


def main(settings: dict[str, Any]) -> None:
    """Detach from the rank that started this process, start the watchdog, and wait for its end."""
    if os.fork():
        os._exit(0)
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)  # they are meant for the run
    line, other = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    other.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, LARGEST_SNAPSHOT)
    listener, *hosts = settings["sockets"]
    passed = [listener, other.fileno(), *hosts]
    words = json.dumps(settings | {"sockets": passed})
    command = [sys.executable, "-m", "harness.tools.watchdog.watchdog", words]
    watchdog = subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, pass_fds=passed)
    for each in (listener, *hosts):
        os.close(each)
    other.close()
    _stand_by(settings, watchdog, line)
    os._exit(0)  # without waiting for threads


def _stand_by(settings: dict[str, Any], watchdog: "subprocess.Popen[bytes]", line: socket.socket) -> None:
    """Wait until the watchdog has ended; then do what it left undone."""
    # Imported only now, so that the watchdog itself starts sooner.
    import pickle

    import psutil

    from harness.tools.watchdog.ending import Snapshot
    from harness.tools.watchdog.host_processes import NO_MESSAGE, SilenceCounter, describe_status
    from harness.tools.watchdog.launcher import RankLauncher

    launcher = RankLauncher(psutil.Process(settings["launcher"]), settings["is_torchrun"])
    silence = SilenceCounter(watchdog.pid, STOPPED_BEATS, SILENT_BEATS)
    last, wrong = Snapshot(), ""
    poll = select.poll()
    poll.register(line, select.POLLIN)
    while not wrong:
        if not poll.poll(TICK_SECONDS * 1000):
            wrong = silence.miss()
        elif data := line.recv(LARGEST_SNAPSHOT):
            last = pickle.loads(data)
            silence.missed = 0
        else:
            break  # it has ended, or is about to
    if wrong:
        watchdog.kill()
    try:
        code = watchdog.wait(ENDED_SECONDS)
    except subprocess.TimeoutExpired:
        watchdog.kill()
        code = watchdog.wait()
    if code:
        how = wrong or describe_status(-code if code < 0 else code << 8).removesuffix(NO_MESSAGE)
        _end_in_its_place(settings, f"(pid {watchdog.pid}) {how}", last, launcher)


def _end_in_its_place(settings: dict[str, Any], detail: str, last: Any, launcher: Any) -> None:
    """End what the watchdog's last snapshot names, and report that."""
    from harness.runtime.processes import is_alive
    from harness.tools.watchdog.ending import HostCleanup, stderr_of
    from harness.tools.watchdog.failures import Place, RunFailure
    from harness.tools.watchdog.verdict import JobView, RunVerdict

    host, places = settings["host"], {rank: place for rank, (_, place) in last.ranks.items()}
    end = HostCleanup(settings["name"], host, launcher, _wait)
    end.shared.ours.update(last.shared)
    end.shared.pids.update(last.started)
    processes, rank_pids = last.processes(), {pid for pid, _ in last.ranks.values()}
    ranks = [process for pid, process in processes.items() if pid in rank_pids]
    end.descendants.known.update({pid: each for pid, each in processes.items() if pid not in rank_pids})
    place = places[min(places)] if places else Place()
    now, all_ranks = time.time(), tuple(sorted(places))
    failure = RunFailure(kind="watchdog", time=now, host=host, ranks=all_ranks, place=place, detail=detail)
    view = JobView(now=now, world_size=settings["world_size"], places=places, hosts=dict.fromkeys(places, host))
    verdict = RunVerdict(host, last.folder, [*last.failures, failure], view)
    verdict.begin_to_explain()
    end.end_and_report(verdict, stderr_of(launcher.pid), ranks, lambda: not any(map(is_alive, ranks)))
    if last.folder and 0 in last.ranks:
        end.write_reports(last.folder)


def _wait(until: Callable[[], bool], seconds: float) -> None:
    given_up = time.monotonic() + seconds
    while not until() and time.monotonic() < given_up:
        time.sleep(QUICK_SECONDS)


if __name__ == "__main__":
    main(json.loads(sys.argv[1]))
