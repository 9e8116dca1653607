"""What the cases of models at their true widths are made of; test_cases.py runs the cases."""

import json
from pathlib import Path

import pytest

from harness.runtime.errors import UnsupportedEnvironment
from harness.tools.full_size.model_and_options import SHIPPED
from harness.tools.repro import true_size_engine
from harness.tools.repro.case import all_cases, describe


def shipped(name: str) -> dict[str, object]:
    return dict(json.loads((SHIPPED / name / "config.json").read_text()))


def test_a_model_has_fewer_layers_and_its_true_widths() -> None:
    with true_size_engine.true_model("mimo_v2_flash", 3, hidden_size=6144, quantization_config=None) as folder:
        made = json.loads((folder / "config.json").read_text())
    whole = shipped("mimo_v2_flash")
    differs = {key for key in whole if made.get(key) != whole[key]}
    assert differs == {
        "num_hidden_layers",
        "hybrid_layer_pattern",
        "moe_layer_freq",
        "hidden_size",
        "quantization_config",
    }
    assert made["hybrid_layer_pattern"] == [0, 1, 1] and made["hidden_size"] == 6144
    assert "quantization_config" not in made


def test_layers_and_fields_of_a_language_model_go_into_its_own_config() -> None:
    with true_size_engine.true_model("kimi_k3", 2, {"hidden_act": "silu"}) as folder:
        made = json.loads((folder / "config.json").read_text())
    assert "num_hidden_layers" not in made and made["text_config"]["num_hidden_layers"] == 2
    assert made["text_config"]["hidden_act"] == "silu"


def test_what_full_size_cannot_answer_is_no_failure(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps({"architectures": ["NobodysForCausalLM"], "model_type": "llama"}))
    with pytest.raises(UnsupportedEnvironment, match="has no class for NobodysForCausalLM"):
        true_size_engine.full_size(tmp_path, "--tp", 2)


def test_a_case_that_installs_a_release_says_so() -> None:
    installing = [case for case in all_cases().values() if case.release]
    assert installing and all(f"installs: sglang {case.release}" in describe(case) for case in installing)
