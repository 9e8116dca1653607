"""Mistakes of newcomers: each is one sentence and exit code 2 before any rank starts, and names what was given."""

import json
import os
import struct
import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace

import pytest

from harness.cluster.network import NetworkError
from harness.config.layers import ConfigError
from harness.config.run_folder import check_run_folder
from harness.rollout.sglang_api.probe import installed
from harness.runtime import cpu_standins
from harness.task.data import load_rows
from harness.task.tiny_models import NOT_OVERRIDABLE, tiny_config, tiny_fields
from harness.tools import preflight
from harness.tools.command_line import parse
from launch import ppo
from tests.end_to_end.launching import QUICKSTART, REPOSITORY

ROW = {"question": "What is 1 + 1?", "answer": "It is 2. #### 2"}
CPU = "--engine.device cpu"
NO_TENSORS = struct.pack("<Q", 2) + b"{}"
HEADER = b'{"weight": {"dtype": "F32", "shape": [2], "data_offsets": [0, 8]}}'
ONE_TENSOR = struct.pack("<Q", len(HEADER)) + HEADER + bytes(8)
DEEP = '{"a":' * 100_000 + "0" + "}" * 100_000
MISTAKES = {
    # Of the schema: known from the words alone.
    "--actor.learning_rat 1": "the nearest is actor.learning_rate",
    "--actor.tp 2": "the nearest is parallel.tp",
    "--optimizer.lr 1": "optimizer",
    "--run.steps many": "must be an integer",
    "--run.steps 0": "must be at least 1",
    "--run.steps": "has no value",
    "--model.dtype fp8": 'must be one of "float32", "bfloat16", "float16", got "fp8"',
    "--dry-rnu": "the nearest is --dry-run",
    "quickstart": "must be a TOML file or an option",
    "missing.toml": "is not a file",
    "{dir}/broken.toml": "is not valid TOML",
    "--engine.args.tp_size 2": "the harness derives it from parallel.tp",
    "--run.phase_timeouts.snyc 9": "the nearest is sync",
    "--inject kil@sync": "the nearest is kill",
    "--inject kill@snyc": "the nearest is sync",
    "--inject kill@sync:7": "the mesh has the ranks 0 to 1",
    "--rollout.prompts_per_step 9": "must divide the 18 sequences of a step",
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
    "--model.name qwen4": "the nearest tiny model is qwen",
    "--model.name runs/data/addition/model": "make it with: python3 launch/prepare_data.py addition runs/data/addition",
    "--model.name {dir}/nothing": 'nothing" is not a folder here',
    "--model.name {dir}/empty": "has no config.json",
    "--model.name {dir}/bare": "has no tokenizer",
    "--model.name {dir}/bad_config": "config.json must be a JSON object",
    "--model.name {dir}/deep_config": "config.json must be a JSON object, and is nested too deeply",
    "--model.name {dir}/pipe_config": "config.json must be a JSON object, and is no regular file",
    "--model.name {dir}/bad_tokenizer": "tokenizer_config.json must be a JSON object, and is not",
    "--model.name {dir}/deep_header": "cannot be read: ",
    "--model.name {dir}/bad_dtype": "model.safetensors (",
    "--model.name {dir}/truncated": "model.safetensors (81 bytes) cannot be read: ",
    "--model.name {dir}/no_header": "model.safetensors (3 bytes) cannot be read: ",
    "--model.name {dir}/part": "lacks 1 of the 2 files of weights that model.safetensors.index.json names, 2.safetensors first",
    "--model.name {dir}/bad_index": "model.safetensors.index.json is no index of safetensors files",
    "--model.name {dir}/unknown": 'model_type = "qwen22", for which the installed transformers has no causal language model; the nearest is qwen2',
    "--model.name {dir}/gpt --parallel.pp 4": "the model has only 3 layers",
    "--task.source {dir}/nothing": 'OWNER/NAME, got "{dir}/nothing"',
    "--task.source {dir}/empty": "has no .jsonl or .parquet file",
    "--validation.source {dir}/empty": "empty has no .jsonl or .parquet file",
    "--task.source {dir}/data --task.split no_rows": "has no rows",
    "--task.source {dir}/data --task.split bad_json": "bad_json.jsonl line 2 is not JSON (Expecting property name enclosed in"
    " double quotes, column 2)",
    "--task.source {dir}/data --task.split no_column": "no_column.jsonl line 1: answer must be a text, got no such field",
    "--task.source {dir}/data --task.split no_number": 'line 1 has the ground truth "two", but task.reward = "gsm8k" needs a number',
    "--task.source {dir}/data --task.split other_columns": "row 1: question must be a text",
    "--task.source {dir}/data --task.split no_messages": "row 1: prompt must be a list of messages",
    "--task.source {dir}/data/no_truth.parquet": "no_truth.parquet row 1: reward_model.ground_truth must be set",
    "--task.source arithmetic,{dir}/data/no_truth.parquet": "row 1: reward_model.ground_truth must be set",
    "--task.reward gsm9k": "must be one of gsm8k, gsm8k_strict, digits, math, math_strict, data_source, or your own as module:function",
    "--task.reward {dir}/no_own.py:scores": "there is no file {dir}/no_own.py",
    "--task.reward data_source": 'arithmetic/train row 1 has data_source "", but task.reward = "data_source" can score openai/gsm8k',
    "--task.source {dir}/data --task.split few": "must be at most the 2 rows",
    "--task.source arithmetc": 'OWNER/NAME, got "arithmetc"',
    "--task.template {{question}}{{hint}}": "must have the field {{question}}, and only that one",
    "--engine.args.mem_fraction_statc 0.5": "the nearest it has is mem_fraction_static",
    "--engine.args.mem_fraction_static high": "must be a number above 0 and at most 1",
    "--engine.args.max_running_requests 9.5": "takes an integer there",
    "--engine.args.disable_cuda_graph 3": "takes true or false there",
    "--engine.args.attention_backend torch_nativ": "the nearest is torch_native",
    "--model.overrides.hidden_sise 64": "the config of qwen2 has no field hidden_sise; the nearest is hidden_size",
    "--model.overrides.hidden_size wide": "must be a whole number of at least 1, got ",
    "--model.overrides.num_attention_heads 3": "num_attention_heads = 3 must be a multiple of its num_key_value_heads = ",
    "--model.overrides.num_attention_heads 12": "must be a multiple of its num_attention_heads = 12",
    "--parallel.pp 4": "the model has only 2 layers",
    "--model.name qwen3_moe --engine.args.ep_size 3": "must divide parallel.tp = 2 and the model's 8 experts",
    "--model.name qwen3_moe --model.overrides.num_experts_per_tok 9": "num_experts_per_tok = 9 is more than the model's 8 experts",
    "--model.name deepseek_v3 --model.overrides.n_group 3": "must be a multiple of its n_group = 3",
    "--rollout.max_response_tokens 4096": "the model's context is 2048",
    "--engine.args.context_length 128": "engine.args.context_length is 128",
    "--engine.args.context_length 8192 --rollout.max_response_tokens 4096": "the model's context is 2048",
    # An engine that no sync can reach.
    "--engine.args.quantization fp8": "a quantized engine keeps parameters whose shapes differ",
    "--engine.args.torchao_config int8wo": "a quantized engine keeps parameters whose shapes differ",
    "--engine.args.quantization awq": "weight updates cannot load",
    "--engine.args.quantization not_yet_known": "weight updates cannot load",
    "--model.name {dir}/quantized": "is quantized (fp8, says quantization_config in its config.json)",
    "--engine.args.speculative_algorithm EAGLE --engine.device cuda": "says num_nextn_predict_layers = 0",
    "--engine.args.speculative_algorithm EAGLE --engine.device cpu": "speculative_num_steps is not set",
    "--engine.args.speculative_algorithm EAGLE3 --weights.transport pull --engine.device cuda": 'use "bucket", "tensor" or "disk"',
    "--engine.args.speculative_algorithm EAGLE3 --engine.device cuda": "weights.verify = true cannot",
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Models and data that lack something."""
    import pyarrow
    from pyarrow import parquet

    path = tmp_path_factory.mktemp("wrong")
    (path / "broken.toml").write_text("[run\nsteps = 3\n")
    for name in (
        "empty",
        "bare",
        "bad_config",
        "gpt",
        "quantized",
        "truncated",
        "no_header",
        "unknown",
        "data",
        "part",
        "bad_index",
        "deep_config",
        "pipe_config",
        "bad_tokenizer",
        "deep_header",
        "bad_dtype",
    ):
        (path / name).mkdir()
    (path / "bare" / "config.json").write_text("{}")
    for name, text in (
        ("bad_config", "{"),
        ("gpt", '{"model_type": "gpt_neox", "num_hidden_layers": 3}'),
        ("truncated", '{"model_type": "llama"}'),
        ("no_header", '{"model_type": "llama"}'),
        ("unknown", '{"model_type": "qwen22"}'),
        ("quantized", '{"model_type": "llama", "quantization_config": {"quant_method": "fp8"}}'),
    ):
        (path / name / "config.json").write_text(text)
        (path / name / "tokenizer.json").write_text("{}")
        (path / name / "model.safetensors").write_bytes(NO_TENSORS)
    for name, index in (("part", '{"weight_map": {"a": "1.safetensors", "b": "2.safetensors"}}'), ("bad_index", "[]")):
        (path / name / "config.json").write_text('{"model_type": "llama"}')
        (path / name / "tokenizer.json").write_text("{}")
        (path / name / "1.safetensors").write_bytes(NO_TENSORS)
        (path / name / preflight.WEIGHT_INDEX).write_text(index)
    (path / "deep_config" / "config.json").write_text(DEEP)
    os.mkfifo(path / "pipe_config" / "config.json")
    for name in ("bad_tokenizer", "deep_header", "bad_dtype"):
        (path / name / "config.json").write_text('{"model_type": "llama"}')
        (path / name / "tokenizer.json").write_text("{}")
    (path / "bad_tokenizer" / "tokenizer_config.json").write_text("{not JSON")
    (path / "bad_dtype" / "model.safetensors").write_bytes(ONE_TENSOR.replace(b"F32", b"F99"))
    deep = struct.pack("<Q", len(DEEP)) + DEEP.encode()
    (path / "deep_header" / "model.safetensors").write_bytes(deep)
    (path / "truncated" / "model.safetensors").write_bytes(ONE_TENSOR[:-1])
    (path / "no_header" / "model.safetensors").write_bytes(b"not")
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


def test_a_full_shared_memory_is_named_before_a_rank_starts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(preflight.shutil, "disk_usage", lambda _: SimpleNamespace(free=3 << 20))
    with pytest.raises(ConfigError, match=r"/dev/shm has 3072 KiB free, and the engines of 2 ranks need at least 8192"):
        preflight.check_here(parse(CPU.split()).config)
    monkeypatch.setattr(preflight.shutil, "disk_usage", lambda _: SimpleNamespace(free=8 << 20))
    preflight.check_here(parse(CPU.split()).config)


FOLDERS = ["--weights.folder", "--rollout.save", "--checkpoint.every 1 --checkpoint.folder"]


@pytest.mark.parametrize("key", FOLDERS)
def test_a_folder_that_cannot_be_made_is_found_before_a_rank_starts(key: str, tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    environment = {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "2"}
    name = key.split()[-1].removeprefix("--")
    for given, cannot in (("file", "written to"), ("file/inner", "made")):
        config = parse([*key.split(), str(tmp_path / given), *CPU.split()]).config
        with pytest.raises(
            ConfigError, match=rf"^{name} = .* cannot be {cannot}: .*/file is a file; give another folder"
        ):
            preflight.check_rank(config, "launch/ppo.py", [], environment)
    preflight.check_rank(parse([*key.split(), str(tmp_path / "new"), *CPU.split()]).config, "", [], environment)
    assert not (tmp_path / "new").exists()


PREPARED = {
    "addition.toml": ["--model.name", "qwen2", "--task.source", "arithmetic", "--validation.source", "arithmetic"]
}
"""Configs for what launch/prepare_data.py writes -> what stands for it here."""


@pytest.mark.slow
def test_what_is_right_passes_without_a_word() -> None:
    for words in (
        [QUICKSTART],
        [QUICKSTART, "--model.name", "deepseek_v3", "--parallel.dp", "2", "--parallel.tp", "1"],
    ):
        resolved = preflight.check_here(parse(words).config)
        assert (resolved.warnings, resolved.not_checked) == ((), ())
    files = list((REPOSITORY / "configs").glob("*/*.toml"))
    assert files
    for file in files:
        preflight.check_plan(parse([str(file), *PREPARED.get(file.name, [])]).config)


DRAFT = "--weights.transport tensor --weights.verify false --engine.args.speculative_algorithm"
NOT_ON_CPU = {
    "--model.name {dir}/qwen2_moe": "cannot serve a qwen2_moe model: its shared expert ends in a Triton kernel",
    "--model.name {dir}/gpt_oss": "cannot serve a gpt_oss model",
    "--model.name {dir}/qwen3_next": "cannot serve a qwen3_next model",
    "--model.name {dir}/minimax_m2": "cannot serve a minimax_m2 model: its norm of queries and keys is a Triton kernel",
    f"{DRAFT} EAGLE3": 'engine.args.speculative_algorithm = "EAGLE3"',
    f"{DRAFT} NGRAM": 'engine.args.speculative_algorithm = "NGRAM"',
    "--engine.args.kv_cache_dtype fp8_e4m3": 'engine.args.kv_cache_dtype = "fp8_e4m3"',
}


@pytest.mark.parametrize("words", NOT_ON_CPU)
def test_what_cpu_mode_cannot_serve_is_125_before_a_rank_starts(
    words: str, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    for name in ("qwen2_moe", "gpt_oss", "qwen3_next", "minimax_m2"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "config.json").write_text(json.dumps({"model_type": name}))
        (tmp_path / name / "tokenizer.json").write_text("{}")
        (tmp_path / name / "model.safetensors").write_bytes(NO_TENSORS)
    asked = words.format(dir=tmp_path).split()
    assert preflight.main([*asked, "--engine.device", "cpu"]) == 125
    said = capfd.readouterr().err.strip()
    assert said.startswith("error: ") and "CPU mode cannot serve" in said and "\n" not in said
    assert NOT_ON_CPU[words] in said
    assert ppo.main([*asked, "--engine.device", "cpu", "--check"]) == 125
    preflight.check_plan(parse([*asked, "--engine.device", "cuda", "--model.dtype", "bfloat16"]).config)  # a GPU can


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
    words += ["--actor.minibatch_size", "12"]
    with pytest.raises(ConfigError, match="parallel.tp = 3 cannot work: the model's 8 attention heads .*CPU mode pads"):
        preflight.check_plan(parse(words).config)
    warnings = preflight.check_here(parse([*words, "--engine.device", "cpu"]).config).warnings
    assert any("refuses it on CUDA" in sentence for sentence in warnings)


def test_a_gpu_that_is_not_there(monkeypatch: pytest.MonkeyPatch) -> None:
    assert "hides every GPU" in preflight.no_gpu({"CUDA_VISIBLE_DEVICES": ""})
    monkeypatch.setattr(cpu_standins, "GPU_FILES", ())
    with pytest.raises(ConfigError, match='engine.device = "cuda" cannot work: this host has no GPU; use "cpu"'):
        preflight.check_here(parse(["--engine.device", "cuda"]).config)
    assert preflight.check_here(parse([]).config).config.engine.device == "cpu"


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
    found = preflight.overridable_fields(installed("transformers"), name)
    assert real <= found
    assert not {"hidden_sise", "self", "kwargs"} & found


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
    assert done.stderr.startswith(
        f'error: {words[0][2:]} = "{words[1]}" is not a folder here, and http://127.0.0.1:9 did not give'
    )
    assert len(done.stderr.splitlines()) == 1 and time.monotonic() - begin < 20


def test_rows_of_a_hub_are_not_known_before_the_run(tmp_path: Path) -> None:
    file = tmp_path / "rows.jsonl"
    file.write_text(json.dumps(ROW) + "\n")
    assert preflight.read_rows([str(file), str(file)], "train", 0) == (load_rows([str(file)] * 2, "train"), "")
    assert preflight.read_rows([str(file), "some/set"], "train", 0) == (
        load_rows([str(file)], "train"),
        "some/set is on the hub",
    )


@pytest.mark.parametrize("given", ["{dir}/file", "{dir}/file/below", "/dev/null/run", "{dir}/old"])
def test_a_run_directory_that_cannot_be_used_is_refused(given: str, tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    (tmp_path / "old").mkdir()
    (tmp_path / "old" / "config.toml").touch()
    check_run_folder("")
    check_run_folder(str(tmp_path / "new" / "run"))
    with pytest.raises(ConfigError, match=r"run\.dir = .*give another folder") as caught:
        check_run_folder(given.format(dir=tmp_path))
    assert "\n" not in str(caught.value)


def test_an_interface_is_checked_before_anything_starts(monkeypatch: pytest.MonkeyPatch) -> None:
    preflight.check_interface("", {})
    preflight.check_interface("lo", {})
    with pytest.raises(NetworkError, match="GLOO_SOCKET_IFNAME = nowhere0"):
        preflight.check_interface("", {"GLOO_SOCKET_IFNAME": "nowhere0"})
