"""The MTP layer of a checkpoint: read next to the trainer's tensors, sent as it is, and found by role where it did not
arrive."""

import json
from collections.abc import Mapping
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from harness.rollout.served_models import ServedModels
from harness.weights.draft_layer import NO_DRAFT_LAYER, read_draft_layer
from harness.weights.fusing import fusing_groups
from harness.weights.loader import EngineLoader
from harness.weights.trainer_weights import TrainerWeights
from harness.weights.verification.comparison import compare_fingerprints
from harness.weights.worker import kept_trace
from tests.weights.toy_model import Given, Holder, InProcessEngine, view_of

pytestmark = pytest.mark.usefixtures("alone")

TRAINED = {
    "model.embed_tokens.weight": torch.ones(4, 2),
    "model.layers.0.mlp.gate.weight": torch.ones(3, 2),
    "model.layers.0.mlp.gate.e_score_correction_bias": torch.ones(3),
}
MTP = {
    "model.layers.1.mlp.gate.weight": torch.full((3, 2), 2.0),
    "model.layers.1.mlp.gate.e_score_correction_bias": torch.full((3,), 1.001),
    "model.layers.1.eh_proj.weight": torch.full((2, 4), 3.0),
}
COPIES = {
    "model.layers.1.embed_tokens.weight": torch.ones(4, 2),
    "model.layers.1.shared_head.head.weight": torch.ones(4, 2),
}


def sending(tensors: Mapping[str, torch.Tensor]) -> Given:
    """A converter that sends these, weights in bfloat16."""
    dtypes = {name: torch.float32 if name.endswith("bias") else torch.bfloat16 for name in tensors}
    views = tuple(view_of(name, tuple(each.shape), dtype=dtypes[name]) for name, each in tensors.items())
    return Given(dict(tensors), views)


def checkpoint(folder: Path, tensors: Mapping[str, torch.Tensor]) -> str:
    fields = {"model_type": "deepseek_v3", "num_hidden_layers": 1, "num_nextn_predict_layers": 1}
    (folder / "config.json").write_text(json.dumps(fields))
    save_file(dict(tensors), folder / "model.safetensors")
    return str(folder)


def test_the_layer_is_read_in_the_dtypes_in_which_the_trainer_sends(tmp_path: Path) -> None:
    model = checkpoint(tmp_path, TRAINED | MTP | COPIES)
    draft = read_draft_layer(model, sending(TRAINED), torch.device("cpu"))
    assert draft.tensors.keys() == MTP.keys() and draft.copies == COPIES.keys()
    dtypes = {view.name.rpartition(".")[2]: view.dtype for view in draft.views}
    assert dtypes == {"weight": torch.bfloat16, "e_score_correction_bias": torch.float32}
    both = draft.after(sending(TRAINED))
    assert [view.name for view in both.layout()] == [*TRAINED, *sorted(MTP)]
    assert both.tensors().keys() == TRAINED.keys() | MTP.keys()
    unchanged = sending(TRAINED)
    assert NO_DRAFT_LAYER.after(unchanged) is unchanged
    save_file(TRAINED, tmp_path / "model.safetensors")  # and the layer in another file
    save_file(MTP, tmp_path / "mtp.safetensors")
    index = dict.fromkeys(TRAINED, "model.safetensors") | dict.fromkeys(MTP, "mtp.safetensors")
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps({"weight_map": index}))
    assert read_draft_layer(model, sending(TRAINED), torch.device("cpu")).tensors.keys() == MTP.keys()


@pytest.mark.parametrize("tensors", [TRAINED, TRAINED | COPIES])
def test_a_checkpoint_without_the_layer_is_refused(tmp_path: Path, tensors: Mapping[str, torch.Tensor]) -> None:
    with pytest.raises(ValueError, match=r"must have the layer .* model\.layers\.1\.\*, and has none"):
        read_draft_layer(checkpoint(tmp_path, tensors), sending(TRAINED), torch.device("cpu"))


def test_what_only_the_draft_holds_is_named_by_its_role() -> None:
    gate, eh_proj = "model.layers.0.mlp.gate.weight", "model.layers.1.eh_proj.weight"
    of_target = {name: TRAINED[name] for name in ("model.embed_tokens.weight", gate)}
    of_draft = {eh_proj: MTP[eh_proj]}
    target, draft = Holder(of_target), Holder(of_draft)
    model = ServedModels(target, draft)
    weights = TrainerWeights(sending(of_target | of_draft), 1 << 20)
    loader = EngineLoader(InProcessEngine(model), weights.groups)  # type: ignore[arg-type]
    with torch.no_grad():
        model.load_weights([(name, tensor.bfloat16()) for name, tensor in weights.tensors.items()])
        assert compare_fingerprints(weights, loader).wrong == ()
        draft.get_parameter(eh_proj).add_(1)
        assert compare_fingerprints(weights, loader).wrong == (f"draft: {eh_proj}",)
        target.get_parameter(gate).add_(1)
        assert set(compare_fingerprints(weights, loader).wrong) == {f"draft: {eh_proj}", gate}
    found = kept_trace.cover(model, fusing_groups(sending(of_target).layout()))
    assert {name: count for name, (count, _) in found.missing.items() if count} == {f"draft.{eh_proj}": 8}
