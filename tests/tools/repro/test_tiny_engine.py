"""What a tiny engine's answers are compared with; the engine is a stand-in that answers as a model would."""

import re
from pathlib import Path
from typing import Any

import pytest
import torch

from harness.tools.repro import tiny_engine
from harness.tools.repro.tiny_engine import OTHER_WEIGHTS, TinyEngine, checkpoint_tensors


class GreedyEngine:
    """An engine that has these weights."""

    model: Any

    def generate(self, input_ids: list[list[int]], sampling_params: dict[str, Any], return_logprob: bool) -> Any:
        tokens, sampled = list(input_ids[0]), []
        for _ in range(sampling_params["max_new_tokens"]):
            with torch.no_grad():
                log_probs = self.model(torch.tensor([tokens])).logits[0, -1].float().log_softmax(-1)
            tokens.append(int(log_probs.argmax()))
            sampled.append((float(log_probs.max()), tokens[-1], None))
        return [{"meta_info": {"output_token_logprobs": sampled}}]


def test_the_difference_is_small_with_the_same_weights_only(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(tiny_engine, "NEW_TOKENS", 4)
    engine = TinyEngine(api=None, engine=GreedyEngine(), folder=Path(), name="qwen2", device="cpu")  # type: ignore[arg-type]
    engine.engine.model = trainer = engine.trainer(seed=0)
    engine.compare(trainer)
    assert "(same weights)" in capsys.readouterr().out
    engine.compare(engine.trainer(seed=1))
    assert re.search(OTHER_WEIGHTS, capsys.readouterr().out)
    monkeypatch.setattr(tiny_engine, "OTHER_ABOVE", 1e6)
    with pytest.raises(RuntimeError, match="neither"):
        engine.compare(engine.trainer(seed=1))
    with torch.no_grad():
        trainer.model.norm.weight.fill_(torch.nan)
    engine.compare(engine.trainer(seed=1))
    assert re.search(OTHER_WEIGHTS, capsys.readouterr().out)


def test_tensors_have_the_names_of_a_checkpoint() -> None:
    engine = TinyEngine(api=None, engine=None, folder=Path(), name="qwen3_moe", device="cpu")  # type: ignore[arg-type]
    names = [name for name, _ in checkpoint_tensors(engine.trainer(seed=0))]
    assert "model.layers.1.mlp.experts.0.gate_proj.weight" in names and len(set(names)) == len(names)
