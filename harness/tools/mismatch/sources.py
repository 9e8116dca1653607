"""The settings that can make engine and trainer differ, each with what the run uses without it."""

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Literal

from harness.config.schema import Config

ENGINE_PRECISION, TRAINER_PRECISION = "engine precision", "trainer precision"
HARMLESS = frozenset(
    [
        "mem_fraction_static",
        "max_total_tokens",
        "log_level",
        "watchdog_timeout",
        "max_running_requests",
        "trust_remote_code",
        "enable_memory_saver",
        "skip_tokenizer_init",
        "sleep_on_idle",
    ]
)
"""Arguments of sglang.Engine that change no number."""
TOGETHER = {"enable_dp_attention": ("dp_size",), "dp_size": ("enable_dp_attention",), "ep_size": ("moe_a2a_backend",)}
"""Argument -> those that make no sense without it."""


@dataclass(frozen=True, kw_only=True, slots=True)
class EngineChange:
    """One setting of the engine changed; it is started again with the same weights."""

    name: str
    how: str
    """From what to what."""
    config: Config
    alone: bool = False
    """Whether one rank serves the whole engine."""


@dataclass(frozen=True, kw_only=True, slots=True)
class TrainerChange:
    """One setting of the trainer changed; it computes the same tokens again with the same weights."""

    name: str
    how: str
    dtype: Literal["same", "float32"] = "same"
    attention: Literal["same", "sdpa", "eager"] = "same"
    head: bool = False
    """Whether only the head computes in float32."""


def engine_changes(config: Config) -> Iterator[EngineChange]:
    """Yield what to change in the engine: the mesh, the precision, the preset, and each argument that the user has set."""
    parallel, args = config.parallel, config.engine.args
    if parallel.tp * parallel.pp > 1:
        world = parallel.dp * parallel.tp * parallel.pp
        given = {"enable_dp_attention", "dp_size", "ep_size", "moe_a2a_backend", "attn_cp_size"}
        alone = replace(
            config,
            parallel=replace(parallel, dp=world, tp=1, pp=1),
            engine=replace(config.engine, args={name: args[name] for name in args if name not in given}),
        )
        ranks = f"tp {parallel.tp}" + (f", pp {parallel.pp}" if parallel.pp > 1 else "")
        yield EngineChange(name="tensor parallelism", how=f"{ranks} -> one rank", config=alone, alone=True)
    if config.model.dtype != "float32" and config.model.rollout_precision == "same":
        how = f"{config.model.dtype} -> float32"
        yield EngineChange(
            name=ENGINE_PRECISION, how=how, config=replace(config, model=replace(config.model, dtype="float32"))
        )
    if config.model.rollout_precision != "same":
        less = replace(config, model=replace(config.model, rollout_precision="same"))
        how = f"{config.model.rollout_precision} -> {config.model.dtype}"
        yield EngineChange(name="rollout precision", how=how, config=less)
    if config.engine.preset == "sglang":
        less = replace(config, engine=replace(config.engine, preset="reproducible"))
        yield EngineChange(name="engine preset", how="sglang -> reproducible", config=less)
    for name in sorted(args.keys() - HARMLESS):
        dropped = {name, *TOGETHER.get(name, ())}
        if name == "dp_size" and "enable_dp_attention" in args:
            continue  # they go together
        kept = {each: value for each, value in args.items() if each not in dropped}
        less = replace(config, engine=replace(config.engine, args=kept))
        yield EngineChange(
            name=f"engine.args.{name}", how=f"{args[name]} -> SGLang's or the preset's default", config=less
        )


def trainer_changes(config: Config, attention: str) -> Iterator[TrainerChange]:
    """Yield what to change in the trainer. attention: its own, as it was resolved."""
    if config.model.dtype != "float32":
        yield TrainerChange(name=TRAINER_PRECISION, how=f"{config.model.dtype} -> float32", dtype="float32")
        yield TrainerChange(name="precision of the trainer's head", how=f"{config.model.dtype} -> float32", head=True)
    if attention in ("sdpa", "eager"):
        other: Literal["sdpa", "eager"] = "eager" if attention == "sdpa" else "sdpa"
        yield TrainerChange(name="trainer attention", how=f"{attention} -> {other}", attention=other)
