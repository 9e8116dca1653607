"""Engines in block-FP8: what is sent to them, what they hold, and what is refused."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from harness.config.facts import Facts
from harness.config.layers import ConfigError, Layer, build_config
from harness.config.resolve import resolve
from harness.rollout import sglang_api
from harness.rollout.sglang_api.probe import engine_facts
from harness.runtime.errors import UnsupportedEnvironment
from harness.tools.full_size.model_and_options import SECTIONS, Options, read_question
from harness.tools.full_size.trainer_names import TrainerNames, trainer_names
from harness.weights.fp8_blocks import is_quantized
from tests.tools.full_size.forks import REPOSITORY, full_size
from tests.tools.full_size.test_full_size import MODELS, with_layers

RANKS = 8


def names_of(model: str, precision: Any, folder: Path, layers: int = 5) -> TrainerNames:
    folder.mkdir()
    return trainer_names(with_layers(model, layers, folder), torch.bfloat16, precision)


def test_a_model_in_bfloat16_is_sent_as_the_checkpoint_that_is_published_in_fp8(tmp_path: Path) -> None:
    """DeepSeek-V3 is published in block-FP8. transformers' class and the run's own rule tell the same matrices."""
    published = names_of("deepseek_v3", "same", tmp_path / "published")
    made = names_of("deepseek_v3_bf16", "fp8_block", tmp_path / "made")
    assert made.layout == published.layout and made.scales == published.scales
    shards = made.shards(RANKS)
    assert shards == published.shards(RANKS) and made.copy_bytes(shards) == published.copy_bytes(shards)
    plain = names_of("deepseek_v3_bf16", "same", tmp_path / "plain")
    quantized = {view.name for view in plain.layout if is_quantized(view.name, view.shape)}
    assert {view.name for view in made.layout if view.dtype == torch.float8_e4m3fn} == quantized
    assert {view.name for view in made.layout} == {view.name for view in plain.layout} | {
        f"{name}_scale_inv" for name in quantized
    }


def test_the_trainers_copy_has_a_byte_for_each_element_and_its_scales(tmp_path: Path) -> None:
    names = names_of("qwen3_30b_a3b", "fp8_block", tmp_path / "names")
    shards = names.shards(RANKS)
    assert shards["model.layers.0.mlp.experts.down_proj_scale_inv"].ranks == RANKS, "as the experts are"
    assert shards["model.layers.0.self_attn.q_proj.weight_scale_inv"].ranks == 1, "all of them on every rank"
    experts, others = 5 * 128 * 3 * 2048 * 768, 5 * (2 * 2048 * 4096 + 2 * 2048 * 512)  # elements of five layers
    scale = 4 / 128**2  # bytes for one element
    assert names.copy_bytes(shards) == experts / RANKS * (1 + scale) + others / RANKS + others * scale
    plain = names_of("qwen3_30b_a3b", "same", tmp_path / "plain")
    assert plain.copy_bytes(plain.shards(RANKS)) == 0


def run_refuses(model: str, **others: Any) -> str:
    """Return the sentences with which a run ends before it starts."""
    table = {
        "model": {"name": str(MODELS / model), "rollout_precision": "fp8_block", "dtype": others.get("dtype", "bfloat16")},
        "parallel": {"tp": others["tp"]},
        "engine": {"device": "cuda"},
    }  # fmt: skip
    fields = json.loads((MODELS / model / "config.json").read_text())
    with pytest.raises((ConfigError, UnsupportedEnvironment)) as refused:
        resolve(
            build_config([Layer("", table)]),
            Facts(device="cuda", sglang=engine_facts(sglang_api.probe()), model=fields),
            SECTIONS,
        )
    return str(refused.value)


@pytest.mark.parametrize(
    ("model", "others", "part"),
    [
        ("qwen2_5_72b", {"tp": 16}, "29568 over 16 ranks"),
        ("qwen3_30b_a3b", {"tp": 4, "dtype": "float16"}, 'must be "bfloat16"'),
        ("llama_3_1_405b", {"tp": 8}, "no block scales of a llama model"),
        ("deepseek_v3", {"tp": 8}, "use a checkpoint that is not quantized"),
    ],
)
@pytest.mark.parametrize("nnodes", [0, 2])
def test_what_a_run_refuses_is_refused_in_the_same_sentence(
    model: str, others: dict[str, Any], part: str, nnodes: int, tmp_path: Path
) -> None:
    options = Options(rollout_precision="fp8_block", nnodes=nnodes, **others)
    with pytest.raises((ConfigError, UnsupportedEnvironment)) as refused:
        read_question(model, options, [], tmp_path)
    assert str(refused.value) in run_refuses(model, **others).splitlines()
    assert part in str(refused.value)


def test_a_config_says_its_own_precision(tmp_path: Path) -> None:
    config = str(REPOSITORY / "configs/cpu/fp8_block.toml")
    assert read_question(config, Options(), [], tmp_path).precision == "fp8_block"
    with pytest.raises(ConfigError, match="--rollout-precision is for a MODEL"):
        read_question(config, Options(rollout_precision="fp8_block"), [], tmp_path)


@pytest.mark.long
def test_an_fp8_engine_holds_what_is_sent(tmp_path: Path) -> None:
    folder, table = with_layers("qwen3_30b_a3b", 3, tmp_path), tmp_path / "found.json"
    done = full_size(folder, "--tp", 2, "--nnodes", 1, "--rollout-precision", "fp8_block", "--json", table)
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.splitlines()[-1].startswith("VERDICT: every name arrives whole")
    found = json.loads(table.read_text())
    names = trainer_names(folder, torch.bfloat16, "fp8_block")
    assert found["run"]["stages"]["sync"]["actor: FP8 copy to send"] == names.copy_bytes(names.shards(RANKS))
    sent = sum(torch.Size(each).numel() * getattr(torch, dtype).itemsize for dtype, each in found["sent"].values())
    assert [each["bytes"] for each in found["ranks"]] == [pytest.approx(sent / 2, rel=1e-2)] * 2
