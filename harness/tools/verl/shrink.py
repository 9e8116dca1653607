"""--tiny: a small model of the same architecture and the built-in task, at the same parallel sizes."""

import re
from collections.abc import Mapping
from typing import Any

from harness.config.layers import ConfigError
from harness.task.tiny_models import ARCHITECTURES, tiny_fields
from harness.tools.verl.draft import Draft

BY_PATH = (
    (r"distill-?qwen|qwq", "qwen2"),
    (r"distill-?llama", "llama"),
    (r"moonlight", "moonlight"),
    (r"deepseek-?(v3|r1)", "deepseek_v3"),
    (r"deepseek-?(llm|math|coder)", "llama"),
    (r"(-vl\b|_vl\b|qwen[23][._]?5?-?vl|qwen3[._]5|qwen3-?next|omni)", ""),
    (r"qwen3.*(-a\d+(\.\d+)?b|moe)", "qwen3_moe"),
    (r"qwen3", "qwen3"),
    (r"qwen(1\.5)?-?moe|qwen1\.5-.*-a", ""),
    (r"qwen(1[._]5|2([._]5)?)(?!.*moe)", "qwen2"),
    (r"llama-?[23]|llama", "llama"),
)
"""Pattern in a model's path (lower case) -> the tiny model of that architecture, or "". The first match counts."""
LARGEST = {
    "task.max_prompt_tokens": 256,
    "rollout.max_response_tokens": 16,
    "rollout.responses_per_prompt": 4,
    "algorithm.critic_warmup": 1,
    "actor.warmup_steps": 2,
}
"""Keys that keep their values up to these."""
LEFT_OUT = (
    "run.epochs", "engine.args.max_running_requests", "model.attention", "checkpoint.folder", "checkpoint.resume",
)  # fmt: skip
"""Keys of the command that a tiny run does without."""
MOST_MINIBATCHES = 2
LARGEST_MICROBATCH = 4
ROWS = 256


def shrink(draft: Draft, asked: str) -> None:
    """Take a tiny model and generated data, smaller batches, shorter prompts and responses, and a shorter run.

    Every parallel size stays, and so does the number of minibatches, up to MOST_MINIBATCHES. asked: a tiny model, or
    "auto" for the one of the path's architecture. Raise ConfigError if there is none.
    """
    value = {key: entry.value for key, entry in draft.entries.items()}
    name = tiny_model_for(str(value["model.name"]), asked)
    ranks = value["parallel.dp"] * value["parallel.tp"] * value.get("parallel.pp", 1)
    new: dict[str, Any] = {
        "model.name": name,
        "model.dtype": "float32",
        "model.master_dtype": "float32",
        # A tiny model's matrices are smaller than a block.
        **({"model.rollout_precision": "same"} if "model.rollout_precision" in value else {}),
        **{f"model.overrides.{key}": number for key, number in overrides(name, value).items()},
        "task.source": ["arithmetic"],
        "task.rows": max(ROWS, 4 * ranks),
        "task.reward": "gsm8k",
        **({"validation.source": ["arithmetic"], "validation.rows": 8} if value.get("validation.source") else {}),
        "run.steps": 3,
        "engine.args.max_total_tokens": 16384,
        "trackers.names": [],
        **{key: min(most, value[key]) for key, most in LARGEST.items() if key in value},
    }
    new |= batches(value, new, ranks)
    for key in LEFT_OUT:
        draft.entries.pop(key, None)
    # A value that stays as it was keeps its origin.
    draft.entries = {key: entry for key, entry in draft.entries.items() if key not in new or entry.value == new[key]}
    for key, each in new.items():
        if key not in draft.entries:
            draft.put(key, each, note="--tiny")


def tiny_model_for(path: str, asked: str = "auto") -> str:
    """Return the tiny model that is asked for, or the one of the architecture that a path names. Raise ConfigError."""
    if asked != "auto":
        return asked
    name = path.rstrip("/").lower()
    found = next((tiny for pattern, tiny in BY_PATH if re.search(pattern, name)), "")
    if not found:
        choices = ", ".join(ARCHITECTURES)
        raise ConfigError(
            f'no tiny model has the architecture that "{path}" names; choose one by --tiny NAME: {choices}.'
        )
    return found


def batches(value: Mapping[str, Any], new: Mapping[str, Any], ranks: int) -> dict[str, int]:
    """Return the batch sizes: in each minibatch, every rank has the responses of one prompt."""
    sequences = value["rollout.prompts_per_step"] * value["rollout.responses_per_prompt"]
    responses = new["rollout.responses_per_prompt"]
    longest = new["task.max_prompt_tokens"] + new["rollout.max_response_tokens"]
    count = min(MOST_MINIBATCHES, max(1, sequences // value["actor.minibatch_size"]))
    found = {"rollout.prompts_per_step": ranks * count}
    found["actor.minibatch_size"] = ranks * responses
    if "actor.microbatch_size" in value:
        found["actor.microbatch_size"] = min(LARGEST_MICROBATCH, value["actor.microbatch_size"])
    if value.get("actor.tokens_per_microbatch"):
        found["actor.tokens_per_microbatch"] = min(4 * longest, value["actor.tokens_per_microbatch"])
    return found


def overrides(name: str, value: Mapping[str, int]) -> dict[str, int]:
    """Return the fields that a tiny model needs for these parallel sizes: as many heads as tp, as many layers as pp."""
    tp, fields = value["parallel.tp"], tiny_fields(name, "cuda")
    found: dict[str, int] = {}
    heads = fields["num_attention_heads"]
    if tp > heads or heads % tp:
        found |= {"num_attention_heads": tp}
        if fields.get("num_key_value_heads"):
            found |= {"num_key_value_heads": tp}
    if value.get("parallel.pp", 1) > fields["num_hidden_layers"]:
        found |= {"num_hidden_layers": value["parallel.pp"]}
    return found
