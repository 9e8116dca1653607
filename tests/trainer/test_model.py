"""Which attention and layers a model has, and its random values; sharded models are in test_sharded.py."""

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
    MambaConfig,
    OPTConfig,
    Qwen2Config,
)
from transformers.utils import is_flash_attn_2_available

from harness.trainer.model import build_on_meta, choose_attention, decoder_layers, fill_random, random_rows
from harness.weights.converter import CheckpointConverter


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


@pytest.mark.parametrize(
    ("config", "wanted", "packed", "said"),
    [
        (Gemma2Config(), "sdpa", False, 'model.attention = "sdpa" cannot work: gemma2 caps attention logits'),
        (CLIPConfig(), "auto", False, "clip is not a causal language model in transformers"),
        (MambaConfig(), "eager", True, "model.packed = true cannot work: .*a recurrent state"),
        (Llama4TextConfig(), "eager", True, "model.packed = true cannot work: .*chunked_attention"),
        pytest.param(
            GPT2Config(),
            "flash_attention_2",
            False,
            '"flash_attention_2" needs the package flash-attn',
            marks=pytest.mark.skipif(is_flash_attn_2_available(), reason="needs a machine without flash-attn"),
        ),
    ],
)
def test_an_attention_that_cannot_compute_the_model_is_refused(
    config: Any, wanted: Any, packed: bool, said: str
) -> None:
    with pytest.raises(ValueError, match=said):
        choose_attention(config, wanted, packed)


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


def test_a_model_of_text_and_images_has_the_sizes_of_its_language_part_and_published_names() -> None:
    """transformers' Gemma3Config has no hidden_size of its own, and learns the prefix vision_model only as it reads a
    checkpoint; here the model is made from its config.
    """
    text = {"vocab_size": 32, "hidden_size": 8, "intermediate_size": 8, "num_hidden_layers": 1, "head_dim": 4}
    text |= {"num_attention_heads": 2, "num_key_value_heads": 1}
    vision = {"hidden_size": 8, "intermediate_size": 8, "num_hidden_layers": 1, "num_attention_heads": 2}
    config = Gemma3Config(text_config=text, vision_config=vision)
    _, model = build_on_meta(config, torch.float32, value_head=True)
    assert model.value_head.weight.shape == (1, 8)
    head = torch.nn.ModuleDict({"value_head": torch.nn.Linear(8, 1, bias=False)})
    fill_random(head, config, seed=0)
    assert 0 < float(head["value_head"].weight.detach().abs().max()) < 2
    _, model = build_on_meta(config, torch.float32)
    names = {view.name for view in CheckpointConverter(model).layout()}
    assert "vision_tower.vision_model.encoder.layers.0.layer_norm1.weight" in names
