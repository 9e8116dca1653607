"""Tiny random models of real architectures, and their tokenizer: small enough for a laptop, no shard trivial."""

from __future__ import annotations

import difflib
import inspect
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from harness.runtime.cpu_standins import make_transformers_importable
from harness.task.architectures import ARCHITECTURES, is_tiny

if TYPE_CHECKING:
    import torch
    from transformers import PretrainedConfig, PreTrainedModel, PreTrainedTokenizerFast

VOCAB_SIZE = 512
CONFIG_CLASSES = {
    "qwen2": ("qwen2", "Qwen2Config"),
    "qwen3": ("qwen3", "Qwen3Config"),
    "llama": ("llama", "LlamaConfig"),
    "qwen3_moe": ("qwen3_moe", "Qwen3MoeConfig"),
    "deepseek_v3": ("deepseek_v3", "DeepseekV3Config"),
    "moonlight": ("deepseek_v3", "DeepseekV3Config"),
}
"""Each tiny model's folder in transformers/models that has the class of its config, and the class."""
CORRECTION_BIAS = "e_score_correction_bias"
NOT_OVERRIDABLE = {"architectures", "dtype", "transformers_version"}

Device = Literal["cpu", "cuda"]
Overrides = Mapping[str, Any]

_MAX_POSITIONS = 2048
# Heads, key-value heads, experts and intermediate sizes divide by tp up to 4. On CUDA head_dim and the MLA sizes
# are real ones, since attention kernels are specialised for them. initializer_range is about 0.8 / sqrt(hidden_size):
# logits of standard deviation near 1, neither flat nor so peaked that nothing is explored.
_DENSE: dict[Device, dict[str, Any]] = {
    "cpu": {"hidden_size": 64, "intermediate_size": 128, "initializer_range": 0.1},
    "cuda": {"hidden_size": 512, "intermediate_size": 512, "initializer_range": 0.04},
}
_QWEN3_HEAD_DIM: dict[Device, int] = {"cpu": 16, "cuda": 64}
_MOE_INTERMEDIATE: dict[Device, int] = {"cpu": 32, "cuda": 128}
_DEEPSEEK: dict[Device, dict[str, Any]] = {
    "cpu": {
        "n_routed_experts": 8,
        "num_experts_per_tok": 2,
        "q_lora_rank": 32,
        "kv_lora_rank": 32,
        "qk_rope_head_dim": 16,
        "qk_nope_head_dim": 16,
        "v_head_dim": 16,
        # SGLang's CPU mode has no rotary embedding of its own; the yarn class brings one in plain torch.
        "rope_parameters": {
            "rope_type": "yarn",
            "rope_theta": 10000.0,
            "factor": 4.0,
            "beta_fast": 32,
            "beta_slow": 1,
            "mscale": 1.0,
            "mscale_all_dim": 1.0,
            "original_max_position_embeddings": _MAX_POSITIONS // 4,
        },
    },
    "cuda": {
        "n_routed_experts": 16,
        "num_experts_per_tok": 4,
        "q_lora_rank": 256,
        "kv_lora_rank": 512,
        "qk_rope_head_dim": 64,
        "qk_nope_head_dim": 128,
        "v_head_dim": 128,
    },
}
_DEEPSEEK_COMMON: dict[str, Any] = {
    "num_key_value_heads": None,  # the config makes it num_attention_heads
    "n_shared_experts": 1,
    "n_group": 2,
    "topk_group": 1,
    "first_k_dense_replace": 1,
    "norm_topk_prob": True,
    "routed_scaling_factor": 1.5,
    # SGLang reads these from config.json; transformers 5 has no such fields and writes them only if they are given.
    "moe_layer_freq": 1,
    "topk_method": "noaux_tc",
    "scoring_func": "sigmoid",
    "num_nextn_predict_layers": 0,
    "ep_size": 1,
}
PAD, EOS = "<pad>", "<eos>"
PAD_ID, EOS_ID = 0, 1


def tiny_config(
    name: str,
    device: Device = "cpu",
    vocab_size: int = VOCAB_SIZE,
    overrides: Overrides | None = None,
) -> PretrainedConfig:
    """Return the transformers config of tiny model `name`, one of ARCHITECTURES, with the fields in `overrides` replaced.

    Raise ValueError: unknown name or device, a key of `overrides` that is no field of this config, or that others
    determine (it names the nearest field), a value of a wrong type.
    """
    if not is_tiny(name):
        raise ValueError(f"a tiny model must be one of {', '.join(ARCHITECTURES)}, got {name!r}")
    if device not in _DENSE:
        raise ValueError(f"device must be cpu or cuda, got {device!r}")
    make_transformers_importable()
    import transformers

    fields = tiny_fields(name, device) | {"vocab_size": vocab_size}
    config_class: type[PretrainedConfig] = getattr(transformers, CONFIG_CLASSES[name][1])
    known = {*inspect.signature(config_class).parameters, *fields} - NOT_OVERRIDABLE
    overrides = dict(overrides or {})
    for key, value in overrides.items():
        if key not in known:
            nearest = difflib.get_close_matches(key, sorted(known), n=1, cutoff=0.0)[0]
            raise ValueError(
                f"model.overrides.{key} = {value!r} is no field of {name}'s config: did you mean {nearest}?"
            )
    try:
        return config_class(**fields | overrides)
    except Exception as error:  # transformers' own type and consistency errors, of several classes
        cause = " ".join(str(error).split())
        raise ValueError(f"model.overrides = {overrides} does not make a {name} config: {cause}") from error


def tiny_model(config: PretrainedConfig, seed: int, dtype: str = "float32") -> PreTrainedModel:
    """Make a random model on the CPU, the same for the same seed; torch's global generator is left as it was.

    Norms and biases are moved away from 1 and 0 by normal(0, 0.1), so that a tensor that does not arrive shows.
    A correction bias stays float32 whatever the dtype, as routers need it.
    """
    import torch

    make_transformers_importable()
    from transformers import AutoModelForCausalLM

    with torch.random.fork_rng(devices=[]), torch.no_grad():
        torch.default_generator.manual_seed(seed)
        model = AutoModelForCausalLM.from_config(config)
        for parameter in model.parameters():
            if parameter.ndim == 1:
                parameter.add_(torch.randn_like(parameter) * 0.1)
            parameter.data = parameter.data.to(getattr(torch, dtype))
        for buffer_name, buffer in model.named_buffers():
            if buffer_name.endswith(CORRECTION_BIAS):
                buffer.copy_(_correction_bias(len(buffer), config.n_group))
    return model


def save_tiny_model(
    name: str,
    folder: str | Path,
    seed: int,
    dtype: str = "float32",
    device: Device = "cpu",
    overrides: Overrides | None = None,
    *,
    texts: Iterable[str],
    weights: bool = True,
) -> Path:
    """Write config.json, model.safetensors and a tokenizer trained on `texts`; return the folder.

    Without `weights` no model is made, however large, and model.safetensors is left out. `dtype` is float32 or bfloat16;
    `device` is where it will run and chooses the sizes, the model is made on the CPU. The same arguments give the same
    bytes (under one version of transformers).
    """
    if dtype not in ("float32", "bfloat16"):
        raise ValueError(f"dtype must be float32 or bfloat16, got {dtype!r}")
    vocab_size = (overrides or {}).get("vocab_size", VOCAB_SIZE)
    config = tiny_config(name, device, vocab_size, overrides)
    tokenizer = train_tokenizer(texts, vocab_size)
    if weights:
        tiny_model(config, seed, dtype).save_pretrained(folder)
    else:
        import torch
        from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

        config.architectures = [MODEL_FOR_CAUSAL_LM_MAPPING_NAMES[config.model_type]]
        setattr(config, "dtype" if hasattr(config, "dtype") else "torch_dtype", getattr(torch, dtype))
        config.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return Path(folder)


def train_tokenizer(texts: Iterable[str], vocab_size: int) -> PreTrainedTokenizerFast:
    """Train a byte-level BPE of exactly `vocab_size` tokens: <pad> is 0, <eos> is 1, then 256 bytes, then merges.

    Any text encodes, and decodes back. Each digit is a token of its own. Where `texts` give too few merges,
    special tokens <unused0>, <unused1>, ... fill up, so that every id a model samples is a token.
    The same texts give the same tokenizer. Raise ValueError if vocab_size is too small for the bytes.
    """
    if vocab_size < 258:
        raise ValueError(f"vocab_size must be at least 258, for {PAD}, {EOS} and every byte, got {vocab_size}")

    make_transformers_importable()
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
    from transformers import PreTrainedTokenizerFast

    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
    )
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=[PAD, EOS],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts, trainer)
    missing = vocab_size - tokenizer.get_vocab_size()
    tokenizer.add_special_tokens([f"<unused{i}>" for i in range(missing)])
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, pad_token=PAD, eos_token=EOS)


def tiny_fields(name: str, device: Device) -> dict[str, Any]:
    """Return the fields that make tiny model `name` what it is; all others have transformers' defaults."""
    fields = dict(
        vocab_size=VOCAB_SIZE,
        max_position_embeddings=_MAX_POSITIONS,
        pad_token_id=PAD_ID,
        bos_token_id=None,
        eos_token_id=EOS_ID,
        tie_word_embeddings=False,
        num_hidden_layers=2,
        num_attention_heads=8,
        num_key_value_heads=4,
        **_DENSE[device],
    )
    if name in ("qwen3", "qwen3_moe"):
        fields["head_dim"] = _QWEN3_HEAD_DIM[device]
    if name in ("qwen3_moe", "deepseek_v3", "moonlight"):
        fields |= {"moe_intermediate_size": _MOE_INTERMEDIATE[device], "norm_topk_prob": True}
    if name == "qwen3_moe":
        fields |= {"num_experts": 8, "num_experts_per_tok": 2, "decoder_sparse_step": 1}
    if name in ("deepseek_v3", "moonlight"):
        fields |= _DEEPSEEK[device] | _DEEPSEEK_COMMON
    if name == "moonlight":
        fields["q_lora_rank"] = None
    return fields


def _correction_bias(experts: int, groups: int) -> torch.Tensor:
    """Return float32 [experts]: near 0 for the first expert of each group, near -1 for the others.

    Sigmoid scores lie in (0, 1), so the second best expert of the chosen group scores below 0. A router that masks
    the other groups with 0 instead of -inf (transformers#45440) then picks from them; a zero bias would hide it.
    """
    import torch

    bias = torch.randn(groups, experts // groups, dtype=torch.float32) * 0.1
    bias[:, 1:] -= 1.0
    return bias.flatten()
