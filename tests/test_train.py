"""What every job builds before its own parts, where it needs no engine."""

from pathlib import Path

import pytest
from transformers import Gemma2Config, PretrainedConfig, Qwen2Config

from harness.runtime.errors import UnsupportedEnvironment
from harness.tools.command_line import parse
from harness.train import trainer_attention


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
