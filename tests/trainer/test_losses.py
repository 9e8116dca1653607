"""Losses against numbers that verl 0.9.1 computed, and their sum over microbatches."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from harness.trainer.advantages import masked_mean
from harness.trainer.losses import (
    entropy_from_logits,
    log_probs_from_logits,
    policy_loss,
    share_of_mean,
    value_loss,
)

VECTORS: dict[str, Any] = json.loads((Path(__file__).parent / "ppo-vectors.json").read_text())


def tensor(numbers: Any) -> Tensor:
    return torch.tensor(numbers, dtype=torch.float64)


def close(actual: Tensor, expected: Any) -> None:
    torch.testing.assert_close(actual, tensor(expected), atol=1e-9, rtol=0)


def token_mean(loss: Tensor, mask: Tensor) -> Tensor:
    return share_of_mean(loss, mask, int(mask.bool().sum()))


@pytest.mark.parametrize("vector", VECTORS["policy"])
def test_policy_loss(vector: dict[str, Any]) -> None:
    mask = tensor(vector["mask"])
    loss, metrics = policy_loss(
        tensor(vector["new"]), tensor(vector["old"]), tensor(vector["adv"]), vector["low"], vector["high"]
    )
    close(token_mean(loss, mask), vector["loss"])
    for name, expected in (
        ("clip_fraction", "clipfrac"),
        ("clip_fraction_lower", "clipfrac_lower"),
        ("update_kl", "ppo_kl"),
    ):
        close(masked_mean(metrics[name], mask), vector[expected])


def test_policy_loss_survives_extreme_ratios() -> None:
    loss, _ = policy_loss(tensor([[0.0, -900.0]]), tensor([[-900.0, 0.0]]), tensor([[1.0, -1.0]]), 0.2, 0.2)
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


def test_shares_of_a_mean_add_up_and_what_does_not_count_does_not_matter() -> None:
    loss, mask = tensor(VECTORS["agg_in"]["loss"]), tensor(VECTORS["agg_in"]["mask"])
    close(token_mean(loss, mask), VECTORS["agg"]["token-mean"])
    close(token_mean(loss.masked_fill(mask == 0, float("nan")), mask), VECTORS["agg"]["token-mean"])
    shares = [share_of_mean(loss[row : row + 1], mask[row : row + 1], 6) for row in range(2)]
    close(shares[0] + shares[1], VECTORS["agg"]["token-mean"])
