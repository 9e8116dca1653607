"""An engine rank's share, against SGLang's own rules and by hand."""

import pytest

from harness.tools.plan.memory_estimate import engine_shares, kv_element_bytes, stage_layers
from harness.tools.plan.model_shapes import ModelShape, model_fields, model_shape


def shape_of(name: str, **changed: object) -> ModelShape:
    return model_shape(model_fields(name, changed, "cuda"))


@pytest.mark.slow
def test_stages_are_those_of_sglang() -> None:
    from sglang.srt.distributed.utils import get_pp_indices

    for layers in range(1, 70):
        for pp in range(1, min(layers, 9) + 1):
            expected = [get_pp_indices(layers, stage, pp) for stage in range(pp)]
            assert [(each.start, each.stop) for each in stage_layers(layers, pp)] == expected


@pytest.mark.parametrize("name", ["qwen2", "qwen3", "llama", "qwen3_moe"])
def test_one_rank_holds_the_whole_model(name: str) -> None:
    model = shape_of(name)
    [share] = engine_shares(model, 1, 1, 2, 2)
    assert share.weights == 2 * model.parameters


def test_mla_keeps_kv_b_proj_twice_and_the_bias_in_float32() -> None:
    model = shape_of("deepseek_v3")
    [share] = engine_shares(model, 1, 1, 2, 2)
    absorbed = sum(tensor.numel for tensor in model.tensors if "kv_b_proj" in tensor.name)
    assert share.weights == 2 * (model.parameters + absorbed) + 4 * model.buffers


def test_tp_cuts_heads_width_and_vocabulary_but_not_norms() -> None:
    model = shape_of("qwen2", vocab_size=1000, num_hidden_layers=1)
    hidden, width, heads, kv_heads, head_dim, tp = 512, 512, 8, 4, 64, 8
    [share] = engine_shares(model, tp, 1, 2, 2)
    vocabulary = 2 * (1024 // tp) * hidden  # padded to 64s
    queries = (heads // tp * head_dim) * (hidden + 1) + hidden * heads * head_dim // tp
    keys_values = 2 * head_dim * (hidden + 1)  # fewer key-value heads than ranks: one on each
    assert kv_heads < tp
    assert share.weights == 2 * (vocabulary + queries + keys_values + 3 * hidden * width // tp + 3 * hidden)
    assert share.kv_token == 2 * head_dim * 2


def test_kv_cache_of_a_token() -> None:
    deepseek = shape_of("deepseek_v3", num_hidden_layers=61)
    shares = engine_shares(deepseek, 4, 2, 2, 2)
    assert [share.kv_token for share in shares] == [(512 + 64) * 2 * layers for layers in (30, 31)]
    [fp8] = engine_shares(deepseek, 4, 1, 2, kv_element_bytes(2, {"kv_cache_dtype": "fp8_e5m2"}))
    assert fp8.kv_token == 576 * 61


@pytest.mark.parametrize("tied", [False, True])
def test_stages_together_hold_the_model_once_but_for_a_tied_embedding(tied: bool) -> None:
    model = shape_of("qwen2", num_hidden_layers=7, tie_word_embeddings=tied)
    shares = engine_shares(model, 1, 3, 2, 2)
    again = 512 * 512 if tied else 0
    assert sum(share.weights for share in shares) == 2 * (model.parameters + again)
    assert [(share.first_layer, share.last_layer) for share in shares] == [(0, 1), (2, 3), (4, 6)]
