"""Run a function of the harness in every scheduler of an engine; with it, updates of an engine with pipeline stages.

SGLang runs a custom weight loader in each scheduler (since 0.4.8); the harness registers one, LOADER, and the name of the
tensor that it is given says which function to call. SGLang's stages all open the payload of their TP rank, which is the
first stage's, and only the first stage answers: so each scheduler is given the payloads of all stages, loads its own, and
leaves an answer in a file for the trainer rank beside it.
"""

import json
import pickle
import time
import traceback
import uuid
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from functools import partial
from pathlib import Path
from pkgutil import resolve_name
from typing import TYPE_CHECKING, Any, TypeVar

import torch
import torch.distributed as dist

from harness.rollout import sglang_api
from harness.rollout.engine_errors import EngineFailed, PeerGone, SchedulerFailed
from harness.runtime import scratch
from harness.runtime.background import in_background

if TYPE_CHECKING:
    from harness.rollout.verl_engine import VerlEngine

T = TypeVar("T")

LOADER = "harness.rollout.schedulers.run_in_scheduler"
LOAD_OWN = "harness.rollout.schedulers.load_own"
ANSWER = "harness.rollout.schedulers.answer"
WATCH_SECONDS = 2.0
"""How long a rank whose scheduler is gone waits: the rank that built the engine sees within half a second which process
died, and must report it first."""
POLL_SECONDS = 0.002
ANSWER_SECONDS = 300.0
"""How long a later stage may take when the first has answered."""


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
        # By value, not as a handle: a handle of this rank's GPU or memory opens on no other host, and on the CPU once.
        tensors = carried or [torch.zeros(1)] * group.tp
        payloads = [[(f"{function} {message}", pickle.dumps(tensor))] for tensor in tensors]
        send = partial(engine.send, engine.inner, payloads, LOADER, flush_cache)
        call = in_background(sglang_api.for_another_thread(engine.inner, send), "engine-call")
        ended: Callable[[], bool] = call.done
    else:
        signal = dist.broadcast(flag, group.head, group.process_group, async_op=True)
        assert signal is not None
        ended = signal.is_completed
    failure: Exception | None = None
    try:
        value = meanwhile(ended)
    except Exception as error:
        if isinstance(error, PeerGone):
            time.sleep(WATCH_SECONDS)
            if not ended():
                raise EngineFailed(f"the scheduler beside rank {group.rank} is gone; see {engine.log}") from error
        elif not isinstance(error, SchedulerFailed) and not ended():
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


def update_stages(engine: "VerlEngine", sent: Any, load_format: str | None, flush_cache: bool) -> None:
    """Load `sent` in all stages: named tensors, or for "flattened_bucket" what sglang_api.flattened_bucket makes.

    Returns when every stage has loaded it: only then may the memory behind its handles go. A collective call of the
    engine's ranks; raises EngineFailed on every rank.
    """
    tp = engine.group.tp
    payloads = engine.group.gather(sglang_api.serialize(sent))
    name = _new_name(engine)
    message, carried = "", []
    if engine.is_head:
        size = max(map(len, payloads))
        padded = [payload.ljust(size, b"\0") for payload in payloads]  # a pickle ends at its own stop mark
        stages = [b"".join(padded[rank::tp]) for rank in range(tp)]
        carried = [torch.frombuffer(bytearray(each), dtype=torch.uint8) for each in stages]
        message = json.dumps({"name": name, "tp": tp, "flattened": load_format is not None, "size": size})
    call_schedulers(engine, LOAD_OWN, message, lambda ended: _await_answer(engine, name, ended), flush_cache, carried)


def await_stages(engine: "VerlEngine") -> None:
    """Return when every stage has done what it was asked; a collective call of the engine's ranks."""
    if engine.group.pp > 1:
        name = _new_name(engine)
        call_schedulers(engine, ANSWER, name, lambda ended: _await_answer(engine, name, ended))


def load_own(model: Any, named_tensors: Sequence[tuple[str, torch.Tensor]]) -> None:
    """Load the payload of this rank's stage, in a scheduler.

    The message is JSON; the tensor holds the stages' payloads one after the other, of `size` bytes each. The answer is
    empty, or the error.
    """
    message, payloads = named_tensors[0]
    asked = json.loads(message)
    failure = ""
    try:
        own = payloads.cpu().split(asked["size"])[dist.get_rank() // asked["tp"]]
        sent = sglang_api.deserialize(own.numpy().tobytes())
        tensors = sglang_api.tensors_of_bucket(sent) if asked["flattened"] else sent
        model.load_weights([(name, tensor.to(payloads.device)) for name, tensor in tensors])
        if payloads.is_cuda:
            torch.cuda.synchronize()
    except Exception as error:
        traceback.print_exc()
        failure = f"{type(error).__name__}: {error}"
    answer(model, [(asked["name"], payloads)], failure)


def answer(model: Any, named_tensors: Sequence[tuple[str, torch.Tensor]], failure: str = "") -> None:
    """Leave an answer of this scheduler: what it was asked before is done. Changes no weight."""
    file = answer_file(named_tensors[0][0], dist.get_rank())
    unfinished = file.with_suffix(".unfinished")
    unfinished.write_text(failure, encoding="utf-8")
    unfinished.rename(file)  # its reader finds it whole


def answer_file(name: str, engine_rank: int) -> Path:
    """Return the file of that scheduler's answer, on its host."""
    return scratch.shared() / f"{name}-{engine_rank}.answer"


def _new_name(engine: "VerlEngine") -> str:
    return engine.group.broadcast(f"harness-{uuid.uuid4().hex[:12]}")


def _await_answer(engine: "VerlEngine", name: str, ended: Callable[[], bool]) -> None:
    """Wait for the scheduler beside this rank. One that dies is noticed by the rank that built the engine."""
    group = engine.group
    file = answer_file(name, group.ranks.index(group.rank))
    give_up = float("inf")
    while not file.exists():
        if ended():
            give_up = min(give_up, time.monotonic() + ANSWER_SECONDS)
        if time.monotonic() > give_up:
            raise SchedulerFailed(f"the scheduler beside rank {group.rank} has not answered; see {engine.log}")
        time.sleep(POLL_SECONDS)
    failure = file.read_text(encoding="utf-8")
    file.unlink()
    if failure:
        raise SchedulerFailed(f"the scheduler beside rank {group.rank}: {failure}")
