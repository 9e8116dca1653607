"""config.json is read from the same three places by --dry-run, by the checks before a run and by each rank."""

from pathlib import Path

import pytest

from harness.config.layers import ConfigError
from harness.config.model_fields import model_fields
from harness.task.tiny_models import ARCHITECTURES, tiny_config


@pytest.fixture
def cached(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Have some/model in the cache of a hub that nobody can reach."""
    from huggingface_hub import constants

    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path))
    snapshot = tmp_path / "models--some--model" / "snapshots" / ("0" * 40)
    snapshot.mkdir(parents=True)
    tiny_config("qwen3").save_pretrained(snapshot)
    (tmp_path / "models--some--model" / "refs").mkdir()
    (tmp_path / "models--some--model" / "refs" / "main").write_text("0" * 40)


@pytest.mark.usefixtures("cached")
def test_a_hubs_model_that_is_cached_is_read_and_another_is_refused_offline() -> None:
    found = model_fields("some/model", {}, "cpu", download=True)
    assert found and found["model_type"] == "qwen3"
    assert model_fields("some/other", {}, "cpu") is None
    with pytest.raises(ConfigError, match="HF_HUB_OFFLINE forbids to download it"):
        model_fields("some/other", {}, "cpu", download=True)


@pytest.mark.parametrize("name", ARCHITECTURES)
def test_a_tiny_model_has_the_fields_that_are_written_when_it_is_made(name: str, tmp_path: Path) -> None:
    tiny_config(name, "cpu", {"num_hidden_layers": 3}).save_pretrained(tmp_path)
    written, planned = model_fields(str(tmp_path), {}, "cpu"), model_fields(name, {"num_hidden_layers": 3}, "cpu")
    assert written and planned
    for field in ("model_type", "num_hidden_layers", "hidden_size", "num_attention_heads", "vocab_size"):
        assert written[field] == planned[field]


def test_a_folder_without_a_config_is_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"config.json cannot be read: No such file"):
        model_fields(str(tmp_path), {}, "cpu")
