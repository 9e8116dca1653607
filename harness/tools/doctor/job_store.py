"""torchrun's TCP store, through which the doctor's ranks talk, with a deadline on every wait.

Not a process group: a host that is cut off, or a rank that never comes, must be named by the ranks that did come. The
store listens on every interface and asks for no password, so its values may come from outside the job: they are JSON,
decoded as the type that the reader expects, and anything else is refused; a pickle would run its sender's code.
"""

import math
import socket
import sys
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from datetime import timedelta
from typing import TypeVar

import msgspec
import torch.distributed as dist

from harness.runtime.processes import in_background

T = TypeVar("T")

LEAST_SECONDS = 0.05


class Absent(RuntimeError):
    """A value did not come in time, or is not of the type that its key must have."""


def left(end: float, at_most: float = math.inf) -> float:
    """Return the seconds until a point of time.monotonic(): a wait that begins after it still looks once."""
    return max(LEAST_SECONDS, min(end - time.monotonic(), at_most))


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
    end = time.monotonic() + seconds
    attempt = environment.get("TORCHELASTIC_RESTART_COUNT", "0")

    def reach() -> dist.Store:
        while not own:  # until someone listens: torch's client would print pages of C++ stacks
            try:
                socket.create_connection((host, port), left(end)).close()
                break
            except OSError:
                if time.monotonic() >= end:
                    raise
                time.sleep(0.1)
        # The thread outlives `within` only if a resolver does not answer: the store keeps to its own timeout.
        store = dist.TCPStore(host, port, None, own, timedelta(seconds=seconds), wait_for_workers=False)
        return dist.PrefixStore(f"doctor/{attempt}", store)

    return within(seconds + 1, reach)


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
            return msgspec.json.decode(self.store.get(key), type=kind)
        except (msgspec.DecodeError, RecursionError, UnicodeDecodeError) as error:
            raise Absent(f"{key} in the store is not what a rank of this job writes: {error}") from error
        except RuntimeError as error:  # DistError is one
            raise Absent(f"{key} did not come within {seconds:.1f} s") from error

    def gather(self, key: str, value: object, seconds: float, kind: type[T]) -> list[T | None]:
        """Return on rank 0 the values of all ranks, None for one that is absent or no `kind`; an empty list
        elsewhere.
        """
        self.put(f"{key}/{self.rank}", value)
        if self.rank != 0:
            return []
        keys = [f"{key}/{rank}" for rank in range(self.world_size)]
        with suppress(RuntimeError):
            self.store.wait(keys, timedelta(seconds=seconds))
        found: list[T | None] = [None] * self.world_size
        for rank, each in enumerate(keys):
            try:
                found[rank] = self.get(each, LEAST_SECONDS, kind) if self.store.check([each]) else None
            except Absent as refused:
                print(f"rank 0: {refused}", file=sys.stderr, flush=True)
        return found

    def barrier(self, key: str, seconds: float) -> None:
        """Wait for all ranks, so long at most."""
        if self.store.add(f"{key}/count", 1) == self.world_size:
            self.put(f"{key}/go", True)
        with suppress(Absent):
            self.get(f"{key}/go", seconds, bool)
