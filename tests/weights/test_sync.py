from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM

from harness.config import schema
from harness.models.tiny import tiny_config, tiny_model
from harness.weights.sync import WeightSync

NO_ENGINE: Any = None  # planning and saving never call it


@pytest.mark.parametrize("name", ["qwen3_moe", "deepseek_v3"])
def test_what_is_saved_is_a_checkpoint_even_if_the_source_is_in_shards(name: str, tmp_path: Path) -> None:
    model = tiny_model(tiny_config(name), seed=1)
    tiny_model(tiny_config(name), seed=2).save_pretrained(tmp_path / "source", max_shard_size="100KB")
    assert (tmp_path / "source" / "model.safetensors.index.json").exists()
    sync = WeightSync(NO_ENGINE, model, schema.Weights(bucket_megabytes=1))
    sync.save(tmp_path / "saved", tmp_path / "source", rank=0)
    assert {file.name for file in (tmp_path / "saved").iterdir()} >= {"config.json", "model.safetensors"}
    assert not list((tmp_path / "saved").glob("*.index.json"))
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path / "saved").state_dict()
    for key, tensor in model.state_dict().items():
        assert torch.equal(loaded[key], tensor), key


def test_a_source_that_is_a_hub_id_gives_the_weights_alone(tmp_path: Path) -> None:
    sync = WeightSync(NO_ENGINE, tiny_model(tiny_config("qwen2"), seed=1), schema.Weights())
    sync.save(tmp_path / "saved", Path("Qwen/Qwen2.5-0.5B"), rank=0)
    assert [file.name for file in (tmp_path / "saved").iterdir()] == ["model.safetensors"]


def test_only_rank_0_saves(tmp_path: Path) -> None:
    sync = WeightSync(NO_ENGINE, tiny_model(tiny_config("qwen2"), seed=1), schema.Weights())
    sync.save(tmp_path / "saved", tmp_path, rank=1)
    assert not (tmp_path / "saved").exists()


def test_the_plan_covers_the_model_in_buckets_of_the_configured_size() -> None:
    model = tiny_model(tiny_config("qwen2"), seed=1)
    sync = WeightSync(NO_ENGINE, model, schema.Weights(bucket_megabytes=1, transport="tensor"))
    assert sync.nbytes == sum(parameter.nbytes for parameter in model.parameters())
    assert sync.load_format is None
    assert WeightSync(NO_ENGINE, model, schema.Weights()).load_format == "flattened_bucket"
