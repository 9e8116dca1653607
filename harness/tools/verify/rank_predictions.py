"""What every rank of a server must hold, by SGLang's own class of the model: built for that rank on the meta device, and
its own load_weights traced over the names of a checkpoint.

Each rank is a forked process, because SGLang keeps one configuration for each process. What it answers with is compact:
a model of true size has a hundred thousand tensors on each of sixteen ranks.
"""

import pickle
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from math import prod
from pathlib import Path
from typing import Any

import torch

from harness.runtime.errors import UnsupportedEnvironment
from harness.tools.engine_class import meta_model
from harness.tools.engine_class.absent_hardware import AssumedGpu
from harness.tools.engine_class.checkpoint_headers import Stored
from harness.tools.engine_class.held_tensors import HeldTensor, held_tensors, unfilled_tensors
from harness.tools.full_size.forks import ForkEnded, Told, in_forks
from harness.tools.full_size.ranks_at_true_size import NO_LAYER, Layers, at_layer, by_layer, kind_of, layer_of
from harness.weights.fusing import fusing_groups
from harness.weights.tensor_view import TensorView
from harness.weights.traced.rank_trace import LoaderTrace

TARGET, DRAFT = "target", "draft"
"""Roles of a server's models."""
COMPUTED = "SGLang's loader computes it, and does not only copy"
IN_PART = "the checkpoint fills a part of it"
REARRANGED = "SGLang rearranges it once it is loaded"
ALL_TRACED = 6000
"""So many names are all traced on every rank."""


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
    like: Mapping[str, str]
    """Tensors of layers that were not traced -> that of the layer that stands for theirs. The others stand for
    themselves."""
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
        """Return what a tensor of `nbytes` is made of."""
        found: HeldTensor = pickle.loads(self.packed[self.like.get(name, name)])
        return _of_layer(found, layer_of(name)) if name in self.like else found


def layout_of(stored: Mapping[str, Stored]) -> tuple[TensorView, ...]:
    """Return the tensors of a checkpoint, each as a whole."""
    return tuple(TensorView.whole(name, getattr(torch, each.dtype), each.shape or ()) for name, each in stored.items())


def predict(
    models: EngineModels,
    layout: Sequence[TensorView],
    wanted: Collection[tuple[str, int]],
    traced: Collection[int] | None = None,
) -> dict[tuple[str, int], RankPrediction]:
    """Return what the wanted models hold, by (role, rank of the engine).

    traced: decoder layers that are traced themselves. Of the others each rank traces one of each kind, which stands for
    its like: a prediction that turns out equal is right whoever made it, and one that does not has to be made again
    with its layer traced. None: trace all, or only those of each kind if there are too many names for that.

    Raise CannotPredict, or UnsupportedEnvironment, with SGLang's own words.
    """
    layers, order = by_layer(fusing_groups(layout)), sorted(wanted)
    if traced is None:
        traced = layers.keys() if len(layout) <= ALL_TRACED else ()
    jobs = {number: (models, layers, frozenset(traced), role, rank) for number, (role, rank) in enumerate(order)}
    try:
        found = in_forks(_predict_in_fork, jobs, models.processes, "ranks")
    except ForkEnded as error:
        role, rank = order[error.number]
        raise CannotPredict(
            f"the process that built rank {rank} ({role}) ended with exit code {error.code} before it answered"
        ) from None
    return {order[number]: each for number, each in found.items()}


def _predict_in_fork(
    models: EngineModels, layers: Layers, traced: Collection[int], role: str, rank: int
) -> RankPrediction:
    torch.set_num_threads(1)  # threads that torch started before the fork are not here, and would be waited for
    try:
        return _predict_rank(models, layers, traced, role, rank)
    except UnsupportedEnvironment:
        raise
    except Exception as error:  # whatever SGLang raises while it builds a model: it is the answer
        raise CannotPredict(f"rank {rank} ({role}): {type(error).__name__}: {error}") from error


def _predict_rank(
    models: EngineModels, layers: Layers, traced: Collection[int], role: str, rank: int
) -> RankPrediction:
    """Build one rank in this process, and trace its loader."""
    if models.on_gpu:
        AssumedGpu().answer()
    is_draft = role != TARGET
    model = meta_model.build_on_meta(models.folder, models.arguments, rank, is_draft, enlarged=not models.on_gpu).model
    stages = models.arguments.get("pp_size") or 1
    # Without a draft model nothing is shared, and a pipeline stage has only one of them to hand out.
    shared = meta_model.embedding_and_head(model, stages) if models.arguments.get("speculative_algorithm") else {}
    not_its_own = {*shared.values()} if is_draft else set()
    stands = _stands_for(model, layers, traced)
    trace = LoaderTrace(model, tuple(group for layer in stands if stands[layer] == layer for group in layers[layer]))
    trace.run()
    coverage = trace.coverage()
    held = held_tensors(replace(trace, traces=trace.without_refused))
    own = {name: each for name, each in held.items() if name not in not_its_own}
    like = {other: name for name in own for other in _like(name, stands)}
    of_all = {**{name: name for name in own}, **like}
    nbytes = {name: prod(each.place.shape) * each.dtype.itemsize for name, each in own.items()}
    doubts = _doubts(model, own)
    dequantized = _dequantized(held)
    return RankPrediction(
        packed={name: pickle.dumps(each) for name, each in own.items()},
        nbytes={name: nbytes[one] for name, one in of_all.items()},
        doubts={name: doubts[one] for name, one in of_all.items() if one in doubts},
        like=like,
        dequantized={
            name: at_layer(dequantized[one], layer_of(name)) for name, one in of_all.items() if one in dequantized
        },
        embedding_and_head=shared,
        unfilled=tuple(name for name in unfilled_tensors(trace, of_all) if name not in not_its_own),
        ignored=tuple(coverage.unknown),
        refused=coverage.errors,
        derived=tuple(sorted(trace.derived - held.keys())),
    )


def _stands_for(model: Any, layers: Layers, traced: Collection[int]) -> dict[int, int]:
    """Return, for each layer whose names a rank's loader may be given, the layer of its kind that stands for it.

    Layers that the rank does not hold are not given to it, unless they are to be traced.
    """
    held = {layer_of(name) for name, _ in model.named_parameters()}
    firsts: dict[Any, int] = {}
    stands = {}
    for layer, groups in layers.items():
        if layer == NO_LAYER or layer in traced:
            stands[layer] = layer
        elif layer in held:
            stands[layer] = firsts.setdefault(kind_of(groups), layer)
    return stands


def _like(name: str, stands: Mapping[int, int]) -> Iterator[str]:
    """Yield the engine's names that a tensor stands for."""
    own = layer_of(name)
    if own != NO_LAYER:
        yield from (at_layer(name, layer) for layer, other in stands.items() if other == own and layer != own)


def _of_layer(held: HeldTensor, layer: int) -> HeldTensor:
    """Return what the same tensor of another layer is made of."""
    copies = tuple(
        (place, replace(source, name=at_layer(source.name, layer), of=at_layer(source.of, layer)))
        for place, source in held.copies
    )
    return replace(held, copies=copies)


def _doubts(model: Any, held: Mapping[str, HeldTensor]) -> dict[str, str]:
    """Return why it is not known what some tensors must hold."""
    found = {name: COMPUTED if each.computed else IN_PART for name, each in held.items() if not each.is_known}
    for path, module in model.named_modules():
        method = getattr(module, "quant_method", None)
        if method is None or _stays_as_loaded(method):
            continue
        names = {f"{path}.{name}" for name, _ in module.named_parameters(recurse=False)}
        found |= {name: f"{REARRANGED} ({type(method).__name__})" for name in names & held.keys()}
    return found


def _stays_as_loaded(method: Any) -> bool:
    """Return whether SGLang leaves a layer's weights as they were loaded: those that are not quantized, and blocks of
    float8.
    """
    return type(method).__name__.startswith("Unquantized") or bool(getattr(method, "block_quant", False))


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
