"""A connection between each trainer rank and the scheduler beside it, over which the rank asks for functions to be run.

An SGLang call costs milliseconds, and only tp rank 0 of the first stage answers it. So one call alone is made, with LOADER
as custom weight loader (since 0.4.8): each scheduler connects to its own trainer rank and serves it on a thread.
"""

import os
import pickle
import stat
import sys
import threading
import time
import traceback
import uuid
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from functools import partial
from multiprocessing.connection import Client, Connection, Listener
from pathlib import Path
from pkgutil import resolve_name
from typing import TYPE_CHECKING, Any, TypeVar

import torch
import torch.distributed as dist

from harness.rollout import sglang_api
from harness.rollout.engine_errors import EngineFailed, PeerGone, SchedulerFailed
from harness.rollout.engine_ranks import together
from harness.runtime import scratch

if TYPE_CHECKING:
    from harness.rollout.verl_engine import VerlEngine

T = TypeVar("T")

LOADER = f"{__name__}.start_serving"
WATCH_SECONDS = 2.0
"""How long a rank whose scheduler is gone waits: the rank that built the engine sees within half a second which process
died, and must report it first."""
SWITCH_SECONDS = 5e-5
"""For how long, in a scheduler, SGLang's thread may keep the interpreter while an answer waits for it. Its loop polls without
a pause, so with Python's own 5 ms every wait for a GPU would cost as much again. With no second thread it has no effect."""
CONNECT_SECONDS = 300.0
"""How long a scheduler may take to connect when SGLang has answered: what it was asked before may still run."""


class SchedulerChannel:
    """A rank's connection to its scheduler: opened by the first ask, and by the first one after close()."""

    def __init__(self, engine: "VerlEngine") -> None:
        self._engine = engine
        self._connection: Connection | None = None
        self.answer_seconds = 0.0
        """Of the last ask in this rank's scheduler, its GPU included."""

    def ask(self, function: Callable[[Any, Any], T], argument: object) -> T:
        """See VerlEngine.ask."""
        if self._connection is None:
            self.open()
        return self._together(partial(self._request, function, argument))

    def open(self) -> None:
        """Connect anew; every scheduler does so when it has done all that SGLang's calls asked of it before.

        A collective call. Raise EngineFailed on every rank: where a scheduler does not come, after CONNECT_SECONDS.
        """
        self.close()
        engine, group = self._engine, self._engine.group
        name = group.broadcast(f"harness-{uuid.uuid4().hex[:12]}")
        with ExitStack() as stack:
            meeting = _listening(socket_folder(name), group.ranks.index(group.rank))
            listener = self._together(partial(stack.enter_context, meeting))
            payloads = [[(name, pickle.dumps(torch.zeros(1)))]] * group.tp
            engine.on_head(lambda inner: engine.send(inner, payloads, LOADER, flush_cache=False))
            self._connection = self._together(partial(self._accept, listener))

    def close(self) -> None:
        """Disconnect; the scheduler's thread ends."""
        if self._connection is not None:
            self._connection.close()
            self._connection = None

    def _accept(self, listener: Listener) -> Connection:
        try:
            return listener.accept()
        except TimeoutError as error:
            rank, log = self._engine.group.rank, self._engine.log
            message = f"the scheduler beside rank {rank} has not connected in {CONNECT_SECONDS:.0f} s; see {log}"
            raise SchedulerFailed(message) from error

    def _request(self, function: Callable[[Any, Any], T], argument: object) -> T:
        assert self._connection is not None
        request = sglang_api.serialize((f"{function.__module__}.{function.__qualname__}", argument))
        try:
            self._connection.send_bytes(request)
            answer = self._connection.recv_bytes()
        except (EOFError, OSError) as error:  # OSError: it died in mid-message
            raise PeerGone("the scheduler has closed its connection") from error
        outcome, value, self.answer_seconds = sglang_api.deserialize(answer)
        if outcome == "failed":
            raise SchedulerFailed(f"the scheduler beside rank {self._engine.group.rank}: {value}")
        result: T = value
        return result

    def _together(self, work: Callable[[], T]) -> T:
        """Return together() of the engine's ranks. Where the scheduler is gone, raise EngineFailed on this rank alone."""
        group = self._engine.group
        try:
            return together(work, group.process_group)
        except PeerGone as error:
            time.sleep(WATCH_SECONDS)
            raise EngineFailed(f"the scheduler beside rank {group.rank} is gone; see {self._engine.log}") from error


def socket_folder(name: str) -> Path:
    """Return the folder of that name in which the ranks and schedulers of one host meet, short enough for sockets."""
    return scratch.shared_for_sockets(len(f"/{name}/99999.socket")) / name


@contextmanager
def _listening(folder: Path, engine_rank: int) -> Iterator[Listener]:
    """Make the folder and listen in it; remove what was made. accept() of the listener raises TimeoutError."""
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    require_private(folder)
    try:
        with Listener(str(folder / f"{engine_rank}.socket"), family="AF_UNIX") as listener:
            # It has no timeout of its own.
            listener._listener._socket.settimeout(CONNECT_SECONDS)  # type: ignore[attr-defined]
            yield listener
    finally:
        with suppress(OSError):  # another rank's socket may still be there: the last one removes the folder
            folder.rmdir()


def require_private(folder: Path) -> None:
    """Raise PermissionError unless the folder is private to this user: what its sockets deliver is unpickled."""
    found = folder.lstat()
    if not stat.S_ISDIR(found.st_mode) or found.st_uid != os.getuid() or found.st_mode & 0o077:
        raise PermissionError(
            f"{folder} must be a folder of user {os.getuid()} with mode 0700: another user may have made it"
        )


def start_serving(model: Any, named_tensors: Sequence[tuple[str, torch.Tensor]]) -> None:
    """Connect this scheduler to the trainer rank beside it, in the folder that the one name says, and serve it."""
    folder = socket_folder(named_tensors[0][0])
    try:
        require_private(folder)
        connection = Client(str(folder / f"{dist.get_rank()}.socket"), family="AF_UNIX")
    except (FileNotFoundError, ConnectionRefusedError) as error:
        # SGLang would end this scheduler, which would look like the cause of what ended the trainer rank.
        print(f"no trainer rank listens: {error!r}", file=sys.stderr, flush=True)
        return
    sys.setswitchinterval(SWITCH_SECONDS)
    threading.Thread(target=_serve, args=(model, connection), name="harness-channel", daemon=True).start()


@torch.no_grad()
def _serve(model: Any, connection: Connection) -> None:
    """Answer one request after the other until the trainer rank disconnects."""
    device = next(model.parameters()).device
    if device.type == "cuda":
        torch.cuda.set_device(device)
    with connection, suppress(EOFError, OSError):
        while True:
            connection.send_bytes(_answer(model, device, connection.recv_bytes()))


def _answer(model: Any, device: torch.device, request: bytes) -> bytes:
    """Run a function of the harness, no other, between what SGLang has queued on a GPU before and what comes after."""
    started = time.perf_counter()
    try:
        path, argument = sglang_api.deserialize(request)
        if not path.startswith("harness."):
            raise ValueError(f"function must be one of harness.*, got {path}.")
        _synchronize(device)
        value = resolve_name(path)(model, argument)
        _synchronize(device)
        return sglang_api.serialize(("done", value, time.perf_counter() - started))
    except Exception as error:
        traceback.print_exc()
        sys.stderr.flush()
        failure = f"{type(error).__name__}: {error}"
        return sglang_api.serialize(("failed", failure, time.perf_counter() - started))


def _synchronize(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def load_own(model: Any, sent: Any) -> None:
    """Load named tensors, or what sglang_api.flattened_bucket makes of them: those of this scheduler's own rank."""
    device = next(model.parameters()).device
    tensors = sglang_api.tensors_of_bucket(sent) if isinstance(sent, dict) else sent
    model.load_weights([(name, tensor.to(device)) for name, tensor in tensors])


def seed_sampling(model: Any, number: int) -> None:
    """Seed torch's default generators, from which SGLang's samplers draw."""
    torch.manual_seed(number)
