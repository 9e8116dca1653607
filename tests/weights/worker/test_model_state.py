from typing import Any

import torch
from torch import nn

from harness.weights.worker.model_state import fill_model, synced_tensors
from harness.weights.worker.readback import held_tensors


def held_by(rank: int) -> dict[str, int]:
    model = torch.nn.Linear(2, 2, dtype=torch.bfloat16)
    with torch.no_grad():
        model.weight.fill_(rank)
        model.bias.fill_(0)
    model.register_buffer("scale", torch.tensor(3.0))
    return held_tensors(model)


def test_schedulers_say_what_they_hold() -> None:
    first, second = held_by(0), held_by(1)
    assert first.keys() == {"weight", "bias", "scale"}
    assert {name for name in first if first[name] != second[name]} == {"weight"}


class Attention(nn.Module):
    """The parts of SGLang's DeepSeek attention that matter here."""

    def __init__(self) -> None:
        super().__init__()
        self.kv_b_proj = nn.Linear(4, 8, bias=False, dtype=torch.bfloat16)
        self.w_kc = torch.ones(2, 3, 4, dtype=torch.bfloat16).transpose(1, 2)
        self.w_vc: Any = None
        self.scratch = torch.ones(3)


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.attn = Attention()
        self.norm = nn.LayerNorm(4)
        self.head = nn.Linear(4, 4)
        self.embedding = nn.Embedding(4, 4)
        self.head.weight = self.embedding.weight
        self.register_buffer("bias_of_router", torch.ones(4))
        self.register_buffer("count", torch.ones(4, dtype=torch.int64))
        self.register_buffer("rotary", torch.ones(4), persistent=False)


def contents(model: nn.Module) -> dict[str, torch.Tensor]:
    return {name: tensor.clone() for name, tensor in synced_tensors(model)}


def test_all_that_a_sync_must_bring_changes_and_nothing_else() -> None:
    model = Model()
    before = contents(model)
    assert {"bias_of_router", "count", "attn.w_kc", "attn.kv_b_proj.weight", "norm.weight"} <= before.keys()
    assert not {"rotary", "attn.scratch", "attn.w_vc"} & before.keys()
    fill_model(model, "seed")
    after = contents(model)
    same = {name for name in before if torch.equal(before[name], after[name])}
    assert same == {"count"}
    for name in before.keys() - same:
        assert (before[name] != after[name]).float().mean() > 0.9, name
        assert after[name].isfinite().all() and after[name].abs().max() <= 0.5
    assert model.rotary.eq(1).all() and model.attn.scratch.eq(1).all()
    assert model.head.weight is model.embedding.weight


def test_the_same_seed_is_the_same_garbage() -> None:
    one, other, third = Model(), Model(), Model()
    for model, seed in ((one, "a"), (other, "a"), (third, "b")):
        fill_model(model, seed)
    assert all(torch.equal(a, b) for a, b in zip(contents(one).values(), contents(other).values(), strict=True))
    assert not torch.equal(one.norm.weight, third.norm.weight)
    assert not torch.equal(one.norm.weight, one.norm.bias)
