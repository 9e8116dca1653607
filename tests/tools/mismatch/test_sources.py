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


def config_with(preset: Any = "reproducible", dtype: Any = "bfloat16", tp: int = 2, **args: object) -> Config:
    return Config(
        model=Model(dtype=dtype), parallel=Parallel(tp=tp), engine=Engine(preset=preset, device="cuda", args=args)
    )


def changes(config: Config, serving: Serving = HOPPER) -> dict[str, EngineChange]:
    """By name; the attention backends by what they become."""
    found = list(engine_changes(config, serving))
    assert len({(each.name, each.how) for each in found}) == len(found)
    return {each.name + each.how.partition("->")[2] * (each.name == "attention backend"): each for each in found}


def test_a_draft_model_is_left_out_with_all_of_its_arguments() -> None:
    drafts = {"speculative_algorithm": "EAGLE", "speculative_num_steps": 1, "speculative_eagle_topk": 1}
    found = {name: each for name, each in changes(config_with(**drafts)).items() if "speculative" in name}
    assert found.keys() == {"engine.args.speculative_algorithm"}
    assert not found["engine.args.speculative_algorithm"].config.engine.args


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


def test_dp_attention_is_one_change_under_its_old_and_its_new_name() -> None:
    new = changes(config_with(attn_dp_size=2))
    assert new["engine.args.attn_dp_size"].config.engine.args == {}
    assert "attn_dp_size" not in new["tensor parallelism"].config.engine.args
    both = changes(config_with(attn_dp_size=2, enable_dp_attention=True, dp_size=2))
    assert both["engine.args.attn_dp_size"].config.engine.args == {}
    assert not {"engine.args.enable_dp_attention", "engine.args.dp_size"} & both.keys()


def test_what_is_on_by_the_preset_alone_is_changed() -> None:
    found = changes(config_with("sglang"))
    off = found["CUDA graphs"].config.engine
    assert off.args == {"disable_cuda_graph": True, "disable_prefill_cuda_graph": True} and off.preset == "sglang"
    assert found["fused all-reduce"].config.engine.args == {"enforce_disable_flashinfer_allreduce_fusion": True}
    assert found["engine preset"].breadth and found["engine preset"].config.engine.preset == "reproducible"
    assert found["attention backend triton"].how == "as SGLang chooses -> triton"
    assert found["attention backend torch_native"].breadth  # which turns the graphs off as well
    assert not {"CUDA graphs", "fused all-reduce", "engine preset"} & changes(config_with()).keys()
    assert "CUDA graphs" not in changes(config_with("sglang", disable_cuda_graph=True))


def test_graphs_that_the_user_turned_on_are_turned_off() -> None:
    found = changes(config_with(disable_cuda_graph=False, cuda_graph_backend_decode="full"))
    assert found["CUDA graphs"].config.engine.args["disable_cuda_graph"] is True
    assert "cuda_graph_backend_decode" not in found["CUDA graphs"].config.engine.args


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


def test_the_float32_engine_gets_an_attention_backend_that_has_float32() -> None:
    assert changes(config_with("sglang"))["engine precision"].config.engine.args == {"attention_backend": "triton"}
    assert changes(config_with())["engine precision"].config.engine.args == {}


def test_deterministic_inference_is_turned_on_where_sglang_takes_it() -> None:
    plain = changes(config_with())["deterministic inference"]
    assert plain.config.engine.args == {"enable_deterministic_inference": True} and not plain.breadth
    target = changes(config_with())["rl_on_policy_target"]
    assert target.config.engine.args == {"rl_on_policy_target": "fsdp"} and target.breadth
    # SGLang refuses its backends without it, and FlashInfer never serves a prompt longer than a chunk below 4096.
    native = changes(config_with(attention_backend="torch_native"))["deterministic inference"]
    assert native.config.engine.args["attention_backend"] == "triton" and native.breadth
    chunks = changes(config_with(attention_backend="flashinfer", chunked_prefill_size=512))["deterministic inference"]
    assert chunks.config.engine.args["chunked_prefill_size"] == 4096 and "4096" in chunks.how


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


def test_deterministic_inference_that_is_on_is_turned_off_with_what_implies_it() -> None:
    found = changes(config_with(enable_deterministic_inference=True, rl_on_policy_target="fsdp"))
    assert found["engine.args.enable_deterministic_inference"].config.engine.args == {}
    assert found["engine.args.rl_on_policy_target"].config.engine.args == {"enable_deterministic_inference": True}


@pytest.mark.parametrize("changed", [{"is_on_policy": False}, {"arguments": RELEASE - {ON_POLICY}}])
def test_the_trainer_is_followed_only_by_models_that_obey(changed: dict[str, Any]) -> None:
    assert "rl_on_policy_target" not in changes(config_with(), replace(HOPPER, **changed))
    assert "rl_on_policy_target" not in changes(config_with(dtype="float16"))


def test_chunks_of_prefill_are_changed_if_the_sequences_can_be_cut() -> None:
    assert "chunked prefill" not in changes(config_with())
    long = replace(HOPPER, tokens=5000)
    assert changes(config_with(), long)["chunked prefill"].config.engine.args == {"chunked_prefill_size": -1}
    own = changes(config_with(chunked_prefill_size=512), long)
    assert "engine.args.chunked_prefill_size" in own and "chunked prefill" not in own


def test_an_argument_that_repeats_the_preset_is_not_changed() -> None:
    assert "engine.args.attention_backend" not in changes(config_with(attention_backend="triton"))
    assert "engine.args.attention_backend" in changes(config_with("sglang", attention_backend="triton"))


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
