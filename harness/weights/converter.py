"""Converter: from the tensors that the trainer has to the tensors that are sent to the engine."""

from collections.abc import Mapping
from typing import Protocol

import torch
from torch import nn

from harness.trainer.model import named_tensors
from harness.weights.names import checkpoint_layout
from harness.weights.tensor_view import TensorView


class Converter(Protocol):
    """What a sync sends. One that quantizes makes two tensors of one: the blocks, and their scales."""

    @property
    def renames_only(self) -> bool:
        """Whether what is sent under the name, and in the dtype, of one of the model's tensors has that tensor's
        values.

        Then the checks also compare what is sent with the model.
        """

    def layout(self) -> tuple[TensorView, ...]:
        """Return the checkpoint tensors as they are sent: names, shapes and dtypes. Called once.

        Each is a view of one of `tensors()`, named by `of`. Together they hold every element of those tensors once.
        """

    def tensors(self) -> Mapping[str, torch.Tensor]:
        """Return the tensors to send, as they are now. Called at every sync; a collective call of all ranks.

        They are the live ones, or converted copies, with the same names and shapes each time. Each is a DTensor sharded
        by rows as FSDP2 does, or a plain tensor that is the same on every rank. A tensor may be wider than the layout
        says; it is then cast while it is sent.
        """


class CheckpointConverter:
    """Send the trainer's own tensors under their checkpoint names, cast to the engine's dtype on the way."""

    renames_only = True

    def __init__(self, model: nn.Module, dtype: torch.dtype | None = None) -> None:
        """dtype: the engine's dtype of parameters; None sends them as the model has them. Raise NotAViewError."""
        # Collected once: the tensors stay the same objects, and walking over the modules takes longer than a small
        # pull.
        self._tensors = dict(named_tensors(model))
        self._layout = checkpoint_layout(model, self._tensors, dtype)

    def layout(self) -> tuple[TensorView, ...]:
        return self._layout

    def tensors(self) -> Mapping[str, torch.Tensor]:
        return self._tensors
