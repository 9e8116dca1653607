"""Names and numbers of architectures that are unlike the shipped ones: KV caches, towers, spellings, pipelines."""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

from harness.tools.engine_class.meta_kv_cache import KvCache
from harness.tools.engine_class.traced_ranks import EngineRank
from harness.tools.full_size.trainer_names import trainer_class, trainer_layout
from harness.tools.full_size.whole_run import kv_cache
from harness.weights.layer_names import NO_LAYER, layer_of, without_layer
from harness.weights.presync_checks import elements_read
from harness.weights.tensor_view import TensorView
from tests.tools.full_size.forks import answer_of, full_size
from tests.tools.full_size.test_full_size import MODELS

LLAMA = {
    "architectures": ["LlamaForCausalLM"], "model_type": "llama", "hidden_size": 64, "intermediate_size": 128,
    "num_attention_heads": 8, "num_key_value_heads": 8, "num_hidden_layers": 4, "vocab_size": 256,
    "max_position_embeddings": 1024,
}  # fmt: skip
COHERE = LLAMA | {"architectures": ["CohereForCausalLM"], "model_type": "cohere"}
"""Command R. Its forward in SGLang takes no tensors of an earlier pipeline stage."""
GEMMA3: dict[str, Any] = {
    "architectures": ["Gemma3ForConditionalGeneration"], "model_type": "gemma3", "image_token_index": 255, "boi_token_index": 253,
    "eoi_token_index": 254, "mm_tokens_per_image": 4,
    "text_config": {
        "model_type": "gemma3_text", "hidden_size": 64, "intermediate_size": 128, "num_attention_heads": 4,
        "num_key_value_heads": 2, "head_dim": 16, "num_hidden_layers": 2, "vocab_size": 256, "sliding_window": 64,
    },
    "vision_config": {
        "model_type": "siglip_vision_model", "hidden_size": 32, "intermediate_size": 64, "num_attention_heads": 2,
        "num_hidden_layers": 3, "image_size": 32, "patch_size": 8,
    },
}  # fmt: skip
LLAMA4: dict[str, Any] = {
    "architectures": ["Llama4ForConditionalGeneration"], "model_type": "llama4", "image_token_index": 200,
    "text_config": {
        "model_type": "llama4_text", "hidden_size": 256, "intermediate_size": 256, "intermediate_size_mlp": 512,
        "num_attention_heads": 8, "num_key_value_heads": 8, "head_dim": 32, "num_hidden_layers": 4, "vocab_size": 256,
        "num_local_experts": 4, "num_experts_per_tok": 1, "interleave_moe_layer_step": 1, "attention_chunk_size": 64,
    },
    "vision_config": {
        "model_type": "llama4_vision_model", "hidden_size": 64, "intermediate_size": 256, "num_attention_heads": 4,
        "num_hidden_layers": 3, "image_size": 32, "patch_size": 8, "projector_input_dim": 64, "projector_output_dim": 64,
        "vision_output_dim": 64,
    },
}  # fmt: skip


def test_columns_of_each_expert_are_counted_without_a_mark_for_each_element() -> None:
    """Llama 4's experts are one tensor: each rank reads its columns, expert by expert.

    A mark for each would take 2 TB.
    """
    experts, rows, columns = 128, 1 << 17, 1 << 17
    whole = torch.empty(experts, rows, columns, device="meta")

    def view(of: torch.Tensor) -> TensorView:
        return TensorView(
            name="w", of="w", dtype=of.dtype, shape=tuple(of.shape), stride=of.stride(), offset=int(of.storage_offset())
        )

    reads = [view(part) for expert in whole for part in expert.chunk(8, dim=1)]
    assert elements_read(view(whole), reads) == whole.numel()
    assert elements_read(view(whole), reads[1:]) == whole.numel() - rows * columns // 8


def written(folder: Path, fields: dict[str, Any]) -> Path:
    (folder / "config.json").write_text(json.dumps(fields))
    return folder


@pytest.mark.parametrize(
    ("name", "layer", "without"),
    [
        ("model.layers.12.mlp.experts.3.up_proj.weight", 12, "model.layers.*.mlp.experts.3.up_proj.weight"),
        ("language_model.model.layers.4.mlp.w.weight", 4, "language_model.model.layers.*.mlp.w.weight"),
        ("model.language_model.layers.4.mlp.w.weight", 4, "model.language_model.layers.*.mlp.w.weight"),
        ("transformer.h.7.attn.c_attn.weight", 7, "transformer.h.*.attn.c_attn.weight"),
        ("transformer.blocks.7.ffn.router.weight", 7, "transformer.blocks.*.ffn.router.weight"),
        ("backbone.layers.9.mixer.A_log", 9, "backbone.layers.*.mixer.A_log"),
        ("model.embed_tokens.weight", NO_LAYER, "model.embed_tokens.weight"),
    ]
    + [
        (name, NO_LAYER, name)
        for name in (
            "vision_model.model.layers.3.self_attn.q_proj.weight",
            "vision_tower.vision_model.encoder.layers.3.layer_norm1.weight",
            "model.vision_tower.encoder.layers.3.layer_norm1.weight",
            "model.visual.blocks.3.attn.qkv.weight",
            "audio_tower.layers.3.fc1.weight",
        )
    ],
)
def test_decoder_layers_are_those_of_the_language_model(name: str, layer: int, without: str) -> None:
    assert layer_of(name) == layer
    assert without_layer(name) == without


def rank_with(**kinds: KvCache) -> EngineRank:
    fields: dict[str, Any] = dict.fromkeys(EngineRank.__dataclass_fields__)
    return EngineRank(**fields | {"kv_caches": kinds})


@pytest.mark.parametrize(
    ("arguments", "token_bytes", "unknown"),
    [
        ({}, 100 + 80, ""),
        ({"kv_cache_dtype": "auto"}, 100 + 80, ""),
        ({"kv_cache_dtype": "fp8_e4m3"}, 50 + 40, ""),
        ({"swa_full_tokens_ratio": 0.5}, 100 + 50, ""),
        ({"kv_cache_dtype": "fp4_e2m1"}, 0, "kv_cache_dtype"),
        ({"disable_hybrid_swa_memory": True}, 0, "disable_hybrid_swa_memory"),
        ({"dcp_size": 2}, 0, "dcp_size"),
    ],
)
def test_engine_arguments_that_change_the_kv_cache(arguments: dict[str, Any], token_bytes: int, unknown: str) -> None:
    rank = rank_with(
        auto=KvCache(full=100, window=100, window_ratio=0.8), fp8=KvCache(full=50, window=50, window_ratio=0.8)
    )
    found = kv_cache(arguments, rank)
    assert unknown in found.unknown and bool(unknown) == bool(found.unknown)
    assert found.token_bytes(arguments.get("swa_full_tokens_ratio")) == token_bytes


@pytest.mark.parametrize("argument", ["max_mamba_cache_size", "mamba_full_memory_ratio", "speculative_algorithm"])
def test_arguments_with_another_rule_for_states_leave_the_kv_cache_unknown(argument: str) -> None:
    rank = rank_with(auto=KvCache(full=100, state_ratio=0.9))
    assert argument in kv_cache({argument: 1}, rank).unknown
    assert not kv_cache({argument: 1}, rank_with(auto=KvCache(full=100))).unknown


def test_a_cache_of_sliding_windows_alone_has_no_ratio() -> None:
    assert KvCache(window=100, window_ratio=0.8).token_bytes() == 100


MLA, INDEXER = 2 * 576, 132
"""Bytes of one layer: DeepSeek's latent in bfloat16, and its indexer's key of 128 bytes with a scale of 4."""


@pytest.mark.long
@pytest.mark.parametrize(
    ("name", "tp", "pp", "expected"),
    [
        # Numbers of SGLang's rules, by hand: layers with a cache x heads of a rank x (key + value) x 2 bytes.
        ("deepseek_v3_2", 8, 2, [{"full": 30 * (MLA + INDEXER)}, {"full": 31 * (MLA + INDEXER)}]),
        ("gpt_oss_120b", 4, 1, [{"full": 18 * 2 * 128 * 2, "window": 18 * 2 * 128 * 2, "window_ratio": 0.8}]),
        ("qwen3_5_397b_a17b", 2, 1, [{"full": 15 * 1 * 512 * 2, "state_ratio": 0.9}]),
    ],
)
def test_kv_cache_is_what_sglang_counts(name: str, tp: int, pp: int, expected: Sequence[dict[str, float]]) -> None:
    nothing = {"full": 0, "window": 0, "window_ratio": 1.0, "state_ratio": 0.0, "unknown": ""}
    stages = answer_of("tests.tools.full_size.asked:kv_caches", MODELS / name, tp, pp)
    assert [stage["auto"] for stage in stages] == [nothing | each for each in expected]
    assert [stage["bfloat16"] for stage in stages] == [stage["auto"] for stage in stages]


@pytest.mark.long
def test_a_class_that_sglang_refuses_in_a_pipeline_cannot_be_built(tmp_path: Path) -> None:
    folder = written(tmp_path, COHERE)
    refused = full_size(folder, "--pp", 2)
    assert refused.returncode == 1, refused.stderr
    assert "cannot be built" in refused.stdout
    assert "Pipeline Parallel is not compatible with this model." in refused.stdout
    assert full_size(folder, "--tp", 2).returncode == 0


def test_names_of_a_vision_tower_are_those_of_a_published_checkpoint(tmp_path: Path) -> None:
    """from_pretrained knows each of these names, and fills every tensor of the model with them."""
    from safetensors.torch import save_file
    from transformers import Gemma3ForConditionalGeneration

    layout = trainer_layout(written(tmp_path, GEMMA3), torch.float32)
    names = [view.name for view in layout]
    assert "vision_tower.vision_model.encoder.layers.2.layer_norm1.weight" in names
    save_file({view.name: torch.zeros(view.shape) for view in layout}, tmp_path / "model.safetensors", {"format": "pt"})
    _, report = Gemma3ForConditionalGeneration.from_pretrained(tmp_path, output_loading_info=True)
    assert not report["missing_keys"] and not report["unexpected_keys"]


def test_an_architecture_that_transformers_spells_otherwise_is_found_by_its_type(tmp_path: Path) -> None:
    fields = {"architectures": ["PhiMoEForCausalLM"], "model_type": "phimoe", "num_hidden_layers": 1}
    found, _ = trainer_class(written(tmp_path, fields))
    assert found.__name__ == "PhimoeForCausalLM"


@pytest.mark.long
def test_a_vision_tower_is_built_though_only_an_index_would_name_it(tmp_path: Path) -> None:
    folder = written(tmp_path, LLAMA4)
    plain = full_size(folder)
    assert plain.returncode == 1
    assert "vision_model" in plain.stdout and "enable_multimodal" in plain.stdout
    found = answer_of("tests.tools.full_size.asked:with_vision", folder)
    assert found["problems"] == [] and found["notes"] == []
    assert any(name.startswith("vision_model.") for name in found["held"])
    assert found["held_layers"] == [0, 1, 2, 3]
    assert [file.name for file in folder.iterdir()] == ["config.json"]
