"""Tiny random models of real architectures, and their tokenizer: small enough for a laptop, no shard trivial.

Imports nothing heavy: configuration checks read the names, the memory estimate the fields.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

if TYPE_CHECKING:
    from transformers import PretrainedConfig, PreTrainedModel, PreTrainedTokenizerFast

CONFIG_CLASSES = {
    "qwen2": ("qwen2", "Qwen2Config"),
    "qwen3": ("qwen3", "Qwen3Config"),
    "llama": ("llama", "LlamaConfig"),
    "qwen3_moe": ("qwen3_moe", "Qwen3MoeConfig"),
    "deepseek_v3": ("deepseek_v3", "DeepseekV3Config"),
    "moonlight": ("deepseek_v3", "DeepseekV3Config"),
}
"""Each tiny model's folder in transformers/models that has the class of its config, and the class."""
ARCHITECTURES = tuple(CONFIG_CLASSES)
CORRECTION_BIAS = "e_score_correction_bias"
NOT_OVERRIDABLE = {"architectures", "dtype", "transformers_version"}

Device = Literal["cpu", "cuda"]
Overrides = Mapping[str, Any]

PAD, EOS = "<pad>", "<eos>"
VOCAB_SIZE = 512
CHAT_TEMPLATE = (
    "{% for message in messages %}{{ message['role'] }}: {{ message['content'] }}\n{% endfor %}"
    "{% if add_generation_prompt %}assistant: {% endif %}"
)
_MAX_POSITIONS = 2048
# A pair is the value on the CPU and on CUDA. Heads, key-value heads, experts and intermediate sizes divide by tp up to
# 4. On CUDA head_dim and the MLA sizes are real ones, since attention kernels are specialised for them.
# initializer_range is about 0.8 / sqrt(hidden_size): logits of standard deviation near 1, neither flat nor so peaked
# that nothing is explored.
_COMMON: dict[str, Any] = {
    "vocab_size": VOCAB_SIZE,
    "max_position_embeddings": _MAX_POSITIONS,
    "pad_token_id": 0,
    "bos_token_id": None,
    "eos_token_id": 1,
    "tie_word_embeddings": False,
    "num_hidden_layers": 2,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "hidden_size": (64, 512),
    "intermediate_size": (128, 512),
    "initializer_range": (0.1, 0.04),
}
_MOE = {"moe_intermediate_size": 128, "norm_topk_prob": True}
_DEEPSEEK: dict[str, Any] = _MOE | {
    "n_routed_experts": (8, 16),
    "num_experts_per_tok": (2, 4),
    "q_lora_rank": (32, 256),
    "kv_lora_rank": (32, 512),
    "qk_rope_head_dim": (16, 64),
    "qk_nope_head_dim": (16, 128),
    "v_head_dim": (16, 128),
    "num_key_value_heads": None,  # the config makes it num_attention_heads
    "n_shared_experts": 1,
    "n_group": 2,
    "topk_group": 1,
    "first_k_dense_replace": 1,
    "routed_scaling_factor": 1.5,
    # SGLang reads these from config.json; transformers 5 has no such fields and writes them only if they are given.
    "moe_layer_freq": 1,
    "topk_method": "noaux_tc",
    "scoring_func": "sigmoid",
    "num_nextn_predict_layers": 0,
    "ep_size": 1,
}
# SGLang's CPU mode has no rotary embedding of its own for MLA; the yarn class brings one in plain torch.
_YARN = {
    "rope_type": "yarn",
    "rope_theta": 10000.0,
    "factor": 4.0,
    "beta_fast": 32,
    "beta_slow": 1,
    "mscale": 1.0,
    "mscale_all_dim": 1.0,
    "original_max_position_embeddings": _MAX_POSITIONS // 4,
}
_OWN: dict[str, dict[str, Any]] = {
    "qwen3": {"head_dim": (16, 64)},
    "qwen3_moe": _MOE | {"head_dim": (16, 64), "num_experts": 8, "num_experts_per_tok": 2, "decoder_sparse_step": 1},
    "deepseek_v3": _DEEPSEEK,
    "moonlight": _DEEPSEEK | {"q_lora_rank": None},
}


def is_tiny(name: str) -> bool:
    """Whether model `name` is one made on the spot, rather than a folder or a hub id."""
    return name in ARCHITECTURES


def tiny_fields(name: str, device: Device) -> dict[str, Any]:
    """Return the fields that make tiny model `name` what it is; all others have transformers' defaults."""
    own = _OWN.get(name, {})
    fields = {
        key: value[device == "cuda"] if isinstance(value, tuple) else value for key, value in (_COMMON | own).items()
    }
    return fields | {"rope_parameters": _YARN} if "kv_lora_rank" in own and device == "cpu" else fields


def tiny_config(name: str, device: Device = "cpu", overrides: Overrides | None = None) -> PretrainedConfig:
    """Return the transformers config of tiny model `name`, one of ARCHITECTURES, with the fields in `overrides`
    replaced.

    Raise ValueError for values that transformers refuses. It takes fields that it does not know: the preflight does
    not.
    """
    import transformers

    try:
        return getattr(transformers, CONFIG_CLASSES[name][1])(**tiny_fields(name, device) | dict(overrides or {}))
    except Exception as error:  # transformers' own type and consistency errors, of several classes
        cause = " ".join(str(error).split())
        raise ValueError(f"model.overrides = {overrides} does not make a {name} config: {cause}") from error


def tiny_model(config: PretrainedConfig, seed: int, dtype: str = "float32") -> PreTrainedModel:
    """Make a random model on the CPU, the same for the same seed; torch's global generator is left as it was.

    Norms and biases are moved away from 1 and 0 by normal(0, 0.1), so that a tensor that does not arrive shows. A
    correction bias stays float32 whatever the dtype, as routers need it: near 0 for the first expert of each group,
    near -1 for the others. Sigmoid scores lie in (0, 1), so the second best expert of the chosen group scores below 0.
    A router that masks the other groups with 0 instead of -inf (transformers#45440) then picks from them; a zero bias
    would hide it.
    """
    import torch
    from transformers import AutoModelForCausalLM

    with torch.random.fork_rng(devices=[]), torch.no_grad():
        torch.default_generator.manual_seed(seed)
        model = AutoModelForCausalLM.from_config(config)
        for parameter in model.parameters():
            if parameter.ndim == 1:
                parameter.add_(torch.randn_like(parameter) * 0.1)
            parameter.data = parameter.data.to(getattr(torch, dtype))
        for name, buffer in model.named_buffers():
            if name.endswith(CORRECTION_BIAS):
                bias = torch.randn(config.n_group, len(buffer) // config.n_group, dtype=torch.float32) * 0.1
                bias[:, 1:] -= 1.0
                buffer.copy_(bias.flatten())
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

    Without `weights` no model is made, however large, and model.safetensors is left out. `dtype` is one of
    schema.Dtype; `device` is where it will run and chooses the sizes, the model is made on the CPU. The same arguments
    give the same bytes (under one version of transformers).
    """
    config = tiny_config(name, device, overrides)
    tokenizer = train_tokenizer(texts, config.vocab_size)
    if weights:
        # The first rank of each host saves the model there. Once torch.distributed is initialized, transformers 5.19
        # lets only rank 0 save, which on other hosts would leave an empty folder.
        from unittest.mock import patch

        with patch("torch.distributed.is_initialized", return_value=False):
            tiny_model(config, seed, dtype).save_pretrained(folder)
        add_mtp_layer(Path(folder) / "model.safetensors", config, seed)
    else:
        save_config(config, folder, dtype)
    tokenizer.save_pretrained(folder)
    return Path(folder)


def add_mtp_layer(file: Path, config: PretrainedConfig, seed: int) -> None:
    """Add the layers for multi-token prediction that num_nextn_predict_layers asks for; transformers' model has none.

    They have the names and shapes of DeepSeek-V3's checkpoint: the tensors of the last decoder layer moved by normal(0,
    0.01), the model's embedding and head again, and what joins a token's embedding with the hidden state before it.
    """
    count = getattr(config, "num_nextn_predict_layers", None) or 0
    if not count:
        return
    import torch
    from safetensors.torch import load_file, save_file

    tensors, generator = load_file(file), torch.Generator().manual_seed(seed)
    last, dtype, hidden = config.num_hidden_layers - 1, tensors["model.embed_tokens.weight"].dtype, config.hidden_size

    def near(tensor: torch.Tensor, deviation: float) -> torch.Tensor:
        noise = torch.randn(tensor.shape, generator=generator) * deviation
        return (tensor.float() + noise).to(tensor.dtype)

    repeated = {name: each for name, each in tensors.items() if name.startswith(f"model.layers.{last}.")}
    for number in range(last + 1, last + 1 + count):
        layer = f"model.layers.{number}"
        tensors |= {name.replace(f"model.layers.{last}", layer, 1): near(each, 0.01) for name, each in repeated.items()}
        norms = ("enorm", "hnorm", "shared_head.norm")
        tensors |= {f"{layer}.{norm}.weight": near(torch.ones(hidden, dtype=dtype), 0.1) for norm in norms}
        tensors |= {
            f"{layer}.eh_proj.weight": near(torch.eye(hidden, 2 * hidden, dtype=dtype), 0.01),
            f"{layer}.embed_tokens.weight": tensors["model.embed_tokens.weight"].clone(),
            f"{layer}.shared_head.head.weight": tensors["lm_head.weight"].clone(),
        }
    save_file(tensors, file, metadata={"format": "pt"})


def save_config(config: PretrainedConfig, folder: str | Path, dtype: str) -> None:
    """Write config.json as save_pretrained of a model of that dtype would."""
    import torch
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

    config.architectures = [MODEL_FOR_CAUSAL_LM_MAPPING_NAMES[config.model_type]]
    setattr(config, "dtype" if hasattr(config, "dtype") else "torch_dtype", getattr(torch, dtype))
    config.save_pretrained(folder)


def train_tokenizer(texts: Iterable[str], vocab_size: int) -> PreTrainedTokenizerFast:
    """Train a byte-level BPE of exactly `vocab_size` tokens: <pad> is 0, <eos> is 1, then 256 bytes, then merges.

    Any text encodes, and decodes back. Each digit is a token of its own. Where `texts` give too few merges, special
    tokens <unused0>, <unused1>, ... fill up, so that every id a model samples is a token. Its chat template writes
    "role: content" lines. The same texts give the same tokenizer. Raise ValueError if vocab_size is too small for the
    bytes.
    """
    if vocab_size < 258:
        raise ValueError(f"vocab_size must be at least 258, for {PAD}, {EOS} and every byte, got {vocab_size}")
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
    from transformers import PreTrainedTokenizerFast

    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
    )
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size, special_tokens=[PAD, EOS], initial_alphabet=alphabet, show_progress=False
    )
    tokenizer.train_from_iterator(texts, trainer)
    missing = vocab_size - tokenizer.get_vocab_size()
    tokenizer.add_special_tokens([f"<unused{i}>" for i in range(missing)])
    # With no unknown token named, transformers' own class of an architecture adds one, beyond the model's vocabulary.
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, pad_token=PAD, eos_token=EOS, unk_token=EOS, chat_template=CHAT_TEMPLATE
    )
