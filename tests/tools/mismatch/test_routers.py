"""Routers in float32, on small modules that are made like transformers' and like SGLang's."""

import pytest
import torch
from torch import Tensor, nn

from harness.task.tiny_models import tiny_config
from harness.tools.mismatch import routers
from harness.trainer.model import build_on_meta


class Gate(nn.Module):
    """Like SGLang's: returns its scores and a bias that is None."""

    def __init__(self, factor: float = 1.0) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(8, 32, generator=torch.Generator().manual_seed(0)).bfloat16())
        self.factor = factor

    def forward(self, hidden: Tensor) -> tuple[Tensor, None]:
        return nn.functional.linear(hidden, self.weight) * self.factor, None


class Block(nn.Module):
    def __init__(self, gate: nn.Module) -> None:
        super().__init__()
        self.gate, self.experts = gate, nn.Identity()

    def forward(self, hidden: Tensor) -> Tensor:
        scores: Tensor = self.gate(hidden)[0]
        return scores


def hidden(rows: int = 16, width: int = 32) -> Tensor:
    return torch.randn(rows, width, generator=torch.Generator().manual_seed(1)).bfloat16()


def test_a_router_of_the_engine_gets_the_product_in_float32() -> None:
    block = Block(Gate())
    own = block(hidden())
    routers.start_exact_routers(block, None)
    exact = block(hidden())
    calls, error = routers.stop_exact_routers(block, None)
    assert torch.equal(exact, nn.functional.linear(hidden().float(), block.gate.weight.float()))  # type: ignore[arg-type, union-attr, operator]
    assert calls == 1 and routers.NOTHING < error <= routers.ROUNDING["bfloat16"]
    assert torch.equal(block(hidden()), own)


def test_a_router_that_computes_something_else_is_not_taken_for_rounding() -> None:
    block = Block(Gate(factor=1.1))
    routers.start_exact_routers(block, None)
    block(hidden())
    assert routers.stop_exact_routers(block, None)[1] > routers.ROUNDING["bfloat16"]


@pytest.mark.parametrize(("name", "computes_in_float32"), [("qwen3_moe", False), ("deepseek_v3", True)])
def test_the_trainers_routers_choose_in_float32(name: str, computes_in_float32: bool) -> None:
    config = tiny_config(name)
    _, model = build_on_meta(config, torch.bfloat16)
    gate = next(routers.routers_of(model))
    gate.to_empty(device="cpu")
    with torch.no_grad():
        gate.weight.normal_(generator=torch.Generator().manual_seed(0))  # type: ignore[union-attr, operator]
        for buffer in gate.buffers():
            buffer.zero_()
        inputs = hidden(width=config.hidden_size)
        own = gate(inputs)
        with routers.exact_routers(model) as exactness:
            scores, weights, _ = gate(inputs)
        assert torch.equal(gate(inputs)[0], own[0])
    assert exactness.calls == 1 and scores.dtype == weights.dtype == torch.float32
    assert (exactness.error <= routers.NOTHING) == computes_in_float32


def test_a_dense_model_has_no_routers() -> None:
    _, model = build_on_meta(tiny_config("qwen2"), torch.bfloat16)
    assert not any(routers.routers_of(model))
