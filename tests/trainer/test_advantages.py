"""Advantages and statistics against numbers that verl 0.9.1 computed."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from harness.trainer import advantages as a

VECTORS: dict[str, Any] = json.loads((Path(__file__).parent / "ppo-vectors.json").read_text())


def tensor(numbers: Any) -> Tensor:
    return torch.tensor(numbers, dtype=torch.float64)


def close(actual: Tensor, expected: Any) -> None:
    torch.testing.assert_close(actual, tensor(expected), atol=1e-9, rtol=0)


@pytest.mark.parametrize("vector", VECTORS["gae"])
def test_gae(vector: dict[str, Any]) -> None:
    mask = tensor(vector["mask"])
    raw, returns = a.gae(tensor(vector["rewards"]), tensor(vector["values"]), mask, vector["gamma"], vector["lam"])
    close(raw, vector["raw_adv_masked"])
    close(returns, vector["returns_masked"])
    close(a.masked_whiten(raw, mask), vector["whitened_adv_masked"])


@pytest.mark.parametrize("garbage", [1e9, float("nan"), float("inf")])
def test_gae_does_not_read_masked_positions(garbage: float) -> None:
    vector = VECTORS["gae"][4]
    mask, rewards, values = (tensor(vector[name]) for name in ("mask", "rewards", "values"))
    masked = mask == 0
    raw, returns = a.gae(
        rewards.masked_fill(masked, garbage), values.masked_fill(masked, garbage), mask, vector["gamma"], vector["lam"]
    )
    close(raw, vector["raw_adv_masked"])
    close(returns, vector["returns_masked"])


def test_masked_statistics() -> None:
    vector = VECTORS["masked"]
    x, mask = tensor(vector["x"]), tensor(vector["mask"])
    close(a.masked_mean(x, mask), vector["mean"])
    close(a.masked_var(x, mask), vector["var_unbiased"])
    close(a.masked_var(x, mask, unbiased=False), vector["var_biased"])
    close(a.masked_whiten(x, mask), vector["whiten"])


def test_masked_statistics_ignore_nan_under_the_mask() -> None:
    x, mask = tensor([[1.0, 3.0, float("nan")]]), tensor([[1, 1, 0]])
    assert float(a.masked_mean(x, mask)) == pytest.approx(2.0)
    assert torch.isfinite(a.masked_whiten(x, mask)).all()


def test_masked_whiten_over_ranks_is_that_of_all_their_tokens() -> None:
    vector = VECTORS["masked"]
    x, mask = tensor(vector["x"]), tensor(vector["mask"])
    # Rank 0 has the first row. The sums that all_sum must return to it are those of both rows, in the order asked for.
    asked: list[Tensor] = []

    def record(total: Tensor) -> Tensor:
        asked.append(total)
        return total

    a.masked_whiten(x, mask, all_sum=record)
    whole = iter(asked)
    close(a.masked_whiten(x[:1], mask[:1], all_sum=lambda _: next(whole)), vector["whiten"][:1])


@pytest.mark.parametrize("count", [0, 1])
def test_unbiased_variance_needs_two_tokens(count: int) -> None:
    with pytest.raises(ValueError, match=f"at least 2 tokens .* got {count}"):
        a.masked_var(torch.ones(1, 3), (torch.arange(3) < count)[None])


def test_group_advantages() -> None:
    vector = VECTORS["grpo"]
    rewards, group = tensor(vector["token_rewards"]), torch.tensor(vector["index"])
    mask = torch.ones_like(rewards)
    for result, name in (
        (a.grpo(rewards, mask, group), "std_norm"),
        (a.grpo(rewards, mask, group, normalize_by_std=False), "no_std"),
        (a.rloo(rewards, mask, group), "rloo"),
    ):
        close(result, [[number, number] for number in vector[name]])


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_a_group_of_equal_rewards_has_advantages_of_exactly_0(dtype: torch.dtype) -> None:
    cases = [(size, i / n) for size in range(2, 17) for n in range(1, 17) for i in range(1, n + 1)]
    scores = torch.cat([torch.full((size,), score, dtype=dtype) for size, score in cases])[:, None]
    group = torch.cat([torch.full((size,), number) for number, (size, _) in enumerate(cases)])
    mask = torch.ones_like(scores)
    for result in (a.grpo(scores, mask, group), a.grpo(scores, mask, group, False), a.rloo(scores, mask, group)):
        assert result.dtype == dtype and not result.any()


def test_group_advantages_need_no_order_and_keep_to_the_mask() -> None:
    vector = VECTORS["grpo"]
    rewards, group = tensor(vector["token_rewards"]), torch.tensor(vector["index"]) * 7 - 3
    mask = torch.ones_like(rewards)
    mask[0, 0] = 0
    order = torch.tensor([3, 0, 5, 2, 4, 1])
    result = a.grpo(rewards[order], mask[order], group[order])
    close(result, (tensor(vector["std_norm"])[:, None] * mask)[order].tolist())


def test_kl() -> None:
    vector = VECTORS["kl"]
    log_probs, reference = tensor(vector["logp"]), tensor(vector["ref"])
    close(a.kl(log_probs, reference, "reward"), vector["k1"])
    close(a.kl(log_probs, reference, "loss"), vector["k3"])


def test_as_a_loss_the_estimate_pulls_towards_the_reference_as_the_kl_does() -> None:
    draw = torch.Generator().manual_seed(0)
    logits, reference = (torch.randn(20, generator=draw, dtype=torch.float64) for _ in range(2))
    logits.requires_grad_()
    log_probs, reference = logits.log_softmax(-1), reference.log_softmax(-1)
    expected = (log_probs.detach().exp() * a.kl(log_probs, reference, "loss")).sum()
    (found,) = torch.autograd.grad(expected, logits, retain_graph=True)
    (right,) = torch.autograd.grad((log_probs.exp() * (log_probs - reference)).sum(), logits)
    assert torch.cosine_similarity(found, right, dim=0) > 0.5


def test_token_rewards_stand_at_the_last_token() -> None:
    mask = torch.tensor([[0, 1, 1, 0], [1, 0, 1, 1]])
    rewards = a.token_rewards(tensor([2.0, -1.0]), mask, kl=torch.ones(2, 4, dtype=torch.float64), kl_coefficient=0.1)
    close(rewards, [[0, -0.1, 1.9, 0], [-0.1, 0, -0.1, -1.1]])
    close(a.token_rewards(tensor([2.0, -1.0]), mask), [[0, 0, 2.0, 0], [0, 0, 0, -1.0]])


def test_explained_variance() -> None:
    returns, mask = tensor([[1.0, 2.0, 3.0, 50.0]]), tensor([[1, 1, 1, 0]])
    assert float(a.explained_variance(returns, returns, mask)) == 1.0
    assert float(a.explained_variance(tensor([[7.0, 7, 7, 0]]), returns, mask)) == pytest.approx(0.0)
    assert float(a.explained_variance(-returns, returns, mask)) == pytest.approx(-3.0)
    assert float(a.explained_variance(returns, torch.full_like(returns, 0.1), mask)) == 0.0


def test_returns_of_rounding_errors_do_not_vary() -> None:
    """Without rewards, and with gamma = lam = 1, all returns are 0 up to rounding (2e-7). Their variance is noise."""
    values = torch.randn(4, 16, generator=torch.Generator().manual_seed(0))
    mask = torch.ones(4, 16)
    _, returns = a.gae(torch.zeros(4, 16), values, mask, 1.0, 1.0)
    assert 0 < float(returns.abs().max()) < 1e-5
    assert float(a.explained_variance(values, returns, mask)) == 0.0
