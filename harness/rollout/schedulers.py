"""Run a function of the harness in every scheduler of an engine.

SGLang runs a custom weight loader in each of them (since 0.4.8); the harness registers one, LOADER, and the name of the
tensor that it is given says which function to call.
"""

import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from functools import partial
from pkgutil import resolve_name
from typing import TYPE_CHECKING, Any, TypeVar

import torch
import torch.distributed as dist

from harness.rollout import sglang_api
from harness.rollout.engine_errors import EngineFailed, PeerGone, SchedulerFailed
from harness.runtime.background import in_background

if TYPE_CHECKING:
    from harness.rollout.verl_engine import VerlEngine

T = TypeVar("T")

LOADER = "harness.rollout.schedulers.run_in_scheduler"
WATCH_SECONDS = 2.0
"""How long a rank whose scheduler is gone waits: the rank that built the engine sees within half a second which process
died, and must report it first."""


def call_schedulers(
    engine: "VerlEngine",
    function: str,
    message: str,
    meanwhile: Callable[[Callable[[], bool]], T],
    flush_cache: bool = False,
    carried: Sequence[torch.Tensor] = (),
) -> T:
    """Run a function in every scheduler of the engine and `meanwhile(ended)` on every rank; return what the latter returns.

    function: its dotted path; it gets the model and [(message, tensor)], as a custom weight loader does. message: the
    head's counts. carried: on the head, the tensor (on the CPU) for each tp rank; every stage is given the same.
    ended() says whether the engine's call is over, so that no rank waits for a scheduler that will not come; SGLang's
    answer is that of the first stage alone.
    A collective call of the engine's ranks. Raises the engine's failure, or what meanwhile raised, on every rank.
    """
    group = engine.group
    flag = torch.zeros(1)
    call: Future[None] = Future()
    if engine.is_head:
        inner = engine.inner
        # By value, not as a handle: a handle of this rank's GPU or memory opens on no other host, and on the CPU once.
        tensors = carried or [torch.zeros(1)] * group.tp
        payloads = [[(f"{function} {message}", sglang_api.serialize_by_value(tensor))] for tensor in tensors]
        send = partial(engine.send, inner, payloads, LOADER, flush_cache)
        call = in_background(sglang_api.for_another_thread(inner, send), "engine-call")
        ended: Callable[[], bool] = call.done
    else:
        signal = dist.broadcast(flag, group.head, group.process_group, async_op=True)
        assert signal is not None
        ended = signal.is_completed
    failure: Exception | None = None
    try:
        value = meanwhile(ended)
    except SchedulerFailed as error:
        failure = error
    except PeerGone as error:
        time.sleep(WATCH_SECONDS)
        if not ended():
            raise EngineFailed(f"the scheduler beside rank {group.rank} is gone; see {engine.log}") from error
        failure = error
    except Exception as error:
        if not ended():
            raise  # on this rank alone: the others are in their own meanwhile, and no collective can reach them
        failure = error
    if engine.is_head:
        call.exception()  # waits
        dist.broadcast(flag, group.head, group.process_group)
    else:
        signal.wait()
    engine.on_head(lambda _: call.result())
    failures = group.all_gather(str(failure) if failure else None)
    if failure is not None:
        raise failure
    for rank, other in failures.items():
        if other:
            raise EngineFailed(f"on rank {rank}: {other}")
    return value


def run_in_scheduler(model: Any, named_tensors: Sequence[tuple[str, torch.Tensor]]) -> None:
    """Call the function that the one name begins with, in a scheduler; no other than the harness's own."""
    name, tensor = named_tensors[0]
    path, _, message = name.partition(" ")
    if not path.startswith("harness."):
        raise ValueError(f"function must be one of harness.*, got {path}.")
    resolve_name(path)(model, [(message, tensor)])
