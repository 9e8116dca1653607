"""Questions that tests ask SGLang's classes and a trainer's memory; forks.py runs each in a fork of its own."""

import dataclasses
import json
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch

from harness.config.layers import Layer, build_config
from harness.task.tiny_models import tiny_config
from harness.tools.engine_class import meta_model
from harness.tools.engine_class.absent_hardware import AssumedGpu
from harness.tools.engine_class.engine_answer import ask_engine
from harness.tools.engine_class.forks import in_forks
from harness.tools.engine_class.traced_ranks import EngineShape
from harness.tools.full_size.command import prepare_import
from harness.tools.full_size.trainer_memory import Execution, trainer_peaks
from harness.tools.full_size.trainer_names import trainer_layout
from harness.weights.fusing import fusing_groups


def imported(folder: str, draft: bool = False) -> Path:
    """Import the classes of this model."""
    prepare_import(Path(folder), draft)
    meta_model.import_all(Path(folder))
    return Path(folder)


def kv_caches(folder: str, tp: int, pp: int) -> list[dict[str, dict[str, object]]]:
    """Return the KV cache of the first rank of each stage."""
    arguments, model = {"tp_size": tp, "pp_size": pp, "ep_size": 1, "dtype": "bfloat16"}, imported(folder)
    jobs = {rank: (model, arguments, rank) for rank in range(0, tp * pp, tp)}
    found = in_forks(_kv_caches_of_rank, jobs, 2)
    return [found[rank] for rank in sorted(found)]


def _kv_caches_of_rank(folder: Path, arguments: dict[str, Any], rank: int) -> dict[str, dict[str, object]]:
    AssumedGpu().answer()
    built = meta_model.build_on_meta(folder, arguments, rank)
    return {kind: dataclasses.asdict(each) for kind, each in built.kv_caches.items()}


def with_vision(folder: str) -> dict[str, list[Any]]:
    """Return what two ranks of an engine with multimodal input do with what a trainer sends."""
    arguments = {"tp_size": 2, "pp_size": 1, "ep_size": 1, "dtype": "bfloat16", "enable_multimodal": True}
    shape = EngineShape(folder=imported(folder), arguments=arguments, tp=2, pp=1, processes=2)
    answer = ask_engine(shape, fusing_groups(trainer_layout(shape.folder, torch.bfloat16)))
    return {
        "problems": list(map(str, answer.findings)),
        "notes": sorted({note for each in answer.ranks for note in each.notes}),
        "held": sorted(answer.ranks[0].held),
        "held_layers": sorted(answer.ranks[0].held_layers),
    }


def sglang_configs(*folders: str) -> dict[str, dict[str, Any]]:
    """Return what SGLang's ModelConfig reads of each folder: architecture, quantization, the language model's
    numbers."""
    from sglang.srt.configs.model_config import ModelConfig

    read = {}
    for folder in folders:
        config = ModelConfig(folder)
        published = json.loads((Path(folder) / "config.json").read_text())
        text = config.hf_config.text_config if "text_config" in published else config.hf_config
        numbers = [field for field, value in published.get("text_config", published).items() if isinstance(value, int)]
        read[Path(folder).name] = {
            "architecture": config.hf_config.architectures[0],
            "quantization": config.quantization,
            "fields": {field: getattr(text, field, None) for field in numbers},
        }
    return read


def sglang_parameters(folder: str) -> int:
    """Return the number of parameters of SGLang's own class, as one rank has them."""
    AssumedGpu().answer()
    with patch("torch.cuda.Stream"):  # some classes make streams while they are built
        built = meta_model.build_on_meta(imported(folder), {"tp_size": 1, "dtype": "bfloat16"}, 0)
    return sum(parameter.numel() for parameter in built.model.parameters())


def peaks(
    name: str, overrides: dict[str, Any], keys: dict[str, Any], ranks: int, role: str, every: bool
) -> dict[str, int]:
    """Return what a trainer rank holds; every: execute each layer, and not only as many as tell what all hold."""
    config = build_config([Layer("a default", {"model": {"dtype": "bfloat16"}}), Layer("a test", keys)])
    whole = Execution(model_config=tiny_config(name, "cpu", overrides), config=config, ranks=ranks, role=role)
    if every:
        return dataclasses.asdict(whole.run())
    parts = [dataclasses.replace(whole, layers=each).run() for each in whole.layers_to_execute()]
    return dataclasses.asdict(trainer_peaks(whole, parts))
