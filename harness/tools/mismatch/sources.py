"""The settings that can make engine and trainer differ, each with what the run uses without it.

What a user has not set may be on as well: by SGLang's own defaults, or by the preset. Only what the device, the release
and the model allow is changed.
"""

from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any, Literal

from harness.config.engine_rules import OF_MANY_RANKS
from harness.config.schema import Config
from harness.rollout.engine_settings import captures_graphs, engine_defaults
from harness.tools.mismatch.serving import ON_POLICY, Serving

ENGINE_PRECISION, TRAINER_PRECISION, PRECISION = "engine precision", "trainer precision", "precision"
ENGINE_ROUTER, TRAINER_ROUTER = "precision of the engine's router", "precision of the trainer's router"
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
TOGETHER = {
    "enable_dp_attention": ("dp_size",),
    "dp_size": ("enable_dp_attention",),
    "attn_dp_size": ("enable_dp_attention", "dp_size"),
    "ep_size": ("moe_a2a_backend",),
    "enable_deterministic_inference": (ON_POLICY,),  # which turns it on
    "speculative_algorithm": ("speculative_num_steps", "speculative_eagle_topk", "speculative_num_draft_tokens"),
}
"""Argument -> those that make no sense without it."""
GRAPHS_OFF = {"disable_cuda_graph": True, "disable_piecewise_cuda_graph": True, "disable_prefill_cuda_graph": True}
"""What turns the graphs of decoding and of prefill off; a release has one of the last two."""
GRAPHS = ("cuda_graph_config", "cuda_graph_backend_decode", "cuda_graph_backend_prefill")
"""Arguments that choose how graphs are captured."""
ANY_DTYPE = ("triton", "torch_native")
"""Attention backends that compute in float32 too; the others have kernels for half precision alone."""
DETERMINISTIC = "enable_deterministic_inference"
FUSION_OFF = "enforce_disable_flashinfer_allreduce_fusion"
TILE, LEAST_CHUNK = 4096, 2048
"""Tokens. With FlashInfer, deterministic inference cuts a long prompt only at multiples of TILE, and never serves one
that is longer than a smaller chunk. LEAST_CHUNK is the smallest chunk of prefill that SGLang chooses by itself."""


@dataclass(frozen=True, kw_only=True, slots=True)
class EngineChange:
    """One setting of the engine changed; it is started again with the same weights."""

    name: str
    how: str
    """From what to what."""
    config: Config
    alone: bool = False
    """Whether one rank serves the whole engine."""
    breadth: int = 0
    """Above that of the changes which it includes."""


@dataclass(frozen=True, kw_only=True, slots=True)
class TrainerChange:
    """One setting of the trainer changed; it computes the same tokens again with the same weights."""

    name: str
    how: str
    dtype: Literal["same", "float32"] = "same"
    attention: Literal["same", "sdpa", "eager"] = "same"
    part: Literal["", "head", "router"] = ""
    """What alone computes in float32."""
    breadth: int = 0
    """As that of an EngineChange."""


def engine_changes(config: Config, serving: Serving) -> Iterator[EngineChange]:
    """Yield what to change in the engine.

    The mesh, the preset, each argument that the user has set, what is on without being set, and the precision.
    """
    parallel, args = config.parallel, config.engine.args
    if parallel.tp * parallel.pp > 1:
        world = parallel.dp * parallel.tp * parallel.pp
        alone = replace(
            config,
            parallel=replace(parallel, dp=world, tp=1, pp=1),
            engine=replace(config.engine, args={name: args[name] for name in args if name not in OF_MANY_RANKS}),
        )
        ranks = f"tp {parallel.tp}" + (f", pp {parallel.pp}" if parallel.pp > 1 else "")
        yield EngineChange(name="tensor parallelism", how=f"{ranks} -> one rank", config=alone, alone=True, breadth=1)
    if config.engine.preset == "sglang" and serving.device == "cuda":
        less = replace(config, engine=replace(config.engine, preset="reproducible"))
        yield EngineChange(name="engine preset", how="sglang -> reproducible", config=less, breadth=1)
    for name in sorted(args.keys() - HARMLESS):
        dropped = {name, *TOGETHER.get(name, ())}
        if name == "dp_size" and dropped & {"enable_dp_attention", "attn_dp_size"} & args.keys():
            continue  # they go together
        if name == "enable_dp_attention" and "attn_dp_size" in args:
            continue
        if name in TOGETHER["speculative_algorithm"] and "speculative_algorithm" in args:
            continue
        less = with_arguments(config, without=dropped)
        if arguments_of(less, serving) != arguments_of(config, serving):
            yield EngineChange(
                name=f"engine.args.{name}", how=f"{args[name]} -> SGLang's or the preset's default", config=less
            )
    yield from _not_asked_for(config, serving)
    # Last: kernels of a GPU may have no float32, and once an engine has died, those after it start without the fork
    # servers.
    yield from _precision(config, serving)


def trainer_changes(config: Config, attention: str, has_routers: bool = False) -> Iterator[TrainerChange]:
    """Yield what to change in the trainer. attention: its own, as it was resolved."""
    if config.model.dtype != "float32":
        how = f"{config.model.dtype} -> float32"
        yield TrainerChange(name=TRAINER_PRECISION, how=how, dtype="float32", breadth=1)
        yield TrainerChange(name="precision of the trainer's head", how=how, part="head")
        if has_routers:
            yield TrainerChange(name=TRAINER_ROUTER, how=how, part="router")
    if attention in ("sdpa", "eager"):
        other: Literal["sdpa", "eager"] = "eager" if attention == "sdpa" else "sdpa"
        yield TrainerChange(name="trainer attention", how=f"{attention} -> {other}", attention=other)


def arguments_of(config: Config, serving: Serving) -> dict[str, Any]:
    """Return the arguments of sglang.Engine that the config sets, itself or by its preset."""
    return {**engine_defaults(serving.device, config.engine.preset), **config.engine.args}


def with_arguments(config: Config, more: Mapping[str, Any] | None = None, without: Collection[str] = ()) -> Config:
    """Return the config with these engine arguments added and those removed."""
    kept = {name: value for name, value in config.engine.args.items() if name not in without}
    return replace(config, engine=replace(config.engine, args=kept | dict(more or {})))


def _precision(config: Config, serving: Serving) -> Iterator[EngineChange]:
    dtype, precision = config.model.dtype, config.model.precision
    if precision.is_quantized:
        less = replace(config, model=replace(config.model, rollout_precision="same"))
        yield EngineChange(name="rollout precision", how=f"{precision.of_engine} -> {dtype}", config=less)
    elif dtype != "float32":
        exact, how = replace(config, model=replace(config.model, dtype="float32")), f"{dtype} -> float32"
        if serving.device == "cuda" and serving.attention != "other" and _attention(config, serving) not in ANY_DTYPE:
            exact, how = with_arguments(exact, {"attention_backend": "triton"}), f"{how}, with attention by triton"
        yield EngineChange(name=ENGINE_PRECISION, how=how, config=exact, breadth=1)


def _attention(config: Config, serving: Serving) -> str | None:
    """Return the attention backend; None if SGLang chooses it."""
    backend: str | None = arguments_of(config, serving).get("attention_backend")
    return backend


def _not_asked_for(config: Config, serving: Serving) -> Iterator[EngineChange]:
    """Yield changes of what SGLang does without being asked."""
    if "chunked_prefill_size" not in config.engine.args and serving.tokens > LEAST_CHUNK:
        whole = with_arguments(config, {"chunked_prefill_size": -1})
        yield EngineChange(name="chunked prefill", how="SGLang's chunks -> none", config=whole)
    if serving.device == "cpu":
        return  # one attention backend, no graphs, and SGLang refuses deterministic inference with that backend
    arguments = arguments_of(config, serving)
    if captures_graphs(arguments):
        off = {name: value for name, value in GRAPHS_OFF.items() if name in serving.arguments}
        yield EngineChange(name="CUDA graphs", how="on -> off", config=with_arguments(config, off, without=GRAPHS))
    if config.parallel.tp > 1 and FUSION_OFF in serving.arguments and not arguments.get(FUSION_OFF):
        less = with_arguments(config, {FUSION_OFF: True}, without=["enable_flashinfer_allreduce_fusion"])
        yield EngineChange(name="fused all-reduce", how="as SGLang chooses -> off", config=less)
    for backend in other_attention(config, serving):
        yield EngineChange(
            name="attention backend",
            how=f"{arguments.get('attention_backend') or 'as SGLang chooses'} -> {backend}",
            config=with_arguments(config, {"attention_backend": backend}),
            breadth=int(backend == "torch_native" and captures_graphs(arguments)),  # SGLang then captures no graphs
        )
    yield from _deterministic(config, serving)


def other_attention(config: Config, serving: Serving) -> list[str]:
    """Return the other attention backends that this GPU, this dtype and this model can be served with."""
    if serving.attention == "other" or serving.device == "cpu":
        return []
    can = {
        "triton": True,
        "fa3": serving.capability == 90,
        "flashinfer": serving.has_flashinfer,
        "torch_native": serving.attention == "plain",
    }
    own, is_half = _attention(config, serving), config.model.dtype != "float32"
    return [each for each in can if can[each] and each != own and (is_half or each in ANY_DTYPE)]


def _deterministic(config: Config, serving: Serving) -> Iterator[EngineChange]:
    """Yield deterministic inference, and the one that follows a trainer, if the config has neither.

    SGLang's kernels then give a token the same numbers in every batch. It wants one of its attention backends for that;
    it sets the sampling backend and the all-reduce itself.
    """
    arguments = arguments_of(config, serving)
    has_any = arguments.get(DETERMINISTIC) or arguments.get(ON_POLICY)
    if has_any or DETERMINISTIC not in serving.arguments or not serving.deterministic:
        return
    own = arguments.get("attention_backend")
    more, how = dict[str, Any](), "off -> on"
    if (own is not None and own not in serving.deterministic) or (own is None and config.model.dtype == "float32"):
        more, how = {"attention_backend": "triton"}, f"{how}, with attention by triton"
    backend = more.get("attention_backend", own)
    chunk = config.engine.args.get("chunked_prefill_size") or TILE
    if backend in ("flashinfer", None) and 0 < chunk < TILE:
        more, how = more | {"chunked_prefill_size": TILE}, f"{how}, with chunks of {TILE} tokens"
    yield EngineChange(
        name="deterministic inference",
        how=how,
        config=with_arguments(config, more | {DETERMINISTIC: True}),
        breadth=int(bool(more)),
    )
    if ON_POLICY in serving.arguments and serving.is_on_policy and config.model.dtype == "bfloat16":
        yield EngineChange(
            name=ON_POLICY,
            how=f"none -> fsdp, deterministic inference {how}",
            config=with_arguments(config, more | {ON_POLICY: "fsdp"}),
            breadth=1,
        )
