"""The models of one scheduler as one: the target, and with speculative decoding its draft.

SGLang calls a custom weight loader once for each of them. What runs in a scheduler on our behalf sees one model, whose
tensors have the names of their role: target.model.layers.0..., draft.model.decoder.... A tensor that both hold, such as
the embedding that SGLang gives to its draft, is there once, under the target's name.
"""

import re
from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch import nn

DRAFT = "draft"
TARGET = "target"
STALE_DRAFT = "mtp-draft-stale"
"""The name, in the catalogue of launch/diagnose.py, of the failure that updates do not reach the draft."""
DRAFT_CLASS = re.compile(r"NextN$|MTP$")
"""SGLang's names for the classes that serve a model's layer for multi-token prediction (MTP) as its draft model."""
_KEPT = "_harness_served"


class ServedModels(nn.Module):
    """Target and draft. Loads as SGLang does: each takes of all tensors those that it knows."""

    def __init__(self, target: nn.Module, draft: nn.Module) -> None:
        super().__init__()
        self.target = target
        self.draft = draft

    def load_weights(self, weights: Iterable[tuple[str, torch.Tensor]]) -> None:
        sent = list(weights)
        for model in (self.target, self.draft):
            model.load_weights(list(sent))  # type: ignore[operator]

    def post_load_weights(self) -> None:
        for model in models_in(self):
            if hasattr(model, "post_load_weights"):
                model.post_load_weights()


def models_in(model: Any) -> tuple[Any, ...]:
    """Return SGLang's own models: those of ServedModels, or the model itself."""
    return (model.target, model.draft) if isinstance(model, ServedModels) else (model,)


def serve_together(models: Sequence[Any]) -> Any:
    """Return one model for all that a scheduler has, always the same for the same: checks keep what they know on it.

    models: in any order, since releases differ in which they show first. Raise ValueError if they are not a target and
    a draft.
    """
    if len(models) == 1:
        return models[0]
    drafts = [model for model in models if DRAFT_CLASS.search(type(model).__name__)]
    targets = [model for model in models if model not in drafts]
    if len(drafts) != 1 or len(targets) != 1:
        found = ", ".join(type(model).__name__ for model in models)
        raise ValueError(f"a scheduler must have one target and one draft (a class ...NextN or ...MTP), got {found}")
    kept = getattr(targets[0], _KEPT, ())
    if not (kept and kept[0].draft is drafts[0]):
        # In a tuple, because a module that is an attribute becomes a submodule.
        kept = (ServedModels(targets[0], drafts[0]),)
        setattr(targets[0], _KEPT, kept)
    return kept[0]


def role_of(engine_name: str) -> str:
    """Return "draft" for the name of a draft's tensor, otherwise "target"."""
    return DRAFT if engine_name.startswith(f"{DRAFT}.") else TARGET
