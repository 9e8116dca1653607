"""Which output counts as the first that differs, for made-up outputs of engine ranks and trainer."""

import pytest
import torch

from harness.tools.mismatch.operators import compare, different_fields, first_difference, routing_flips, suspects
from harness.tools.mismatch.recording import Outputs, chosen, short


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


def test_what_a_flipped_token_changes_after_it_is_no_difference() -> None:
    theirs: Outputs = {
        "layers.0.mlp.topk": [torch.ones(40, 4)],
        "layers.1.self_attn.attn": [torch.ones(40, 4)],
        "layers.1.mlp": [torch.ones(40, 4)],
    }
    flipped = {name: [each[0].clone()] for name, each in theirs.items()}
    flipped["layers.0.mlp.topk"][0][20] = torch.tensor([0.0, 2.0, 1.0, 1.0])
    flipped["layers.1.self_attn.attn"][0][20:] *= 1.5  # attention shows it to the tokens that follow
    found = compare([flipped], theirs, "bfloat16")
    assert [each.agreeing for each in found] == [20, 20, 20] and first_difference(found, "bfloat16") is None
    for name, late in (("layers.1.mlp", slice(0, 20)), ("layers.1.self_attn.attn", slice(0, 40))):
        wrong = {each: [some[0].clone()] for each, some in flipped.items()}
        wrong[name][0][late] *= 1.5
        first = first_difference(compare([wrong], theirs, "bfloat16"), "bfloat16")
        assert first and first.name == name
    flipped["layers.0.mlp.topk"][0][4] = torch.tensor([0.0, 2.0, 1.0, 1.0])  # too early to say anything of what follows
    assert [each.name for each in compare([flipped], theirs, "bfloat16")] == ["layers.0.mlp.topk"]


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
