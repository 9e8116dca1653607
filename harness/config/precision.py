"""Precision: in what a run's weights are kept, sent and computed with. `config.model.precision` has the run's.

To add a format in which the engine holds its weights: an entry in QUANTIZED here, its converter and the writer of its
checkpoint in harness/weights/quantizers.py, and rules for what SGLang refuses in it (fp8_rules.py has those of
block-FP8). Nothing here imports torch, so dtypes are torch's names of them.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

Dtype = Literal["float32", "bfloat16", "float16"]
Format = Literal["fp8_block"]
RolloutPrecision = Literal["same", Format]
EnginePrecision = Literal[Dtype, Format]


@dataclass(frozen=True, kw_only=True, slots=True)
class Quantized:
    """A format in which the engine holds the matrices of decoder layers in fewer bits than it computes in."""

    name: Format
    weights: str
    """Their dtype."""
    scales: str
    """The dtype of the scales that are sent with them."""
    block: tuple[int, int]
    """Rows and columns of a matrix that share one scale."""
    computed: Dtype
    """In which SGLang computes with it. No other model.dtype will do."""
    checkpoint: Mapping[str, Any]
    """quantization_config in the config.json of a checkpoint in this format."""
    variables: Mapping[str, str]
    """Environment variables that its engine needs on a GPU, unless the user has set them."""
    floor: float
    """Mean log-prob difference, in nats, that passes however close the engine's first load is to the trainer."""
    largest_baseline: float
    """Mean log-prob difference on the engine's own first load above which nothing could be proven."""


FP8_BLOCK = Quantized(
    name="fp8_block",
    weights="float8_e4m3fn",
    scales="float32",
    block=(128, 128),
    computed="bfloat16",
    # As in DeepSeek-V3's own config.json.
    checkpoint={
        "quant_method": "fp8",
        "fmt": "e4m3",
        "weight_block_size": [128, 128],
        "activation_scheme": "dynamic",
    },
    # DeepGEMM compiles a kernel for each shape that it meets: on one H200 with 0.5.17 a tiny FP8 engine's first prefill
    # was not through after 170 s. Without it Triton serves.
    variables={"SGLANG_ENABLE_JIT_DEEPGEMM": "0"},
    # One epsilon of e4m3; on H200 tiny models were 0.11 to 0.15 from the same engine in bfloat16.
    floor=2.0**-3,
    # Further than an engine in 16 bits may be, which is what the precision costs. So log-probs prove next to nothing,
    # and bytes show what arrives. Two models that have nothing in common are about 1 apart.
    largest_baseline=0.6,
)
QUANTIZED: Mapping[RolloutPrecision, Quantized] = {each.name: each for each in (FP8_BLOCK,)}
"""The formats, by model.rollout_precision."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Precision:
    """In what a run's weights are kept, sent and computed with."""

    stored: Dtype
    """In which the trainer's ranks keep parameters and update them: model.master_dtype."""
    computed: Dtype
    """In which trainer and engine compute. Every value is rounded to it before it is sent, or quantized:
    model.dtype."""
    quantized: Quantized | None
    """The format in which matrices are sent, with their scales, and in which the engine holds them. None: as
    `computed`."""

    @property
    def is_quantized(self) -> bool:
        """Whether the engine computes with other numbers than the trainer."""
        return self.quantized is not None

    @property
    def of_engine(self) -> EnginePrecision:
        """The engine's precision in a word."""
        return self.quantized.name if self.quantized else self.computed
