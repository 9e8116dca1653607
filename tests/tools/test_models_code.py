"""Python code in a model's folder: it runs by no door unless the user says engine.args.trust_remote_code."""

import json
import os
import re
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from harness.config.layers import ConfigError
from harness.inputs import load_tokenizer
from harness.rollout.engine_settings import without_models_code
from harness.rollout.sglang_api.probe import installed
from harness.task.tiny_models import save_tiny_model
from harness.tools import preflight
from harness.tools.command_line import parse
from harness.tools.models_code import model_classes, unasked_code
from tests.end_to_end.launching import QUICKSTART, REPOSITORY
from tests.tools.test_preflight import NO_TENSORS

DEEPSEEK_V3 = REPOSITORY / "configs" / "models" / "deepseek_v3" / "config.json"
AUTO_MAP = {"AutoConfig": "evil.Config", "AutoModel": "evil.Model", "AutoModelForCausalLM": "evil.Model"}
UNKNOWN_CLASS = {"model_type": "qwen2", "architectures": ["EvilForCausalLM"], "auto_map": AUTO_MAP}
UNKNOWN_TYPE = UNKNOWN_CLASS | {"model_type": "evil"}
OF_PROCESSOR = {"auto_map": {"AutoProcessor": "evil.Processor"}}
EVIL = """
from pathlib import Path
from transformers import PreTrainedTokenizerFast, Qwen2Config, Qwen2Model
Path(r"{ran}").touch()
class Tokenizer(PreTrainedTokenizerFast): pass
class Config(Qwen2Config): model_type = "evil"
class Model(Qwen2Model): pass
"""


def hostile(folder: Path, fields: Mapping[str, Any], processor: Mapping[str, Any] | None = None) -> Path:
    """Write a model whose code makes the file `ran` beside it."""
    folder.mkdir(exist_ok=True)
    for name, table in (("config.json", fields), ("preprocessor_config.json", processor)):
        if table is not None:
            (folder / name).write_text(json.dumps(table))
    (folder / "tokenizer.json").write_text("{}")
    (folder / "model.safetensors").write_bytes(NO_TENSORS)
    (folder / "evil.py").write_text(EVIL.format(ran=folder / "ran"))
    return folder


DOORS = {
    "quickstart": "-m harness.tools.preflight {config} --model.name {folder}",
    "sync": "launch/sync.py {config} --model.name {folder}",
    "mismatch": "launch/mismatch.py {config} --model.name {folder}",
    "step_bench": "launch/step_bench.py {config} --model.name {folder}",
    "export": "launch/export.py {config} --model.name {folder}",
    "draft": (
        "launch/ppo.py {config} --check --weights.verify false --engine.args.speculative_algorithm EAGLE3"
        " --engine.args.speculative_draft_model_path {folder}"
    ),
}


@pytest.mark.parametrize("door", DOORS)
def test_a_model_that_names_code_is_refused_in_one_sentence_before_a_rank_starts(door: str, tmp_path: Path) -> None:
    folder = hostile(tmp_path / "model", UNKNOWN_CLASS)
    words = DOORS[door].format(config=QUICKSTART, folder=folder).split()
    rank_0 = {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2"}
    done = subprocess.run(
        [sys.executable, *words],
        cwd=REPOSITORY,
        env=os.environ | (rank_0 if door in ("sync", "mismatch", "step_bench") else {}),
        input="y\n" * 9,
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert done.returncode == 2 and not (folder / "ran").exists(), done.stderr
    [said] = [line for line in done.stderr.splitlines() if "names Python code" in line]
    assert said.startswith("error: ") and "engine.args.trust_remote_code = true" in said


def test_the_trainer_runs_no_code_of_a_model_and_trust_does_not_change_that(tmp_path: Path) -> None:
    folder = str(hostile(tmp_path / "model", UNKNOWN_TYPE))
    for trust in ("false", "true"):
        words = ["--model.name", folder, "--engine.args.trust_remote_code", trust]
        with pytest.raises(ConfigError, match='model_type = "evil", .* the trainer runs no code of a model'):
            preflight.check_here(parse(words).config)


def test_the_tokenizer_of_a_model_is_not_made_by_its_code(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = hostile(tmp_path / "model", {"model_type": "evil"})
    save_tiny_model("qwen2", folder, 0, "float32", "cpu", {}, texts=["1 + 1"], weights=False)
    (folder / "config.json").write_text(json.dumps({"model_type": "evil"}))
    own = {"auto_map": {"AutoTokenizer": [None, "evil.Tokenizer"]}, "tokenizer_class": "Tokenizer"}
    (folder / "tokenizer_config.json").write_text(json.dumps(own))
    monkeypatch.setattr("builtins.input", lambda *_: "y")
    with pytest.raises(ConfigError, match="tokenizer_config.json names Python code .* the trainer runs no code"):
        load_tokenizer(folder)
    assert not (folder / "ran").exists()


def why(folder: Path, **arguments: str) -> str:
    words = [word for name, value in arguments.items() for word in (f"--engine.args.{name}", value)]
    return " ".join(unasked_code(parse(["--model.name", str(folder), *words]).config).values())


def test_code_is_refused_where_sglang_would_run_it_and_nowhere_else(tmp_path: Path) -> None:
    published = json.loads(DEEPSEEK_V3.read_text()) | {"auto_map": AUTO_MAP}  # as on the hub
    assert not why(hostile(tmp_path / "known", published))
    assert not why(hostile(tmp_path / "no_code", UNKNOWN_CLASS | {"auto_map": {}}))
    of_part = {"model_type": "qwen2", "text_config": {"auto_map": AUTO_MAP}}  # which SGLang copies to the top
    assert "has no class of its own for this model" in why(hostile(tmp_path / "of_part", of_part))
    asks_nobody = "names Python code for its processor (evil.Processor)"
    assert asks_nobody in why(hostile(tmp_path / "processor", published, OF_PROCESSOR))
    known = tmp_path / "known"
    assert asks_nobody in why(known, tokenizer_path=str(tmp_path / "processor"))
    assert not why(known, tokenizer_path=str(hostile(tmp_path / "unknown", UNKNOWN_CLASS)))  # no model is made of it
    assert "no class of its own for EvilForCausalLM" in why(
        known, speculative_draft_model_path=str(tmp_path / "unknown")
    )


def test_a_model_of_the_hub_is_looked_at_too(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from huggingface_hub import constants

    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path))
    cached = tmp_path / "models--some--model"
    (cached / "refs").mkdir(parents=True)
    (cached / "refs" / "main").write_text("0" * 40)
    (cached / "snapshots").mkdir()
    hostile(cached / "snapshots" / ("0" * 40), UNKNOWN_CLASS)
    assert "no class of its own for EvilForCausalLM" in why(Path("some/model"))


def test_whom_the_user_trusts_is_not_refused(tmp_path: Path) -> None:
    folder = str(hostile(tmp_path / "model", UNKNOWN_CLASS))
    preflight.check_plan(parse(["--model.name", folder, "--engine.args.trust_remote_code", "true"]).config)
    assert "json_model_override_args" not in without_models_code({"trust_remote_code": True})


def test_the_engine_gets_no_auto_map_beside_what_the_user_overrides() -> None:
    own = without_models_code(
        {"json_model_override_args": '{"rope_theta": 1.0, "auto_map": {"AutoModel": "evil.Model"}}'}
    )
    assert json.loads(own["json_model_override_args"]) == {"rope_theta": 1.0, "auto_map": {}}
    assert json.loads(without_models_code({})["json_model_override_args"]) == {"auto_map": {}}


SGLANG = """
import sys
from pathlib import Path
from sglang.srt.configs.model_config import ModelConfig
from sglang.srt.model_loader.utils import get_model_architecture
folder, *overrides = sys.argv[1:]
for each in overrides:
    try:
        get_model_architecture(ModelConfig(folder, trust_remote_code=False, model_override_args=each))
    except ValueError as error:
        print(error, file=sys.stderr)
    print(Path(folder, "ran").exists())
"""


@pytest.mark.long
def test_sglang_runs_the_code_of_a_class_that_it_lacks_unless_auto_map_is_empty(tmp_path: Path) -> None:
    folder = hostile(tmp_path / "model", UNKNOWN_CLASS)
    empty = without_models_code({})["json_model_override_args"]
    not_needed = ",".join(file.stem for file in model_classes(installed("sglang")))
    environment = {"SGLANG_USE_CPU_ENGINE": "1", "SGLANG_DISABLED_MODEL_ARCHS": not_needed}
    done = subprocess.run(
        [sys.executable, "-c", SGLANG, str(folder), empty, "{}"],
        cwd=REPOSITORY,
        env=os.environ | environment | {"HF_MODULES_CACHE": str(tmp_path / "modules")},
        check=True,
        stdout=subprocess.PIPE,
        text=True,
        timeout=240,
    )
    assert done.stdout.split()[-2:] == ["False", "True"]


def test_every_call_of_transformers_says_that_no_code_is_trusted() -> None:
    """Without the argument transformers asks on standard input."""
    files = [
        file
        for folder in ("harness", "launch")
        for pattern in ("*.py", "*.jinja")
        for file in (REPOSITORY / folder).rglob(pattern)
    ]
    call = re.compile(r"\bAuto\w+\.from_pretrained\((?:[^()]|\([^()]*\))*\)")
    calls = [found[0] for file in files for found in call.finditer(file.read_text(encoding="utf-8"))]
    assert len(calls) > 20
    assert not [each for each in calls if "trust_remote_code=False" not in each]
