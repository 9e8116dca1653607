"""What resolve() makes of a config: "auto" replaced, steps counted, what was not checked, and what only facts of other
machines and releases show; tests/said has the rest."""

import dataclasses
from typing import Any

import pytest

from harness.config.facts import EngineArgument, Facts, SGLangFacts
from harness.config.layers import ConfigError
from harness.config.model_rules import CPU_MODELS
from harness.config.resolve import SECTIONS, SYNC_SECTIONS, resolve
from harness.config.schema import Config
from harness.runtime.errors import UnsupportedEnvironment
from harness.tools.command_line import parse

CPU, CUDA = Facts(device="cpu"), Facts(device="cuda")
GPU_HERE = Facts(device="cuda", environment={}, model={"model_type": "qwen2"})
SGLANG = SGLangFacts(
    version="9.9.9",
    arguments={
        "mem_fraction_static": EngineArgument(("float", "None")),
        "max_total_tokens": EngineArgument(("int",)),
        "attention_backend": EngineArgument(("str", "None"), ("triton", "torch_native")),
        "kv_events_config": EngineArgument(("KVEventsConfig",)),
    },
)


def config_of(words: str = "") -> Config:
    return parse(words.split()).config


@pytest.mark.parametrize("rope", [None, "default", 4, {"rope_type": "linear", "factor": "two"}, {"factor": 2.0}])
@pytest.mark.parametrize("name", ["rope_scaling", "rope_parameters"])
def test_any_rope_of_a_models_config_json_is_read_or_passed_over(name: str, rope: Any) -> None:
    model = {"model_type": "qwen2", "max_position_embeddings": 300, name: rope}
    words = "--task.max_prompt_tokens 256 --rollout.max_response_tokens 100"
    if isinstance(rope, dict) and rope["factor"] == 2.0:
        resolve(config_of(words), Facts(model=model))
        return
    with pytest.raises(ConfigError, match=r"it is 356 tokens, and the model's context is 300"):
        resolve(config_of(words), Facts(model=model))


@pytest.mark.parametrize(
    ("words", "facts", "name"),
    [
        ("", CPU, "bucket"),
        ("", CUDA, "bucket"),
        ("--weights.transport pull", CUDA, "pull"),
        ("--parallel.colocate false", CUDA, "distributed"),
        ("--weights.transport disk --parallel.colocate false", CUDA, "disk"),
        ("--weights.transport distributed", CPU, "distributed"),
    ],
)
def test_the_transport_is_chosen_and_the_reason_given(words: str, facts: Facts, name: str) -> None:
    resolved = resolve(config_of(words), facts)
    assert resolved.config.weights.transport == name
    assert resolved.reasons[0].startswith(f'weights.transport = "{name}" (')


def test_what_is_resolved_resolves_to_itself_and_the_given_config_is_left_alone() -> None:
    given = config_of("--run.epochs 2")
    before = dataclasses.asdict(given)
    resolved = resolve(given, Facts(device="cpu", prompts=20)).config
    assert (resolved.engine.device, resolved.run.steps) == ("cpu", 4), "two passes of two whole steps"
    assert resolve(resolved, Facts(device="cpu", prompts=20)).config == resolved
    assert dataclasses.asdict(given) == before


def test_without_facts_nothing_is_invented() -> None:
    resolved = resolve(config_of("--run.epochs 2 --engine.args.mem_fraction_statik 0.5"))
    assert (resolved.config.engine.device, resolved.config.run.steps) == ("auto", 3)
    assert any("engine.args" in line for line in resolved.not_checked)
    assert any("task.source" in line for line in resolved.not_checked)


def test_with_all_facts_nothing_is_left_unchecked() -> None:
    facts = Facts(device="cpu", sglang=SGLANG, model={"model_type": "qwen2"}, model_types={"qwen2"}, rows=8)
    assert resolve(config_of(), facts).not_checked == ()


def test_a_step_takes_no_more_prompts_than_there_are() -> None:
    with pytest.raises(ConfigError, match=r"must be at most the 4 prompts of at most task.max_prompt_tokens .* got 8"):
        resolve(config_of(), Facts(prompts=4))


@pytest.mark.parametrize(
    ("words", "facts", "sections"),
    [
        ("--model.dtype bfloat16", GPU_HERE, SECTIONS),
        ("--engine.device cpu", GPU_HERE, SECTIONS),
        ("--rollout.load saved", GPU_HERE, SECTIONS),
        ("--engine.args.enable_deterministic_inference true", GPU_HERE, SECTIONS),
        ("--model.name a/b", dataclasses.replace(GPU_HERE, model={"model_type": "phi"}), SECTIONS),
        ("", GPU_HERE, SYNC_SECTIONS),
        ("", dataclasses.replace(GPU_HERE, environment=None), SECTIONS),
    ],
)
def test_float32_on_a_gpu_is_refused_only_where_sglang_would_compute_a_norm_in_it(
    words: str, facts: Facts, sections: tuple[str, ...]
) -> None:
    assert resolve(config_of(words), facts, sections).config.model.dtype


@pytest.mark.parametrize(
    ("words", "model"),
    [
        ("--engine.args.kv_cache_dtype fp8_e4m3", None),
        ("--engine.args.enable_lora true", None),
        *(("--model.name x/y", {"model_type": name}) for name in CPU_MODELS),
        ("--model.name x/y", {"model_type": "deepseek_v3", "kv_lora_rank": 512}),
    ],
)
def test_what_only_the_cpu_cannot_do_is_unsupported(words: str, model: dict[str, Any] | None) -> None:
    arguments = {"kv_cache_dtype": EngineArgument(("str",)), "enable_lora": EngineArgument(("bool",))}
    old = dataclasses.replace(SGLANG, serves_mla_on_cpu=False, arguments=arguments)
    with pytest.raises(UnsupportedEnvironment, match=r"cannot work: .*CPU"):
        resolve(config_of(words), Facts(device="cpu", model=model, sglang=old))
    resolve(config_of(words), Facts(device="cuda", model=model, sglang=old))


@pytest.mark.parametrize(("device", "lacks"), [("cpu", "returns_routing_on_cpu"), ("cuda", "returns_routing")])
def test_a_release_that_does_not_tell_its_experts_is_unsupported(device: Any, lacks: str) -> None:
    model = {"model_type": "qwen3_moe", "num_experts": 8, "num_experts_per_tok": 2}
    words, able = "--model.name x/y --rollout.routing record", Facts(device=device, model=model, sglang=SGLANG)
    assert resolve(config_of(words), able).config.rollout.routing == "record"
    old = dataclasses.replace(SGLANG, **{lacks: False})
    with pytest.raises(UnsupportedEnvironment, match=r"rollout\.routing = .record. cannot work: sglang 9\.9\.9"):
        resolve(config_of(words), dataclasses.replace(able, sglang=old))
    resolve(config_of(f"{words} --rollout.load saved"), dataclasses.replace(able, sglang=old))


def test_llama_in_blocks_of_fp8_is_refused_where_sglang_loads_no_scales_of_it() -> None:
    words = "--model.name x/y --model.rollout_precision fp8_block --model.dtype bfloat16"
    facts = Facts(device="cuda", model={"model_type": "llama"}, sglang=SGLANG)
    resolve(config_of(words), facts)
    old = dataclasses.replace(SGLANG, loads_block_scales_of_llama=False)
    with pytest.raises(UnsupportedEnvironment, match=r"sglang 9\.9\.9 loads no block scales of a llama.*sglang#30234"):
        resolve(config_of(words), dataclasses.replace(facts, sglang=old))


def test_the_sync_alone_is_not_refused_for_what_it_does_not_use() -> None:
    words = ["--parallel.dp", "3"]
    assert parse(words, sections=SYNC_SECTIONS).config.parallel.dp == 3
    assert resolve(config_of("--weights.folder x --validation.rows 8"), sections=SYNC_SECTIONS).warnings == ()
    with pytest.raises(ConfigError, match=r"parallel\.tp"):
        parse(["--parallel.tp", "0"], sections=SYNC_SECTIONS)


@pytest.mark.parametrize(("prompts", "steps"), [(20, 4), (None, None)])
def test_an_actor_that_never_learns_in_its_epochs_is_warned_of(prompts: int | None, steps: int | None) -> None:
    found = {
        warmup: resolve(
            config_of(f"--run.epochs 2 --algorithm.critic_warmup {warmup}"), Facts(prompts=prompts)
        ).warnings
        for warmup in (3, 4)
    }
    assert found[3] == ()
    assert [f"run.steps = {steps}: the actor learns nothing" in said for said in found[4]] == ([True] if steps else [])


@pytest.mark.parametrize(
    ("words", "initial_weights"), [("--rollout.load saved", "dummy"), ("--rollout.only", "checkpoint")]
)
def test_half_a_run_has_no_sync_to_verify(words: str, initial_weights: str) -> None:
    resolved = resolve(config_of(words), CPU)
    assert (resolved.config.weights.verify, resolved.config.engine.initial_weights) == (False, initial_weights)
    assert resolved.reasons == ()
