"""The draft model of speculative decoding: SGLang's class for a model's layer for multi-token prediction (MTP).

Transformers' classes have no such layer, so its checkpoint names are made from the last decoder layer, which it
repeats, and from what published checkpoints add to that.
"""

import json
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

from harness.config.layers import ConfigError
from harness.runtime.errors import UnsupportedEnvironment
from harness.tools.engine_class.engine_answer import EngineAnswer, ask_engine
from harness.tools.engine_class.traced_ranks import EngineRank, EngineShape
from harness.weights.fusing import fusing_groups
from harness.weights.layer_names import layer_of, one_layer_of_each_kind
from harness.weights.tensor_view import TensorView


@dataclass(frozen=True, kw_only=True)
class MtpNames:
    """How published checkpoints of one family name an MTP layer. {n} is the layer's number."""

    layer: str
    """Stands for `model.layers.N` of the decoder layer that the MTP layer repeats."""
    number: str
    """The field of config.json that says how many there are; "" if there is always one."""
    norms: tuple[str, ...]
    """Norms of the hidden size."""
    projection: str
    """The matrix that joins a token's embedding and the hidden state: hidden size x twice that."""
    copies: tuple[str, ...] = ()
    """Copies of the model's embedding and head. SGLang ignores them: it takes the target's own."""
    has_copies: bool = False
    """Every checkpoint of the family has them, and not some alone, as GLM-4.5 and not GLM-4.6."""
    counts_on: bool = True
    """The layers are numbered on from the decoder layers, and not from zero."""


DEEPSEEK = MtpNames(
    layer="model.layers.{n}",
    number="num_nextn_predict_layers",
    norms=("model.layers.{n}.enorm", "model.layers.{n}.hnorm", "model.layers.{n}.shared_head.norm"),
    projection="model.layers.{n}.eh_proj",
    copies=("model.layers.{n}.embed_tokens", "model.layers.{n}.shared_head.head"),
)
QWEN = MtpNames(
    layer="mtp.layers.{n}",
    number="",
    norms=("mtp.norm", "mtp.pre_fc_norm_embedding", "mtp.pre_fc_norm_hidden"),
    projection="mtp.fc",
    counts_on=False,
)
WITH_COPIES = replace(DEEPSEEK, has_copies=True)
FAMILIES = {
    "DeepseekV3ForCausalLM": WITH_COPIES,
    "DeepseekV32ForCausalLM": WITH_COPIES,
    "Glm4MoeForCausalLM": DEEPSEEK,
    "GlmMoeDsaForCausalLM": DEEPSEEK,
    "Qwen3_5MoeForConditionalGeneration": QWEN,
    "Qwen3NextForCausalLM": QWEN,
}
"""The model's class -> names. The number of stored parameters tells whether a checkpoint has the copies."""


@dataclass(frozen=True, kw_only=True)
class DraftModel:
    """What was found out about the draft model of one engine."""

    answer: EngineAnswer
    mtp: tuple[TensorView, ...]
    """The names of the MTP layer that were given to its loader."""
    filled_by_trainer: frozenset[str]
    """Its parameters that the names fill which a trainer with transformers' class sends."""


def examine_draft(
    shape: EngineShape, target: Sequence[EngineRank], sent: Sequence[TensorView], mtp: Sequence[TensorView]
) -> DraftModel:
    """Build the draft model of each rank, and give its loader the MTP layer and what the trainer sends.

    target: the ranks of the target model. sent: the trainer's names, of which the loader gets one layer of each kind,
    because a sync gives every name to both loaders. Raise RankFailed, UnsupportedEnvironment.
    """
    sample = one_layer_of_each_kind(fusing_groups(sent))
    of_trainer = {view.name for group in sample for view in group.views}
    answer = ask_engine(
        replace(shape, draft=True),
        (*sample, *fusing_groups(mtp)),
        every_name=True,
        passed_over=of_trainer | copies_in(shape.folder, mtp),
        target=target,
    )
    filled = {
        copy.into
        for each in answer.ranks
        for group, copies in zip(each.groups, each.coverage.copies, strict=True)
        for copy in copies
        if group.views[0].name in of_trainer and copy.into in each.coverage.missing
    }
    return DraftModel(answer=answer, mtp=tuple(mtp), filled_by_trainer=frozenset(filled))


def copies_in(folder: Path, mtp: Iterable[TensorView]) -> set[str]:
    """Return those names of the MTP layer that are copies of the model's embedding and head."""
    copied = tuple(f"{path.partition('{n}')[2]}.weight" for path in mtp_names(folder).copies)
    return {view.name for view in mtp if view.name.endswith(copied)}


def mtp_names(folder: Path) -> MtpNames:
    """Return how the model's checkpoint names its MTP layer.

    Raise ConfigError if it has none, UnsupportedEnvironment if unknown.
    """
    architecture = _fields(folder)["architectures"][0]
    if architecture not in FAMILIES:
        raise UnsupportedEnvironment(
            f"the names that {architecture} has for a layer for multi-token prediction are not known here; known are those"
            f" of {', '.join(sorted(FAMILIES))}"
        )
    names = FAMILIES[architecture]
    if names.number and not _language(folder).get(names.number):
        raise ConfigError(f"config.json must have {names.number} of 1 or more for --speculative-algorithm.")
    return names


def mtp_layout(folder: Path, sent: Sequence[TensorView]) -> tuple[TensorView, ...]:
    """Return the tensors of the MTP layer as a published checkpoint has them, quantized like the trainer's.

    sent: the trainer's tensors. Raise ConfigError, UnsupportedEnvironment as mtp_names does.
    """
    names, fields = mtp_names(folder), _language(folder)
    decoders = fields["num_hidden_layers"]
    start = decoders if names.counts_on else 0
    numbers = range(start, start + (fields[names.number] if names.number else 1))
    return tuple(view for number in numbers for view in _one_layer(names, number, decoders - 1, sent))


def _one_layer(names: MtpNames, number: int, like: int, sent: Sequence[TensorView]) -> Iterator[TensorView]:
    embedding = next(view for view in sent if view.name.endswith("embed_tokens.weight"))
    hidden = embedding.shape[1]
    for view in sent:
        if layer_of(view.name) == like:
            yield replace(view, name=_moved(view.name, names, number), of=_moved(view.of, names, number))
    shapes: dict[str, tuple[int, ...]] = {name: (hidden,) for name in names.norms}
    shapes |= {names.projection: (hidden, 2 * hidden)}
    shapes |= {name: embedding.shape for name in names.copies if names.has_copies}
    for path, shape in shapes.items():
        name = f"{path.format(n=number)}.weight"
        stride = tuple(torch.empty(shape, device="meta").stride())
        yield TensorView(name=name, of=name, dtype=embedding.dtype, shape=shape, stride=stride)


def _moved(name: str, names: MtpNames, number: int) -> str:
    """Return the name of a decoder layer's tensor in the MTP layer."""
    rest = name.partition(".layers.")[2].partition(".")[2]
    return f"{names.layer.format(n=number)}.{rest}"


def _fields(folder: Path) -> dict[str, Any]:
    return dict(json.loads((folder / "config.json").read_text(encoding="utf-8")))


def _language(folder: Path) -> dict[str, Any]:
    """Return the fields of the language model."""
    fields = _fields(folder)
    return dict(fields.get("text_config") or fields)
