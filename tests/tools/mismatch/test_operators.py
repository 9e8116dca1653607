"""Which output counts as the first that differs, for made-up outputs of engine ranks and trainer."""

import pytest
import torch

from harness.config.schema import Config, Engine, Model, Parallel
from harness.tools.mismatch.operators import compare, different_fields, first_difference, routing_flips, suspects
from harness.tools.mismatch.recording import Outputs, chosen, short
from harness.tools.mismatch.sources import engine_changes, trainer_changes


def rows(seed: int, width: int = 8) -> torch.Tensor:
    return torch.randn(6, width, generator=torch.Generator().manual_seed(seed))


def trainer_outputs() -> Outputs:
    names = ("embed_tokens", "layers.0.input_layernorm", "layers.0.self_attn.q_proj", "layers.0.self_attn.k_proj")
    return {name: [rows(n)] for n, name in enumerate((*names, "layers.0.self_attn.v_proj", "layers.0.mlp", "norm"))}


def engine_of_two() -> list[Outputs]:
    """The same as two ranks hold it: copies, summands, and columns of a fused projection."""
    theirs = trainer_outputs()
    parts = [theirs[f"layers.0.self_attn.{name}_proj"][0] for name in "qkv"]
    ranks = list[Outputs]()
    for rank in range(2):
        own = {name: theirs[name] for name in ("embed_tokens", "layers.0.input_layernorm", "norm")}
        own["layers.0.self_attn.qkv_proj"] = [torch.cat([part.chunk(2, dim=-1)[rank] for part in parts], dim=-1)]
        half = rows(100)
        own["layers.0.mlp"] = [half if rank else theirs["layers.0.mlp"][0] - half]
        ranks.append(own)
    return ranks


def test_shares_of_ranks_are_no_difference() -> None:
    compared = compare(engine_of_two(), trainer_outputs(), "float32")
    assert [each.name for each in compared] == list(trainer_outputs())
    assert first_difference(compared, "float32") is None and not suspects(compared, "float32")


@pytest.mark.parametrize("name", ["layers.0.input_layernorm", "layers.0.mlp", "norm"])
def test_the_first_output_that_differs_is_named(name: str) -> None:
    engine = engine_of_two()
    for rank in engine:
        rank[name] = [each * 1.01 for each in rank[name]]
        rank["norm"] = [each * 1.02 for each in rank["norm"]]  # what follows differs more
    first = first_difference(compare(engine, trainer_outputs(), "float32"), "float32")
    assert first and first.name == name and first.error >= 0.009 and first.tokens == 1


def test_one_wrong_projection_of_a_fused_one_is_named() -> None:
    engine = engine_of_two()
    fused = engine[1]["layers.0.self_attn.qkv_proj"][0]
    fused[:, 4:8] += 0.1  # the second rank's half of k_proj
    first = first_difference(compare(engine, trainer_outputs(), "float32"), "float32")
    assert first and first.name == "layers.0.self_attn.k_proj"


def test_rounding_of_half_precision_is_no_difference_and_a_few_tokens_of_other_experts_are_none() -> None:
    engine, theirs = engine_of_two(), trainer_outputs()
    for rank in engine:
        rank["embed_tokens"] = [each.bfloat16().float() for each in rank["embed_tokens"]]
    assert first_difference(compare(engine, theirs, "bfloat16"), "bfloat16") is None


def test_routing_is_compared_by_the_experts_that_are_chosen() -> None:
    ids = torch.tensor([[0, 1], [1, 2], [2, 3]])
    weights = torch.tensor([[0.5, 0.5], [0.2, 0.8], [1.0, 1.0]])
    theirs = {"layers.0.mlp.topk": [chosen(weights, ids, 4)]}
    swapped = {"layers.0.mlp.topk": [chosen(weights.flip(-1), ids.flip(-1), 4)]}
    other = {"layers.0.mlp.topk": [chosen(weights, torch.tensor([[0, 1], [1, 3], [2, -1]]), 4)]}
    assert routing_flips(swapped, theirs) == 0
    assert routing_flips(other, theirs) == pytest.approx(2 / 3)
    assert routing_flips({}, theirs) is None


def test_fields_that_differ_are_told_by_their_path() -> None:
    ours = {"rope_parameters": {"rope_theta": 1e4, "type": "default"}, "dtype": "x", "hidden_size": 64}
    theirs = {"rope_parameters": {"rope_theta": 1e6}, "dtype": "y", "hidden_size": 64}
    assert different_fields(ours, theirs) == [
        "rope_parameters.rope_theta: 10000.0 in the engine, 1000000.0 in the trainer"
    ]


def test_names_are_the_same_on_both_sides() -> None:
    assert short("model.language_model.layers.3.mlp.gate") == "layers.3.mlp.gate"
    assert short("model.embed_tokens") == "embed_tokens" and short("") == ""


def test_what_is_changed_follows_from_the_config() -> None:
    args = {"enable_dp_attention": True, "dp_size": 2, "chunked_prefill_size": 16, "mem_fraction_static": 0.4}
    config = Config(
        model=Model(dtype="bfloat16"),
        parallel=Parallel(dp=2, tp=2),
        engine=Engine(args=args, preset="sglang"),
    )
    changes = {each.name: each for each in engine_changes(config)}
    assert changes.keys() == {
        "tensor parallelism", "engine precision", "engine preset", "engine.args.enable_dp_attention",
        "engine.args.chunked_prefill_size",
    }  # fmt: skip
    alone = changes["tensor parallelism"].config
    assert (alone.parallel.dp, alone.parallel.tp) == (4, 1) and "dp_size" not in alone.engine.args
    without = changes["engine.args.enable_dp_attention"].config.engine.args
    assert without == {"chunked_prefill_size": 16, "mem_fraction_static": 0.4}
    assert [each.name for each in trainer_changes(config, "sdpa")] == [
        "trainer precision", "precision of the trainer's head", "trainer attention",
    ]  # fmt: skip
    assert [each.name for each in engine_changes(Config(parallel=Parallel(tp=1)))] == []
