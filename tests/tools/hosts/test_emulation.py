"""How an emulation ends, with namespaces and without: all together, and without a trace."""

import os
import signal
import subprocess
import time
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from glob import glob
from pathlib import Path

import psutil
import pytest

from tests.tools.hosts.hosts import ON_HOST, command, needs_namespaces, run

ISOLATIONS = [pytest.param("namespaces", marks=needs_namespaces), "processes"]
MAINLY_NAMESPACES = [ISOLATIONS[0], pytest.param("processes", marks=pytest.mark.long)]
SECONDS = 20.0


def processes_with(marker: str) -> list[int]:
    found = []
    for process in psutil.process_iter(["cmdline", "status"]):
        words = process.info["cmdline"] or []
        if process.info["status"] != psutil.STATUS_ZOMBIE and any(marker in word for word in words):
            found.append(process.pid)
    return found


def networks(pids: Iterable[int]) -> set[str]:
    """Network namespaces that these processes are in."""
    found = set()
    for pid in pids:
        try:
            found.add(os.readlink(f"/proc/{pid}/ns/net"))
        except OSError:
            continue  # it has ended
    return found


@contextmanager
def waiting_hosts(isolation: str, folder: Path, marker: str) -> Iterator[subprocess.Popen[str]]:
    """Two hosts whose script waits, once both do."""
    words = command("--isolation", isolation, "--", ON_HOST, "wait", marker)
    launcher = subprocess.Popen(
        words, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=os.environ | {"TMPDIR": str(folder)}
    )
    try:
        assert launcher.stdout
        waiting = 0
        for line in launcher.stdout:
            waiting += '"waiting"' in line
            if waiting == 2:
                break
        assert waiting == 2
        yield launcher
    finally:
        launcher.kill()
        launcher.communicate()


def soon(what: str, get: object) -> None:
    """Wait until the callable returns nothing."""
    assert callable(get)
    deadline = time.monotonic() + SECONDS
    while found := get():
        assert time.monotonic() < deadline, f"{what} left: {found}"
        time.sleep(0.05)


@pytest.mark.parametrize("isolation", ISOLATIONS)
def test_nothing_is_left_when_the_launcher_is_killed(isolation: str, tmp_path: Path) -> None:
    marker = f"marker-{tmp_path.name}-{os.getpid()}"
    with waiting_hosts(isolation, tmp_path, marker) as launcher:
        soon("nothing yet", lambda: len(processes_with(marker)) < 5)  # the launcher, two scripts, two daemons
        own_networks = networks(processes_with(marker)) - networks([os.getpid()])
        assert len(own_networks) == (2 if isolation == "namespaces" else 0)
        assert list(tmp_path.glob("hosts-*"))
        own = psutil.Process(launcher.pid).children(recursive=True)
        launcher.send_signal(signal.SIGKILL)
        launcher.wait()
        soon("processes", lambda: processes_with(marker))
        soon("children", lambda: [each for each in own if each.is_running() and each.status() != psutil.STATUS_ZOMBIE])
    soon("folders", lambda: [*tmp_path.iterdir(), *glob(f"/tmp/harness-*-{marker}")])
    assert str(tmp_path) not in Path("/proc/self/mountinfo").read_text()
    soon(
        "networks", lambda: own_networks & networks(psutil.pids())
    )  # their numbers may have gone to others for a while


@pytest.mark.parametrize("isolation", MAINLY_NAMESPACES)
def test_a_signal_ends_all(isolation: str, tmp_path: Path) -> None:
    marker = f"marker-{tmp_path.name}-{os.getpid()}"
    with waiting_hosts(isolation, tmp_path, marker) as launcher:
        launcher.send_signal(signal.SIGTERM)
        assert launcher.wait(SECONDS) == 128 + signal.SIGTERM
        assert not processes_with(marker)
        assert not list(tmp_path.iterdir())
        assert launcher.stderr.read() == "launch/hosts.py was interrupted by SIGTERM\n"
    assert not glob(f"/tmp/harness-*-{marker}")


@pytest.mark.parametrize("isolation", MAINLY_NAMESPACES)
def test_when_one_fails_the_others_end_after_their_patience(isolation: str) -> None:
    started = time.monotonic()
    answer = run("--isolation", isolation, "--patience", "1", "--", ON_HOST, "fail")
    assert answer.code == 3
    assert time.monotonic() - started < 3 * SECONDS
    assert any("host1: torchrun FAILED with exit code 3" in line for line in answer.console), answer.output
    assert any("host0: 1 s left to end" in line for line in answer.console)
    assert any("host0 was ended" in line for line in answer.console)


@pytest.mark.parametrize(
    "isolation", [pytest.param("namespaces", marks=(needs_namespaces, pytest.mark.long)), "processes"]
)
def test_what_outlives_torchrun_is_named_and_ended(isolation: str) -> None:
    answer = run("--isolation", isolation, "--", ON_HOST, "leave", "x")
    assert answer.code == 0
    assert "host1 | ended what outlived torchrun: sleep (pid " in answer.output


def test_a_host_without_namespaces_can_be_killed(tmp_path: Path) -> None:
    marker = f"marker-{tmp_path.name}-{os.getpid()}"
    answer = run(
        "--isolation", "processes", "--kill", "host1@1s", "--patience", "0", "--", ON_HOST, "wait", marker
    )  # fmt: skip
    assert answer.code == 1
    assert any(line.startswith("hosts: killed host1 1 s after the start (") for line in answer.console)
    assert not processes_with(marker)
    assert not glob(f"/tmp/harness-*-{marker}")


@pytest.mark.parametrize("isolation", MAINLY_NAMESPACES)
def test_a_scheduler_that_lost_its_parent_cannot_end_its_host(isolation: str) -> None:
    answer = run("--isolation", isolation, "--", ON_HOST, "quit_parent")
    assert answer.code == 0, answer.output


def test_a_time_that_never_came_is_a_mistake() -> None:
    answer = run("--isolation", "processes", "--kill", "host1@600s", "--", ON_HOST, "nothing")
    assert answer.code == 2
    assert "kill host1 600 s after the start never happened" in answer.console[-1]
