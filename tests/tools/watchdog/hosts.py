"""Hosts of stand-ins on this machine, each an agent with its ranks and its real watchdog, and what they said."""

import json
import os
import platform
import re
import signal
import subprocess
import sys
import time
import uuid
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import psutil

from harness.runtime.processes import is_alive

LINUX = tuple(int(part) for part in re.findall(r"\d+", platform.release())[:2])
MARK = "HARNESS_TEST_JOB"
AGENT = Path(__file__).with_name("stand_in_agent.py")


def ended(how: str) -> str:
    """Return a pattern: before 6.15, Linux may forget how a rank ended before the watchdog looks."""
    return how if LINUX >= (6, 15) else f"({how}|died)"


@dataclass
class Hosts:
    """Started together; orders are given by rank. Ranks fill the hosts in order."""

    folder: Path
    ranks_by_host: dict[str, list[int]]
    orders: dict[int, str]
    settings: dict[str, Any] = field(default_factory=dict)
    by_host: dict[str, dict[str, Any]] = field(default_factory=dict)
    """Settings of one host."""
    mark: str = field(default_factory=lambda: uuid.uuid4().hex)
    agents: dict[str, subprocess.Popen[bytes]] = field(default_factory=dict)

    def start(self) -> "Hosts":
        self.folder.mkdir(exist_ok=True)
        world_size = sum(map(len, self.ranks_by_host.values()))
        for host, ranks in self.ranks_by_host.items():
            said = {
                "host": host,
                "ranks": ranks,
                "world_size": world_size,
                "folder": str(self.folder),
                "orders": {rank: self.orders.get(rank, self.orders[-1]) for rank in ranks},
            }
            with self.log(host).open("w") as log:
                self.agents[host] = subprocess.Popen(
                    [sys.executable, str(AGENT), json.dumps(said | self.settings | self.by_host.get(host, {}))],
                    env=os.environ | {MARK: self.mark, "HOST_OF_TEST": host},
                    stdout=log,
                    stderr=subprocess.STDOUT,
                    start_new_session=True,
                )
        return self

    def log(self, host: str) -> Path:
        return self.folder / f"{host}.log"

    def said(self, host: str) -> str:
        return self.log(host).read_text()

    def verdict(self, host: str) -> str:
        """The one line that names the first failure there."""
        (line,) = {line for line in self.said(host).splitlines() if line.startswith("FIRST FAILURE")}
        return line

    def wait_until_hanging(self, *ranks: int) -> None:
        end = time.monotonic() + 40
        while not all((self.folder / f"hangs-{rank}").exists() for rank in ranks):
            assert time.monotonic() < end, {host: self.said(host) for host in self.ranks_by_host}
            time.sleep(0.02)

    def processes(self, host: str | None = None, kind: str = "") -> list[psutil.Process]:
        """Those that live: of one host, and with a word of that kind in their command line."""
        found = []
        for process in psutil.process_iter():
            try:
                environment = process.environ()
                ours = environment.get(MARK) == self.mark and (host is None or environment["HOST_OF_TEST"] == host)
                if ours and is_alive(process) and kind in ("", self._kind(process)):
                    found.append(process)
            except psutil.Error:
                continue  # it ended while we looked, or is not ours
        return found

    def _kind(self, process: psutil.Process) -> str:
        """Its script, or "watchdog"."""
        words = process.cmdline()
        if "harness.tools.watchdog.watchdog" in words:
            return "watchdog"
        return Path(words[1]).stem if len(words) > 1 else ""

    def harm(self, number: signal.Signals, host: str, kind: str = "") -> None:
        found = self.processes(host, kind)
        # A host that goes tells nobody: all of its processes stop before the first one ends.
        for each in (signal.SIGSTOP, number) if not kind else (number,):
            for process in found:
                with suppress(psutil.NoSuchProcess):  # it may end with what was killed before it
                    process.send_signal(each)

    def wait(self, *hosts: str, seconds: float = 40) -> float:
        """Until nothing of these hosts, or of any, is left; how long that took."""
        started = time.monotonic()
        agents = [self.agents[host] for host in hosts or self.agents]
        while True:
            running = [
                agent for agent in agents if agent.poll() is None
            ]  # just started, its environment is still empty
            left = [process for host in hosts or (None,) for process in self.processes(host)]
            if not running and not left and (hosts or not list(Path("/dev/shm").glob(f"{self.mark}*"))):
                return time.monotonic() - started
            if time.monotonic() - started > seconds:
                said = {host: self.said(host) for host in self.ranks_by_host}
                left_names = [" ".join(process.cmdline())[:90] for process in left]
                self.kill()
                raise AssertionError(f"left after {seconds} s: {left_names}; {said}")
            time.sleep(0.05)

    def kill(self) -> None:
        for process in self.processes():
            with suppress(psutil.NoSuchProcess):  # it has just ended
                process.kill()
        for agent in self.agents.values():
            agent.wait()
