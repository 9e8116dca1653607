"""The shipped configs: both sides read them, and the classes that they name have the published number of parameters."""

import json
import tomllib
from dataclasses import dataclass
from decimal import Decimal
from enum import Enum
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from torch import nn
from transformers import AutoConfig, PreTrainedConfig
from transformers.models.auto.configuration_auto import CONFIG_MAPPING_NAMES

from harness.tools.full_size.trainer_names import trainer_layout
from tests.tools.full_size.forks import REPOSITORY, answer_of
from tests.tools.full_size.test_full_size import MODELS

NAMES = sorted(file.parent.name for file in MODELS.glob("*/config.json"))
ONLY_SGLANG = {"kimi_k2", "kimi_k3"}
"""Their model_type is unknown to transformers. Kimi-K2 still names a class of transformers; Kimi-K3 does not."""
HUB = "the page's count of the stored tensors"


class Part(Enum):
    """What a published count counts. Transformers' classes have no multi-token prediction (MTP) layer."""

    MODEL = "without an MTP layer"
    WITH_MTP = "with an MTP layer that uses the model's embedding and head"
    WITH_MTP_AND_COPIES = "with an MTP layer that is stored with an embedding and a head"


@dataclass(frozen=True)
class Published:
    """A number of parameters, with as many digits as its source gives."""

    name: str
    billions: str
    source: str
    part: Part = Part.MODEL


PUBLISHED = (
    Published("deepseek_v3", "671", "https://huggingface.co/deepseek-ai/DeepSeek-V3, model card"),
    Published("deepseek_v3_bf16", "671", "https://huggingface.co/deepseek-ai/DeepSeek-V3, model card"),
    Published(
        "deepseek_v3_2", "685", f"https://huggingface.co/deepseek-ai/DeepSeek-V3.2, {HUB}", Part.WITH_MTP_AND_COPIES
    ),
    Published("deepseek_v4_flash", "284", "https://huggingface.co/deepseek-ai/DeepSeek-V4-Flash, model card"),
    Published("deepseek_v4_pro", "1.6e3", "https://huggingface.co/deepseek-ai/DeepSeek-V4-Pro, model card"),
    Published("glm_4_6", "357", f"https://huggingface.co/zai-org/GLM-4.6, {HUB}", Part.WITH_MTP),
    Published("glm_5", "744", "https://huggingface.co/zai-org/GLM-5, model card"),
    Published("glm_5", "754", f"https://huggingface.co/zai-org/GLM-5, {HUB}", Part.WITH_MTP),
    Published("gpt_oss_120b", "116.83", "https://arxiv.org/abs/2508.10925, table 1"),
    Published("kimi_k2", "1e3", "https://huggingface.co/moonshotai/Kimi-K2-Instruct, model card"),
    Published("llama_3_1_405b", "406", f"https://huggingface.co/meta-llama/Llama-3.1-405B, {HUB}"),
    Published("mimo_v2_flash", "309", "https://huggingface.co/XiaomiMiMo/MiMo-V2-Flash, model card"),
    Published("minimax_m2_7", "229", f"https://huggingface.co/MiniMaxAI/MiniMax-M2.7, {HUB}"),
    Published("qwen2_5_72b", "72.7", "https://huggingface.co/Qwen/Qwen2.5-72B, model card"),
    Published("qwen3_235b_a22b", "235", "https://huggingface.co/Qwen/Qwen3-235B-A22B, model card"),
    Published("qwen3_30b_a3b", "30.5", "https://huggingface.co/Qwen/Qwen3-30B-A3B, model card"),
    Published("qwen3_5_397b_a17b", "397", "https://huggingface.co/Qwen/Qwen3.5-397B-A17B, model card"),
)
KIMI_K3 = Published("kimi_k3", "2.8e3", "https://huggingface.co/moonshotai/Kimi-K3, model card")
"""Apart, because no class of transformers counts it."""


@cache
def published_fields(name: str) -> dict[str, Any]:
    return dict(json.loads((MODELS / name / "config.json").read_text()))


def text_fields(name: str) -> dict[str, Any]:
    """Return the fields of the language model, which a model with a vision tower keeps in text_config."""
    fields = published_fields(name)
    return dict(fields.get("text_config", fields))


def numbers(name: str) -> dict[str, int]:
    """Return the language model's whole numbers, but for those that transformers keeps under another name."""
    renamed = {"rope_theta", "num_hash_layers"}
    return {field: value for field, value in text_fields(name).items() if type(value) is int and field not in renamed}


def transformers_config(name: str) -> PreTrainedConfig:
    """Return the config that the class named in config.json takes."""
    if name not in ONLY_SGLANG:
        return AutoConfig.from_pretrained(MODELS / name)
    return model_class(name).config_class.from_dict(published_fields(name) | {"model_type": "deepseek_v3"})


def model_class(name: str) -> Any:
    return getattr(transformers, published_fields(name)["architectures"][0])


@cache
def meta_model(name: str) -> nn.Module:
    config = transformers_config(name)
    with torch.device("meta"):
        return model_class(name)(config)


def count(module: nn.Module) -> int:
    return sum(parameter.numel() for parameter in module.parameters())


def parameters(name: str, part: Part) -> int:
    """Count the model's parameters, and those of its MTP layer, which is a decoder layer, a projection and three
    norms."""
    model, total = meta_model(name), count(meta_model(name))
    if part is not Part.MODEL:
        assert published_fields(name)["num_nextn_predict_layers"] == 1
        width = published_fields(name)["hidden_size"]
        total += count(model.model.layers[-1]) + 2 * width * width + 3 * width
    if part is Part.WITH_MTP_AND_COPIES:
        total += count(model.model.embed_tokens) + count(model.lm_head)
    return total


@pytest.mark.parametrize("published", PUBLISHED, ids=lambda each: f"{each.name}-{each.billions}")
def test_the_class_has_the_published_number_of_parameters(published: Published) -> None:
    check(published, parameters(published.name, published.part))


@pytest.mark.long
def test_sglangs_class_for_kimi_k3_has_the_published_number_of_parameters(tmp_path: Path) -> None:
    fields = published_fields(KIMI_K3.name)
    text = {name: value for name, value in text_fields(KIMI_K3.name).items() if name != "quantization_config"}
    (tmp_path / "config.json").write_text(json.dumps(fields | {"text_config": text}))
    check(KIMI_K3, answer_of("tests.tools.full_size.asked:sglang_parameters", tmp_path))


def check(published: Published, counted: int) -> None:
    """Compare a number of parameters with the published one, rounded to as many digits."""
    billions, claimed = Decimal(counted) / 10**9, Decimal(published.billions)
    assert billions.quantize(claimed) == claimed, f"{billions} B, {published.part.value}; {published.source}"


def test_gpt_oss_in_mxfp4_has_the_published_size() -> None:
    """The size of the checkpoint in https://arxiv.org/abs/2508.10925, table 1: 60.8 GiB."""
    layout = trainer_layout(MODELS / "gpt_oss_120b", torch.bfloat16)
    assert round(sum(view.nbytes for view in layout) / 2**30, 1) == 60.8


def test_every_folder_has_a_published_number() -> None:
    assert {each.name for each in (*PUBLISHED, KIMI_K3)} == set(NAMES)


@pytest.mark.parametrize("name", NAMES)
def test_transformers_reads_every_number(name: str) -> None:
    known = published_fields(name)["model_type"] in CONFIG_MAPPING_NAMES
    assert known == (name not in ONLY_SGLANG)
    if known:
        config = AutoConfig.from_pretrained(MODELS / name).get_text_config()
        published = numbers(name)
        assert {field: getattr(config, field, None) for field in published} == published


@pytest.mark.long
def test_sglang_reads_every_number() -> None:
    for name, read in answer_of(
        "tests.tools.full_size.asked:sglang_configs", *(MODELS / name for name in NAMES)
    ).items():
        fields, published = published_fields(name), numbers(name)
        quantization = text_fields(name).get("quantization_config", {})
        assert read["architecture"] == fields["architectures"][0]
        assert read["quantization"] == quantization.get("quant_method")
        assert {field: read["fields"].get(field) for field in published} == published


def test_the_bf16_config_is_the_published_one_without_quantization() -> None:
    published = dict(published_fields("deepseek_v3"))
    del published["quantization_config"]
    assert published_fields("deepseek_v3_bf16") == published


def test_the_plan_for_deepseek_v3_has_the_published_numbers() -> None:
    plan = tomllib.loads((REPOSITORY / "configs/multinode/deepseek_v3_671b.toml").read_text())
    published = published_fields("deepseek_v3")
    overrides = plan["model"]["overrides"]
    assert overrides == {field: published[field] for field in overrides}


def test_no_config_asks_for_code_of_the_hub() -> None:
    assert not [name for name in NAMES if "auto_map" in (MODELS / name / "config.json").read_text()]
