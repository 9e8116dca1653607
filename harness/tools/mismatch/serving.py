"""What this machine, this release of SGLang and this model allow to be changed in an engine."""

import ast
import importlib.util
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

import torch
from transformers import AutoConfig

from harness.config.facts import Device
from harness.inputs import Inputs
from harness.observer import RunContext
from harness.rollout import sglang_api

Attention = Literal["plain", "mla", "other"]
LISTS = ("srt/arg_groups/choices.py", "srt/server_args.py")
"""Where releases list the attention backends of deterministic inference: the first since 0.5.20, before that the
second."""
DETERMINISTIC, DETERMINISTIC_MLA = (
    "DETERMINISTIC_ATTENTION_BACKEND_CHOICES",
    "RADIX_SUPPORTED_DETERMINISTIC_ATTENTION_BACKEND",
)
"""Names of those lists: for any model, and for models with MLA, which SGLang refuses with the others."""
ON_POLICY = "rl_on_policy_target"


@dataclass(frozen=True, kw_only=True, slots=True)
class Serving:
    """What decides which settings can be changed: the device, the release and the model. By default a CPU."""

    device: Device = "cpu"
    capability: int = 0
    """Compute capability of the GPU: 90 for Hopper."""
    has_flashinfer: bool = False
    arguments: frozenset[str] = frozenset()
    """Names of the engine arguments that the release has."""
    deterministic: tuple[str, ...] = ()
    """Attention backends with which this model can be served deterministically."""
    attention: Attention = "plain"
    """plain: any attention backend computes it. other: SGLang wants a backend made for it."""
    is_on_policy: bool = False
    """Whether SGLang's class of the model can be served with rl_on_policy_target."""
    tokens: int = 0
    """How many tokens an engine is given at once, at most."""


def serving_of(run: RunContext, inputs: Inputs, tokens: int) -> Serving:
    """Return what can be changed in the engines of a run. tokens: as in Serving."""
    api = sglang_api.probe()
    fields = AutoConfig.from_pretrained(str(inputs.model_folder), trust_remote_code=False).get_text_config().to_dict()
    attention = attention_of(fields)
    major, minor = torch.cuda.get_device_capability(run.world.device) if run.world.device_type == "cuda" else (0, 0)
    return Serving(
        device=run.world.device_type,
        capability=10 * major + minor,
        has_flashinfer=importlib.util.find_spec("flashinfer") is not None,
        arguments=api.engine_arguments,
        deterministic=listed(api.tree, DETERMINISTIC_MLA if attention == "mla" else DETERMINISTIC),
        attention=attention,
        is_on_policy=is_on_policy(api.tree.text(f"srt/models/{fields.get('model_type')}.py")),
        tokens=tokens,
    )


def is_on_policy(model: str) -> bool:
    """Return whether SGLang's file of a model works with rl_on_policy_target, whose norms return float32.

    Its attention must cast that. Qwen2's casts in the MLP alone: on an H200 0.5.17 died of "Incompatible dtypes".
    """
    return ON_POLICY in model and "hidden_states.bfloat16()" in model


def attention_of(fields: Mapping[str, Any]) -> Attention:
    """Return the kind of attention of a model with these fields in its config."""
    kinds = set(fields.get("layer_types") or ()) - {"full_attention"}
    if kinds or fields.get("index_topk") or fields.get("sliding_window") or fields.get("model_type") == "gpt_oss":
        return "other"
    return "mla" if fields.get("kv_lora_rank") else "plain"


def listed(tree: sglang_api.SourceTree, name: str) -> tuple[str, ...]:
    """Return a list of strings that a release has under this name; () if it has none."""
    for file in LISTS:
        if (found := tree.assigned(file).get(name)) is not None:
            return tuple(ast.literal_eval(found))
    return ()
