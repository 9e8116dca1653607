"""Faults in what is sent to an engine. Tests call the functions at the end, each in a fork of its own.

The model has its real widths, a few layers, and perhaps fewer experts. They return fault -> what was found.
"""

import re
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path

import torch

from harness.tools.engine_class.draft_model import examine_draft, mtp_layout
from harness.tools.engine_class.engine_answer import ask_engine
from harness.tools.engine_class.traced_ranks import EngineShape
from harness.tools.full_size.trainer_names import trainer_layout
from harness.weights.fusing import fusing_groups
from harness.weights.tensor_view import TensorView
from tests.tools.full_size.asked import imported

Views = list[TensorView]
Plant = Callable[[Views], Views]


def without(part: str) -> Plant:
    return lambda views: [view for view in views if part not in view.name]


def renamed(old: str, new: str) -> Plant:
    return lambda views: [replace(view, name=view.name.replace(old, new)) for view in views]


def transposed(part: str) -> Plant:
    return lambda views: [
        replace(view, shape=view.shape[::-1], stride=view.stride[::-1]) if part in view.name else view for view in views
    ]


def sent_as_float32(part: str) -> Plant:
    return lambda views: [replace(view, dtype=torch.float32) if part in view.name else view for view in views]


def shorter(part: str) -> Plant:
    return lambda views: [
        replace(view, shape=(view.shape[0] - 64, *view.shape[1:])) if part in view.name else view for view in views
    ]


def cut(part: str, axis: int, by: int) -> Plant:
    """Send one of so many equal parts along an axis."""
    return lambda views: [
        replace(view, shape=tuple(size // by if at == axis else size for at, size in enumerate(view.shape)))
        if part in view.name
        else view
        for view in views
    ]


def both(*plants: Plant) -> Plant:
    def plant(views: Views) -> Views:
        for each in plants:
            views = each(views)
        return views

    return plant


def viewed(part: str, *axes: int) -> Plant:
    """Send the axes in another order, contiguously: as many elements in another shape."""

    def shaped(view: TensorView) -> TensorView:
        shape = tuple(view.shape[axis] for axis in axes)
        return replace(view, shape=shape, stride=torch.empty(shape, device="meta").stride())

    return lambda views: [shaped(view) if part in view.name else view for view in views]


def sent_again(part: str) -> Plant:
    """Another rank of the trainer sends the same names once more, from tensors of its own."""
    return lambda views: [*views, *(replace(view, of=f"again.{view.of}") for view in views if part in view.name)]


def copied(name: str, other: str) -> Plant:
    """Send a copy of a tensor under another name."""
    return lambda views: [*views, *(replace(view, name=other, of=other) for view in views if view.name == name)]


def with_expert_numbers(number: Callable[[int], int | None]) -> Plant:
    """Number the experts otherwise, or leave out those that have no number."""

    def plant(views: Views) -> Views:
        sent = []
        for view in views:
            expert = re.search(r"\.experts\.(\d+)\.", view.name)
            new = number(int(expert[1])) if expert else 0
            if new is not None:
                sent.append(replace(view, name=re.sub(r"\.experts\.\d+\.", f".experts.{new}.", view.name)))
        return sent

    return plant


NONE: Plant = lambda views: views  # noqa: E731
FAULTS: dict[str, Plant] = {
    "three that are no matter of each other": both(
        without("layers.4.self_attn.kv_a_proj_with_mqa.weight"),
        renamed("layers.5.mlp.experts.17.up_proj.weight", "layers.5.mlp.experts.17.up_porj.weight"),
        sent_as_float32("layers.2.input_layernorm"),
    ),
    "transposed expert, vocabulary cut": both(
        transposed("layers.3.mlp.experts.50.down_proj.weight"), shorter("embed_tokens")
    ),
    "an expert lost": without("layers.4.mlp.experts.63."),
    "a layer sent by two stages": sent_again("layers.4."),
    # The trainer has ep 4, so 16 experts on each rank, but numbers them by the engine's ep 2, of 32: 32 * rank + place.
    "experts numbered by the engine's ep_size": with_expert_numbers(lambda expert: expert // 16 * 32 + expert % 16),
    "shards sent as the whole": both(
        cut("layers.4.self_attn.q_b_proj", 0, 4),
        cut("layers.2.self_attn.o_proj", 1, 4),
        cut("layers.1.mlp.gate_proj", 0, 2),
        cut("layers.5.mlp.experts.9.down_proj", 1, 2),
    ),
    "refused and lost": both(
        transposed("layers.3.mlp.experts.50.down_proj.weight"),
        without("layers.3.mlp.experts.51.down_proj.weight"),
        without("layers.3.self_attn.kv_a_layernorm"),
        shorter("layers.4.self_attn.q_a_layernorm"),
        without("layers.5.mlp.gate.e_score"),
    ),
    "lost in every layer": without("self_attn.q_a_layernorm"),
}
FLOAT8_FAULTS: dict[str, Plant] = {
    "float8: none": NONE,
    "float8: scales of one expert": without("layers.4.mlp.experts.50.up_proj.weight_scale_inv"),
}
DRAFT_FAULTS: dict[str, Plant] = {
    "draft: none": NONE,
    "draft: MTP layer lost": lambda views: [],
    "draft: an expert lost": without("layers.6.mlp.experts.63."),
}
HEAD_TOO = copied("model.embed_tokens.weight", "lm_head.weight")
ROUTING_FAULTS: dict[str, Plant] = {
    "routing: none": NONE,
    "routing: no table": without("layers.1.ffn.gate.tid2eid"),
}
MXFP4_FAULTS: dict[str, Plant] = {
    "mxfp4: none": NONE,
    "mxfp4: no scales": without("layers.1.mlp.experts.gate_up_proj_scales"),
    "mxfp4: blocks in another order": viewed("layers.1.mlp.experts.gate_up_proj_blocks", 0, 2, 1, 3),
}


def deepseek_v3(model: str, quantized: str) -> dict[str, list[str]]:
    """DeepSeek-V3 with six layers at tp 4, ep 2, in bfloat16 and in blocks of float8, and its draft model."""
    folder, float8 = imported(model, draft=True), Path(quantized)
    engine = engine_of(folder, tp_size=4, ep_size=2, speculative_algorithm="NEXTN")
    layout = list(trainer_layout(folder, torch.bfloat16))
    sound = ask_engine(engine, fusing_groups(layout))
    answers = {"none": list(map(str, sound.findings))}
    answers |= {name: found(engine, plant(layout)) for name, plant in FAULTS.items()}
    three = "three that are no matter of each other"
    answers[f"{three}, all ranks"] = found(engine, FAULTS[three](layout), every_name=True)
    in_float8, blocks = engine_of(float8, tp_size=4, ep_size=2), list(trainer_layout(float8, torch.bfloat16))
    answers |= {name: found(in_float8, plant(blocks)) for name, plant in FLOAT8_FAULTS.items()}
    mtp = list(mtp_layout(folder, layout))
    for name, plant in DRAFT_FAULTS.items():
        draft = examine_draft(engine, sound.ranks, layout, plant(mtp))
        answers[name] = list(map(str, draft.answer.findings))
        assert not draft.filled_by_trainer
    return answers


def tied(model: str) -> dict[str, list[str]]:
    """Qwen2.5 with tied embeddings.

    The last pipeline stage has a head of its own, which it fills from the embedding.
    """
    folder = imported(model)
    one, two = engine_of(folder, tp_size=2), engine_of(folder, tp_size=2, pp_size=2)
    layout = list(trainer_layout(folder, torch.bfloat16))
    return {
        "tied: none": found(two, layout),
        "tied: sent twice": found(one, HEAD_TOO(layout)),
        "tied: sent twice to two stages": found(two, HEAD_TOO(layout)),
    }


def routing(model: str) -> dict[str, list[str]]:
    """DeepSeek-V4, of which the first layers have a table of experts for each token: a buffer of transformers'
    class."""
    folder = imported(model)
    engine, layout = engine_of(folder, tp_size=2, ep_size=2), list(trainer_layout(folder, torch.bfloat16))
    return {name: found(engine, plant(layout)) for name, plant in ROUTING_FAULTS.items()}


def mxfp4(model: str) -> dict[str, list[str]]:
    """gpt-oss at tp 8, where the last rank's part of each expert is half padding."""
    folder = imported(model)
    engine, layout = engine_of(folder, tp_size=8), list(trainer_layout(folder, torch.bfloat16))
    faults = {name: found(engine, plant(layout), padded=True) for name, plant in MXFP4_FAULTS.items()}
    return faults | {"mxfp4: each rank padded": found(engine_of(folder, tp_size=2), layout, padded=True)}


def engine_of(folder: Path, tp_size: int, pp_size: int = 1, **arguments: object) -> EngineShape:
    arguments |= {"tp_size": tp_size, "pp_size": pp_size, "dtype": "bfloat16"}
    return EngineShape(folder=folder, arguments=arguments, tp=tp_size, pp=pp_size, processes=2)


def found(
    engine: EngineShape, views: Sequence[TensorView], every_name: bool = False, padded: bool = False
) -> list[str]:
    """Return the problems of one engine with these tensors. padded: its ranks, or the last one, hold padding."""
    answer = ask_engine(engine, fusing_groups(views), every_name=every_name)
    assert bool(answer.padding) == padded, answer.padding
    return [f"{each}{f'; so layers {each.layers}' if each.layers else ''}" for each in answer.findings]
