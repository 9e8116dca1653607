"""Bugs of what sends the weights, planted in the trainer's ranks."""

from dataclasses import replace
from typing import Any

from tests.real_bugs.bug import acted, bug
from tests.real_bugs.engine import DEEPSEEK, MOE, MTP

REFRESH = "harness.weights.trainer_weights:TrainerWeights.refresh"
TENSORS = "harness.weights.converter:CheckpointConverter.tensors"
LAYOUT = "harness.weights.converter:CheckpointConverter.layout"
OTHERWISE = "sent other values"
NO_REWARD = ("task.reward=gsm8k",)
"""No answer of a random model is right, so that no rewards of a group differ, and no weight moves."""


def send_rounded(weights: Any, name: str) -> None:
    """Round what is sent of the tensors with this in their names to bfloat16."""
    rounded = {each: tensor.bfloat16().float() for each, tensor in weights.tensors.items() if name in each}
    assert rounded, f"no tensor is called {name}"
    weights.tensors = {**weights.tensors, **rounded}
    acted()


@bug(
    "T09", "miles#524", "the correction bias is rounded to bfloat16", REFRESH, DEEPSEEK,
    says="e_score_correction_bias", slugs=("lost-correction-bias",),
)  # fmt: skip
def bias_rounded(refresh: Any, weights: Any) -> None:
    refresh(weights)
    send_rounded(weights, "e_score_correction_bias")


@bug("T11", "miles#725", "the weights of the step before are sent", TENSORS, says=OTHERWISE)
def one_step_late(tensors: Any, converter: Any) -> Any:
    current = {name: tensor.detach().clone() for name, tensor in tensors(converter).items()}
    before, converter.before = getattr(converter, "before", current), current
    acted()
    return before


@bug("N03", "verl#7014", "q_proj is sent as it was before training", TENSORS, says=r"q_proj")
def base_of_q_proj(tensors: Any, converter: Any) -> Any:
    current, kept = tensors(converter), vars(converter).setdefault("kept", {})
    for name, tensor in current.items():
        if name.endswith("q_proj.weight"):
            kept.setdefault(name, tensor.detach().clone())
            acted()
    return {**current, **kept}


@bug("N12", "verl (class)", "the draft's eh_proj is rounded to bfloat16", REFRESH, says="eh_proj", **MTP)
def draft_rounded(refresh: Any, weights: Any) -> None:
    refresh(weights)
    send_rounded(weights, "eh_proj")


@bug("N11", "slime@0b463d5b9", "the halves of the draft's eh_proj are swapped in place", REFRESH, says="eh_proj", **MTP)
def draft_swapped(refresh: Any, weights: Any) -> None:
    refresh(weights)
    for name, tensor in weights.tensors.items():
        if "eh_proj" in name:
            rows = tensor.to_local()
            rows.copy_(rows.roll(rows.shape[1] // 2, 1))
            acted()


@bug(
    "N02", "miles#1926", "an update leaves the draft's tensors out",
    "harness.rollout.verl_engine:VerlEngine.update_weights_from_tensor",
    says=r"in its draft model alone .*draft: model\.layers\.2\.eh_proj\.weight", slugs=("mtp-draft-stale",), **MTP,
)  # fmt: skip
def draft_left_out(update: Any, engine: Any, named_tensors: Any, *arguments: Any, **named: Any) -> None:
    kept = [each for each in named_tensors if ".layers.2." not in each[0]]
    if len(kept) < len(named_tensors):
        acted()
    update(engine, kept, *arguments, **named)


@bug(
    "T10", "verl#5801", "buffers are not sent", "harness.weights.converter:named_tensors", DEEPSEEK,
    says="e_score_correction_bias", slugs=("lost-correction-bias",),
)  # fmt: skip
def no_buffers(tensors: Any, model: Any) -> Any:
    acted()
    parameters = {name for name, _ in model.named_parameters()}
    return [(name, tensor) for name, tensor in tensors(model) if name in parameters]


@bug(
    "T15", "verl#6896", "experts are sent under the trainer's fused names", LAYOUT, MOE,
    says=r"experts", slugs=("packed-experts-names",),
)  # fmt: skip
def fused_experts(layout: Any, converter: Any) -> Any:
    from harness.weights.tensor_view import TensorView

    acted()
    views, tensors = layout(converter), converter.tensors()
    fused = {view.of: view.dtype for view in views if ".experts." in view.of}
    whole = [TensorView.whole(name, dtype, tensors[name].shape) for name, dtype in fused.items()]
    return (*(view for view in views if view.of not in fused), *whole)


@bug(
    "N09", "prime-rl#1765", "a tied embedding is sent as lm_head.weight alone", LAYOUT,
    "model.overrides.tie_word_embeddings=true", says="lm_head|embed_tokens", slugs=("tied-embeddings",),
)  # fmt: skip
def embedding_as_head(layout: Any, converter: Any) -> Any:
    acted()
    return tuple(
        replace(view, name="lm_head.weight") if view.name.endswith("embed_tokens.weight") else view
        for view in layout(converter)
    )


@bug(
    "D1", "none (no-op)", "from the third sync on (a rehearsal comes first) nothing is sent; GRPO by bucket",
    "harness.weights.sync:WeightSync.update_engine", *NO_REWARD, "algorithm.advantage=grpo", says="holds other weights",
)  # fmt: skip
def nothing_sent(update: Any, sync: Any) -> None:
    sync.calls = getattr(sync, "calls", 0) + 1
    if sync.calls <= 2:
        return update(sync)
    acted()


NOTHING_BY_PULL = replace(
    nothing_sent, id="D2", sentence="from the third sync on nothing is sent; RLOO by pull",
    settings=(*NO_REWARD, "algorithm.advantage=rloo", DEEPSEEK, "weights.transport=pull"),
)  # fmt: skip
NOTHING_BY_BUCKET = replace(
    nothing_sent, id="D3", sentence="from the third sync on nothing is sent; GAE by bucket",
    settings=("algorithm.advantage=gae", DEEPSEEK),
)  # fmt: skip


@bug(
    "D4", "none (no-op)", "nothing is ever sent to an engine that began with the right weights",
    "harness.weights.sync:WeightSync.update_engine", *NO_REWARD, "algorithm.advantage=grpo",
    "engine.initial_weights=checkpoint", says="holds other weights",
)  # fmt: skip
def nothing_ever_sent(update: Any, sync: Any) -> None:
    acted()
