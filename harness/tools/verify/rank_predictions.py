"""What every rank of a server must hold, by SGLang's own class of the model: built for that rank on the meta device, and
its own load_weights traced over the names of a checkpoint (engine_class/traced_ranks.py).

What a rank's process answers with is compact: a model of true size has a hundred thousand tensors on each of sixteen
ranks.
"""

import pickle
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from math import prod
from typing import Any

import torch

from harness.tools.engine_class.checkpoint_headers import Stored
from harness.tools.engine_class.held_tensors import HeldTensor, held_tensors, unfilled_tensors
from harness.tools.engine_class.traced_ranks import EngineShape, ModelRank, Part, TracedRank, ask_ranks
from harness.weights.findings import Finding
from harness.weights.fusing import fusing_groups
from harness.weights.layer_names import at_layer, by_layer, kind_of, layer_of
from harness.weights.tensor_view import TensorView

COMPUTED = "SGLang's loader computes it, and does not only copy"
IN_PART = "the checkpoint fills a part of it"
REARRANGED = "SGLang rearranges it once it is loaded"
ALL_TRACED = 6000
"""So many names are all traced on every rank."""


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
    refused: tuple[Finding, ...]
    """What the loader refuses."""
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
    shape: EngineShape,
    layout: Sequence[TensorView],
    wanted: Collection[ModelRank],
    traced: Collection[int] | None = None,
) -> dict[ModelRank, RankPrediction]:
    """Return what the wanted models hold, by (role, rank of the engine).

    traced: decoder layers that are traced themselves. Of the others each rank traces one of each kind, which stands for
    its like: a prediction that turns out equal is right whoever made it, and one that does not has to be made again
    with its layer traced. None: trace all, or only those of each kind if there are too many names for that.

    Raise RankFailed, or UnsupportedEnvironment, with SGLang's own words.
    """
    layers = by_layer(fusing_groups(layout))
    if traced is None:
        traced = layers.keys() if len(layout) <= ALL_TRACED else ()
    part = Part(kinds={layer: kind_of(members) for layer, members in layers.items()}, odd=frozenset(traced))
    return ask_ranks(shape, dict.fromkeys(sorted(wanted), part), layers, predicted)


def predicted(rank: TracedRank) -> RankPrediction:
    """Return what a rank must hold, in its process."""
    model, trace, coverage = rank.built.model, rank.trace, rank.coverage
    not_its_own = {*rank.shared.values()} if rank.shape.draft else set()
    alike = rank.alike(rank.stands)
    held = held_tensors(replace(trace, traces=trace.without_refused))
    own = {name: each for name, each in held.items() if name not in not_its_own}
    like = {at_layer(name, layer): name for name in own for layer in alike.get(layer_of(name), ())}
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
        embedding_and_head=rank.shared,
        unfilled=tuple(name for name in unfilled_tensors(trace, of_all) if name not in not_its_own),
        ignored=tuple(coverage.unknown),
        refused=tuple(
            Finding(kind="refused", tensor=name, names=tuple(others), counts={"error": error})
            for (name, *others), error in coverage.errors.items()
        ),
        derived=tuple(sorted(trace.derived - held.keys())),
    )


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
