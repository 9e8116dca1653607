"""What is looked at before any rank starts, of this machine, its files and the hub; tests/said has what is then said."""

import os
import struct
import subprocess
import sys
import time
from dataclasses import fields
from pathlib import Path
from types import SimpleNamespace

import pytest

from harness.cluster.network import NetworkError
from harness.config.layers import ConfigError
from harness.config.schema import ENGINE_MODELS, Config, named_paths
from harness.rollout.sglang_api.probe import installed
from harness.runtime import cpu_standins
from harness.task.tiny_models import NOT_OVERRIDABLE, tiny_config, tiny_fields
from harness.tools import preflight
from harness.tools.command_line import parse
from tests.end_to_end.launching import QUICKSTART, REPOSITORY

ROW = {"question": "What is 1 + 1?", "answer": "It is 2. #### 2"}
CPU = "--engine.device cpu"
NO_TENSORS = struct.pack("<Q", 2) + b"{}"
"""A file of safetensors."""


def test_a_full_shared_memory_is_named_before_a_rank_starts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(preflight.shutil, "disk_usage", lambda _: SimpleNamespace(free=3 << 20))
    with pytest.raises(ConfigError, match=r"/dev/shm has 3072 KiB free, and the engines of 2 ranks need at least 8192"):
        preflight.check_here(parse(CPU.split()).config)
    monkeypatch.setattr(preflight.shutil, "disk_usage", lambda _: SimpleNamespace(free=8 << 20))
    preflight.check_here(parse(CPU.split()).config)


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


def test_a_gpu_that_is_not_there(monkeypatch: pytest.MonkeyPatch) -> None:
    assert "hides every GPU" in preflight.no_gpu({"CUDA_VISIBLE_DEVICES": ""})
    monkeypatch.setattr(cpu_standins, "GPU_FILES", ())
    with pytest.raises(ConfigError, match='engine.device = "cuda" cannot work: this host has no GPU; use "cpu"'):
        preflight.check_here(parse(["--engine.device", "cuda"]).config)
    assert preflight.check_here(parse([]).config).config.engine.device == "cpu"


def test_the_quickstart_is_told_how_many_ranks_to_start(capfd: pytest.CaptureFixture[str]) -> None:
    assert preflight.main(CPU.split()) == 0 and capfd.readouterr().out == "2\n"
    assert preflight.main([*CPU.split(), "--engine.args.kv_cache_dtype", "fp8_e4m3"]) == 125


def test_ranks_look_for_what_their_own_host_must_have(tmp_path: Path) -> None:
    for rank in (0, 1):
        (tmp_path / f"step00000-rank000{rank}.safetensors").touch()
    words = f"--rollout.load {tmp_path} --run.steps 1 --parallel.tp 4 --weights.folder /dev/null"
    config = parse([*words.split(), *CPU.split()]).config
    mesh = {"WORLD_SIZE": "4", "LOCAL_WORLD_SIZE": "2", "LOCAL_RANK": "0"}
    with pytest.raises(ConfigError, match="^weights.folder"):  # its two ranks have what they need
        preflight.check_rank(config, "launch/ppo.py", [], {"RANK": "0"} | mesh)
    with pytest.raises(ConfigError, match="^rollout.load .* lacks .*rank0002"):  # and another host's disk is its own
        preflight.check_rank(config, "launch/ppo.py", [], {"RANK": "2"} | mesh)


def test_every_key_that_names_files_has_a_check() -> None:
    config = Config()
    for section in (getattr(config, each.name) for each in fields(config)):
        for each in fields(section):
            if each.metadata:
                setattr(section, each.name, ("x",) if isinstance(getattr(section, each.name), tuple) else "x")
    config.engine.args = dict.fromkeys(ENGINE_MODELS, "x")
    named = {key for use in ("read", "written") for key, _ in named_paths(config, use)}
    assert named == preflight.CHECKS.keys() and len(named) == 12


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


@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_a_rank_whose_python_lacks_packages_says_so_in_one_sentence(device: str) -> None:
    variables = {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2"}
    command = [sys.executable, "-S", "launch/ppo.py", QUICKSTART, "--engine.device", device]
    done = subprocess.run(command, cwd=REPOSITORY, env=os.environ | variables, capture_output=True, text=True)
    assert done.returncode == 2
    assert done.stderr.startswith("error: launch/ppo.py needs torch and psutil and transformers and sglang, which ")
    assert len(done.stderr.splitlines()) == 1


def test_an_interface_is_checked_before_anything_starts(monkeypatch: pytest.MonkeyPatch) -> None:
    preflight.check_interface("", {})
    preflight.check_interface("lo", {})
    with pytest.raises(NetworkError, match="GLOO_SOCKET_IFNAME = nowhere0"):
        preflight.check_interface("", {"GLOO_SOCKET_IFNAME": "nowhere0"})
