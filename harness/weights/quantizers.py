"""The code of each format in which an engine may hold its weights (harness/config/precision.py has the facts about
them).
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

import torch

from harness.config.precision import Format, Precision
from harness.weights.converter import Converter
from harness.weights.fp8_blocks import Fp8BlockConverter
from harness.weights.fp8_checkpoint import write_quantized_model


class WriteModel(Protocol):
    """Writes a model's quantized copy, from its own files."""

    def __call__(self, source: str, folder: Path, dtype: torch.dtype, *, weights: bool = True) -> None:
        """Write the model in `source`, a folder or a hub id in the cache, to `folder`.

        dtype: what values are rounded to before they are quantized. weights: False leaves the tensors out.
        """


@dataclass(frozen=True, kw_only=True, slots=True)
class Quantizer:
    """The two ways to one format, which must make the same bytes: a comparison of them checks how a sync quantizes."""

    converter: Callable[[Converter], Converter]
    """Makes what a sync sends, of what it would send unquantized."""
    write_model: WriteModel


QUANTIZERS: Mapping[Format, Quantizer] = {
    "fp8_block": Quantizer(converter=Fp8BlockConverter, write_model=write_quantized_model),
}


def quantizer_of(precision: Precision) -> Quantizer | None:
    """Return what makes the format in which the engine holds its weights; None if it holds them as they are."""
    return QUANTIZERS[precision.quantized.name] if precision.quantized else None
