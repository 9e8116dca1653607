"""Forty mistakes of newcomers: each is one sentence and exit code 2 before any rank starts, and names what was given."""

import json
import os
import subprocess
import sys
import time
from pathlib import Path

import pytest

from harness.cluster.network import NetworkError
from harness.config.layers import ConfigError
from harness.runtime.errors import UnsupportedEnvironment
from harness.task.data import load_rows
from harness.tools import preflight
from harness.tools.command_line import parse
from harness.tools.tiny_models import NOT_OVERRIDABLE, tiny_config, tiny_fields
from launch import ppo
from tests.end_to_end.launching import QUICKSTART, REPOSITORY

ROW = {"question": "What is 1 + 1?", "answer": "It is 2. #### 2"}
CPU = "--engine.device cpu"
MISTAKES = {
    # Of the schema: known from the words alone.
    "--actor.learning_rat 1": "the nearest is actor.learning_rate",
    "--actor.tp 2": "the nearest is parallel.tp",
    "--optimizer.lr 1": "optimizer",
    "--run.steps many": "must be an integer",
    "--run.steps 0": "must be at least 1",
    "--run.steps": "has no value",
    "--model.dtype fp8": 'must be one of "float32", "bfloat16", got "fp8"',
    "--dry-rnu": "the nearest is --dry-run",
    "quickstart": "must be a TOML file or an option",
    "missing.toml": "is not a file",
    "{dir}/broken.toml": "is not valid TOML",
    "--engine.args.tp_size 2": "the harness derives it from parallel.tp",
    "--run.phase_timeouts.snyc 9": "the nearest is sync",
    "--inject kil@sync": "the nearest is kill",
    "--inject kill@snyc": "the nearest is sync",
    "--inject kill@sync:7": "the mesh has the ranks 0 to 1",
    "--rollout.prompts_per_step 9": "must divide the step's 18 sequences",
    "--parallel.dp 3": "rollout.prompts_per_step must be a multiple",
    "--actor.minibatch_size 5": "must be a multiple of the 2 ranks",
    "--rollout.temperature 0": "must be at least 1e-06",
    "--rollout.max_response_tokens 0": "must be at least 1",
    "--algorithm.advantage grpo --rollout.responses_per_prompt 1": "must be at least 2",
    "--weights.transport distributed --parallel.pp 2": "use parallel.pp = 1",
    f"--parallel.colocate false {CPU}": "use true",
    "--engine.base_port 80": "between 1024 and 60000",
    "--run.dir runs/12:30": "no colon",
    # Of models, data, engines and this host: known from files.
    "--model.name qwen4": "the nearest of these is qwen",
    "--model.name {dir}/nothing": 'nothing" is no folder here',
    "--model.name {dir}/empty": "has no config.json",
    "--model.name {dir}/bare": "has no tokenizer",
    "--model.name {dir}/bad_config": "is not JSON",
    "--model.name {dir}/gpt --parallel.pp 4": "more than the model's 3 layers",
    "--task.source {dir}/nothing": 'OWNER/NAME, got "{dir}/nothing"',
    "--task.source {dir}/empty": "there is no jsonl or parquet file",
    "--validation.source {dir}/empty": 'validation.split = "test" has no file in validation.source',
    "--task.source {dir}/data --task.split no_rows": "has no rows",
    "--task.source {dir}/data --task.split bad_json": "bad_json.jsonl line 2 is not JSON",
    "--task.source {dir}/data --task.split no_column": "no_column.jsonl line 1 has no field 'answer'",
    "--task.source {dir}/data --task.split no_number": 'line 1 has the ground truth "two", which is no number',
    "--task.source {dir}/data --task.split other_columns": "row 1 has no field 'question'",
    "--task.source {dir}/data --task.split no_messages": "row 1 has a str as 'prompt': it must be a list of messages",
    "--task.source {dir}/data/no_truth.parquet": "no_truth.parquet row 1 has no reward_model.ground_truth",
    "--task.source arithmetic,{dir}/data/no_truth.parquet": "row 1 has no reward_model.ground_truth",
    "--task.reward gsm9k": "must be one of gsm8k, gsm8k_strict, digits, math, data_source, or your own as module:function",
    "--task.reward {dir}/own.py:scores": "own.py has no function scores",
    "--task.reward no_such_module:score": "no_such_module is no module that Python finds",
    "--task.reward data_source": 'arithmetic/train row 1 has data_source "", and task.reward = "data_source" scores openai/gsm8k',
    "--task.source {dir}/data --task.split few": "is more than the 2 rows",
    "--task.source arithmetc": 'OWNER/NAME, got "arithmetc"',
    "--task.template {{question}}{{hint}}": "must have the field {{question}} and no other",
    "--engine.args.mem_fraction_statc 0.5": "the nearest it has is mem_fraction_static",
    "--engine.args.mem_fraction_static high": "takes a number there",
    "--engine.args.max_total_tokens 9.5": "takes an integer there",
    "--engine.args.disable_cuda_graph 3": "takes true or false there",
    "--engine.args.attention_backend torch_nativ": "the nearest is torch_native",
    "--model.overrides.hidden_sise 64": "model.overrides.hidden_sise = 64 is no field of qwen2's config: did you mean hidden_size?",
    "--model.overrides.hidden_size wide": "hidden_size = 'wide'",
    "--model.overrides.num_attention_heads 3": "model.overrides.num_attention_heads = 3 must be a multiple of num_key_value_heads = ",
    "--model.overrides.num_attention_heads 12": "must be a multiple of model.overrides.num_attention_heads = 12",
    "--parallel.pp 4": "more than the model's 2 layers",
    "--model.name qwen3_moe --engine.args.ep_size 3": "must divide parallel.tp = 2 and the model's 8 experts",
    "--model.name qwen3_moe --model.overrides.num_experts_per_tok 9": "num_experts_per_tok = 9 is more than the model's 8 experts",
    "--model.name deepseek_v3 --model.overrides.n_group 3": "must be a multiple of model.overrides.n_group = 3",
    "--rollout.max_response_tokens 4096": "the model's context is 2048",
    "--engine.args.context_length 128": "engine.args.context_length is 128",
    "--engine.args.context_length 8192 --rollout.max_response_tokens 4096": "the model's context is 2048",
    # An engine that no sync can reach.
    "--engine.args.quantization fp8": "a quantized engine takes quantized tensors",
    "--engine.args.torchao_config int8wo": "a quantized engine takes quantized tensors",
    "--engine.args.quantization awq": "takes quantized tensors with their scales",
    "--engine.args.quantization not_yet_known": "takes quantized tensors with their scales",
    "--model.name {dir}/quantized": "is quantized (fp8, quantization_config in its config.json)",
    "--engine.args.speculative_algorithm EAGLE": 'weights.verify = "log_probs" cannot',
    "--engine.args.speculative_algorithm nextn --weights.transport pull": 'use "bucket", "tensor" or "disk"',
    "--engine.args.speculative_algorithm EAGLE3 --weights.transport tensor": 'weights.verify = "log_probs" cannot',
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Models and data that lack something."""
    import pyarrow
    from pyarrow import parquet

    path = tmp_path_factory.mktemp("wrong")
    (path / "broken.toml").write_text("[run\nsteps = 3\n")
    for name in ("empty", "bare", "bad_config", "gpt", "quantized", "data"):
        (path / name).mkdir()
    (path / "bare" / "config.json").write_text("{}")
    for name, text in (
        ("bad_config", "{"),
        ("gpt", '{"model_type": "unknown", "num_hidden_layers": 3}'),
        ("quantized", '{"model_type": "llama", "quantization_config": {"quant_method": "fp8"}}'),
    ):
        (path / name / "config.json").write_text(text)
        for file in ("tokenizer.json", "model.safetensors"):
            (path / name / file).touch()
    lines = {
        "no_rows": [],
        "few": [ROW, ROW],
        "bad_json": [ROW, "{"],
        "no_column": [{"question": "?"}],
        "no_number": [ROW | {"answer": "two"}],
    }
    for split, rows in lines.items():
        text = "\n".join(row if isinstance(row, str) else json.dumps(row) for row in rows)
        (path / "data" / f"{split}.jsonl").write_text(text)
    for name, prompt in (("no_messages", "?"), ("no_truth", [{"role": "user", "content": "?"}])):
        parquet.write_table(pyarrow.table({"prompt": [prompt] * 9}), path / "data" / f"{name}.parquet")
    (path / "own.py").write_text("def score(**_): return 1.0")
    parquet.write_table(pyarrow.table({"text": ["?"] * 9}), path / "data" / "other_columns.parquet")
    return path


@pytest.mark.parametrize("words", MISTAKES)
def test_each_is_found_before_a_rank_starts(words: str, folder: Path) -> None:
    asked = words.format(dir=folder).split()
    with pytest.raises(ValueError) as caught:
        preflight.check_here(parse(asked).config)
    assert MISTAKES[words].format(dir=folder) in str(caught.value)
    assert "\n" not in str(caught.value)


PREPARED = {
    "addition.toml": ["--model.name", "qwen2", "--task.source", "arithmetic", "--validation.source", "arithmetic"]
}
"""Configs for what launch/prepare_data.py writes -> what stands for it here."""


def test_what_is_right_passes_without_a_word() -> None:
    for words in (
        [QUICKSTART],
        [QUICKSTART, "--model.name", "deepseek_v3", "--parallel.dp", "2", "--parallel.tp", "1"],
    ):
        assert preflight.check_here(parse(words).config) == []
    for config in (REPOSITORY / "configs").glob("*/*.toml"):
        preflight.check_plan(parse([str(config), *PREPARED.get(config.name, [])]).config)


DRAFT = "--weights.transport tensor --weights.verify off --engine.args.speculative_algorithm"
NOT_ON_CPU = {
    "--model.name {dir}/qwen2_moe": "model_type qwen2_moe: its shared expert ends in a Triton kernel",
    "--model.name {dir}/gpt_oss": "model_type gpt_oss",
    "--model.name {dir}/qwen3_next": "model_type qwen3_next",
    f"{DRAFT} EAGLE": "engine.args.speculative_algorithm = 'EAGLE'",
    f"{DRAFT} NGRAM": "engine.args.speculative_algorithm = 'NGRAM'",
    "--engine.args.kv_cache_dtype fp8_e4m3": "engine.args.kv_cache_dtype = 'fp8_e4m3'",
}


@pytest.mark.parametrize("words", NOT_ON_CPU)
def test_what_cpu_mode_cannot_serve_is_125_before_a_rank_starts(
    words: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for name in ("qwen2_moe", "gpt_oss", "qwen3_next"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "config.json").write_text(json.dumps({"model_type": name}))
        for file in ("tokenizer.json", "model.safetensors"):
            (tmp_path / name / file).touch()
    asked = words.format(dir=tmp_path).split()
    assert preflight.main([*asked, "--engine.device", "cpu"]) == 125
    said = capsys.readouterr().err.strip()
    assert said.startswith("error: CPU mode cannot serve ") and "\n" not in said
    assert NOT_ON_CPU[words] in said
    assert ppo.main([*asked, "--engine.device", "cpu", "--check"]) == 125
    preflight.check_plan(parse([*asked, "--engine.device", "cuda"]).config)  # a GPU can


@pytest.mark.parametrize(
    "words",
    [
        "--engine.args.kv_cache_dtype bfloat16",
        "--model.name qwen3_moe --engine.args.ep_size 2",
        "--model.name deepseek_v3 --engine.args.enable_dp_attention true --engine.args.dp_size 2",
    ],
)
def test_what_cpu_mode_serves_is_not_refused(words: str) -> None:
    preflight.check_plan(parse([*words.split(), "--engine.device", "cpu"]).config)


def test_cuda_refuses_what_cpu_mode_pads() -> None:
    words = ["--parallel.tp", "3", "--rollout.prompts_per_step", "3", "--rollout.responses_per_prompt", "4"]
    words += ["--actor.minibatch_size", "12", "--critic.minibatch_size", "12"]
    with pytest.raises(
        ConfigError, match="parallel.tp = 3 does not divide the model's 8 attention heads: .*CPU mode pads"
    ):
        preflight.check_plan(parse(words).config)
    warnings = preflight.check_here(parse([*words, "--engine.device", "cpu"]).config)
    assert any("refuses it on CUDA" in sentence for sentence in warnings)


def test_a_gpu_that_is_not_there(monkeypatch: pytest.MonkeyPatch) -> None:
    config = parse(["--engine.device", "cuda"]).config
    with pytest.raises(ConfigError, match="hides every GPU; set engine.device"):
        preflight.device_here(config, {"CUDA_VISIBLE_DEVICES": ""})
    monkeypatch.setattr(preflight, "GPU_FILES", ())
    with pytest.raises(ConfigError, match="this host has no GPU"):
        preflight.device_here(config, {})
    assert preflight.device_here(parse([]).config, {}) == "cpu"


def test_ranks_without_torchrun_or_of_another_number() -> None:
    config = parse([]).config
    with pytest.raises(ConfigError, match=r"torchrun --nnodes=1 --nproc-per-node=2 launch/ppo.py --run.seed 1$"):
        preflight.check_started(config, "launch/ppo.py", ["--run.seed", "1"], {})
    with pytest.raises(ValueError, match="the world size is 3: start 2 ranks"):
        preflight.check_started(config, "launch/ppo.py", [], {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "3"})


@pytest.mark.parametrize("name", ["qwen2", "qwen3", "llama", "qwen3_moe", "deepseek_v3", "moonlight"])
def test_fields_read_from_source_are_those_of_the_class(name: str) -> None:
    import inspect

    real = (
        {*inspect.signature(type(tiny_config(name))).parameters, *tiny_fields(name, "cpu")}
        - NOT_OVERRIDABLE
        - {"kwargs"}
    )
    assert real <= preflight.shape_fields(name)
    assert not {"hidden_sise", "self", "kwargs"} & preflight.shape_fields(name)


@pytest.mark.parametrize("words", [("--model.name", "some/model"), ("--task.source", "some/set")])
def test_a_hub_that_does_not_answer_is_asked_once(words: tuple[str, str]) -> None:
    command = [sys.executable, "-m", "harness.tools.preflight", *words]
    begin = time.monotonic()
    done = subprocess.run(
        command,
        cwd=REPOSITORY,
        env=os.environ | {"HF_ENDPOINT": "http://127.0.0.1:9", "HF_HUB_OFFLINE": "0"},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 2
    assert done.stderr.startswith(f'error: {words[0][2:]} = "{words[1]}" is no folder here, and as a hub id')
    assert len(done.stderr.splitlines()) == 1 and time.monotonic() - begin < 20


def test_a_hubs_model_that_is_cached_is_read_and_another_is_refused_offline(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from huggingface_hub import constants

    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path))
    snapshot = tmp_path / "models--some--model" / "snapshots" / ("0" * 40)
    snapshot.mkdir(parents=True)
    (snapshot / "config.json").write_text('{"model_type": "qwen2"}')
    (tmp_path / "models--some--model" / "refs").mkdir()
    (tmp_path / "models--some--model" / "refs" / "main").write_text("0" * 40)
    assert preflight._hub_config("some/model", on_hub=True) == {"model_type": "qwen2"}
    assert preflight._hub_config("some/other", on_hub=False) == {}
    with pytest.raises(ConfigError, match="HF_HUB_OFFLINE is set"):
        preflight._hub_config("some/other", on_hub=True)


def test_rows_of_a_hub_are_not_known_before_the_run(tmp_path: Path) -> None:
    file = tmp_path / "rows.jsonl"
    file.write_text(json.dumps(ROW) + "\n")
    assert preflight.check_rows([str(file), str(file)], "train", 0) == (load_rows([str(file)] * 2, "train"), True)
    assert preflight.check_rows([str(file), "some/set"], "train", 0) == (load_rows([str(file)], "train"), False)


def test_mla_is_refused_on_a_sglang_without_the_registry(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    preflight.require_absorbed_mla()
    (tmp_path / "sglang" / "srt").mkdir(parents=True)
    (tmp_path / "sglang" / "__init__.py").touch()
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(UnsupportedEnvironment, match="an MLA model"):
        preflight.require_absorbed_mla()


def test_an_interface_is_checked_before_anything_starts(monkeypatch: pytest.MonkeyPatch) -> None:
    preflight.check_interface("", {})
    preflight.check_interface("lo", {})
    with pytest.raises(NetworkError, match="GLOO_SOCKET_IFNAME = nowhere0"):
        preflight.check_interface("", {"GLOO_SOCKET_IFNAME": "nowhere0"})
