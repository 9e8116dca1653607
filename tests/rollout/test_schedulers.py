"""What trainer ranks ask their schedulers: gloo ranks, each with a process that stands in for SGLang's scheduler.

Real engines are asked in tests/weights.
"""

import multiprocessing
import operator
import os
import signal
import socket
import struct
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from itertools import count
from multiprocessing.connection import Connection
from pathlib import Path
from types import SimpleNamespace
from typing import Any, TypeVar

import pytest
import torch
import torch.distributed as dist
from torch import nn

from harness.rollout import schedulers, sglang_api
from harness.rollout.engine import PeerGone
from harness.rollout.engine_ranks import Group
from harness.rollout.schedulers import LOADER, SchedulerChannel, load_own, start_serving
from harness.runtime.events import Work
from harness.weights.worker.kept_trace import fingerprint_everything
from tests.cluster.gloo import on_ranks

T = TypeVar("T")


@pytest.fixture
def tmp_path() -> Iterator[Path]:
    """A folder like an engine's: private, and with a path short enough for sockets."""
    with tempfile.TemporaryDirectory(prefix="t", dir="/tmp") as folder:
        yield Path(folder)


class Stage(nn.Module):
    """Loads by name, as SGLang's models do, and refuses a shape that does not fit."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(4))

    def load_weights(self, named: Sequence[tuple[str, torch.Tensor]]) -> None:
        for name, tensor in named:
            self.get_parameter(name).copy_(tensor)


class Draft(Stage):
    """Named as SGLang names the classes of draft models."""


Draft.__name__ = "StageNextN"


class Engine:
    """A channel of one rank with its scheduler. The engine's calls are files, which all schedulers handle in order.

    As SGLang does, it answers when the first scheduler is done. models: how many the channel expects; shown: how many
    it is shown.
    """

    def __init__(
        self, rank: int, ranks: int, folder: str, seconds_a_call: float = 0.0, models: int = 1, shown: int = 1
    ) -> None:
        group = dist.group.WORLD
        assert group is not None
        self.group = Group(process_group=group, ranks=tuple(range(ranks)), rank=rank, tp=ranks, pp=1)
        self.folder = Path(folder)
        self.calls = 0
        tempfile.tempdir = folder  # the schedulers' too, as an engine's folder is
        self.channel = SchedulerChannel(self.group, self.send, self.folder, Path("engine.log"), models)
        arguments = (rank, self.folder, seconds_a_call, models, shown)
        self.scheduler = multiprocessing.get_context("fork").Process(target=scheduler, args=arguments, daemon=True)
        self.scheduler.start()

    def send(self, payloads: Sequence[Any], load_format: str, flush_cache: bool) -> None:
        assert load_format == LOADER and len(payloads) == self.group.tp and not flush_cache
        if self.group.rank == self.group.head:
            call = self.folder / f"call{self.calls}"
            self.calls += 1
            call.with_suffix(".unfinished").write_text(payloads[0][0][0])
            call.with_suffix(".unfinished").rename(call)
            while not call.with_suffix(".done").exists() and self.scheduler.is_alive():
                time.sleep(0.01)
        self.group.barrier()

    def asked(self, function: Callable[[Any, Any], Any], argument: object = None) -> str:
        """The answer, or the failure, as text."""
        try:
            return str(self.channel.ask(function, argument))
        except Exception as error:
            return f"{type(error).__name__}: {error}"


def scheduler(rank: int, folder: Path, seconds_a_call: float, models: int, shown: int) -> None:
    """Handle the engine's calls: each counts itself in the weight before it starts to serve. Ends with its rank."""
    dist.get_rank = lambda group=None: rank
    model, draft, parent = Stage(), Draft(), os.getppid()
    for number in count():
        call = folder / f"call{number}"
        while not call.exists():
            if os.getppid() != parent:
                os._exit(0)
            time.sleep(0.01)
        time.sleep(seconds_a_call)
        model.weight.data += 1
        for each in (model, draft)[:shown]:
            start_serving(each, [(call.read_text(), torch.zeros(models))])
        if rank == 0:
            call.with_suffix(".done").touch()


def planted(function: Callable[..., T]) -> Callable[..., T]:
    """The function as one of the harness's, also in the processes that are forked from here."""
    function.__module__, function.__qualname__ = schedulers.__name__, function.__name__
    setattr(schedulers, function.__name__, function)
    return function


def first(model: Any, place: int) -> float:
    return float(model.weight[place])


def die(model: Any, dies: bool) -> None:
    if dies:
        os.kill(os.getpid(), signal.SIGKILL)


def unpicklable(model: Any, argument: object) -> Any:
    return lambda: None


def _answers(rank: int, folder: str) -> list[Any]:
    ask = planted(first)
    planted(unpicklable)
    engine = Engine(rank, 2, folder)
    held = engine.channel.ask(ask, 0)
    assert engine.channel.ask(load_own, [("weight", torch.full((4,), rank + 5.0))]) is None
    found = engine.channel.ask(fingerprint_everything, None).sums
    told = [held, engine.channel.ask(ask, 3), found, engine.calls]
    wrong_shape = [("weight", torch.zeros(3 + (rank == 0)))]
    asked = [engine.asked(load_own, wrong_shape), engine.asked(operator.add, "true"), engine.asked(unpicklable)]
    return [*told, *asked, engine.asked(load_own, iter([]) if rank else []), engine.asked(load_own, [])]


def test_every_rank_is_answered_by_its_own_scheduler_and_a_failure_is_raised_on_every_rank(tmp_path: Path) -> None:
    zero, one = on_ranks(_answers, 2, tmp_path, str(tmp_path))
    assert zero[:2] == [1.0, 5.0] and one[:2] == [1.0, 6.0]
    assert zero[2] != one[2] and zero[2].keys() == {"weight"}
    assert (zero[3], one[3]) == (1, 0), "one call of the engine"
    failed = one[4].removeprefix("SchedulerFailed: ")
    assert failed.startswith("the scheduler of rank 1: RuntimeError: The size of tensor a (4) must")
    assert failed != one[4] and zero[4] == f"EngineFailed: on rank 1: {failed}"
    for rank, seen in enumerate((zero, one)):
        beside = f"SchedulerFailed: the scheduler of rank {rank}: "
        assert seen[5] == f"{beside}ValueError: function must be one of harness.*, got _operator.add."
        assert seen[6].startswith(beside) and "pickle" in seen[6]
        assert seen[7] == seen[8] == "None", "the next question is answered"


def _order(rank: int, folder: str) -> list[Any]:
    ask = planted(first)
    engine = Engine(rank, 2, folder, seconds_a_call=0.4 * rank)
    asked = [engine.channel.ask(ask, 0)]
    engine.channel.open()
    asked.append(engine.channel.ask(ask, 0))
    engine.channel.close()
    return [*asked, engine.channel.ask(ask, 0)]


def test_what_is_asked_on_a_new_connection_comes_after_the_engine_s_calls(tmp_path: Path) -> None:
    assert on_ranks(_order, 2, tmp_path, str(tmp_path)) == [[1.0, 2.0, 3.0]] * 2
    assert not list(tmp_path.glob("harness-*")), "sockets are removed"


def _late(rank: int, folder: str) -> list[str]:
    """What rank 0 says of what it waits for, while the scheduler of rank 1 takes its time."""
    schedulers.LOOK_SECONDS = 0.1
    engine, said = Engine(rank, 2, folder, seconds_a_call=1.0 * rank), []

    class Noted(Work):
        def __setattr__(self, name: str, value: object) -> None:
            said.append(str(value))

    @contextmanager
    def noted(what: str) -> Iterator[Work]:
        yield Noted(what)

    schedulers.working = noted
    os.environ["RANK"] = str(rank)
    engine.channel.open()
    return said


def test_a_wait_says_which_rank_s_scheduler_is_late(tmp_path: Path) -> None:
    zero, one = on_ranks(_late, 2, tmp_path, str(tmp_path))
    assert "rank 1 waits for its scheduler to connect" in zero and not one


def _death(rank: int, folder: str) -> tuple[str, float]:
    schedulers.WATCH_SECONDS = 0.5
    planted(die)
    engine = Engine(rank, 2, folder)
    engine.asked(die, False)
    start = time.monotonic()
    return engine.asked(die, rank == 1), time.monotonic() - start


def test_a_scheduler_that_dies_in_the_middle_is_named_on_the_rank_beside_it(tmp_path: Path) -> None:
    _, (message, seconds) = on_ranks(_death, 2, tmp_path, str(tmp_path))
    assert message == "EngineFailed: the scheduler of rank 1 has closed its connection; see engine.log"
    assert 0.5 <= seconds < 60


def _absent(rank: int, folder: str) -> str:
    schedulers.CONNECT_SECONDS = 0.5 if rank == 1 else 60.0
    engine = Engine(rank, 2, folder)
    if rank == 1:
        engine.scheduler.kill()
        engine.scheduler.join()
    dist.barrier()
    return engine.asked(fingerprint_everything)


def test_a_scheduler_that_does_not_connect_is_named_on_every_rank(tmp_path: Path) -> None:
    said = "in 0 s it showed 0 of 1 models to the scheduler of rank 1; see engine.log"
    zero, one = on_ranks(_absent, 2, tmp_path, str(tmp_path))
    assert zero == f"EngineFailed: on rank 1: {one.removeprefix('SchedulerFailed: ')}"
    assert one.startswith("SchedulerFailed: SGLang answered an update call, but") and one.endswith(said)


def _one_of_two(rank: int, folder: str) -> tuple[str, float]:
    schedulers.ANSWERED_SECONDS = 0.5
    start = time.monotonic()
    engine = Engine(rank, 2, folder, models=2, shown=1)
    return engine.asked(fingerprint_everything), time.monotonic() - start


def test_a_draft_model_that_no_update_call_is_shown_is_named_at_once(tmp_path: Path) -> None:
    for message, seconds in on_ranks(_one_of_two, 2, tmp_path, str(tmp_path)):
        assert "1 of 2 models to the scheduler of rank " in message
        assert "no update reaches the draft model (mtp-draft-stale)" in message
        assert seconds < schedulers.CONNECT_SECONDS / 5


def _both(rank: int, folder: str) -> list[str]:
    return sorted(Engine(rank, 2, folder, models=2, shown=2).channel.ask(fingerprint_everything, None).sums)


def test_a_target_and_its_draft_are_served_as_one(tmp_path: Path) -> None:
    assert on_ranks(_both, 2, tmp_path, str(tmp_path)) == [["draft.weight", "target.weight"]] * 2


HALF = struct.pack("!i", 1000) + b"of a thousand bytes"


def channel_over(connection: Connection) -> Any:
    group: Any = SimpleNamespace(rank=0)
    channel: Any = SchedulerChannel(group, lambda *_, **__: None, Path("unused"), Path("engine.log"))
    channel._connection = connection
    return channel


def test_half_an_answer_is_of_a_scheduler_that_is_gone_but_not_a_failure_of_the_connection_itself() -> None:
    mine, theirs = multiprocessing.Pipe()
    os.write(theirs.fileno(), HALF)
    with mine, pytest.raises(PeerGone):
        threading.Timer(0.1, theirs.close).start()
        channel_over(mine)._request(fingerprint_everything, None)
    mine, theirs = multiprocessing.Pipe()
    with theirs, unreadable(mine), pytest.raises(OSError, match="Bad file descriptor"):
        channel_over(mine)._request(fingerprint_everything, None)
    mine, theirs = multiprocessing.Pipe()
    with mine, unreadable(theirs), pytest.raises(OSError, match="Bad file descriptor"):
        schedulers._serve(torch.nn.Linear(1, 1), theirs)


def test_an_answer_is_taken_although_its_scheduler_has_died_since() -> None:
    mine, theirs = multiprocessing.Pipe()

    def answer_and_die() -> None:
        with theirs:
            theirs.recv_bytes()
            theirs.send_bytes(sglang_api.serialize(("done", 5)))

    scheduler = threading.Thread(target=answer_and_die)
    scheduler.start()
    channel = channel_over(mine)
    with mine:
        assert channel._request(fingerprint_everything, None) == 5
        scheduler.join()
        with pytest.raises(PeerGone):
            channel._request(fingerprint_everything, None)


@pytest.mark.parametrize("takes_model", [True, False], ids=["0.5.23", "0.5.17"])
def test_what_sglang_refuses_to_update_is_not_updated_beside_it(
    takes_model: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    refusal = (lambda model: f"no update of {type(model).__name__}") if takes_model else (lambda: "no update")
    name = "sglang.srt.model_executor.model_runner_components.weight_updater"
    updater = SimpleNamespace(_unsupported_derived_weight_cache_error=refusal)
    monkeypatch.setitem(sys.modules, name, updater)  # type: ignore[arg-type]
    stage = Stage()
    with pytest.raises(RuntimeError, match="no update"):
        load_own(stage, [("weight", torch.ones(4))])
    assert not stage.weight.any()


def unreadable(connection: Connection) -> Connection:
    """Put a file that cannot be read in the place of a connection's socket."""
    with open(os.devnull, "wb") as nothing:
        os.dup2(nothing.fileno(), connection.fileno())
    return connection


@pytest.mark.parametrize("dies", ["before it asks", "in the middle of a request", "before it is answered"])
def test_a_scheduler_outlives_its_trainer_rank(dies: str) -> None:
    mine, theirs = multiprocessing.Pipe()
    if dies == "in the middle of a request":
        os.write(mine.fileno(), HALF)
    elif dies == "before it is answered":
        mine.send_bytes(sglang_api.serialize(("harness.weights.worker.kept_trace.fingerprint_everything", None)))
    mine.close()
    schedulers._serve(Stage(), theirs)
    assert theirs.closed


def test_a_scheduler_outlives_a_trainer_rank_that_never_accepted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """SGLang would end a scheduler whose loader raises."""
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    monkeypatch.setattr(dist, "get_rank", lambda: 0)
    with socket.socket(socket.AF_UNIX) as one:  # killed, the rank leaves its socket
        one.bind(str(tmp_path / "f-0"))
    before = threading.active_count()
    for _ in range(2):
        start_serving(Stage(), [("f", torch.zeros(2))])
    assert threading.active_count() == before
    assert "no trainer rank listens" in capsys.readouterr().err
    monkeypatch.setattr(dist, "get_rank", lambda: 3)
    with pytest.raises(RuntimeError, match=f"the scheduler of engine rank 3 waits for its trainer rank in {tmp_path}"):
        start_serving(Stage(), [("f", torch.zeros(1))])


@pytest.mark.parametrize("made", ["open to its group", "a link", "of another user"])
def test_a_folder_that_another_user_could_have_made_is_refused_at_both_ends(
    made: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(dist, "get_rank", lambda: 0)
    folder = tmp_path / "engine"
    monkeypatch.setattr(tempfile, "tempdir", str(folder))
    if made == "a link":
        (tmp_path / "elsewhere").mkdir(mode=0o700)
        folder.symlink_to(tmp_path / "elsewhere")
    else:
        folder.mkdir(mode=0o700)
    if made == "open to its group":
        folder.chmod(0o770)
    if made == "of another user":
        if os.geteuid():
            pytest.skip("only root gives a folder away")
        os.chown(folder, 65534, 65534)
    with pytest.raises(PermissionError, match="with mode 0700"), schedulers._listening(folder, "f", 0):
        pass
    with pytest.raises(PermissionError, match="with mode 0700"):
        start_serving(Stage(), [("f", torch.zeros(1))])


def test_sglang_finds_the_loader_by_its_path() -> None:
    assert f"{start_serving.__module__}.{start_serving.__name__}" == LOADER
