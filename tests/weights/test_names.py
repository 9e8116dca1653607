"""The layout's names, shapes, dtypes and values are those of the file that save_pretrained writes."""

from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from safetensors.torch import load_file

from harness.task.tiny_models import tiny_config, tiny_model
from harness.trainer.model import named_tensors
from harness.weights.names import NotAViewError, checkpoint_layout, names_in_checkpoint
from harness.weights.tensor_view import TensorView

COMMON = {
    "vocab_size": 64, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "max_position_embeddings": 64, "pad_token_id": 0, "bos_token_id": 0, "eos_token_id": 1,
}  # fmt: skip
MOE = {"moe_intermediate_size": 16, "num_experts_per_tok": 2, "norm_topk_prob": True}
SHARED = {"n_routed_experts": 4, "n_shared_experts": 1, "n_group": 2, "topk_group": 1, "first_k_dense_replace": 1}
LATENT = {
    "num_key_value_heads": 4, "q_lora_rank": 16, "kv_lora_rank": 16, "qk_rope_head_dim": 8, "qk_nope_head_dim": 8,
    "v_head_dim": 8,
}  # fmt: skip
FIELDS: dict[str, dict[str, Any]] = {
    "qwen2": {"tie_word_embeddings": False},
    "qwen2 tied": {"tie_word_embeddings": True},
    "qwen3_moe": {"num_experts": 4, "decoder_sparse_step": 1, "head_dim": 8, **MOE},
    "deepseek_v3": {**MOE, **SHARED, **LATENT},
    "mixtral": {"num_local_experts": 4, "num_experts_per_tok": 2},
    "glm4_moe": {"head_dim": 8, **MOE, **SHARED},
    "phi3": {},
    "gemma3_text": {"head_dim": 8},
}


def build(kind: str) -> Any:
    """A random model, whose buffers are not zero either."""
    config = transformers.AutoConfig.for_model(kind.split()[0], **COMMON | FIELDS[kind])
    torch.manual_seed(0)
    model = transformers.AutoModelForCausalLM.from_config(config)
    for name, buffer in model.named_buffers():
        if name.endswith("e_score_correction_bias"):
            buffer.normal_()
    return model


@pytest.mark.parametrize("kind", FIELDS)
def test_the_layout_is_what_save_pretrained_writes(kind: str, tmp_path: Path) -> None:
    model = build(kind)
    model.save_pretrained(tmp_path)
    saved = load_file(tmp_path / "model.safetensors")
    live = dict(named_tensors(model))
    layout = checkpoint_layout(model, live)
    assert len(layout) == len(saved)
    assert {tensor.name for tensor in layout} == saved.keys()
    assert ("lm_head.weight" in saved) == (kind not in ("qwen2 tied", "gemma3_text"))
    for tensor in layout:
        there = saved[tensor.name]
        view = tensor.in_memory(live[tensor.of].detach())
        assert (tensor.shape, tensor.dtype) == (tuple(there.shape), there.dtype)
        assert torch.equal(view, there), tensor.name


def test_the_layout_needs_no_values_and_keeps_the_live_order() -> None:
    model = build("deepseek_v3")
    live = dict(named_tensors(model))
    layout = checkpoint_layout(model, live)
    assert checkpoint_layout(model, {name: tensor.to("meta") for name, tensor in live.items()}) == layout
    assert list(dict.fromkeys(tensor.of for tensor in layout)) == list(live)


def test_a_view_of_a_live_tensor_that_does_not_begin_its_storage() -> None:
    storage = torch.arange(10.0)
    view = TensorView(name="a", of="a", shape=(2, 2), stride=(1, 2), offset=1, dtype=torch.float32)
    assert view.in_memory(storage[3:]).tolist() == [[4.0, 6.0], [5.0, 7.0]]


def test_an_architecture_whose_checkpoint_merges_parameters_is_refused() -> None:
    """nomic_bert is saved with its query, key and value projections as one."""
    config = transformers.AutoConfig.for_model("nomic_bert", **COMMON)
    model = transformers.AutoModel.from_config(config)
    with pytest.raises(
        NotAViewError, match=r"Wqkv.* of NomicBertModel must be a view of one of .* give WeightSync a Converter"
    ):
        checkpoint_layout(model, dict(named_tensors(model)))


def test_an_architecture_whose_checkpoint_transposes_parameters_is_refused() -> None:
    loading = pytest.importorskip("transformers.core_model_loading")
    model = build("qwen2")
    transposed = loading.WeightConverter("o_proj.weight", "o_proj.weight", operations=[loading.Transpose(0, 1)])
    model._weight_conversions = [transposed]
    with pytest.raises(NotAViewError, match=r"layers\.0\.self_attn\.o_proj\.weight of Qwen2ForCausalLM must be a view"):
        checkpoint_layout(model, dict(named_tensors(model)))


@pytest.mark.parametrize("shards", [False, True])
def test_the_names_in_a_checkpoint_are_those_that_are_sent(shards: bool, tmp_path: Path) -> None:
    model = tiny_model(tiny_config("qwen3_moe"), seed=1)
    model.save_pretrained(tmp_path, **({"max_shard_size": "100KB"} if shards else {}))
    sent = {view.name for view in checkpoint_layout(model, dict(named_tensors(model)))}
    assert names_in_checkpoint(str(tmp_path)) == sent
    (tmp_path / "empty").mkdir()
    assert names_in_checkpoint(str(tmp_path / "empty")) == frozenset()
