"""Questions to launch/full_size.py: which keys and engine.args count."""

import json
from pathlib import Path
from typing import Any

import pytest

from harness.tools.engine_class.forks import Told, in_forks
from harness.tools.full_size.model_and_options import Options, Question, read_question
from tests.tools.full_size.test_full_size import MODELS, full_size, with_layers

MODEL = "deepseek_v3_bf16"
TOML = """
[parallel]
dp = 1
tp = 16
[model]
name = "{model}"
dtype = "bfloat16"
weights = "{weights}"
[engine]
device = "cuda"
args = {{ {arguments} }}
[algorithm]
advantage = "grpo"
kl_placement = "none"
[weights]
transport = "{transport}"
verify = false
"""


def ask(tmp_path: Path, *words: str, model: str | Path = MODEL, **options: Any) -> Question:
    return read_question(str(model), Options(**options), words, tmp_path)


def ask_toml(tmp_path: Path, arguments: str, weights: str = "random", transport: str = "pull") -> Question:
    file = tmp_path / "run.toml"
    text = TOML.format(model=MODELS / MODEL, arguments=arguments, weights=weights, transport=transport)
    file.write_text(text)
    return ask(tmp_path, model=file)


def test_keys_of_the_run_reach_the_engine_as_those_of_a_config_do(tmp_path: Path) -> None:
    words = ["--engine.args.moe_dense_tp_size", "1", "--engine.args.enable_dp_lm_head=true"]
    asked = ask(tmp_path, *words, tp=16, ep=16, dp_attention=16, nnodes=2)
    keys = "ep_size = 16, dp_size = 16, enable_dp_attention = true, moe_dense_tp_size = 1, enable_dp_lm_head = true"
    assert asked.arguments == ask_toml(tmp_path, keys).arguments
    assert asked.arguments["moe_dense_tp_size"] == 1 and asked.arguments["enable_dp_lm_head"] is True


def test_a_key_sets_what_its_option_leaves_at_the_default(tmp_path: Path) -> None:
    asked = ask(tmp_path, "--model.dtype", "float32", "--engine.args.ep_size", "8", tp=16, nnodes=2)
    assert (asked.dtype, asked.arguments["dtype"], asked.arguments["ep_size"]) == ("float32", "float32", 8)
    assert ask(tmp_path, "--model.rollout_precision", "fp8_block", tp=16, nnodes=2).precision == "fp8_block"


def test_what_may_change_the_weights_is_passed_on_and_the_rest_is_named(tmp_path: Path) -> None:
    arguments = 'enable_multimodal = true, mem_fraction_static = 0.5, attention_backend = "fa3", enable_lora = true'
    none_placed_by_a_table = 'ep_num_redundant_experts = 0, init_expert_location = "trivial"'
    asked = ask_toml(tmp_path, f"{arguments}, {none_placed_by_a_table}")
    assert asked.arguments["enable_multimodal"] is True
    assert not {"mem_fraction_static", "attention_backend", "enable_lora"} & asked.arguments.keys()
    runs, beside = asked.passed_on.as_lines()
    assert "mem_fraction_static, attention_backend" in runs and "enable_lora" in beside


def test_a_config_with_a_draft_model_of_the_checkpoint_has_one_here(tmp_path: Path) -> None:
    asked = ask_toml(tmp_path, 'speculative_algorithm = "EAGLE"', weights="checkpoint")
    assert asked.has_draft
    other = 'speculative_algorithm = "EAGLE3", speculative_draft_model_path = "draft"'
    asked = ask_toml(tmp_path, other, weights="checkpoint", transport="bucket")
    assert not asked.has_draft and "speculative_algorithm" not in asked.arguments
    assert "speculative_algorithm" in asked.passed_on.not_counted


def test_models_that_are_no_mistake(tmp_path: Path) -> None:
    assert ask(tmp_path, model=MODELS / MODEL).folder == ask(tmp_path).folder, "a shipped one, by its path"
    folder = with_layers("qwen3_30b_a3b", 2, tmp_path, num_attention_heads=14, num_key_value_heads=2)
    assert ask(tmp_path, model=folder, tp=8, dp_attention=4).arguments["dp_size"] == 4, "fewer ranks share heads"


@pytest.mark.long
def test_a_field_that_only_transformers_refuses_is_one_sentence(tmp_path: Path) -> None:
    done = full_size(with_layers("qwen2_5_72b", 2, tmp_path, rms_norm_eps="x"))
    assert done.returncode == 2 and "Traceback" not in done.stderr, done.stderr
    assert "rms_norm_eps" in done.stderr.splitlines()[-1]


@pytest.mark.long
def test_what_is_passed_on_changes_what_the_engine_holds(tmp_path: Path) -> None:
    folder, table = with_layers(MODEL, 4, tmp_path), tmp_path / "found.json"
    words = ["--engine.args.enable_dp_lm_head", "true", "--engine.args.mem_fraction_static", "0.5"]
    done = full_size(folder, "--tp", 2, "--dp-attention", 2, "--nnodes", 1, "--json", table, *words)
    assert done.returncode in (0, 1), done.stderr
    assert "not given to SGLang, as they change no weights: engine.args mem_fraction_static" in done.stdout
    found = json.loads(table.read_text())
    assert found["held"][0]["parameters"]["lm_head.weight"][1] == [129280, 7168], "whole on each rank, and not halved"
    assert found["arguments_left_out"] == ["mem_fraction_static"]


@pytest.mark.long
def test_an_argument_for_absent_hardware_is_125(tmp_path: Path) -> None:
    words = ["--engine.args.moe_a2a_backend", "deepep"]
    done = full_size(with_layers(MODEL, 4, tmp_path), "--tp", 2, "--nnodes", 1, *words)
    assert done.returncode == 125, done.stdout + done.stderr
    assert "SGLang cannot build" in done.stderr.splitlines()[-1]


@pytest.mark.long
def test_what_only_the_cpu_refuses_is_passed_over_and_a_run_of_it_is_one_sentence(tmp_path: Path) -> None:
    """GLM-5.3 has states of linear attention, of which SGLang's CPU mode keeps no snapshots, and a vision tower."""
    text = {
        "model_type": "glm5_next_text", "num_hidden_layers": 4, "n_routed_experts": 8, "mhc": True, "swiglu_limit": 10.0,
        "layer_types": ["linear_attention"] * 3 + ["full_attention"], "mlp_layer_types": ["dense"] * 3 + ["sparse"],
        "linear_lower_bound": -5.0, "index_head_dim": 128, "index_topk": 2048, "index_n_heads": 32, "index_kpool": 16,
        "index_kpool_compress": True, "index_kpool_always_select_tail": True, "num_key_value_heads": 64,
    }  # fmt: skip
    vision = {
        "model_type": "glm5_next_vision", "depth": 2, "hidden_size": 1024, "num_heads": 16, "out_hidden_size": 1536,
        "intermediate_size": 4096, "projection_intermediate_size": 10240, "swiglu_limit": 10.0,
    }  # fmt: skip
    fields = {"architectures": ["Glm5NextForConditionalGeneration"], "model_type": "glm5_next"}
    (tmp_path / "config.json").write_text(json.dumps({**fields, "text_config": text, "vision_config": vision}))
    done = full_size(tmp_path, "--tp", 2)
    assert done.returncode == 0, done.stdout + done.stderr
    done = full_size(tmp_path, "--tp", 2, "--nnodes", 1)
    assert done.returncode == 2 and "has none for Glm5NextForConditionalGeneration" in done.stderr
    assert "leave out --nnodes" in done.stderr.splitlines()[-1] and "Traceback" not in done.stderr


def asserting(cause: Exception) -> None:
    try:
        raise cause
    except Exception as error:
        raise Told(f"rank 0: {type(error).__name__}: {error}") from error


def test_a_cause_without_words_is_named_by_its_place(capfd: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(Told, match=r"rank 0: AssertionError at .*test_model_and_options\.py:\d+: raise cause"):
        in_forks(asserting, {0: (AssertionError(),)}, processes=1)
    with pytest.raises(Told, match=r"^rank 0: ValueError: heads$"):
        in_forks(asserting, {0: (ValueError("heads"),)}, processes=1)
    assert "Traceback" not in capfd.readouterr().err
