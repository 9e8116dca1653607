"""What every job builds before its own parts, where it needs no engine."""

from pathlib import Path

import pytest
from transformers import Gemma2Config, PretrainedConfig, Qwen2Config

from harness.inputs import check_vocabulary, trainer_attention
from harness.runtime.errors import UnsupportedEnvironment
from harness.task.data import Prompt, Row
from harness.tools.command_line import parse


def attention(config: PretrainedConfig, folder: Path, device: str) -> tuple[str, list[str]]:
    config.save_pretrained(folder)
    said: list[str] = []
    return trainer_attention(parse([]).config, folder, device, said.append), said


def test_attention_that_is_not_sdpa_is_said_with_its_reason(tmp_path: Path) -> None:
    assert attention(Qwen2Config(), tmp_path / "qwen2", "cuda") == ("sdpa", [])
    found, [line] = attention(Gemma2Config(), tmp_path / "gemma2", "cuda")
    assert found == "eager" and 'model.attention = "eager": gemma2 caps attention logits' in line


def test_a_cap_that_the_engine_leaves_out_on_the_cpu_cannot_run_there(tmp_path: Path) -> None:
    with pytest.raises(UnsupportedEnvironment, match="gemma2 caps attention logits .* torch_native"):
        attention(Gemma2Config(), tmp_path, "cpu")
    assert attention(Gemma2Config(attn_logit_softcapping=None), tmp_path / "without", "cpu") == ("sdpa", [])


def test_a_token_that_the_model_does_not_have_is_found_before_an_engine_does(tmp_path: Path) -> None:
    Qwen2Config(vocab_size=300).save_pretrained(tmp_path)
    row = Row(prompt="?", ground_truth="", where="train.jsonl line 7")
    check_vocabulary([Prompt(0, [299, 0], row), Prompt(1, [], row)], tmp_path)
    with pytest.raises(ValueError, match="train.jsonl line 7 has token 300, but model.name's vocab_size is 300"):
        check_vocabulary([Prompt(0, [5, 300, 6], row)], tmp_path)
