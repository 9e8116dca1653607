"""What brings each pipeline stage its own payload: SGLang's stages all open that of their tp rank, which is the first's.

Named as a custom weight loader; SGLang runs it in every rank of the engine, and answers for the first stage alone.
"""

import json
import traceback
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from harness.rollout import scratch, sglang_api

STAGED = "harness.rollout.stage_loader.load_own"
ARRIVED = "harness.rollout.stage_loader.say_arrived"


def load_own(model: Any, named_tensors: Sequence[tuple[str, torch.Tensor]]) -> None:
    """Load the payload of this rank's stage. The first name is JSON: {"done", "tp", "flattened", "size"}; its tensor
    holds the stages' payloads one after the other, of `size` bytes each.

    What came of it is left for the trainer rank beside this scheduler, under `done`: empty, or the error.
    """
    name, payloads = named_tensors[0]
    asked = json.loads(name)
    rank = dist.get_rank()
    failure = ""
    try:
        own = payloads.cpu().split(asked["size"])[rank // asked["tp"]]
        sent = sglang_api.deserialize(own.numpy().tobytes())
        tensors = sglang_api.tensors_of_bucket(sent) if asked["flattened"] else sent
        model.load_weights([(name, tensor.to(payloads.device)) for name, tensor in tensors])
        if payloads.is_cuda:
            torch.cuda.synchronize()
    except Exception as error:
        traceback.print_exc()
        failure = f"{type(error).__name__}: {error}"
    _answer(asked["done"], rank, failure)


def say_arrived(model: Any, named_tensors: Sequence[tuple[str, torch.Tensor]]) -> None:
    """Answer under the first name: what was asked of this scheduler before is done. Changes no weight."""
    _answer(named_tensors[0][0], dist.get_rank(), "")


def answer_path(done: str, engine_rank: int) -> Path:
    """Where that scheduler leaves its answer, on its host."""
    return scratch.shared() / f"{done}-{engine_rank}.answer"


def _answer(done: str, rank: int, failure: str) -> None:
    answer = answer_path(done, rank)
    unfinished = answer.with_suffix(".unfinished")
    unfinished.write_text(failure, encoding="utf-8")
    unfinished.rename(answer)  # whoever waits for the file finds it whole
