"""The trainer's choice of experts, compared with the engine's and replaced by it, on the tiny models with experts.

tests/end_to_end/test_routing.py has the experts of a real engine.
"""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from transformers import AutoModelForCausalLM

from harness.task.tiny_models import tiny_config
from harness.trainer.actor import token_log_probs
from harness.trainer.batch import Batch, from_sequences
from harness.trainer.model import choose_attention
from harness.trainer.routing import NOT_RECORDED, Routers, RoutingNotSeen, blocks_of, routed_shape, scatter_routing
from tests.trainer.sequences import advantage_batch, sequences

MODELS = ("qwen3_moe", "deepseek_v3")
both_models = pytest.mark.parametrize("name", MODELS)
both_layouts = pytest.mark.parametrize("packed", [False, True])


def model_of(name: str, packed: bool = False, checkpointing: bool = False) -> Any:
    torch.manual_seed(0)
    config = tiny_config(name)
    model = AutoModelForCausalLM.from_config(config, attn_implementation=choose_attention(config, "eager", packed)[0])
    for block in blocks_of(model).values():  # transformers' initial routers prefer no expert
        gate: Any = block.gate
        nn.init.normal_(gate.weight, std=1.0)
    if checkpointing:
        model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    return model.train()


def batch_of(model: Any) -> Batch:
    """Sequences of unequal lengths, whose experts the engine did not tell."""
    batch = advantage_batch(*sequences(), slice(0, 4))
    config = model.config
    shape = config.num_hidden_layers, config.num_experts_per_tok
    return batch.replace(routed_experts=scatter_routing([None] * len(batch), shape, batch))


def log_probs(model: Any, routers: Routers, batch: Batch, packed: bool, replay: bool) -> tuple[Tensor, Tensor]:
    """Log-probs [B, T] of the batch, and in how many layers the choices differ."""
    routers.follow(batch, packed, replay=replay)
    found, _ = token_log_probs(model, batch, 1.0, packed=packed)
    return found, routers.differing_layers(batch, packed)


def with_own_choice(name: str) -> Batch:
    """A batch as from an engine whose routers choose what the trainer's do."""
    model = model_of(name)
    routers, batch = Routers(model), batch_of(model)
    routers.follow(batch, False, replay=False)
    token_log_probs(model, batch, 1.0)
    routed = batch.require("routed_experts").clone()
    tokens = batch.attention_mask.sum(-1).tolist()
    for layer in routers.experts:
        chosen = routers._chosen[layer].view(*routed.shape[:2], -1)
        for row, length in enumerate(tokens):
            routed[row, : length - 1, layer] = chosen[row, : length - 1].int()
    return batch.replace(routed_experts=routed)


@both_layouts
@both_models
def test_the_same_experts_in_another_order_agree_and_a_replay_of_them_changes_nothing(name: str, packed: bool) -> None:
    model = model_of(name, packed)
    routers = Routers(model)
    assert sorted(routers.experts) == ([0, 1] if name == "qwen3_moe" else [1]), "DeepSeek's first layer is dense"
    batch = with_own_choice(name)
    batch = batch.replace(routed_experts=batch.require("routed_experts").flip(-1))
    mask = batch.response_mask.bool()
    own, differing = log_probs(model, routers, batch, packed, replay=False)
    replayed, same = log_probs(model, routers, batch, packed, replay=True)
    assert not differing[mask].any() and not same[mask].any()
    assert torch.allclose(own[mask], replayed[mask], atol=1e-6)


@both_layouts
@both_models
def test_another_expert_is_counted_at_the_token_after_and_a_replay_takes_it(name: str, packed: bool) -> None:
    model = model_of(name, packed)
    routers = Routers(model)
    batch = with_own_choice(name)
    row, place, layer = 1, 7, 1  # of a response: 5 tokens of prompt, 9 of response
    routed = batch.require("routed_experts").clone()
    other = next(each for each in range(8) if each not in routed[row, place, layer])
    routed[row, place, layer, 0] = other
    batch = batch.replace(routed_experts=routed)
    own, differing = log_probs(model, routers, batch, packed, replay=False)
    assert differing[batch.response_mask.bool()].sum() == 1 and differing[row, place + 1] == 1
    replayed, _ = log_probs(model, routers, batch, packed, replay=True)
    moved = (own - replayed).abs() > 1e-5
    assert moved[row, place + 1] and not moved[row, : place + 1].any(), "what came before is as it was"
    assert not moved[[each for each in range(4) if each != row]].any()


def test_a_token_of_which_the_engine_said_nothing_is_routed_by_the_trainer_and_nothing_is_watched_at_rest() -> None:
    model = model_of("qwen3_moe")
    routers, batch = Routers(model), batch_of(model)
    own, differing = log_probs(model, routers, batch, packed=False, replay=False)
    replayed, _ = log_probs(model, routers, batch, packed=False, replay=True)
    assert torch.equal(own, replayed)
    assert (differing[batch.response_mask.bool()] == NOT_RECORDED).all()
    routers.rest()
    token_log_probs(model, batch, 1.0)
    assert not routers._chosen and not routers._open


def expected_weights(name: str, gate: Any, hidden: Tensor, experts: Tensor) -> Tensor:
    """The weights that the model's paper gives these experts: [N, K]."""
    logits = hidden @ gate.weight.T
    scores = logits.sigmoid() if name == "deepseek_v3" else logits.softmax(-1)
    chosen = scores.gather(1, experts)
    return chosen / chosen.sum(-1, keepdim=True) * (gate.routed_scaling_factor if name == "deepseek_v3" else 1)


@both_models
def test_a_replay_weighs_the_engines_experts_by_the_trainers_router_which_learns(name: str) -> None:
    gradients = []
    for checkpointing in (False, True):
        model = model_of(name, checkpointing=checkpointing)
        routers, batch = Routers(model), batch_of(model)
        generator = torch.Generator().manual_seed(0)
        routed = torch.rand((*batch.require("routed_experts").shape[:3], 8), generator=generator).topk(2).indices.int()
        batch = batch.replace(routed_experts=routed)
        seen: dict[str, Any] = {}
        block: Any = blocks_of(model)[1]
        hook = block.experts.register_forward_pre_hook(lambda module, inputs, seen=seen: seen.update(inputs=inputs))
        found, _ = log_probs(model, routers, batch, packed=False, replay=True)
        hook.remove()  # checkpointing computes the layer again
        hidden, experts, weights = seen["inputs"]
        assert torch.equal(experts, routed[:, :, 1].flatten(0, 1).long())
        assert torch.allclose(weights, expected_weights(name, block.gate, hidden, experts), atol=1e-6)
        found[batch.response_mask.bool()].sum().backward()
        gradients.append(block.gate.weight.grad)
    assert gradients[0].abs().sum() > 0 and torch.equal(*gradients)


def test_a_model_whose_choice_cannot_be_seen_is_named() -> None:
    with pytest.raises(RoutingNotSeen, match=r'has no layer with a module "experts"; set rollout.routing = "off"'):
        Routers(AutoModelForCausalLM.from_config(tiny_config("qwen2")))
    model = model_of("qwen3_moe")
    batch, gate = batch_of(model), blocks_of(model)[1].gate
    assert isinstance(gate, nn.Module)
    gate.forward = lambda hidden: (None, torch.ones(len(hidden), 2) / 2, torch.tensor([[0, 1]] * len(hidden)))
    with pytest.raises(RoutingNotSeen, match="layer 1 without torch.topk"):
        log_probs(model, Routers(model), batch, packed=False, replay=False)


def test_the_shape_is_that_of_the_models_config(tmp_path: Path) -> None:
    for name in (*MODELS, "qwen2"):
        tiny_config(name).save_pretrained(tmp_path / name)
    assert [routed_shape(str(tmp_path / name)) for name in MODELS] == [(2, 2), (2, 2)]
    with pytest.raises(ValueError, match="has no experts, or no num_experts_per_tok"):
        routed_shape(str(tmp_path / "qwen2"))


def test_what_the_engine_said_is_aligned_with_its_tokens() -> None:
    batch = from_sequences([[5, 6], [7], [8]], [[11], [12, 13], []], pad_id=3)
    said = [np.arange(2 * 6).reshape(2, 3, 2), None, np.arange(0).reshape(0, 3, 2)]
    routed = scatter_routing(said, (3, 2), batch)
    assert routed.shape == (3, 3, 3, 2) and routed.dtype == torch.int32
    assert routed[0, 1].tolist() == [[6, 7], [8, 9], [10, 11]], "the second token's"
    assert (routed[0, 2] == NOT_RECORDED).all() and (routed[1:] == NOT_RECORDED).all()
    dropped = scatter_routing([np.ones((5, 3, 2))] * 3, (3, 2), batch)
    assert (dropped[:, 0] == 1)[:2].all() and (dropped[2] == NOT_RECORDED).all(), (
        "tokens that were dropped are not there"
    )
    wide = batch.replace(routed_experts=routed).as_wide_as(5).require("routed_experts")
    assert wide.shape == (3, 5, 3, 2) and (wide[:, 3:] == NOT_RECORDED).all()
