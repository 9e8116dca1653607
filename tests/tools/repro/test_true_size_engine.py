"""What the cases of models at their true widths are made of; test_cases.py runs the cases."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from harness.runtime.errors import UnsupportedEnvironment
from harness.tools.full_size.model_and_options import SHIPPED
from harness.tools.repro import releases, true_size_engine
from harness.tools.repro.case import Case, all_cases, describe


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


def test_a_variant_goes_on_in_the_other_release(monkeypatch: pytest.MonkeyPatch) -> None:
    from harness.tools.bisection.installation import Environment
    from harness.tools.full_size import compare

    ran: list[list[str]] = []

    def run(command: list[str], **_: object) -> subprocess.CompletedProcess[bytes]:
        ran.append(command)
        return subprocess.CompletedProcess(command, 7)

    monkeypatch.setattr(releases.importlib.metadata, "version", lambda package: "0.5.16")
    monkeypatch.setattr(compare, "environment_of", lambda release: Environment(python=f"python-of-{release}"))
    monkeypatch.setattr(releases.subprocess, "run", run)
    monkeypatch.setattr(sys, "argv", ["", "some-case", "broken"])
    releases.use_release("0.5.16")
    assert ran == [], "this release is installed"
    with pytest.raises(SystemExit) as ended:
        releases.use_release("0.5.13")
    assert ended.value.code == 7
    assert ran == [["python-of-0.5.13", "-P", "-m", "harness.tools.repro.cases", "some-case", "broken"]]


def installing() -> list[Case]:
    return [case for case in all_cases().values() if case.releases]


def test_a_case_that_installs_a_release_says_so_and_has_time_for_it() -> None:
    assert installing()
    for case in installing():
        assert f"installs: sglang {case.releases[0]}" in describe(case)
        assert case.timeout_seconds > all_cases()["dsv3-fp8-tp32"].timeout_seconds
