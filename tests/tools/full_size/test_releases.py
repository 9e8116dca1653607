"""Releases of SGLang that a bisect has installed on this machine, asked about a model of true widths."""

import json
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from packaging.version import Version

from harness.runtime.errors import UnsupportedEnvironment
from harness.tools.engine_class.meta_groups import call_with
from harness.tools.full_size.compare import ask, compare
from harness.tools.trial.environment import Environment, store_root
from tests.tools.full_size.test_full_size import MODELS, with_layers

INSTALLED = {
    folder.parent.name.split("-")[1]: folder.parent / "venv" / "bin" / "python"
    for folder in sorted(store_root().glob("sglang-*/complete"))
}
"""Version -> its Python, of the environments that launch/bisect_versions.py keeps."""
ASKED = sorted(INSTALLED, key=Version)
ASKED = ASKED[:1] + ASKED[1:][-1:]
"""The oldest and the newest of them."""
NONE = pytest.param(
    "", marks=pytest.mark.skip(reason=f"{store_root()} has no environment of SGLang, which a bisect makes")
)


def ask_release(python: Path | str, *words: object) -> dict[str, Any]:
    return ask(Environment(python=str(python)), list(map(str, words)))


@pytest.fixture(scope="module")
def asked(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, Any]]:
    """Return a model, and what this release says of it."""
    folder = with_layers("qwen2_5_72b", 4, tmp_path_factory.mktemp("model"))
    return folder, ask_release(sys.executable, folder, "--tp", 4)


@pytest.mark.long
@pytest.mark.parametrize("version", ASKED or [NONE])
def test_an_installed_release_gets_and_holds_what_this_one_does(
    version: str, asked: tuple[Path, dict[str, Any]]
) -> None:
    folder, here = asked
    there = ask_release(INSTALLED[version], folder, "--tp", 4)
    assert there["versions"]["sglang"] == version != here["versions"]["sglang"]
    assert here["verdict"].startswith("every name arrives whole") and there["ranks"] == here["ranks"]
    assert compare(there, here).arrives == ()
    there["sent"].popitem()
    assert len(compare(there, here).arrives) == 1


def test_a_function_of_sglang_gets_what_it_names_and_no_more() -> None:
    def of_an_older_release(*, tp_size: int, pp_size: int, backend: str = "nccl") -> tuple[int, int, str]:
        return tp_size, pp_size, backend

    known = {"tp_size": 4, "pp_size": 2, "backend": "fake", "gpu_id": 0}
    assert call_with(of_an_older_release, known) == (4, 2, "fake")


def test_what_a_release_wants_and_nobody_knows_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    def of_a_newer_release(*, tp_size: int, moon_phase: int) -> None:
        raise AssertionError((tp_size, moon_phase))

    source = SimpleNamespace(version=lambda: "9.9")
    monkeypatch.setattr("harness.tools.engine_class.meta_groups.installed", lambda _: source)
    with pytest.raises(UnsupportedEnvironment, match=r"sglang 9\.9: of_a_newer_release wants moon_phase"):
        call_with(of_a_newer_release, {"tp_size": 4})


@pytest.mark.long
@pytest.mark.parametrize(("version", "is_followed"), [("0.5.12", False), ("0.5.13", True)])
def test_the_release_that_follows_the_norms_of_qwen3_5(version: str, is_followed: bool, tmp_path: Path) -> None:
    """A bisect found it. 0.5.12's GemmaRMSNorm makes a new tensor of weight + 1 at each load; 0.5.13 writes into the
    old one."""
    if version not in INSTALLED:
        pytest.skip(f"{store_root()} has no environment of SGLang {version}")
    fields = json.loads((MODELS / "qwen3_5_397b_a17b" / "config.json").read_text())
    fields["text_config"] |= {"num_hidden_layers": 4, "layer_types": fields["text_config"]["layer_types"][:4]}
    (tmp_path / "config.json").write_text(json.dumps(fields))
    norm = "model.language_model.layers.0.input_layernorm.weight"
    assert (norm not in ask_release(INSTALLED[version], tmp_path)["not_followed"]) == is_followed
