"""Which settings are changed for which config, device, release and model; no engine is started."""

from dataclasses import replace
from typing import Any

import pytest

from harness.config.schema import Config, Engine, Model, Parallel
from harness.rollout.sglang_api import probe
from harness.tools.mismatch.serving import (
    DETERMINISTIC,
    DETERMINISTIC_MLA,
    ON_POLICY,
    Serving,
    attention_of,
    is_on_policy,
    listed,
)
from harness.tools.mismatch.sources import EngineChange, engine_changes, other_attention, trainer_changes

RELEASE = frozenset(
    [
        *["disable_cuda_graph", "disable_prefill_cuda_graph", "enforce_disable_flashinfer_allreduce_fusion"],
        *["enable_deterministic_inference", "rl_on_policy_target", "attention_backend", "chunked_prefill_size"],
    ]
)
HOPPER = Serving(
    device="cuda",
    capability=90,
    has_flashinfer=True,
    arguments=RELEASE,
    deterministic=("fa3", "flashinfer", "triton"),
    is_on_policy=True,
    tokens=1000,
)
LONG = replace(HOPPER, tokens=5000)


def config_with(preset: Any = "reproducible", dtype: Any = "bfloat16", tp: int = 2, **args: object) -> Config:
    return Config(
        model=Model(dtype=dtype), parallel=Parallel(tp=tp), engine=Engine(preset=preset, device="cuda", args=args)
    )


def changes(config: Config, serving: Serving = HOPPER) -> dict[str, EngineChange]:
    """By name; the attention backends by what they become."""
    found = list(engine_changes(config, serving))
    assert len({(each.name, each.how) for each in found}) == len(found)
    return {each.name + each.how.partition("->")[2] * (each.name == "attention backend"): each for each in found}


def test_what_is_changed_follows_from_the_config() -> None:
    args = {"enable_dp_attention": True, "dp_size": 2, "chunked_prefill_size": 16, "mem_fraction_static": 0.4}
    config = Config(
        model=Model(dtype="bfloat16"), parallel=Parallel(dp=2, tp=2), engine=Engine(args=args, preset="sglang")
    )
    found = changes(config, Serving())
    assert found.keys() == {
        "tensor parallelism", "engine precision", "engine.args.enable_dp_attention", "engine.args.chunked_prefill_size",
    }  # fmt: skip
    alone = found["tensor parallelism"].config
    assert (alone.parallel.dp, alone.parallel.tp) == (4, 1) and "dp_size" not in alone.engine.args
    without = found["engine.args.enable_dp_attention"].config.engine.args
    assert without == {"chunked_prefill_size": 16, "mem_fraction_static": 0.4}
    assert [each.name for each in trainer_changes(config, "sdpa", has_routers=True)] == [
        "trainer precision", "precision of the trainer's head", "precision of the trainer's router",
        "trainer attention",
    ]  # fmt: skip
    assert [each.name for each in trainer_changes(config, "sdpa")].count("precision of the trainer's router") == 0
    assert changes(Config(parallel=Parallel(tp=1)), Serving()) == {}


NO_GRAPHS = {"disable_cuda_graph": True, "disable_prefill_cuda_graph": True}
DRAFTS = {"speculative_algorithm": "EAGLE", "speculative_num_steps": 1, "speculative_eagle_topk": 1}
OWN_BACKEND = {"attention_backend": "triton"}
DETERMINISM = {"enable_deterministic_inference": True}
ABSENT: Any = None
ARGUMENTS: list[tuple[Config, Serving, dict[str, dict[str, Any]]]] = [
    # A draft model is left out with all of its arguments.
    (config_with(**DRAFTS), HOPPER, {"engine.args.speculative_algorithm": {}, "engine.args.speculative_num_steps": ABSENT}),
    (config_with(**DRAFTS), HOPPER, {"engine.args.speculative_eagle_topk": ABSENT}),
    # DP attention is one change, under its old and its new name.
    (config_with(attn_dp_size=2), HOPPER, {"engine.args.attn_dp_size": {}, "tensor parallelism": {}}),
    (config_with(attn_dp_size=2, enable_dp_attention=True, dp_size=2), HOPPER, {
        "engine.args.attn_dp_size": {}, "engine.args.enable_dp_attention": ABSENT, "engine.args.dp_size": ABSENT,
    }),
    # What is on by the preset alone is changed, and graphs that the user turned on are turned off.
    (config_with("sglang"), HOPPER, {"CUDA graphs": NO_GRAPHS, "engine preset": {}}),
    (config_with("sglang"), HOPPER, {"fused all-reduce": {"enforce_disable_flashinfer_allreduce_fusion": True}}),
    (config_with(), HOPPER, {"CUDA graphs": ABSENT, "fused all-reduce": ABSENT, "engine preset": ABSENT}),
    (config_with("sglang", disable_cuda_graph=True), HOPPER, {"CUDA graphs": ABSENT}),
    (config_with(disable_cuda_graph=False, cuda_graph_backend_decode="full"), HOPPER, {"CUDA graphs": NO_GRAPHS}),
    # The float32 engine gets an attention backend that has float32.
    (config_with("sglang"), HOPPER, {"engine precision": OWN_BACKEND}),
    (config_with(), HOPPER, {"engine precision": {}}),
    # SGLang refuses its backends without it, and FlashInfer never serves a prompt longer than a chunk below 4096.
    (config_with(), HOPPER, {"deterministic inference": DETERMINISM, "rl_on_policy_target": {"rl_on_policy_target": "fsdp"}}),
    (config_with(attention_backend="torch_native"), HOPPER, {"deterministic inference": DETERMINISM | OWN_BACKEND}),
    (config_with(attention_backend="flashinfer", chunked_prefill_size=512), HOPPER, {
        "deterministic inference": DETERMINISM | {"attention_backend": "flashinfer", "chunked_prefill_size": 4096},
    }),
    # What is on is turned off, with what implies it.
    (config_with(enable_deterministic_inference=True, rl_on_policy_target="fsdp"), HOPPER, {
        "engine.args.enable_deterministic_inference": {}, "engine.args.rl_on_policy_target": DETERMINISM,
    }),
    # Models that do not obey, releases that cannot, and dtypes in which nothing is followed.
    (config_with(), replace(HOPPER, is_on_policy=False), {"rl_on_policy_target": ABSENT}),
    (config_with(), replace(HOPPER, arguments=RELEASE - {ON_POLICY}), {"rl_on_policy_target": ABSENT}),
    (config_with(dtype="float16"), HOPPER, {"rl_on_policy_target": ABSENT}),
    # Chunks are changed if the sequences can be cut.
    (config_with(), HOPPER, {"chunked prefill": ABSENT}),
    (config_with(), LONG, {"chunked prefill": {"chunked_prefill_size": -1}}),
    (config_with(chunked_prefill_size=512), LONG, {"engine.args.chunked_prefill_size": {}, "chunked prefill": ABSENT}),
    # An argument that repeats the preset is not changed.
    (config_with(attention_backend="triton"), HOPPER, {"engine.args.attention_backend": ABSENT}),
    (config_with("sglang", attention_backend="triton"), HOPPER, {"engine.args.attention_backend": {}}),
]  # fmt: skip
"""Config and serving -> changes, with the engine.args that they lead to."""


@pytest.mark.parametrize(("config", "serving", "expected"), ARGUMENTS)
def test_a_change_has_its_arguments(config: Config, serving: Serving, expected: dict[str, dict[str, Any]]) -> None:
    found = changes(config, serving)
    assert {name: found[name].config.engine.args if name in found else ABSENT for name in expected} == expected


def test_a_broad_change_is_told_from_a_narrow_one() -> None:
    found, narrow = changes(config_with("sglang")), changes(config_with())
    assert found["CUDA graphs"].config.engine.preset == "sglang"
    assert found["engine preset"].breadth and found["engine preset"].config.engine.preset == "reproducible"
    assert found["attention backend triton"].how == "as SGLang chooses -> triton"
    assert found["attention backend torch_native"].breadth  # which turns the graphs off as well
    assert narrow["rl_on_policy_target"].breadth and not narrow["deterministic inference"].breadth
    native = changes(config_with(attention_backend="torch_native"))["deterministic inference"]
    chunks = changes(config_with(attention_backend="flashinfer", chunked_prefill_size=512))["deterministic inference"]
    assert native.breadth and "4096" in chunks.how


@pytest.mark.parametrize(
    ("config", "serving", "others"),
    [
        (config_with(), HOPPER, ["fa3", "flashinfer", "torch_native"]),
        (config_with(), replace(HOPPER, capability=100, has_flashinfer=False), ["torch_native"]),
        (config_with(), replace(HOPPER, attention="mla"), ["fa3", "flashinfer"]),
        (config_with(), replace(HOPPER, attention="other"), []),
        (config_with(attention_backend="fa3"), HOPPER, ["triton", "flashinfer", "torch_native"]),
        (config_with(dtype="float32"), HOPPER, ["torch_native"]),
        (config_with(), Serving(), []),
    ],
)
def test_attention_is_changed_to_what_gpu_model_and_dtype_have(
    config: Config, serving: Serving, others: list[str]
) -> None:
    assert other_attention(config, serving) == others


@pytest.mark.parametrize(
    ("config", "serving"),
    [
        (config_with(), Serving(arguments=RELEASE, deterministic=("triton",))),  # a CPU
        (config_with(), replace(HOPPER, arguments=RELEASE - {"enable_deterministic_inference"})),
        (config_with(enable_deterministic_inference=True), HOPPER),
        (config_with(rl_on_policy_target="fsdp"), HOPPER),
    ],
)
def test_deterministic_inference_is_not_turned_on_where_it_cannot_be_or_is(config: Config, serving: Serving) -> None:
    assert not {"deterministic inference", "rl_on_policy_target"} & changes(config, serving).keys()


@pytest.mark.parametrize(
    ("fields", "kind"),
    [
        ({"model_type": "qwen3"}, "plain"),
        ({"layer_types": ["full_attention"] * 2, "sliding_window": None}, "plain"),
        ({"kv_lora_rank": 512}, "mla"),
        ({"kv_lora_rank": 512, "index_topk": 2048}, "other"),
        ({"layer_types": ["linear_attention", "full_attention"]}, "other"),
        ({"model_type": "gpt_oss"}, "other"),
    ],
)
def test_attention_that_only_some_backends_compute_is_told_apart(fields: dict[str, Any], kind: str) -> None:
    assert attention_of(fields) == kind


def test_the_backends_of_deterministic_inference_are_read_from_the_release() -> None:
    tree = probe().tree
    assert {"fa3", "flashinfer", "triton"} <= set(listed(tree, DETERMINISTIC))
    assert "triton" in listed(tree, DETERMINISTIC_MLA) and "flashinfer" not in listed(tree, DETERMINISTIC_MLA)
    assert listed(tree, "NO_SUCH_LIST") == ()


def test_which_models_of_the_installed_release_follow_a_trainer() -> None:
    text = probe().tree.text
    assert is_on_policy(text("srt/models/qwen3.py")) and not is_on_policy(text("srt/models/qwen2.py"))
