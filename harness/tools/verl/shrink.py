"""--tiny: a small model of the same architecture and the built-in task, at the same parallel sizes."""

import re

from harness.config.layers import ConfigError
from harness.tools.tiny_models import ARCHITECTURES, tiny_fields
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
"""What a model's path has in it, in small letters -> the tiny model of its architecture, "" where there is none."""
LARGEST = {
    "task.max_prompt_tokens": 256,
    "rollout.max_response_tokens": 16,
    "rollout.responses_per_prompt": 4,
    "algorithm.critic_warmup": 1,
    "actor.warmup_steps": 2,
    "critic.warmup_steps": 2,
}
MOST_MINIBATCHES = 2
LARGEST_MICROBATCH = 4
ROWS = 256


def tiny_model_for(path: str, asked: str = "auto") -> str:
    """Return the tiny model that is asked for, or that has the architecture of a path's name. Raise ConfigError."""
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


def shrink(draft: Draft, asked: str) -> None:
    """Swap model and data, scale batch, lengths and steps; keep every parallel size, and how the batches divide."""
    value = {key: entry.value for key, entry in draft.entries.items()}
    name = tiny_model_for(str(value["model.name"]), asked)
    ranks = value["parallel.dp"] * value["parallel.tp"] * value.get("parallel.pp", 1)
    new: dict[str, object] = {"model.name": name, "model.dtype": "float32", "model.master_dtype": "float32"}
    new |= {f"model.overrides.{key}": each for key, each in overrides(name, value).items()}
    new |= {"task.source": ["arithmetic"], "task.rows": max(ROWS, 4 * ranks), "task.reward": "gsm8k"}
    if value.get("validation.source"):
        new |= {"validation.source": ["arithmetic"], "validation.rows": 8}
    new |= {key: min(most, value[key]) for key, most in LARGEST.items() if key in value}
    new |= {"run.steps": 3, "engine.args.max_total_tokens": 16384, "trackers.names": []}
    sequences = value["rollout.prompts_per_step"] * value["rollout.responses_per_prompt"]
    count = min(MOST_MINIBATCHES, max(1, sequences // value["actor.minibatch_size"]))
    # Of each minibatch, every rank has as many sequences as a prompt has responses.
    responses = int(str(new["rollout.responses_per_prompt"]))
    new["rollout.prompts_per_step"] = ranks * count
    longest = int(str(new["task.max_prompt_tokens"])) + int(str(new["rollout.max_response_tokens"]))
    for section in ("actor", "critic"):
        if f"{section}.minibatch_size" not in value:
            continue
        own = min(count, max(1, sequences // value[f"{section}.minibatch_size"]))
        new[f"{section}.minibatch_size"] = ranks * responses * count // own
        if f"{section}.microbatch_size" in value:
            new[f"{section}.microbatch_size"] = min(LARGEST_MICROBATCH, value[f"{section}.microbatch_size"])
        if value.get(f"{section}.tokens_per_microbatch"):
            new[f"{section}.tokens_per_microbatch"] = min(4 * longest, value[f"{section}.tokens_per_microbatch"])
    for gone in (
        "run.epochs",
        "engine.args.max_running_requests",
        "model.attention",
        "checkpoint.folder",
        "checkpoint.resume",
    ):
        draft.entries.pop(gone, None)
    draft.entries = {key: each for key, each in draft.entries.items() if key not in new or each.value == new[key]}
    for key, each in new.items():
        if key not in draft.entries:
            draft.put(key, each, note="--tiny")


def overrides(name: str, value: dict[str, int]) -> dict[str, int]:
    """Return the fields by which a tiny model's shards exist at these parallel sizes: heads by tp, layers by pp."""
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
