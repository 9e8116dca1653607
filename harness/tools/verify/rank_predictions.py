"""What every rank of a server must hold, by SGLang's own class of the model: built for that rank on the meta device, and
its own load_weights traced over the names of a checkpoint.

Each rank is a forked process, because SGLang keeps one configuration for each process. What it answers with is compact:
a model of true size has a hundred thousand tensors on each of sixteen ranks.
"""

import pickle
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from math import prod
from pathlib import Path
from typing import Any

import torch

from harness.rollout.sglang_api import meta_model
from harness.rollout.sglang_api.absent_hardware import AssumedGpu
from harness.runtime.errors import UnsupportedEnvironment
from harness.tools.full_size.forks import ForkEnded, Told, in_forks
from harness.weights.checkpoint_headers import Stored
from harness.weights.fusing import FusingGroup, fusing_groups
from harness.weights.tensor_view import TensorView
from harness.weights.traced.held_tensors import HeldTensor, held_tensors, unfilled_tensors
from harness.weights.traced.rank_trace import LoaderTrace

TARGET, DRAFT = "target", "draft"
"""Roles of a server's models."""
COMPUTED = "SGLang's loader computes it, and does not only copy"
IN_PART = "the checkpoint fills a part of it"


class CannotPredict(Told):
    """SGLang's class could not be built for a rank. The message has SGLang's own words."""


@dataclass(frozen=True, kw_only=True)
class EngineModels:
    """What is to be built."""

    folder: Path
    """With config.json."""
    arguments: Mapping[str, Any]
    """Of SGLang's server arguments, those that decide about parameters."""
    on_gpu: bool
    processes: int
    """How many ranks are built at the same time."""


@dataclass(frozen=True, kw_only=True)
class RankPrediction:
    """What one model of one rank must hold."""

    packed: Mapping[str, bytes]
    """The engine's name -> a HeldTensor, pickled by our own fork."""
    nbytes: Mapping[str, int]
    """How large they are."""
    doubts: Mapping[str, str]
    """Why it is not known what some of them must hold."""
    dequantized: Mapping[str, str]
    """Weights in blocks of float8 -> their scales. SGLang's checker hashes their product and not the scales."""
    embedding_and_head: Mapping[str, str]
    """"embedding" and "head" -> the parameter. Those of a draft model are the target's own."""
    unfilled: tuple[str, ...]
    """Parameters and persistent buffers that nothing in the checkpoint fills."""
    ignored: tuple[str, ...]
    """Checkpoint names that the loader ignores."""
    refused: Mapping[str, str]
    """Checkpoint names, some joined by commas -> what the loader raised."""
    derived: tuple[str, ...]
    """Plain attributes that the loader derives, such as w_kc. No checker of SGLang sees them."""

    def held(self, name: str) -> HeldTensor:
        """Return what a tensor of `packed` is made of."""
        found: HeldTensor = pickle.loads(self.packed[name])
        return found


def layout_of(stored: Mapping[str, Stored]) -> tuple[TensorView, ...]:
    """Return the tensors of a checkpoint, each as a whole."""
    found = []
    for name, each in stored.items():
        shape = each.shape or ()
        stride = tuple(torch.empty(shape, device="meta").stride())
        dtype: torch.dtype = getattr(torch, each.dtype)
        found.append(TensorView(name=name, of=name, dtype=dtype, shape=shape, stride=stride))
    return tuple(found)


def predict(
    models: EngineModels, layout: Sequence[TensorView], wanted: Collection[tuple[str, int]]
) -> dict[tuple[str, int], RankPrediction]:
    """Return what the wanted models hold, by (role, rank of the engine).

    Raise CannotPredict, or UnsupportedEnvironment, with SGLang's own words.
    """
    groups, order = fusing_groups(layout), sorted(wanted)
    jobs = {number: (models, groups, role, rank) for number, (role, rank) in enumerate(order)}
    try:
        found = in_forks(_predict_in_fork, jobs, models.processes, "ranks")
    except ForkEnded as error:
        role, rank = order[error.number]
        raise CannotPredict(
            f"the process that built rank {rank} ({role}) ended with exit code {error.code} before it answered"
        ) from None
    return {order[number]: each for number, each in found.items()}


def _predict_in_fork(models: EngineModels, groups: tuple[FusingGroup, ...], role: str, rank: int) -> RankPrediction:
    torch.set_num_threads(1)  # threads that torch started before the fork are not here, and would be waited for
    try:
        return _predict_rank(models, groups, role, rank)
    except UnsupportedEnvironment:
        raise
    except Exception as error:  # whatever SGLang raises while it builds a model: it is the answer
        raise CannotPredict(f"rank {rank} ({role}): {type(error).__name__}: {error}") from error


def _predict_rank(models: EngineModels, groups: tuple[FusingGroup, ...], role: str, rank: int) -> RankPrediction:
    """Build one rank in this process, and trace its loader."""
    if models.on_gpu:
        AssumedGpu().answer()
    is_draft = role != TARGET
    model = meta_model.build_on_meta(models.folder, models.arguments, rank, is_draft).model
    stages = models.arguments.get("pp_size") or 1
    shared = meta_model.embedding_and_head(model, stages)
    not_its_own = {*shared.values()} if is_draft else set()
    trace = LoaderTrace(model, groups)
    trace.run()
    coverage = trace.coverage()
    held = held_tensors(replace(trace, traces=trace.without_refused))
    own = {name: each for name, each in held.items() if name not in not_its_own}
    return RankPrediction(
        packed={name: pickle.dumps(each) for name, each in own.items()},
        nbytes={name: prod(each.place.shape) * each.dtype.itemsize for name, each in own.items()},
        doubts={name: COMPUTED if each.computed else IN_PART for name, each in own.items() if not each.is_known},
        dequantized=_dequantized(held),
        embedding_and_head=shared,
        unfilled=tuple(name for name in unfilled_tensors(trace, held) if name not in not_its_own),
        ignored=tuple(coverage.unknown),
        refused=coverage.errors,
        derived=tuple(sorted(trace.derived - held.keys())),
    )


def _dequantized(held: Mapping[str, HeldTensor]) -> dict[str, str]:
    """Return the weights in float8 whose scales lie beside them, as SGLang's checker pairs them
    (srt/utils/weight_checker.py, _build_quantized_set).
    """
    found = {}
    for name, each in held.items():
        scale = name.replace("weight", "weight_scale_inv")
        if name.endswith("weight") and each.dtype == torch.float8_e4m3fn and scale in held:
            found[name] = scale
    return found
