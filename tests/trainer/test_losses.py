"""Losses against numbers that verl 0.9.1 computed, and their aggregation over ranks."""

import json
from pathlib import Path
from typing import Any, get_args

import pytest
import torch
from torch import Tensor

from harness.config.schema import LossAggregation
from harness.trainer.advantages import masked_mean
from harness.trainer.losses import (
    Counts,
    aggregate,
    entropy_from_logits,
    local_counts,
    log_probs_from_logits,
    policy_loss,
    value_loss,
)
from tests.trainer.torchrun import torchrun
from tests.trainer.worker_aggregate import HORIZON, ROWS, losses

VECTORS: dict[str, Any] = json.loads((Path(__file__).parent / "ppo-vectors.json").read_text())
MODES = get_args(LossAggregation)


def tensor(numbers: Any) -> Tensor:
    return torch.tensor(numbers, dtype=torch.float64)


def close(actual: Tensor, expected: Any) -> None:
    torch.testing.assert_close(actual, tensor(expected), atol=1e-9, rtol=0)


def token_mean(loss: Tensor, mask: Tensor) -> Tensor:
    return aggregate(loss, mask, "token-mean", Counts(*local_counts(mask).tolist()), loss.shape[1])


@pytest.mark.parametrize("vector", VECTORS["policy"])
def test_policy_loss(vector: dict[str, Any]) -> None:
    mask = tensor(vector["mask"])
    loss, metrics = policy_loss(
        tensor(vector["new"]), tensor(vector["old"]), tensor(vector["adv"]), vector["low"], vector["high"], vector["c"]
    )
    close(token_mean(loss, mask), vector["loss"])
    for name, expected in (
        ("clip_fraction", "clipfrac"),
        ("clip_fraction_lower", "clipfrac_lower"),
        ("update_kl", "ppo_kl"),
    ):
        close(masked_mean(metrics[name], mask), vector[expected])


def test_policy_loss_without_dual_clip_is_that_of_a_bound_never_reached() -> None:
    vector = VECTORS["policy"][4]
    numbers = [tensor(vector[name]) for name in ("new", "old", "adv")]
    loss, metrics = policy_loss(numbers[0], numbers[1], numbers[2], clip_low=0.2, clip_high=0.2, dual_clip=0)
    close(token_mean(loss, tensor(vector["mask"])), vector["loss"])
    assert not metrics["clip_fraction_lower"].any()


def test_policy_loss_survives_extreme_ratios() -> None:
    loss, _ = policy_loss(tensor([[0.0, -900.0]]), tensor([[-900.0, 0.0]]), tensor([[1.0, -1.0]]), 0.2, 0.2, 0)
    close(loss, [[-1.2, 0.8]])


@pytest.mark.parametrize("vector", VECTORS["value"])
def test_value_loss(vector: dict[str, Any]) -> None:
    values, old_values, returns = (tensor(vector[name]) for name in ("vpreds", "values", "returns"))
    mask = torch.ones_like(values)
    loss, clipped = value_loss(values, old_values, returns, vector["cliprange"])
    close(token_mean(loss, mask), vector["loss"])
    close(masked_mean(clipped, mask), vector["clipfrac"])


def test_value_loss_without_clip() -> None:
    loss, clipped = value_loss(tensor([[0.5, 9.0]]), tensor([[0.0, 0.0]]), tensor([[1.0, 1.0]]), value_clip=0)
    close(loss, [[0.125, 32.0]])
    assert not clipped.any()


def test_entropy() -> None:
    vector = VECTORS["entropy"]
    entropy = entropy_from_logits(tensor(vector["logits"]))
    close(entropy, vector["token"])
    close(token_mean(entropy, torch.ones_like(entropy)), vector["token_mean"])
    close(entropy_from_logits(2 * tensor(vector["logits"]), temperature=2.0), vector["token"])


def test_log_probs() -> None:
    logits = torch.randn(3, 4, 11, generator=torch.Generator().manual_seed(0), dtype=torch.float64) * 9
    labels = torch.randint(11, (3, 4), generator=torch.Generator().manual_seed(1))
    expected = (logits / 0.7).log_softmax(-1).gather(-1, labels[..., None])[..., 0]
    close(log_probs_from_logits(logits, labels, temperature=0.7), expected.tolist())
    assert log_probs_from_logits(logits.bfloat16(), labels).dtype == torch.float32


@pytest.mark.parametrize("mode", MODES)
def test_aggregate(mode: LossAggregation) -> None:
    loss, mask = tensor(VECTORS["agg_in"]["loss"]), tensor(VECTORS["agg_in"]["mask"])
    counts = Counts(*local_counts(mask).tolist())
    assert counts == Counts(tokens=6, sequences=2)
    close(aggregate(loss, mask, mode, counts, horizon=4), VECTORS["agg"][mode])
    close(aggregate(loss.masked_fill(mask == 0, float("nan")), mask, mode, counts, horizon=4), VECTORS["agg"][mode])
    shares = [aggregate(loss[row : row + 1], mask[row : row + 1], mode, counts, horizon=4) for row in range(2)]
    close(shares[0] + shares[1], VECTORS["agg"][mode])


@pytest.mark.slow
def test_mean_gradient_of_three_ranks_is_that_of_one_process(tmp_path: Path) -> None:
    measured = torchrun("worker_aggregate.py", 3, tmp_path / "gradients.json")
    mask = (torch.arange(HORIZON) < torch.tensor([1, 3, 8, 2, 0, 5])[:, None]).to(torch.int64)
    counts = Counts(*local_counts(mask).tolist())
    assert measured["counts"] == [counts.tokens, counts.sequences] == [19, 5]
    assert set(measured["gradients"]) == set(MODES)
    for mode, gradient in measured["gradients"].items():
        weight = torch.linspace(-1, 1, 5, dtype=torch.float64, requires_grad=True)
        aggregate(losses(weight, slice(0, ROWS)), mask, mode, counts, HORIZON).backward()
        assert weight.grad is not None and float(weight.grad.abs().max()) > 1e-3
        torch.testing.assert_close(tensor(gradient), weight.grad, atol=1e-10, rtol=0)
