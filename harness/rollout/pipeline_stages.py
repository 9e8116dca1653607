"""Updates of an engine with pipeline stages: each scheduler loads the payload of the trainer rank beside it.

SGLang's stages all open the payload of their TP rank, which is the first stage's, and only the first stage answers. So
each scheduler is given the payloads of all stages, loads its own, and leaves an answer in a file for its trainer rank.
"""

import json
import time
import traceback
import uuid
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist

from harness.rollout import sglang_api
from harness.rollout.engine_errors import SchedulerFailed
from harness.rollout.schedulers import call_schedulers
from harness.runtime import scratch

if TYPE_CHECKING:
    from harness.rollout.verl_engine import VerlEngine

LOAD_OWN = "harness.rollout.pipeline_stages.load_own"
ANSWER = "harness.rollout.pipeline_stages.answer"
POLL_SECONDS = 0.002
ANSWER_SECONDS = 300.0
"""How long a later stage may take when the first has answered."""


def update_stages(engine: "VerlEngine", sent: Any, load_format: str | None, flush_cache: bool) -> None:
    """Load `sent` in all stages: named tensors, or for "flattened_bucket" what sglang_api.flattened_bucket makes.

    Returns when every stage has loaded it: only then may the memory behind its handles go. A collective call of the
    engine's ranks; raises EngineFailed on every rank, ValueError for another load_format.
    """
    if load_format not in (None, "flattened_bucket"):
        raise ValueError(f"load_format = {load_format!r}: with pipeline stages it must be None or 'flattened_bucket'.")
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
