"""torchrun's TCP store, through which the doctor's ranks talk, with a deadline on every wait.

Not a process group: a host that is cut off, or a rank that never comes, must be named by the ranks that did come.

The store listens on every interface and asks for no password: its values may come from outside the job. They are JSON,
decoded as the type that the reader expects, and anything else is refused; a pickle would run its sender's code.
"""

import math
import socket
import sys
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from datetime import timedelta
from typing import Self, TypeVar

import msgspec
import torch.distributed as dist

from harness.runtime.background import in_background

T = TypeVar("T")

LEAST_SECONDS = 0.05
"""A wait that begins after its deadline still looks once."""


class Absent(RuntimeError):
    """A value did not come in time, or is not of the type that its key must have."""


@dataclass(frozen=True, slots=True)
class Deadline:
    """A point of time.monotonic()."""

    end: float

    @classmethod
    def after(cls, seconds: float) -> Self:
        return cls(time.monotonic() + seconds)

    def left(self, at_most: float = math.inf) -> float:
        """Return the seconds until then, at most so many and at least LEAST_SECONDS."""
        return max(LEAST_SECONDS, min(self.end - time.monotonic(), at_most))

    @property
    def past(self) -> bool:
        return time.monotonic() >= self.end


def within(seconds: float, function: Callable[[], T]) -> T:
    """Return what the function returns, or raise TimeoutError and leave it behind on its daemon thread."""
    future = in_background(function, "doctor")
    try:
        return future.result(seconds)
    except TimeoutError as late:
        if future.done():
            raise  # the function's own
        raise TimeoutError(f"no answer within {seconds:.0f} s") from late


def connect(environment: Mapping[str, str], seconds: float, serve: bool = False) -> dist.Store:
    """Return a new connection to the store at MASTER_ADDR:MASTER_PORT. serve: be its server if torchrun's agent is not.

    Raise OSError, DistError or TimeoutError when there is no answer in time.
    """
    own = serve and environment.get("TORCHELASTIC_USE_AGENT_STORE") != "True"
    host, port = environment["MASTER_ADDR"], int(environment["MASTER_PORT"])
    attempt = environment.get("TORCHELASTIC_RESTART_COUNT", "0")

    def reach() -> dist.Store:
        if not own:
            _wait_for_listener(host, port, Deadline.after(seconds))
        # The thread outlives `within` only if a resolver does not answer: the store keeps to its own timeout.
        store = dist.TCPStore(host, port, None, own, timedelta(seconds=seconds), wait_for_workers=False)
        return dist.PrefixStore(f"doctor/{attempt}", store)

    return within(seconds + 1, reach)


def _wait_for_listener(host: str, port: int, deadline: Deadline) -> None:
    """Raise OSError if no one listens: torch's client would print pages of C++ stacks."""
    while True:
        try:
            with socket.create_connection((host, port), deadline.left()):
                return
        except OSError:
            if deadline.past:
                raise
            time.sleep(0.1)


@dataclass(frozen=True, slots=True)
class JobStore:
    """One connection to the store. Do not share it with a thread that may block in it: it is locked meanwhile."""

    store: dist.Store
    rank: int
    world_size: int

    def put(self, key: str, value: object) -> None:
        """Store the value as JSON."""
        self.store.set(key, msgspec.json.encode(value).decode())

    def get(self, key: str, seconds: float, kind: type[T]) -> T:
        """Return the value, decoded as `kind`. Raise Absent if it does not come in time or is of another type."""
        try:
            self.store.wait([key], timedelta(seconds=seconds))
        except (dist.DistError, RuntimeError) as error:
            raise Absent(f"{key} did not come within {seconds:.1f} s") from error
        return self._decoded(key, kind)

    def gather(self, key: str, value: object, seconds: float, kind: type[T]) -> list[T | None]:
        """Return on rank 0 the values of all ranks, None for one that is absent or no `kind`; an empty list elsewhere."""
        self.put(f"{key}/{self.rank}", value)
        if self.rank != 0:
            return []
        keys = [f"{key}/{rank}" for rank in range(self.world_size)]
        try:
            self.store.wait(keys, timedelta(seconds=seconds))
        except (dist.DistError, RuntimeError):
            keys = [each if self.store.check([each]) else "" for each in keys]
        found: list[T | None] = []
        for each in keys:
            try:
                found.append(self._decoded(each, kind) if each else None)
            except Absent as refused:
                print(f"rank {self.rank}: {refused}", file=sys.stderr, flush=True)
                found.append(None)
        return found

    def barrier(self, key: str, seconds: float) -> bool:
        """Wait for all ranks; return False if some did not come in time."""
        if self.store.add(f"{key}/count", 1) == self.world_size:
            self.put(f"{key}/go", True)
        try:
            return self.get(f"{key}/go", seconds, bool)
        except Absent:
            return False

    def _decoded(self, key: str, kind: type[T]) -> T:
        try:
            return msgspec.json.decode(self.store.get(key), type=kind)
        except (msgspec.DecodeError, RecursionError, UnicodeDecodeError) as error:
            raise Absent(f"{key} in the store is not what a rank of this job writes: {error}") from error
