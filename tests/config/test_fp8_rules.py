"""model.rollout_precision = "fp8_block": what is refused before a run, in one sentence."""

from dataclasses import replace
from typing import Any

import pytest

from harness.config.facts import Facts, SGLangFacts
from harness.config.layers import ConfigError
from harness.config.resolve import resolve
from harness.config.schema import Config, Engine, Model, Parallel
from harness.runtime.errors import UnsupportedEnvironment

DENSE = {
    "hidden_size": 256,
    "intermediate_size": 512,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "head_dim": 64,
}
EXPERTS = DENSE | {"num_experts": 8, "moe_intermediate_size": 256}
LATENT = {
    "hidden_size": 7168,
    "intermediate_size": 18432,
    "num_attention_heads": 128,
    "q_lora_rank": 1536,
    "kv_lora_rank": 512,
    "qk_nope_head_dim": 128,
    "qk_rope_head_dim": 64,
    "v_head_dim": 128,
    "n_routed_experts": 256,
    "n_shared_experts": 1,
    "moe_intermediate_size": 2048,
    "first_k_dense_replace": 3,
}
"""DeepSeek-V3's."""


def config(tp: int = 2, dtype: Any = "bfloat16", **arguments: Any) -> Config:
    return Config(
        model=Model(rollout_precision="fp8_block", dtype=dtype), parallel=Parallel(tp=tp), engine=Engine(args=arguments)
    )


def refusal(asked: Config, model: dict[str, Any] | None = None) -> str:
    rollout = replace(asked.rollout, prompts_per_step=16 * asked.parallel.tp)
    learn = {"actor": replace(asked.actor, minibatch_size=32 * asked.parallel.tp)}
    try:
        resolve(replace(asked, rollout=rollout, **learn), Facts(device="cuda", model=model))
    except ConfigError as error:
        return str(error)
    return ""


def test_the_engine_computes_in_bfloat16() -> None:
    said = refusal(config(dtype="float32"))
    assert said.startswith('model.dtype must be "bfloat16" for model.rollout_precision = "fp8_block"')
    assert said.endswith('got "float32".')


@pytest.mark.parametrize(
    ("tp", "model", "arguments"),
    [
        (2, DENSE, {}),
        (2, EXPERTS, {}),
        (4, EXPERTS | {"num_key_value_heads": 8}, {"ep_size": 4}),
        (4, EXPERTS | {"intermediate_size": 100, "num_key_value_heads": 8}, {"ep_size": 2}),  # no dense layer
        (16, LATENT, {}),
        (8, LATENT, {"enable_dp_attention": True, "dp_size": 8, "ep_size": 8}),
        (2, {}, {}),
        (2, {"architectures": ["Unknown"]}, {}),
    ],
)
def test_sizes_of_whole_blocks_pass(tp: int, model: dict[str, Any], arguments: dict[str, Any]) -> None:
    assert refusal(config(tp, **arguments), model) == ""


@pytest.mark.parametrize(
    ("tp", "changes", "arguments", "said"),
    [
        (2, DENSE | {"hidden_size": 192}, {}, "the model's hidden size is 192, which must be a multiple of 128"),
        (2, DENSE | {"intermediate_size": 384}, {}, "intermediate size is 384 over 2 ranks"),
        (1, DENSE | {"intermediate_size": 192}, {}, "intermediate size is 192, which must be a multiple of 128"),
        (
            2,
            DENSE | {"head_dim": 32},
            {},
            "the model's keys (key-value heads x head_dim) have the size 128 over 2 ranks",
        ),
        (4, EXPERTS | {"num_key_value_heads": 8}, {}, "an expert's intermediate size is 256 over 4 ranks"),
        (2, LATENT | {"q_lora_rank": 192}, {}, "q_lora_rank, which SGLang fuses with kv_a, is 192"),
        # https://github.com/sgl-project/sglang/issues/3491
        (
            32,
            LATENT,
            {},
            "the model's intermediate size is 18432 over 32 ranks, which must be a multiple of 128 x 32 = 4096",
        ),
        (32, LATENT, {"moe_dense_tp_size": 1}, "an expert's intermediate size is 2048 over 32 ranks"),
    ],
)
def test_shares_that_end_inside_a_block_are_refused(
    tp: int, changes: dict[str, Any], arguments: dict[str, Any], said: str
) -> None:
    [found] = [line for line in refusal(config(tp, **arguments), changes).splitlines() if said in line]
    assert found.startswith('model.rollout_precision = "fp8_block" cannot work: ')
    assert found.endswith("SGLang's block-FP8 layers take whole blocks of 128 x 128 alone.")


@pytest.mark.parametrize(
    ("value", "known"), [("fp8", "sglang 0.5.17"), ("mxfp8", "sglang#28676"), ("w4afp8", ""), ("awq", "")]
)
def test_engines_that_quantize_themselves_are_refused_with_what_is_known(value: str, known: str) -> None:
    asked = Config(engine=Engine(args={"quantization": value}))
    said = refusal(asked)
    assert said.startswith(f'engine.args.quantization = "{value}" cannot work: ')
    assert known in said and 'model.rollout_precision = "fp8_block"' in said


@pytest.mark.parametrize(
    ("engine", "said"),
    [
        (Engine(preset="sglang"), True),
        (Engine(args={"disable_cuda_graph": False}), True),
        (Engine(preset="sglang", initial_weights="checkpoint"), False),
        (Engine(preset="sglang", args={"disable_cuda_graph": True}), False),
        (Engine(), False),
    ],
)
def test_cuda_graphs_must_not_keep_what_dummy_weights_bring(engine: Engine, said: bool) -> None:
    found = refusal(replace(config(), engine=engine), DENSE)
    assert found.startswith('engine.initial_weights = "dummy" cannot work: dummy weights make the scales') == said
    assert said or found == ""


def test_llama_is_refused_where_sglang_loads_no_block_scales_of_it() -> None:
    model = DENSE | {"model_type": "llama"}
    for loads, said in ((True, ""), (False, "sglang 1.2 loads no block scales of a llama model")):
        sglang = SGLangFacts(version="1.2", arguments={}, loads_block_scales_of_llama=loads)
        try:
            resolve(config(), Facts(device="cuda", model=model, sglang=sglang))
            found = ""
        except UnsupportedEnvironment as error:
            found = str(error)
        assert said in found and ("sglang#30234" in found) == bool(said)


def test_without_it_no_size_matters() -> None:
    assert refusal(Config(), DENSE | {"hidden_size": 192}) == ""
