"""Names, shapes and counts are those of transformers' own models, on the meta device."""

from pathlib import Path
from typing import Any

import pytest
from accelerate import init_empty_weights
from transformers import AutoModelForCausalLM

from harness.config.layers import build_config, read_layer
from harness.tools.plan.model_shapes import UnknownShape, model_fields, model_shape
from harness.tools.tiny_models import ARCHITECTURES, tiny_config
from harness.trainer.model import ValueModel, named_tensors

DEEPSEEK = Path(__file__).parents[3] / "configs/multinode/deepseek_v3_671b.toml"

CASES: list[tuple[str, dict[str, Any]]] = [
    *((name, {}) for name in ARCHITECTURES),
    *((name, {"tie_word_embeddings": True}) for name in ("qwen2", "qwen3", "llama", "qwen3_moe")),
    *((name, {"attention_bias": True}) for name in ("llama", "qwen3", "qwen3_moe", "deepseek_v3", "moonlight")),
    ("llama", {"mlp_bias": True}),
    ("llama", {"head_dim": 24}),
    ("qwen2", {"num_hidden_layers": 5, "vocab_size": 1000}),
    ("qwen3_moe", {"num_hidden_layers": 4, "decoder_sparse_step": 2, "mlp_only_layers": [3]}),
    ("deepseek_v3", {"num_hidden_layers": 4, "first_k_dense_replace": 2, "n_shared_experts": 3}),
]


@pytest.mark.parametrize("device", ["cpu", "cuda"])
@pytest.mark.parametrize(("name", "shape"), CASES)
def test_every_tensor_of_the_real_model(name: str, shape: dict[str, Any], device: str) -> None:
    config = tiny_config(name, device, shape)  # type: ignore[arg-type]
    with init_empty_weights(include_buffers=False):
        model = AutoModelForCausalLM.from_config(config)
    model.tie_weights()
    parameters = dict(model.named_parameters())
    real = {key: (tuple(tensor.shape), key not in parameters) for key, tensor in named_tensors(model)}
    counted = model_shape(model_fields(name, shape, device))  # type: ignore[arg-type]
    found = {tensor.name: (tensor.shape, tensor.is_buffer) for tensor in counted.tensors}
    assert list(found.items()) == list(real.items())
    assert counted.parameters == sum(parameter.numel() for parameter in parameters.values())


@pytest.mark.parametrize("name", ARCHITECTURES)
def test_a_folder_s_config_counts_alike(name: str, tmp_path: Path) -> None:
    shape = {"num_hidden_layers": 3}
    tiny_config(name, "cuda", overrides=shape).save_pretrained(tmp_path)
    assert model_shape(model_fields(str(tmp_path), {}, "cuda")) == model_shape(model_fields(name, shape, "cuda"))


@pytest.mark.parametrize("name", ARCHITECTURES)
def test_groups_of_the_critic_hold_a_value_model(name: str) -> None:
    config = tiny_config(name)
    with init_empty_weights(include_buffers=False):
        from torch import float32
        from transformers import AutoModel

        model = ValueModel(AutoModel.from_config(config), config.hidden_size, float32)
    counted = model_shape(model_fields(name, {}, "cpu"))
    found = sum(t.numel for group in counted.groups(head=False) for t in group if not t.is_buffer)
    assert found == sum(parameter.numel() for parameter in model.parameters())


def test_deepseek_v3_has_671_billion() -> None:
    config = build_config([read_layer(str(DEEPSEEK))])
    model = model_shape(model_fields(config.model.name, config.model.overrides, "cuda"))
    assert model.parameters + model.buffers == 671_026_419_200
    assert model.buffers == 58 * 256


def test_what_is_not_known_is_said(tmp_path: Path) -> None:
    with pytest.raises(UnknownShape, match='"someone/model" is no folder'):
        model_fields("someone/model", {}, "cuda")
    with pytest.raises(UnknownShape, match='model_type must be one of qwen2, .* got "mamba"'):
        model_shape({"model_type": "mamba"})
    with pytest.raises(UnknownShape, match="the config of a llama model has no hidden_size"):
        model_shape({"model_type": "llama"})


@pytest.mark.parametrize("wrong", [{"hidden_size": "wide"}, {"num_hidden_layers": 0}, {"num_key_value_heads": "four"}])
def test_sizes_that_are_none_are_said(wrong: dict[str, Any]) -> None:
    with pytest.raises(UnknownShape, match="the config of a qwen2 model has sizes that no tensor can have"):
        model_shape(model_fields("qwen2", wrong, "cpu"))
