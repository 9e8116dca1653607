"""A checkpoint beside config.json is compared with what the trainer's class has, by its headers."""

import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from harness.config.layers import ConfigError
from harness.tools.full_size.checkpoint_beside import CheckpointBeside, compare_checkpoint
from harness.weights.findings import grouped
from harness.weights.tensor_view import TensorView
from tests.weights.toy_model import view_of

SHAPES = {f"model.layers.{layer}.mlp.{name}.weight": (4, 6) for layer in range(3) for name in ("gate_proj", "up_proj")}
LAYOUT = tuple(view_of(name, shape, dtype=torch.bfloat16) for name, shape in SHAPES.items())
FIRST = next(iter(SHAPES))


def compared(
    folder: Path, layout: tuple[TensorView, ...] = LAYOUT, dtype: torch.dtype = torch.bfloat16, **others: str
) -> CheckpointBeside:
    """Compare a checkpoint that has this layout, with some names changed: name in the layout -> name in the file."""
    fields = {"num_hidden_layers": 3, "num_nextn_predict_layers": 1, "tie_word_embeddings": True}
    (folder / "config.json").write_text(json.dumps(fields))
    tensors = {others.get(view.name, view.name): torch.zeros(view.shape, dtype=dtype) for view in layout}
    save_file(tensors, folder / "model.safetensors")
    found = compare_checkpoint(folder, LAYOUT, ("vision_only",))
    assert found
    return found


def test_a_checkpoint_that_has_what_is_sent_has_no_problem(tmp_path: Path) -> None:
    found = compared(tmp_path)
    assert found.findings == () and "6 names compared, 6 of them with dtype and shape" in found.notes[0]


def test_a_misspelt_name_is_named_on_both_sides(tmp_path: Path) -> None:
    lacks, more = compared(tmp_path, **{FIRST: "model.layers.0.mlp.gate_porj.weight"}).findings
    assert str(lacks).startswith(f"{FIRST}: sent by the trainer, but the checkpoint")
    assert str(more).startswith("model.layers.0.mlp.gate_porj.weight: in the checkpoint")


def test_other_shapes_are_a_problem_once_for_all_layers_and_other_dtypes_a_note(tmp_path: Path) -> None:
    halves = tuple(replace(view, shape=(2, 6)) if "up_proj" in view.name else view for view in LAYOUT)
    (sentence,) = map(str, grouped(compared(tmp_path, halves).findings))
    assert "up_proj" in sentence and "[2, 6] in the checkpoint, but [4, 6]" in sentence and "and 2 like it" in sentence
    found = compared(tmp_path, dtype=torch.float32)
    assert found.findings == () and "float32 in the checkpoint, but sent as bfloat16" in "".join(found.notes)


def test_what_published_checkpoints_have_besides_is_a_note(tmp_path: Path) -> None:
    names = ("model.layers.3.enorm.weight", "vision_only.weight", "lm_head.weight")  # MTP, ignored, tied
    more = [view_of(name, (2,), dtype=torch.bfloat16) for name in names]
    found = compared(tmp_path, (*LAYOUT, *more))
    assert found.findings == () and sum("in the checkpoint alone" in note for note in found.notes) == 3


def test_an_index_without_its_files_is_compared_by_names(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("{}")
    names = {name: "model-00001-of-00002.safetensors" for name in SHAPES if name != FIRST}
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps({"weight_map": names}))
    found = compare_checkpoint(tmp_path, LAYOUT)
    assert found and found.findings[0].tensor == FIRST and "0 of them with dtype" in found.notes[0]


def test_a_folder_without_a_checkpoint_has_nothing_to_compare_and_a_broken_file_is_refused(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("{}")
    assert compare_checkpoint(tmp_path, LAYOUT) is None
    (tmp_path / "model.safetensors").write_bytes(b"\xff" * 20)
    with pytest.raises(ConfigError, match="model.safetensors must be a safetensors file"):
        compare_checkpoint(tmp_path, LAYOUT)
