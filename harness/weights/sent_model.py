"""SentModel: a trainer's model, and what a sync sends of it. Converters are chained here and nowhere else.

the model's tensors  ->  under their checkpoint names  ->  and the draft model's layer  ->  quantized
CheckpointConverter               DraftLayer.after                 Quantizer.converter
"""

from collections.abc import Collection
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import nn

from harness.config.schema import Config
from harness.trainer.model import named_tensors
from harness.weights.converter import CheckpointConverter, Converter
from harness.weights.draft_layer import NO_DRAFT_LAYER, DraftLayer, draft_layer_of
from harness.weights.names import names_in_checkpoint
from harness.weights.quantizers import quantizer_of


@dataclass(frozen=True, slots=True)
class SentModel:
    """A trainer's model, and what a sync sends of it."""

    model: nn.Module
    converter: Converter
    """What is sent."""
    unquantized: Converter | None = None
    """The converter without its quantization; None if it does not quantize."""
    dtype: torch.dtype | None = None
    """The engine's, to which parameters are cast on their way; None: they are sent as the model has them."""
    draft_layer: DraftLayer = NO_DRAFT_LAYER
    checkpoint_names: Collection[str] = ()
    """Of the tensors in the model's own checkpoint; empty if they are not known."""

    @classmethod
    def plain(cls, model: nn.Module, dtype: torch.dtype | None = None, names: Collection[str] = ()) -> "SentModel":
        """Return a model's own tensors under their checkpoint names, in `dtype`. names: see checkpoint_names.

        Raise NotAViewError for an architecture that needs another converter.
        """
        return cls(model, CheckpointConverter(model, dtype), dtype=dtype, checkpoint_names=names)

    @classmethod
    def of_run(cls, config: Config, model: nn.Module, folder: Path, device: torch.device) -> "SentModel":
        """Return what a run sends of its model. folder: the model's own. A collective call of all ranks.

        Raise NotAViewError for an architecture that needs another converter, ConfigError if the folder lacks the layer
        of a draft model that the run's engine serves.
        """
        dtype = getattr(torch, config.model.precision.computed)
        trained = CheckpointConverter(model, dtype)
        draft = draft_layer_of(config, str(folder), trained, device)
        converter = unquantized = draft.after(trained)
        if quantizer := quantizer_of(config.model.precision):
            converter = quantizer.converter(unquantized)
        return cls(model, converter, unquantized, dtype, draft, names_in_checkpoint(str(folder)))

    def held_tensors(self) -> dict[str, torch.Tensor]:
        """Return the live tensors that what is sent is made of: the model's, and those of the draft's layer."""
        return dict(named_tensors(self.model)) | dict(self.draft_layer.tensors)
