"""What every test of this process needs before it imports transformers, and before it starts others."""

import multiprocessing.process
import os
import signal
import sys
from collections import Counter
from collections.abc import Container, Iterable, Iterator
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from hypothesis import settings

from harness.tools import kernel_caches

# Programs that tests start import this checkout, whatever the environment's `import harness` finds.
CHECKOUT = str(Path(__file__).resolve().parents[1])
os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, [CHECKOUT, os.environ.get("PYTHONPATH")]))

CACHES_GIVEN = {name: os.environ[name] for name in kernel_caches.FOLDERS if name in os.environ}

# Started in a shell's background this process ignores Ctrl-C, and so would all that tests start and then interrupt.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)


# On a busy machine any example may take a second: no test measures a speed.
settings.register_profile("harness", deadline=None)
settings.load_profile("harness")


FORBIDDEN_WHEN_FAST = ("subprocess.Popen", "os.fork", "os.forkpty", "os.posix_spawn", "os.system")
"""Python's audit events of a new process (https://docs.python.org/3/library/audit_events.html)."""

ENDS = ("passed", "failed", "error", "skipped")
SECONDS = Path(__file__).with_name("seconds.txt")
"""Of each file, the seconds of its long tests and of the others: lines of `seconds lane file`."""
RECORDED_FROM = 2.0
"""Seconds; shorter ones are left out."""


def pytest_addoption(parser: pytest.Parser) -> None:
    """Add the options of launch/run_tests.py."""
    parser.addoption("--fast", action="store_true", help="skip every test that starts a process, as soon as it does")
    parser.addoption("--all", action="store_true", help="say how each room did; run_tests.py selects every test")
    parser.addoption("--record-seconds", action="store_true", help="write tests/seconds.txt from this run")
    parser.addoption("--rewrite-said", action="store_true", help="write the texts that tests compare: said, exported")


def pytest_configure(config: pytest.Config) -> None:
    """With --fast, skip whatever is about to start a process: no list of such tests is kept, so none can be wrong."""
    is_worker = hasattr(config, "workerinput")
    if not config.getoption("--fast") or (config.getoption("numprocesses", None) and not is_worker):
        return  # xdist's own process starts the workers

    def refuse(event: str, _: object) -> None:
        if event in FORBIDDEN_WHEN_FAST and "PYTEST_CURRENT_TEST" in os.environ:
            pytest.skip("starts a process")

    def refuse_start(_: multiprocessing.process.BaseProcess) -> None:
        pytest.skip("starts a process")

    sys.addaudithook(refuse)
    multiprocessing.process.BaseProcess.start = refuse_start  # type: ignore[method-assign]  # it raises no audit event


@pytest.hookimpl(trylast=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Skip what needs a GPU where there is none. Let the longest files start first, so that no worker idles at the
    end."""
    if not torch.cuda.is_available():
        for item in items:
            if item.get_closest_marker("gpu"):
                item.add_marker(pytest.mark.skip(reason="needs a CUDA GPU"))
    seconds, files = recorded_seconds(), Counter[str]()
    for lane, file in {(lane_of(item.keywords), file_of(item.nodeid)) for item in items}:
        files[file] += seconds[lane, file]
    items.sort(key=lambda item: -files[file_of(item.nodeid)])


def file_of(nodeid: str) -> str:
    return nodeid.partition("::")[0]


def lane_of(keywords: Container[str]) -> str:
    return "long" if "long" in keywords else "default"


def recorded_seconds() -> Counter[tuple[str, str]]:
    """Return what is known of each lane's part of each file."""
    lines = SECONDS.read_text(encoding="utf-8").splitlines() if SECONDS.exists() else []
    return Counter({(lane, file): float(seconds) for seconds, lane, file in map(str.split, lines)})


def record_seconds(reports: Iterable[pytest.TestReport]) -> None:
    """Write what this run took, and keep what is known of files that were not in it."""
    taken = Counter[tuple[str, str]]()
    for report in reports:
        taken[lane_of(report.keywords), file_of(report.nodeid)] += report.duration
    known = {key: seconds for key, seconds in recorded_seconds().items() if (SECONDS.parents[1] / key[1]).exists()}
    lines = [
        f"{seconds:.0f} {lane} {file}\n"
        for (lane, file), seconds in Counter(known | taken).most_common()
        if seconds >= RECORDED_FROM
    ]
    SECONDS.write_text("".join(lines), encoding="utf-8")


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter, config: pytest.Config) -> None:
    """With --all, print a line for each room: the folder of its tests, how they ended, and their seconds."""
    rooms: dict[str, Counter[str]] = {}
    reports = []
    for outcome in (*ENDS, ""):  # set-ups and what follows a test have none
        for report in terminalreporter.stats.get(outcome, []):
            if not isinstance(report, pytest.TestReport):
                continue  # of a file that could not be collected, which is said above
            reports.append(report)
            room = rooms.setdefault(str(Path(file_of(report.nodeid)).parent), Counter())
            room.update({outcome: 1, "seconds": report.duration})
    if config.getoption("--record-seconds"):
        record_seconds(reports)
    if not config.getoption("--all"):
        return
    terminalreporter.section("rooms")
    for name, room in sorted(rooms.items()):
        ended = ", ".join(f"{room[outcome]} {outcome}" for outcome in ENDS if room[outcome])
        red = "RED" if room["failed"] or room["error"] else "ok"
        terminalreporter.line(f"{red:3}  {name}: {ended}; {room['seconds']:.0f} s")


@pytest.fixture(autouse=True)
def caches_as_given() -> None:
    """Take back what imports have set: programs that tests start have the user's variables, whatever was imported
    here."""
    for name in kernel_caches.FOLDERS:
        os.environ.pop(name, None)
    os.environ.update(CACHES_GIVEN)


@pytest.fixture(scope="module")
def alone(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """Make this process the only rank of a gloo process group."""
    store = tmp_path_factory.mktemp("store") / "store"
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=0, world_size=1)
    yield
    dist.destroy_process_group()
