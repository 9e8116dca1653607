"""The one door into an engine's schedulers: a custom weight loader that SGLang runs in each of them."""

import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from functools import partial
from pathlib import Path
from typing import Any, Protocol, TypeVar

import torch
import torch.distributed as dist

from harness.cluster.world import all_gather
from harness.rollout import sglang_api
from harness.rollout.errors import EngineFailed, SchedulerFailed
from harness.rollout.group import Group
from harness.runtime.background import in_background
from harness.weights.stream.slots import PeerGone

T = TypeVar("T")

WATCH_SECONDS = 2.0
"""A rank whose scheduler is gone waits so long: the rank that built the engine sees within half a second which process
died, and its word must come first."""


class EngineOfRanks(Protocol):
    """What of a VerlEngine is used here, and in stages.py, which it uses in turn."""

    group: Group
    log: Path

    @property
    def is_head(self) -> bool: ...

    @property
    def inner(self) -> Any: ...

    def send(self, engine: Any, payloads: Sequence[Any], load_format: str | None, flush_cache: bool) -> None: ...

    def on_head(self, call: Callable[[Any], T]) -> T: ...


def call_schedulers(
    engine: EngineOfRanks,
    loader: str,
    message: str,
    meanwhile: Callable[[Callable[[], bool]], T],
    flush_cache: bool = False,
    carried: Sequence[torch.Tensor] = (),
) -> T:
    """Run a custom weight loader in every scheduler of the engine, and `meanwhile(ended)` on every rank; its value.

    message: the name that the loader is given, the head's counts. carried: on the head, the tensor (on the CPU) that it
    is given with it, one for each tp rank; every stage is given the same. ended() tells whether the engine's call is
    over, so that nobody waits for a scheduler that will not come; SGLang's answer is that of the first stage alone.
    A collective call of the engine's ranks. Raises the engine's failure, or what meanwhile raised, on every rank.
    """
    group, head = engine.group.process_group, engine.group.head
    flag = torch.zeros(1)
    call: Future[None] = Future()
    if engine.is_head:
        inner = engine.inner
        # By value, not as a handle: a handle of this rank's GPU or memory opens on no other host, and on the CPU once.
        tensors = carried or [torch.zeros(1)] * engine.group.tp
        payloads = [[(message, sglang_api.serialize_by_value(tensor))] for tensor in tensors]
        send = partial(engine.send, inner, payloads, loader, flush_cache)
        call = in_background(sglang_api.for_another_thread(inner, send), "engine-call")
        ended: Callable[[], bool] = call.done
    else:
        signal = dist.broadcast(flag, head, group, async_op=True)
        assert signal is not None
        ended = signal.is_completed
    try:
        value = meanwhile(ended)
        failure: Exception | None = None
    except SchedulerFailed as error:
        failure = error
    except PeerGone as error:
        time.sleep(WATCH_SECONDS)
        if not ended():
            raise EngineFailed(f"the scheduler beside rank {engine.group.rank} is gone; see {engine.log}") from error
        failure = error
    except Exception as error:
        if not ended():
            raise  # this rank alone: the others are in their own meanwhile, and no collective can reach them
        failure = error
    if engine.is_head:
        call.exception()  # waits
        dist.broadcast(flag, head, group)
    else:
        signal.wait()
    engine.on_head(lambda _: call.result())
    failures = all_gather(str(failure) if failure else None, engine.group.process_group)
    if failure is not None:
        raise failure
    for rank, other in zip(sorted(engine.group.ranks), failures, strict=True):
        if other:
            raise EngineFailed(f"on rank {rank}: {other}")
    return value
