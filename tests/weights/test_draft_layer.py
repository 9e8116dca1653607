"""The MTP layer of a checkpoint: read next to the trainer's tensors, sent as it is, and found by role where it did not
arrive."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from harness.rollout.served_models import ServedModels
from harness.weights.draft_layer import NO_DRAFT_LAYER, read_draft_layer
from harness.weights.fusing import fusing_groups
from harness.weights.loader import EngineLoader
from harness.weights.tensor_view import TensorView
from harness.weights.trainer_weights import TrainerWeights
from harness.weights.verification.comparison import compare_fingerprints
from harness.weights.worker import kept_trace

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


class Given:
    """A converter that sends these tensors, weights in bfloat16."""

    def __init__(self, tensors: Mapping[str, torch.Tensor]) -> None:
        self.given = dict(tensors)

    def layout(self) -> tuple[TensorView, ...]:
        return tuple(
            TensorView(
                name=name,
                of=name,
                dtype=torch.float32 if name.endswith("bias") else torch.bfloat16,
                shape=tuple(each.shape),
                stride=each.stride(),
            )
            for name, each in self.given.items()
        )

    def tensors(self) -> Mapping[str, torch.Tensor]:
        return self.given


def checkpoint(folder: Path, tensors: Mapping[str, torch.Tensor]) -> str:
    fields = {"model_type": "deepseek_v3", "num_hidden_layers": 1, "num_nextn_predict_layers": 1}
    (folder / "config.json").write_text(json.dumps(fields))
    save_file(dict(tensors), folder / "model.safetensors")
    return str(folder)


def test_the_layer_is_read_in_the_dtypes_in_which_the_trainer_sends(tmp_path: Path) -> None:
    model = checkpoint(tmp_path, TRAINED | MTP | COPIES)
    draft = read_draft_layer(model, Given(TRAINED), torch.device("cpu"))
    assert draft.tensors.keys() == MTP.keys() and draft.copies == COPIES.keys()
    dtypes = {view.name.rpartition(".")[2]: view.dtype for view in draft.views}
    assert dtypes == {"weight": torch.bfloat16, "e_score_correction_bias": torch.float32}
    both = draft.after(Given(TRAINED))
    assert [view.name for view in both.layout()] == [*TRAINED, *sorted(MTP)]
    assert both.tensors().keys() == TRAINED.keys() | MTP.keys()
    unchanged = Given(TRAINED)
    assert NO_DRAFT_LAYER.after(unchanged) is unchanged


def test_a_layer_in_another_file_of_the_checkpoint_is_found(tmp_path: Path) -> None:
    model = checkpoint(tmp_path, TRAINED)
    save_file(MTP, tmp_path / "mtp.safetensors")
    index = dict.fromkeys(TRAINED, "model.safetensors") | dict.fromkeys(MTP, "mtp.safetensors")
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps({"weight_map": index}))
    assert read_draft_layer(model, Given(TRAINED), torch.device("cpu")).tensors.keys() == MTP.keys()


@pytest.mark.parametrize("tensors", [TRAINED, TRAINED | COPIES])
def test_a_checkpoint_without_the_layer_is_refused(tmp_path: Path, tensors: Mapping[str, torch.Tensor]) -> None:
    with pytest.raises(ValueError, match=r"must have the layer .* model\.layers\.1\.\*, and has none"):
        read_draft_layer(checkpoint(tmp_path, tensors), Given(TRAINED), torch.device("cpu"))


class Loads(torch.nn.Module):
    """Holds some of the tensors, under names of its own, and ignores the others."""

    def __init__(self, names: Mapping[str, str], tensors: Mapping[str, torch.Tensor]) -> None:
        super().__init__()
        self.names = dict(names)
        for own, name in names.items():
            self.register_parameter(own, torch.nn.Parameter(torch.zeros_like(tensors[name]), requires_grad=False))

    def load_weights(self, weights: Any) -> None:
        own = {name: each for each, name in self.names.items()}
        for name, tensor in weights:
            if name in own:
                self.get_parameter(own[name]).copy_(tensor)


class Engine:
    """Answers in this process, as the scheduler of one rank."""

    def __init__(self, model: Any) -> None:
        self.model = model
        self.group: Any = self
        self.ranks = (0,)

    def ask(self, function: Any, argument: object = None) -> Any:
        return function(self.model, argument)

    def all_gather(self, value: Any) -> dict[int, Any]:
        return {0: value}

    def weight_update(self) -> Any:
        return torch.no_grad()


def test_what_only_the_draft_holds_is_named_by_its_role() -> None:
    sent = TRAINED | MTP
    target = Loads({"embed": "model.embed_tokens.weight", "gate": "model.layers.0.mlp.gate.weight"}, sent)
    draft = Loads({"eh_proj": "model.layers.1.eh_proj.weight"}, sent)
    model = ServedModels(target, draft)
    weights = TrainerWeights(
        Given({name: sent[name] for name in (*target.names.values(), *draft.names.values())}), 1 << 20
    )
    loader = EngineLoader(Engine(model), weights.groups)  # type: ignore[arg-type]
    with torch.no_grad():
        model.load_weights([(name, tensor.bfloat16()) for name, tensor in weights.tensors.items()])
        assert compare_fingerprints(weights, loader).wrong == ()
        draft.eh_proj += 1
        assert compare_fingerprints(weights, loader).wrong == ("draft: model.layers.1.eh_proj.weight",)
        target.gate += 1
        assert set(compare_fingerprints(weights, loader).wrong) == {
            "draft: model.layers.1.eh_proj.weight",
            "model.layers.0.mlp.gate.weight",
        }


def test_a_parameter_of_the_draft_that_nothing_fills_is_named_by_its_role() -> None:
    target, draft = (
        Loads({"embed": "model.embed_tokens.weight"}, TRAINED),
        Loads({"own": "model.layers.1.eh_proj.weight"}, MTP),
    )
    found = kept_trace.cover(ServedModels(target, draft), fusing_groups(Given(TRAINED).layout()[:1]))
    assert {name: count for name, (count, _) in found.missing.items() if count} == {"draft.own": 8}
