"""Updates of an engine with pipeline stages: each scheduler loads the payload of the trainer rank beside it."""

import json
import time
import uuid
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist

from harness.rollout import sglang_api
from harness.rollout.errors import SchedulerFailed
from harness.rollout.schedulers import EngineOfRanks, call_schedulers
from harness.rollout.stage_loader import ARRIVED, STAGED, answer_path

POLL_SECONDS = 0.002
ANSWER_SECONDS = 300.0
"""How long a later stage may take when the first has answered."""


def update_stages(engine: EngineOfRanks, sent: Any, load_format: str | None, flush_cache: bool) -> None:
    """Load `sent` in all stages: named tensors, or for "flattened_bucket" what sglang_api.flattened_bucket makes.

    Returns when every stage has loaded it: only then may the memory behind its handles go. A collective call of the
    engine's ranks; raises EngineFailed on every rank, ValueError for another load_format.
    """
    if load_format not in (None, "flattened_bucket"):
        raise ValueError(f"load_format = {load_format!r}: with pipeline stages it must be None or 'flattened_bucket'.")
    group = engine.group
    payloads = group.gather(sglang_api.serialize(sent))
    done = _name_of_answers(engine)
    message, carried = "", []
    if engine.is_head:
        size = max(map(len, payloads))
        padded = [payload.ljust(size, b"\0") for payload in payloads]  # a pickle ends at its own stop mark
        stages = [b"".join(padded[tp :: group.tp]) for tp in range(group.tp)]
        carried = [torch.frombuffer(bytearray(each), dtype=torch.uint8) for each in stages]
        message = json.dumps({"done": done, "tp": group.tp, "flattened": load_format is not None, "size": size})
    call_schedulers(engine, STAGED, message, lambda ended: _await_answer(engine, done, ended), flush_cache, carried)


def await_stages(engine: EngineOfRanks) -> None:
    """Return when every stage has done what it was asked: SGLang answers for the first alone, and the others follow in
    order. A collective call of the engine's ranks."""
    if engine.group.pp > 1:
        done = _name_of_answers(engine)
        call_schedulers(engine, ARRIVED, done, lambda ended: _await_answer(engine, done, ended))


def _name_of_answers(engine: EngineOfRanks) -> str:
    name = [f"harness-{uuid.uuid4().hex[:12]}"]
    dist.broadcast_object_list(name, engine.group.head, engine.group.process_group)
    return name[0]


def _await_answer(engine: EngineOfRanks, done: str, ended: Callable[[], bool]) -> None:
    """Wait for the scheduler beside this rank. One that dies is noticed by the rank that built the engine."""
    answer = answer_path(done, engine.group.ranks.index(engine.group.rank))
    give_up = float("inf")
    while not answer.exists():
        if ended():
            give_up = min(give_up, time.monotonic() + ANSWER_SECONDS)
        if time.monotonic() > give_up:
            raise SchedulerFailed(f"the scheduler beside rank {engine.group.rank} has not answered; see {engine.log}")
        time.sleep(POLL_SECONDS)
    failure = answer.read_text(encoding="utf-8")
    answer.unlink()
    if failure:
        raise SchedulerFailed(f"the scheduler beside rank {engine.group.rank}: {failure}")
