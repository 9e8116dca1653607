"""What CPU mode cannot serve, in one table each for models and engine arguments; known from names alone, before anything
starts. Of sglang 0.5.20; pure, and imports nothing heavy."""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

MODELS = {
    "qwen2_moe": "its shared expert ends in a Triton kernel (fused_gate_sigmoid_mul_add), and Triton needs a GPU",
    "gpt_oss": "SGLang serves it with GPU attention backends only (triton, fa3, trtllm_mha and the like)",
    "qwen3_next": "SGLang keeps the state of its linear attention in a buffer that needs a GPU (FLA)",
}
"""model_type -> why not."""


@dataclass(frozen=True, slots=True)
class Limit:
    """An engine argument that CPU mode does not serve for some of its values."""

    argument: str
    applies: Callable[[Any], bool]
    reason: str


ARGUMENTS = (
    Limit("speculative_algorithm", bool, "SGLang's draft workers wait for CUDA streams"),
    Limit(
        "kv_cache_dtype",
        lambda value: str(value).startswith("fp8"),
        "SGLang's FP8 KV cache needs CPU kernels that the import-only stand-in for sgl_kernel does not have",
    ),
)


def cpu_refusals(model_type: str | None, engine_args: Mapping[str, Any]) -> Iterator[str]:
    """One sentence for each reason why CPU mode cannot serve this model with these engine arguments.

    model_type: as the model's config.json names it; None where it is not known yet.
    """
    if model_type in MODELS:
        yield (
            f"CPU mode cannot serve a model of model_type {model_type}: {MODELS[model_type]}; use a GPU, or another model."
        )
    for limit in ARGUMENTS:
        value = engine_args.get(limit.argument)
        if value is not None and limit.applies(value):
            yield (
                f"CPU mode cannot serve engine.args.{limit.argument} = {value!r}: {limit.reason}; use a GPU, or leave it out."
            )
