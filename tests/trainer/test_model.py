"""Sharded models against transformers' own, measured by two ranks."""

from itertools import pairwise
from typing import Any

import pytest
import torch
from accelerate import init_empty_weights
from hypothesis import given
from hypothesis import strategies as st
from transformers import (
    AutoModelForCausalLM,
    CLIPConfig,
    Gemma2Config,
    Gemma3Config,
    GPT2Config,
    GptOssConfig,
    Llama4TextConfig,
    OPTConfig,
    Qwen2Config,
)
from transformers.utils import is_flash_attn_2_available

from harness.trainer.model import build_on_meta, choose_attention, decoder_layers, fill_random, random_rows
from harness.weights.converter import CheckpointConverter

Measurements = list[dict[str, Any]]

pytestmark = pytest.mark.slow

ARCHITECTURES = ("qwen2", "qwen2_tied", "qwen3", "llama", "qwen3_moe", "deepseek_v3")


@pytest.mark.parametrize("name", ARCHITECTURES)
def test_checkpoint_arrives_whole(measurements: Measurements, name: str) -> None:
    for rank in measurements:
        measured = rank[f"log_probs/{name}"]
        assert measured["weights"] == 0
        assert measured["buffers"] == 0, "rotary frequencies and correction biases"
        assert measured["buffer_names"] >= 2
        assert measured["sharded"], "every parameter is a DTensor, between calls too"


@pytest.mark.parametrize("name", ARCHITECTURES)
def test_log_probs_are_those_of_the_whole_unpadded_model(measurements: Measurements, name: str) -> None:
    for rank in measurements:
        measured = rank[f"log_probs/{name}"]
        assert measured["log_probs"] < 1e-5
        assert measured["eager"] < 1e-5
        assert measured["entropy_min"] > 0.1


@pytest.mark.parametrize("name", ARCHITECTURES)
def test_a_second_model_computes_in_float32_on_the_values_of_one_in_bfloat16(
    measurements: Measurements, name: str
) -> None:
    for rank in measurements:
        measured = rank[f"log_probs/{name}"]
        assert measured["rounding"] > 1e-3 and measured["in_float32"] < 1e-5
        assert measured["held"] == 0, "rounded to what the first one computes with"


@pytest.mark.parametrize("name", ARCHITECTURES)
def test_values_are_those_of_the_whole_backbone(measurements: Measurements, name: str) -> None:
    for rank in measurements:
        assert rank[f"log_probs/{name}"]["values"] < 1e-5
        assert rank[f"log_probs/{name}"]["value_spread"] > 0.01


def test_random_weights_do_not_depend_on_the_world_size(measurements: Measurements) -> None:
    for rank in measurements:
        measured = rank["random"]
        assert measured["differences"] == 0
        assert measured["value_differences"] == 0
        assert measured["same_as_other_seed"] == []


@given(
    rows=st.integers(1, 40),
    columns=st.integers(1, 5),
    block_values=st.integers(1, 60),
    cuts=st.lists(st.integers(0, 40), max_size=4),
)
def test_random_rows_are_the_same_however_they_are_cut(
    rows: int, columns: int, block_values: int, cuts: list[int]
) -> None:
    def draw(first: int, count: int) -> torch.Tensor:
        shard = torch.full((count, columns), torch.nan)
        for start, block in random_rows((rows, columns), first, count, "key", torch.device("cpu"), block_values):
            shard[start : start + len(block)] = block
        return shard

    edges = [0, *sorted(min(cut, rows) for cut in cuts), rows]
    whole = draw(0, rows)
    parts = [draw(first, after - first) for first, after in pairwise(edges)]
    assert torch.equal(torch.cat(parts), whole)
    assert len(whole.unique()) == whole.numel(), "no two rows or blocks are alike"


def test_random_weights_are_distributed_as_said(measurements: Measurements) -> None:
    measured = measurements[0]["random"]
    assert measured["norm_mean"] == pytest.approx(1, abs=0.05)
    assert measured["norm_std"] == pytest.approx(0.1, abs=0.02)
    assert measured["matrix_std"] == pytest.approx(0.1, rel=0.02), "initializer_range of the tiny models"
    assert measured["smallest"] > 0.05, "no tensor is all zeros, correction biases included"


def test_bfloat16_keeps_correction_biases_in_float32(measurements: Measurements) -> None:
    for rank in measurements:
        measured = rank["bfloat16"]
        wide = [name for name, dtype in measured["dtypes"].items() if dtype == "torch.float32"]
        assert wide == ["model.layers.1.mlp.gate.e_score_correction_bias"]
        assert set(measured["dtypes"].values()) == {"torch.float32", "torch.bfloat16"}
        assert measured["bias_differences"] == 0
        assert measured["inv_freq_dtypes"] == ["torch.float32"]
        assert abs(measured["loss"]) < 10


@pytest.mark.parametrize("name", ["qwen2", "deepseek_v3"])
def test_float32_masters_learn_in_bfloat16_what_float32_does(measurements: Measurements, name: str) -> None:
    for rank in measurements:
        measured = rank["mixed"][name]
        assert measured["forward"] == 0, "the forward is that of a model in bfloat16, which is the engine's"
        full, mixed, pure = measured["dtypes"]
        assert full == mixed == ["torch.float32"] and pure == ["torch.bfloat16"]
        mixed, pure = measured["cosine"]
        assert mixed > 0.99 and pure < 0.5, measured["cosine"]
        full, mixed, pure = measured["moved"]
        assert mixed > 0.99 * full and pure < 0.1 * full, measured["moved"]
        full, mixed, pure = measured["stuck"]
        assert full == mixed == 0 and pure == 1, "AdamW's second moment decays where there is no gradient"


def test_tied_weights_stay_tied_and_are_named_once(measurements: Measurements) -> None:
    for rank in measurements:
        measured = rank["tied"]
        assert measured["tied"] == {"lm_head.weight": "model.embed_tokens.weight"}
        assert "lm_head.weight" not in measured["names"]
        assert len(measured["names"]) == len(set(measured["names"])) == 26
        assert measured["equal"]


@pytest.mark.parametrize(
    ("config", "wanted", "attention", "part"),
    [
        (Qwen2Config(), "auto", "sdpa", ""),
        (Qwen2Config(), "eager", "eager", ""),
        (Gemma2Config(), "auto", "eager", "attn_logit_softcapping"),
        (Gemma2Config(attn_logit_softcapping=None), "auto", "sdpa", ""),
        (GptOssConfig(), "auto", "eager", "transformers has no sdpa for gpt_oss"),
    ],
)
def test_the_attention_is_one_that_computes_the_model(config: Any, wanted: Any, attention: str, part: str) -> None:
    found, why = choose_attention(config, wanted)
    assert found == attention and part in why and bool(why) == bool(part)


def test_an_attention_that_computes_another_model_is_refused() -> None:
    with pytest.raises(ValueError, match='model.attention = "sdpa" cannot work: gemma2 caps attention logits'):
        choose_attention(Gemma2Config(), "sdpa")
    with pytest.raises(ValueError, match="clip is not a causal language model in transformers"):
        choose_attention(CLIPConfig(), "auto")


@pytest.mark.skipif(is_flash_attn_2_available(), reason="needs a machine without flash-attn")
def test_an_attention_whose_package_is_missing_is_refused() -> None:
    with pytest.raises(ValueError, match='"flash_attention_2" needs the package flash-attn'):
        choose_attention(GPT2Config(), "flash_attention_2")


@pytest.mark.parametrize(
    "config",
    [
        Llama4TextConfig(num_hidden_layers=3, num_local_experts=3, hidden_size=16, intermediate_size=8, vocab_size=32),
        GPT2Config(n_layer=3, n_embd=16, n_head=2, vocab_size=32),
        OPTConfig(num_hidden_layers=3, hidden_size=16, num_attention_heads=2, ffn_dim=8, vocab_size=32),
    ],
    ids=lambda config: config.model_type,
)
def test_decoder_layers_are_found_wherever_an_architecture_has_them(config: Any) -> None:
    with init_empty_weights():
        model = AutoModelForCausalLM.from_config(config)
    layers = decoder_layers(model)
    assert len(layers) == 3 and all(
        "attn" in name for name in (" ".join(dict(each.named_modules())) for each in layers)
    )


def test_a_model_without_a_list_of_layers_is_refused_in_one_sentence() -> None:
    model = torch.nn.Linear(2, 2)
    model.config = Qwen2Config(num_hidden_layers=3)  # type: ignore[assignment]
    with pytest.raises(ValueError, match="Linear has no list of num_hidden_layers = 3 layers"):
        decoder_layers(model)


def gemma3() -> Gemma3Config:
    text = {"vocab_size": 32, "hidden_size": 8, "intermediate_size": 8, "num_hidden_layers": 1, "head_dim": 4}
    text |= {"num_attention_heads": 2, "num_key_value_heads": 1}
    vision = {"hidden_size": 8, "intermediate_size": 8, "num_hidden_layers": 1, "num_attention_heads": 2}
    return Gemma3Config(text_config=text, vision_config=vision)


def test_sizes_of_a_model_of_text_and_images_are_those_of_its_language_part() -> None:
    """transformers' Gemma3Config has no hidden_size of its own."""
    _, model = build_on_meta(gemma3(), torch.float32, value_head=True)
    assert model.value_head.weight.shape == (1, 8)
    head = torch.nn.ModuleDict({"value_head": torch.nn.Linear(8, 1, bias=False)})
    fill_random(head, gemma3(), seed=0)
    assert 0 < float(head["value_head"].weight.detach().abs().max()) < 2


def test_a_vision_tower_has_the_names_of_a_published_checkpoint() -> None:
    """transformers learns the prefix vision_model only as it reads a checkpoint, and here the model is made from its
    config."""
    _, model = build_on_meta(gemma3(), torch.float32)
    names = {view.name for view in CheckpointConverter(model).layout()}
    assert "vision_tower.vision_model.encoder.layers.0.layer_norm1.weight" in names
