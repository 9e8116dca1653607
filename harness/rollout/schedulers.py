"""A connection between each trainer rank and the scheduler next to it, by which the rank runs functions in the
scheduler.

A call of SGLang costs milliseconds, and only TP rank 0 of the first stage answers it. So SGLang is called only once, to
load one dummy tensor by the custom weight loader LOADER. In each scheduler the loader connects to its own trainer rank
and starts a thread that serves it. They meet in the engine's own folder for temporary files on their host: the rank that
built the engine there tells it to the other ranks, and the schedulers inherit it. With a draft model SGLang calls the loader twice, and the thread serves both as one
model. The loader tells its rank of each model that it is shown, so a rank knows when SGLang has left one out.
"""

import errno
import os
import pickle
import stat
import sys
import tempfile
import threading
import time
import traceback
import uuid
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, nullcontext
from functools import partial
from multiprocessing.connection import Client, Connection, Listener
from pathlib import Path
from pkgutil import resolve_name
from typing import Any, Protocol, TypeVar

import torch
import torch.distributed as dist

from harness.rollout import sglang_api
from harness.rollout.engine import EngineFailed, PeerGone, SchedulerFailed
from harness.rollout.engine_ranks import Group, together
from harness.rollout.served_models import DRAFT, DRAFT_CLASS, STALE_DRAFT, TARGET, models_in, serve_together
from harness.runtime.errors import rank_in
from harness.runtime.events import Work, working
from harness.runtime.processes import wake_on_time

T = TypeVar("T")

LOADER = f"{__name__}.start_serving"
WATCH_SECONDS = 2.0
"""How long a rank waits before it reports that its scheduler has closed its connection. If the scheduler has died, the
rank that built the engine sees that within half a second; it knows the cause and must report first."""
SWITCH_SECONDS = 5e-5
"""How long SGLang's thread in a scheduler may keep the interpreter while our thread wants it. SGLang's loop polls
without a pause, so Python's default of 5 ms would be added to every answer. It has no effect while there is only one
thread."""
SHOWN: dict[str, tuple[Connection, list[Any]]] = {}
"""In a scheduler, by the name of the channel that is being opened: its connection, and the models that SGLang has shown
to our loader so far."""
ANSWERED_SECONDS = 5.0
"""How long the head's scheduler may take after SGLang has answered. SGLang answers when that scheduler has done the
call."""
CONNECT_SECONDS = 300.0
"""How long the other schedulers may take: they may still be busy with earlier calls."""
LOOK_SECONDS = 2.0
"""How long a rank waits for its scheduler before all ranks tell each other who still waits."""


class Send(Protocol):
    """One update call of the engine; a collective call of its ranks."""

    def __call__(self, payloads: Sequence[Any], load_format: str, flush_cache: bool) -> None:
        """Send the head's payloads, one for each TP rank: lists of (name, serialized tensor)."""


class SchedulerChannel:
    """A rank's connection to its scheduler. The first ask opens it, and so does the first one after close().

    Every method but close() is a collective call of the group. folder: the engine's, on this host. log: the engine's,
    for messages. models: how many each scheduler has: two with a draft model.
    """

    def __init__(self, group: Group, send: Send, folder: Path, log: Path, models: int = 1) -> None:
        self._group = group
        self._models = models
        self._send = send
        self._folder = folder
        self._log = log
        self._connection: Connection | None = None

    def ask(self, function: Callable[[Any, Any], T], argument: object) -> T:
        if self._connection is None:
            self.open()
        return self._together(partial(self._request, function, argument))

    def open(self) -> None:
        """Connect anew.

        Returns when every scheduler has done all earlier calls: the connection is made by the last one.

        Raise EngineFailed on every rank if SGLang does not show a scheduler all its models: at once if it is the
        head's, for the others after CONNECT_SECONDS.
        """
        self.close()
        # The dummy tensor's name tells the schedulers which sockets to use, and its size how many models there are.
        name = self._group.broadcast(f"harness-{uuid.uuid4().hex[:12]}")
        with ExitStack() as stack:
            meeting = _listening(self._folder, name, self._place)
            listener = self._together(partial(stack.enter_context, meeting))
            self._send([[(name, pickle.dumps(torch.zeros(self._models)))]] * self._group.tp, LOADER, flush_cache=False)
            speaks = rank_in(os.environ) == 0
            with working("waiting for the schedulers") if speaks else nullcontext(Work("")) as work:
                self._connection = self._accept_together(listener, work)

    def _accept_together(self, listener: Listener, work: Work) -> Connection:
        """Return this rank's connection once all ranks have theirs. work: gets the ranks whose schedulers are late."""
        connection: Connection | None = None
        until = time.monotonic() + (CONNECT_SECONDS if self._place else ANSWERED_SECONDS)
        while True:
            connection = self._together(partial(self._accept, listener, until, connection))
            late = torch.zeros(len(self._group.ranks), dtype=torch.int64)
            late[self._place] = connection is None
            dist.all_reduce(late, group=self._group.process_group)
            if connection and not late.any():
                return connection
            ranks = ", ".join(str(self._group.ranks[place]) for place in late.nonzero().flatten().tolist())
            work.what = f"rank {ranks} waits for its scheduler to connect"

    @property
    def _place(self) -> int:
        """Number of this rank in the engine; 0 is the head's."""
        return self._group.ranks.index(self._group.rank)

    def close(self) -> None:
        """Disconnect; the scheduler's thread ends."""
        if self._connection is not None:
            self._connection.close()
            self._connection = None

    def _accept(self, listener: Listener, until: float, before: Connection | None) -> Connection | None:
        """Return the connection of this rank's scheduler, once that has been shown all its models; None if it may still
        come. before: what an earlier call returned.
        """
        if before:
            return before
        shown: list[str] = []
        # A Listener has no public way to set a timeout.
        listener._listener._socket.settimeout(min(LOOK_SECONDS, max(0.0, until - time.monotonic())))  # type: ignore[attr-defined]
        try:
            connection = listener.accept()
        except (TimeoutError, BlockingIOError):
            if time.monotonic() < until:
                return None
        else:
            with _naming_a_closed_peer():
                while len(shown) < self._models and connection.poll(ANSWERED_SECONDS):
                    shown.append(connection.recv_bytes().decode())
            if len(shown) == self._models:
                return connection
        missing = DRAFT if not any(map(DRAFT_CLASS.search, shown)) else TARGET
        only = f", only {shown[0]}: no update reaches the {missing} model ({STALE_DRAFT})" if shown else ""
        seconds = CONNECT_SECONDS if self._place and not shown else ANSWERED_SECONDS
        raise SchedulerFailed(
            f"SGLang answered an update call, but in {seconds:.0f} s it showed {len(shown)} of {self._models} models to"
            f" {self._scheduler}{only}; see {self._log}"
        )

    @property
    def _scheduler(self) -> str:
        return f"the scheduler of rank {self._group.rank}"

    def _request(self, function: Callable[[Any, Any], T], argument: object) -> T:
        assert self._connection is not None
        request = sglang_api.serialize((f"{function.__module__}.{function.__qualname__}", argument))
        with _naming_a_closed_peer():
            self._connection.send_bytes(request)
            answer = self._connection.recv_bytes()
        outcome, value = sglang_api.deserialize(answer)
        if outcome == "failed":
            raise SchedulerFailed(f"{self._scheduler}: {value}")
        result: T = value
        return result

    def _together(self, work: Callable[[], T]) -> T:
        """Return together(work).

        If this rank's scheduler has closed its connection, raise EngineFailed on this rank alone.
        """
        try:
            return together(work, self._group.process_group)
        except PeerGone as error:
            time.sleep(WATCH_SECONDS)
            raise EngineFailed(f"{self._scheduler} has closed its connection; see {self._log}") from error


@contextmanager
def _listening(folder: Path, name: str, engine_rank: int) -> Iterator[Listener]:
    """Listen on a socket in the folder, which is removed at the end. Raise PermissionError, FileNotFoundError."""
    require_private(folder)
    with Listener(str(folder / f"{name}-{engine_rank}"), family="AF_UNIX") as listener:
        yield listener


def require_private(folder: Path) -> None:
    """Raise PermissionError unless only this user can use the folder: what arrives by its sockets is unpickled."""
    found = folder.lstat()
    if not stat.S_ISDIR(found.st_mode) or found.st_uid != os.getuid() or found.st_mode & 0o077:
        raise PermissionError(
            f"{folder} must be a folder of user {os.getuid()} with mode 0700; another user may have made it"
        )


def start_serving(model: Any, named_tensors: Sequence[tuple[str, torch.Tensor]]) -> None:
    """Connect this scheduler to its trainer rank and serve it on a thread. SGLang calls it as a custom weight loader.

    named_tensors: one dummy tensor, whose name is that of the sockets, and whose size is the number of models
    that the loader is called for. The rank is told the class of each of them; it is served when all have been seen.
    """
    name, dummy = named_tensors[0]
    try:
        connection, shown = SHOWN.pop(name) if name in SHOWN else (_connect(name), [])
        shown.append(model)
        connection.send_bytes(type(model).__name__.encode())
    except (ConnectionRefusedError, ConnectionResetError, BrokenPipeError) as error:
        # The trainer rank has died. If this raised, SGLang would end the scheduler, and that would look like the cause.
        print(f"no trainer rank listens: {error!r}", file=sys.stderr, flush=True)
        return
    if len(shown) < dummy.numel():
        SHOWN[name] = connection, shown
        return
    model = serve_together(shown)
    sys.setswitchinterval(SWITCH_SECONDS)
    threading.Thread(target=_serve, args=(model, connection), name="harness-channel", daemon=True).start()


def _connect(name: str) -> Connection:
    """Connect this scheduler to its trainer rank.

    Raise RuntimeError if that has never listened here: all ranks did, before SGLang was called.
    """
    folder, rank = Path(tempfile.gettempdir()), dist.get_rank()
    require_private(folder)
    socket = folder / f"{Path(name).name}-{rank}"  # in this folder, whatever the name is
    if not socket.exists():
        raise RuntimeError(
            f"the scheduler of engine rank {rank} waits for its trainer rank in {folder}, where that does not listen:"
            " ranks and schedulers of one host must share their folder for temporary files"
        )
    return Client(str(socket), family="AF_UNIX")


@torch.no_grad()
def _serve(model: Any, connection: Connection) -> None:
    """Answer requests, one after the other, until the trainer rank disconnects."""
    # After each blocking call the thread waits SWITCH_SECONDS for the interpreter. Without this a pull of 5 ms took 0.3
    # ms more.
    wake_on_time()
    device = next(model.parameters()).device
    if device.type == "cuda":
        torch.cuda.set_device(device)
    with connection:
        while True:
            try:
                connection.send_bytes(_answer(model, device, connection.recv_bytes()))
            except (EOFError, OSError) as error:
                if not _was_closed(error):
                    raise  # the engine's log must tell why, for example that there is no memory
                return


@contextmanager
def _naming_a_closed_peer() -> Iterator[None]:
    """Raise PeerGone for an error of a connection which says that the scheduler at its other end is gone."""
    try:
        yield
    except (EOFError, OSError) as error:
        if not _was_closed(error):
            raise
        raise PeerGone("the scheduler has closed its connection") from error


def _was_closed(error: EOFError | OSError) -> bool:
    """Return whether an error of a connection says that its other end is gone.

    multiprocessing gives no number to the error of a message that breaks off.
    """
    return isinstance(error, EOFError) or error.errno in (None, errno.EPIPE, errno.ECONNRESET)


def _answer(model: Any, device: torch.device, request: bytes) -> bytes:
    """Run the function that a request names, and return the pickled answer: its value, or its failure.

    Only functions of the harness are run. The GPU is synchronized before, so that the function sees the results of the
    kernels that SGLang has queued, and after, so that SGLang and the trainer see the function's.
    """
    try:
        path, argument = sglang_api.deserialize(request)
        if not path.startswith("harness."):
            raise ValueError(f"function must be one of harness.*, got {path}.")
        _synchronize(device)
        value = resolve_name(path)(model, argument)
        _synchronize(device)
        return sglang_api.serialize(("done", value))
    except Exception as error:
        traceback.print_exc()
        sys.stderr.flush()
        return sglang_api.serialize(("failed", f"{type(error).__name__}: {error}"))


def _synchronize(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def refuse_update(model: Any) -> None:
    """Raise RuntimeError if SGLang's own update calls would refuse this scheduler's models."""
    for each in models_in(model):
        if why := sglang_api.why_no_update(each):
            raise RuntimeError(why)


def load_own(model: Any, sent: Any) -> None:
    """Load the tensors that this scheduler's own rank sent: named ones, or a flattened bucket."""
    refuse_update(model)
    device = next(model.parameters()).device
    tensors = sglang_api.tensors_of_bucket(sent) if isinstance(sent, dict) else sent
    model.load_weights([(name, tensor.to(device)) for name, tensor in tensors])


def seed_sampling(model: Any, number: int) -> None:
    """Seed torch's default generators, which SGLang's samplers use."""
    torch.manual_seed(number)
