"""What an engine rank and a trainer rank hold, against SGLang's own rule for stages and against plain arithmetic."""

from pathlib import Path

import pytest

from harness.config.layers import build_config, read_layer
from harness.config.model_fields import model_fields
from harness.tools.plan.memory_estimate import (
    FP8_BYTES,
    copy_bytes,
    engine_shares,
    largest_bucket,
    stage_layers,
    trainer_share,
)
from harness.tools.plan.model_shapes import ModelShape, model_shape

DEEPSEEK = Path(__file__).parents[3] / "configs/multinode/deepseek_v3_671b.toml"


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
    assert trainer_share(model, 1, 4, 2).parameters == 4 * model.parameters


def test_mla_keeps_kv_b_proj_twice() -> None:
    model = shape_of("deepseek_v3")
    [share] = engine_shares(model, 1, 1, 2, 2)
    assert share.weights == 2 * (model.parameters + sum(layer.absorbed for layer in model.layers))


def test_fewer_key_value_heads_than_ranks_are_repeated() -> None:
    model = shape_of("qwen2", num_hidden_layers=1)  # 8 heads and 4 key-value heads of 64, hidden and width 512
    one, two = (engine_shares(model, tp, 1, 2, 2)[0] for tp in (4, 8))
    assert one.kv_token == two.kv_token == 2 * 64 * 2
    key_value = 2 * 512 * 64
    assert one.weights // 2 - key_value == 2 * (two.weights // 2 - key_value)


@pytest.mark.parametrize("tied", [False, True])
def test_stages_together_hold_the_model_once_and_a_tied_embedding_twice(tied: bool) -> None:
    model = shape_of("qwen2", num_hidden_layers=7, tie_word_embeddings=tied)
    shares = engine_shares(model, 1, 3, 2, 2)
    again = 512 * 512 if tied else 0
    assert sum(share.weights for share in shares) == 2 * (model.parameters + again)
    assert [(share.first_layer, share.last_layer) for share in shares] == [(0, 1), (2, 3), (4, 6)]


def test_256_experts_on_512_ranks_take_twice_their_bytes() -> None:
    config = build_config([read_layer(str(DEEPSEEK))])
    model = model_shape(model_fields(config.model.name, config.model.overrides, "cuda"))
    experts = sum(layer.experts for layer in model.layers)
    assert trainer_share(model, 512, 2, 2).parameters == pytest.approx((model.parameters + experts) / 512 * 2)
    assert trainer_share(model, 256, 2, 2).parameters == pytest.approx(model.parameters / 256 * 2)


def test_a_bucket_is_as_large_as_its_limit_or_what_cannot_be_split() -> None:
    model = shape_of("qwen2")
    assert largest_bucket(model, 2, 2, 10**6) == 10**6
    assert largest_bucket(model, 2, 2, 1) == 512 * 512 * 2, "the embedding"
    assert largest_bucket(model, 2, 2, 10**12) == model.parameters * 2


def test_an_fp8_engine_has_a_byte_for_each_quantized_element_and_four_for_its_block() -> None:
    model = shape_of("qwen2", num_hidden_layers=1)  # 8 heads and 4 key-value heads of 64; hidden and width 512
    [share] = engine_shares(model, 1, 1, 2, 2, FP8_BYTES)
    quantized = model.parameters - 2 * 512 * 512  # all but the embedding and the head
    assert share.weights == quantized + 4 * quantized // 128**2 + 2 * 2 * 512 * 512
    assert copy_bytes(model, 2) == quantized // 2 + 4 * quantized // 128**2, "each rank has all scales"
    assert largest_bucket(model, 2, 2, 10**12, FP8_BYTES) == share.weights, "all that is sent"


def test_routers_and_what_mla_absorbs_stay_in_16_bits() -> None:
    model = shape_of("deepseek_v3")
    [share], [plain] = (engine_shares(model, 1, 1, 2, 2, each) for each in (FP8_BYTES, None))
    quantized = sum(layer.elements - layer.router for layer in model.layers)
    assert sum(layer.router for layer in model.layers) > 0
    assert share.weights == pytest.approx(plain.weights - quantized * (2 - FP8_BYTES))


def test_experts_on_too_many_ranks_are_copied_as_often_as_they_are_held() -> None:
    model = shape_of("qwen3_moe", num_hidden_layers=1)
    few, many = copy_bytes(model, model.experts), copy_bytes(model, 2 * model.experts)
    others = model.layers[0].quantized - model.layers[0].experts
    assert few - many == pytest.approx(others / model.experts / 2, abs=2), "a rank's expert is as large as before"
