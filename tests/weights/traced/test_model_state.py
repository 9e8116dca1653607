from typing import Any

import torch
from torch import nn

from harness.weights.traced.model_state import reset_scales_of_kv_cache, synced_tensors


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


def test_what_a_sync_must_bring() -> None:
    names = contents(Model()).keys()
    assert {"bias_of_router", "count", "attn.w_kc", "attn.kv_b_proj.weight", "norm.weight"} <= names
    assert not {"rotary", "attn.scratch", "attn.w_vc"} & names


class Quantized(nn.Module):
    """As SGLang holds block-FP8, with the scales of its KV cache."""

    def __init__(self) -> None:
        super().__init__()
        values = torch.randn(300, 5, generator=torch.Generator().manual_seed(0))
        self.weight = nn.Parameter(values.to(torch.float8_e4m3fn), requires_grad=False)
        self.weight_scale_inv = nn.Parameter(torch.ones(3, 1), requires_grad=False)
        self.attn = nn.Module()
        self.attn.k_scale = nn.Parameter(torch.tensor(1.0), requires_grad=False)
        self.attn.v_scale = nn.Parameter(torch.tensor(1.0), requires_grad=False)


def test_scales_of_the_kv_cache_are_not_synced_and_can_be_reset() -> None:
    model = Quantized()
    assert contents(model).keys() == {"weight", "weight_scale_inv"}
    model.attn.k_scale.data.fill_(0.5)
    reset_scales_of_kv_cache(model)
    assert model.attn.k_scale == model.attn.v_scale == model.attn.k_scale_float == model.attn.v_scale_float == 1.0
