"""The counted weights are those of transformers' own models, on the meta device, but for norms, biases and buffers."""

from pathlib import Path
from typing import Any

import pytest
from accelerate import init_empty_weights
from transformers import AutoModelForCausalLM

from harness.config.layers import build_config, read_layer
from harness.config.model_fields import model_fields
from harness.task.tiny_models import ARCHITECTURES, tiny_config
from harness.tools.plan.model_shapes import UnknownShape, model_shape

DEEPSEEK = Path(__file__).parents[3] / "configs/multinode/deepseek_v3_671b.toml"

CASES: list[tuple[str, dict[str, Any]]] = [
    *((name, {}) for name in ARCHITECTURES),
    ("qwen2", {"tie_word_embeddings": True}),
    ("llama", {"head_dim": 24}),
    ("qwen2", {"num_hidden_layers": 5, "vocab_size": 1000}),
    ("qwen3_moe", {"num_hidden_layers": 4, "decoder_sparse_step": 2, "mlp_only_layers": [3]}),
    ("deepseek_v3", {"num_hidden_layers": 4, "first_k_dense_replace": 2, "n_shared_experts": 3}),
]


@pytest.mark.parametrize("device", ["cpu", "cuda"])
@pytest.mark.parametrize(("name", "shape"), CASES)
def test_every_matrix_of_the_real_model_is_counted(name: str, shape: dict[str, Any], device: str) -> None:
    config = tiny_config(name, device, shape)  # type: ignore[arg-type]
    with init_empty_weights(include_buffers=False):
        model = AutoModelForCausalLM.from_config(config)
    model.tie_weights()
    real = sum(parameter.numel() for parameter in model.parameters() if parameter.ndim > 1)
    fields = model_fields(name, shape, device)  # type: ignore[arg-type]
    assert fields and model_shape(fields).parameters == real


@pytest.mark.parametrize("name", ARCHITECTURES)
def test_the_config_of_a_folder_counts_alike(name: str, tmp_path: Path) -> None:
    shape = {"num_hidden_layers": 3}
    tiny_config(name, "cuda", overrides=shape).save_pretrained(tmp_path)
    assert model_shape(model_fields(str(tmp_path), {}, "cuda")) == model_shape(model_fields(name, shape, "cuda"))


def test_deepseek_v3_has_671_billion() -> None:
    config = build_config([read_layer(str(DEEPSEEK))])
    model = model_shape(model_fields(config.model.name, config.model.overrides, "cuda"))
    assert model.parameters == pytest.approx(671.026e9, rel=1e-4)


def test_an_architecture_of_deepseek_under_another_name_counts_alike() -> None:
    fields = model_fields("deepseek_v3", {}, "cuda")
    assert fields is not None
    other = {**fields, "model_type": "kimi_k2", "architectures": ["DeepseekV3ForCausalLM"]}
    assert model_shape(other) == model_shape(fields)


def test_what_is_not_known_is_said() -> None:
    with pytest.raises(UnknownShape, match='model_type must be one of qwen2, .* got "mamba"'):
        model_shape({"model_type": "mamba"})
    with pytest.raises(UnknownShape, match="the config of a llama model has no hidden_size"):
        model_shape({"model_type": "llama", "num_hidden_layers": 1})
    with pytest.raises(UnknownShape, match="the config of a qwen2 model has sizes that no tensor can have"):
        model_shape(model_fields("qwen2", {"hidden_size": "wide"}, "cpu"))
