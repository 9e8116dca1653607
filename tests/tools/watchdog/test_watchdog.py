"""Real watchdogs, agents and ranks without torch: what each way to fail is called, and that nothing stays."""

import json
import os
import re
import signal
import tempfile
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from harness.tools.hosts import kernel
from tests.tools.watchdog.hosts import Hosts, ended

ONE = {"host0": [0, 1]}
TWO = {"host0": [0, 1], "host1": [2, 3]}
TIME = r"\d\d:\d\d:\d\d UTC"
HANG = "begin:meet:0 meet end:meet begin:sync:1 flush hang"
HANG_WITH_CHILD = HANG.replace("end:meet", "end:meet child")

Start = Callable[..., Hosts]
Scenario = Callable[[Start], None]
SCENARIOS: list[Any] = []
AT_ONCE = 3


def scenario(by_default: bool = False) -> Callable[[Scenario], Scenario]:
    """Register a way to fail; by_default: every run of the tests has it, the others are marked long."""

    def register(function: Scenario) -> Scenario:
        marks = () if by_default else pytest.mark.long
        SCENARIOS.append(pytest.param(function, id=function.__name__, marks=marks))
        return function

    return register


def played(folder: Path, play: Scenario) -> None:
    made: list[Hosts] = []

    def begin(ranks: dict[str, list[int]], orders: dict[int, str], by_host: Any = None, **settings: Any) -> Hosts:
        made.append(Hosts(folder / play.__name__, ranks, orders, settings, by_host or {}))
        return made[-1].start()

    try:
        play(begin)
    finally:
        for hosts in made:
            hosts.kill()


@pytest.fixture(scope="module")
def results(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[Scenario, Any]]:
    """Play the scenarios that were asked for side by side: most of the time each of them waits."""
    folder = tmp_path_factory.mktemp("scenarios")
    asked = [item.callspec.params["play"] for item in request.session.items if item.path == request.path]  # type: ignore[attr-defined]
    with ThreadPoolExecutor(AT_ONCE) as pool:
        yield {play: pool.submit(played, folder, play) for play in asked}


def said_but_warnings(hosts: Hosts) -> list[str]:
    """What all hosts said, without what a busy machine may make true: a heartbeat that is late, a rank that is slow."""
    lines = [line for host in hosts.ranks_by_host for line in hosts.said(host).splitlines()]
    return [line for line in lines if not line.startswith(("warning: ", "slow: "))]


@scenario(by_default=True)
def a_run_that_ends_well_prints_nothing(start: Start) -> None:
    hosts = start(TWO, {-1: "begin:meet:0 meet end:meet begin:sync:0 wait:0.3 end:sync bye"})
    hosts.wait()
    assert said_but_warnings(hosts) == []


@scenario(by_default=True)
def an_exception_is_named_on_every_host(start: Start) -> None:
    hosts = start(TWO, {2: "meet begin:generate:1 child wait:1 raise:ValueError:_half_\ud83d", -1: HANG})
    hosts.wait()
    for host in TWO:
        pattern = rf"FIRST FAILURE: rank 2 on host1 failed in generate of step 1 at {TIME}: ValueError: half \\ud83d"
        assert re.fullmatch(pattern, hosts.verdict(host))
    kept = json.loads((hosts.folder / "failure-host0.json").read_text())
    assert kept["first"]["ranks"] == [2]
    assert kept["first"]["host"] == "host1"


@scenario(by_default=True)
def a_silent_exit_is_named_with_its_code(start: Start) -> None:
    hosts = start(ONE, {1: "meet begin:sync:0 exit:7", -1: HANG})
    hosts.wait()
    assert re.match(f"FIRST FAILURE: rank 1 on host0 {ended('ended with exit code 7')}", hosts.verdict("host0"))


@scenario(by_default=True)
def the_rank_that_the_others_wait_for_is_named_at_the_deadline(start: Start) -> None:
    hosts = start(
        TWO,
        {2: "meet begin:sleep:1 end:sleep hang", -1: HANG.replace("begin:sync", "begin:sleep:1 end:sleep begin:sync")},
        phase_timeouts={"sync": 6.0},
    )
    hosts.wait()
    for host in TWO:
        assert hosts.verdict(host) == (
            "FIRST FAILURE: deadline of 6 s passed in sync of step 1: rank 2 on host1 was after sleep of step 1, and had not"
            " arrived (waited for by ranks 0, 1, 3)"
        )
    assert json.loads((hosts.folder / "failure-host1.json").read_text())["code"] == 124


@scenario(by_default=True)
def a_host_that_falls_silent_is_gone(start: Start) -> None:
    hosts = start(TWO, {-1: HANG})
    hosts.wait_until_hanging(0, 1, 2, 3)
    hosts.harm(signal.SIGSTOP, "host1")
    hosts.wait("host0")  # long before the deadline of 600 s
    assert re.fullmatch(
        rf"FIRST FAILURE: host1 \(ranks 2, 3\) is gone: last heard {TIME}, \d\.\d s ago, when its ranks were in sync of step 1",
        hosts.verdict("host0"),
    )


@scenario(by_default=True)
def a_lost_peer_is_explained_by_a_host_that_is_found_lost_later(start: Start) -> None:
    lost = "RuntimeError:_[pair.cc:547]_Connection_closed_by_peer_[127.0.0.1]:1"
    hosts = start(TWO, {0: f"meet begin:sync:1 flush until:harmed raise:{lost}", -1: HANG})
    hosts.wait_until_hanging(1, 2, 3)
    hosts.harm(signal.SIGKILL, "host1")
    (hosts.folder / "harmed").touch()
    hosts.wait("host0")
    assert "FIRST FAILURE: host1 (ranks 2, 3) is gone" in hosts.verdict("host0")
    assert "s: rank 0 on host0 failed too in sync of step 1" in hosts.said("host0")


@scenario()
def a_lost_peer_is_reported_when_nothing_else_is_known(start: Start) -> None:
    hosts = start(ONE, {0: "meet begin:sync:1 raise:RuntimeError:_Connection_reset_by_peer", -1: HANG})
    hosts.wait()
    assert "rank 0 on host0 lost a peer in sync of step 1" in hosts.verdict("host0")
    assert "a peer vanished" in hosts.said("host0")


@scenario(by_default=True)
def ranks_end_when_their_launcher_is_killed(start: Start) -> None:
    hosts = start(TWO, {-1: HANG_WITH_CHILD})
    hosts.wait_until_hanging(0, 1, 2, 3)
    hosts.harm(signal.SIGKILL, "host1", "stand_in_agent")
    hosts.wait()
    for host in TWO:
        assert "FIRST FAILURE: torchrun of ranks 2, 3 on host1 (pid " in hosts.verdict(host)


@scenario()
def a_launcher_that_stays_after_a_host_was_lost_is_ended(start: Start) -> None:
    hosts = start(TWO, {-1: HANG}, by_host={"host0": {"hangs": True}})
    hosts.wait_until_hanging(0, 1, 2, 3)
    hosts.harm(signal.SIGKILL, "host1")
    hosts.wait("host0")
    assert "is still there 8 s after its ranks" in hosts.said("host0")


@scenario(by_default=True)
def a_user_error_gets_no_verdict(start: Start) -> None:
    hosts = start(TWO, {0: "meet wait:0.5 bye:2", -1: "meet wait:1.5 bye:2"})
    hosts.wait()
    assert said_but_warnings(hosts) == [], "no verdict"


@scenario(by_default=True)
def the_end_of_a_watchdog_ends_its_host_and_the_others_name_it(start: Start) -> None:
    hosts = start(TWO, {-1: HANG_WITH_CHILD.replace("flush", "scratch flush")})
    hosts.wait_until_hanging(0, 1, 2, 3)
    hosts.processes("host1", "watchdog")[0].kill()
    hosts.wait()
    assert "FIRST FAILURE: host1 (ranks 2, 3) is gone" in hosts.verdict("host0")
    for rank in (2, 3):
        said = f"FAILED: the watchdog of host1 is gone, so rank {rank} ends too, in sync of step 1"
        assert said in hosts.said("host1")
    assert not [rank for rank in (2, 3) if Path((hosts.folder / f"scratch-{rank}").read_text()).exists()]


@contextmanager
def dead_mount(folder: Path) -> Iterator[None]:
    """A file system that answers nobody: FUSE, without the program that would serve it."""
    folder.mkdir(parents=True)
    try:
        server = os.open("/dev/fuse", os.O_RDWR)
        options = f"fd={server},rootmode=40000,user_id={os.getuid()},group_id={os.getgid()}"
        kernel.mount("dead", str(folder), "fuse", 0, options)
    except OSError as error:
        pytest.skip(f"nothing can be mounted here: {error}")
    try:
        yield
    finally:
        kernel.unmount(str(folder))
        os.close(server)


@scenario(by_default=True)
def a_run_directory_that_blocks_keeps_nothing_alive(start: Start) -> None:
    orders = {1: f"meet child begin:sync:1 wait:1.2 kill:{int(signal.SIGKILL)}", -1: HANG_WITH_CHILD}
    with tempfile.TemporaryDirectory() as folder, dead_mount(Path(folder, "run")):
        hosts = start(ONE, orders, run_folder=f"{folder}/run")
        hosts.wait()
    # On a busy machine torchrun may take the exit status first, and its report lies in the directory that does not
    # answer.
    said = hosts.verdict("host0")
    assert "FIRST FAILURE: rank 1 on host0 " in said and " in sync of step 1" in said
    assert "the run directory does not answer" in hosts.said("host0")


@scenario(by_default=True)
def a_stopped_process_of_an_engine_is_named_at_the_deadline(start: Start) -> None:
    hosts = start(ONE, {0: HANG_WITH_CHILD, -1: HANG}, phase_timeouts={"sync": 6.0})
    hosts.wait_until_hanging(0, 1)
    engine = int((hosts.folder / "child-0").read_text())
    os.kill(engine, signal.SIGSTOP)
    hosts.wait()
    named = rf"engine process python\S* \(pid {engine}\) of rank 0 on host0 was stopped in sync of step 1"
    assert re.match(f"FIRST FAILURE: {named}", hosts.verdict("host0")), hosts.said("host0")


@scenario(by_default=True)
def a_host_that_was_never_heard_causes_a_warning_only(start: Start) -> None:
    blocked = {"host1": {"address": "203.0.113.1"}, "host0": {"address": "203.0.113.2"}}
    hosts = start(TWO, {-1: "meet begin:sync:0 wait:2 end:sync bye"}, by_host=blocked)
    hosts.wait()
    assert "warning: host0 got no heartbeat from host1 (ranks 2, 3) at 203.0.113.1 port" in hosts.said("host0")
    assert "FIRST FAILURE" not in hosts.said("host0") + hosts.said("host1")


@pytest.mark.parametrize("play", SCENARIOS)
def test_a_scenario(results: dict[Scenario, Any], play: Scenario) -> None:
    results[play].result()
