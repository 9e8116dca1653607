"""Facts about the machine, the model and the data of a run: the second input of resolve().

Plain values only, so that this room needs neither torch nor sglang. harness/tools/preflight.py collects them before a
run, harness/inputs.py on a rank.
"""

from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

Device = Literal["cpu", "cuda"]


@dataclass(frozen=True, slots=True)
class EngineArgument:
    """One argument of sglang.Engine, as its source declares it."""

    kinds: tuple[str, ...]
    """Names of the Python types that it takes, such as ("int", "None")."""
    choices: tuple[str, ...] = ()
    """The values that it lists, if any. Plugins may add others."""


@dataclass(frozen=True, kw_only=True, slots=True)
class SGLangFacts:
    """The installed sglang; harness/rollout/sglang_api reads it from the source."""

    version: str
    arguments: Mapping[str, EngineArgument]
    """The arguments of sglang.Engine by name."""
    serves_mla_on_cpu: bool = True
    """Whether an MLA model (DeepSeek) can run in its CPU mode, with the attention backend that the stand-ins
    register."""
    loads_block_scales_of_llama: bool = True
    """Whether its Llama class, and those made from it, take the scales of a checkpoint in block-FP8."""
    returns_routing: bool = True
    """Whether an answer can say which experts each token took."""
    returns_routing_on_cpu: bool = True
    """Whether that works in its CPU mode too, with the stand-ins: SGLang pins the memory for it, which needs a GPU."""
    why_no_drafts_on_cpu: str = ""
    """Why its EAGLE worker cannot serve rollouts in its CPU mode with the stand-ins, as part of a sentence; "" if it
    can."""
    updates_drafts_by_group: bool = True
    """Whether an update by an update group reaches the draft model too."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Facts:
    """What is known when a config is resolved. Rules that need a fact that is None are skipped."""

    device: Device | None = None
    """What engine.device = "auto" means here."""
    why_no_gpu: str = ""
    """Why device is "cpu", as part of a sentence: "this host has no GPU"."""
    environment: Mapping[str, str] | None = None
    """Environment variables of the ranks."""
    sglang: SGLangFacts | None = None
    model: Mapping[str, Any] | None = None
    """The fields of the model's config.json."""
    code: Mapping[str, str] = field(default_factory=dict)
    """For a key that names a model: why SGLang would run Python code of that model, whatever trust_remote_code says."""
    model_types: Collection[str] | None = None
    """Every model_type that the installed transformers has."""
    overridable: Collection[str] | None = None
    """Fields that model.overrides may set."""
    rows: int | None = None
    """How many rows task.source has."""
    prompts: int | None = None
    """How many of these rows are short enough to be prompts."""
    unknown: Mapping[str, str] = field(default_factory=dict)
    """For a fact that is None, for "reward" and for "validation": why it is unknown, as part of a sentence: "sglang is
    not installed here"."""
