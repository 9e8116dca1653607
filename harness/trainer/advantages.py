"""From rewards to advantages: masked statistics, GAE, GRPO, RLOO and the KL to the reference.

Pure functions of tensors. Masks are [B, T], any dtype, nonzero where a token counts. Statistics follow verl 0.9.1
(core_algos.py, torch_functional.py) to the last epsilon, so that numbers can be compared. Where a statistic spans
several ranks, `all_sum` adds a tensor up over them.
"""

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from harness.config.schema import KlEstimator

AllSum = Callable[[Tensor], Tensor]


def one_rank(total: Tensor) -> Tensor:
    """Return the total: the `all_sum` of a single rank."""
    return total


def masked_sum(x: Tensor, mask: Tensor, all_sum: AllSum = one_rank) -> Tensor:
    """Sum x where mask is nonzero, a scalar. What lies under a zero mask does not matter, NaN included."""
    return all_sum(torch.where(mask.bool(), x, torch.zeros_like(x)).sum())


def masked_mean(x: Tensor, mask: Tensor, all_sum: AllSum = one_rank) -> Tensor:
    """Average x where mask is nonzero, a scalar: sum / (n + 1e-8), hence 0 for an empty mask."""
    return masked_sum(x, mask, all_sum) / (all_sum(mask.bool().sum().to(x.dtype)) + 1e-8)


def masked_var(x: Tensor, mask: Tensor, unbiased: bool = True, all_sum: AllSum = one_rank) -> Tensor:
    """Return the variance of x where mask is nonzero, a scalar; unbiased divides by n - 1.

    Raise ValueError if unbiased and fewer than two tokens count.
    """
    mean = masked_mean(x, mask, all_sum)
    variance = masked_mean((x - mean).square(), mask, all_sum)
    if not unbiased:
        return variance
    count = all_sum(mask.bool().sum().to(x.dtype))
    if count < 2:
        raise ValueError(f"an unbiased variance needs at least 2 tokens in the mask, got {int(count)}")
    return variance * count / (count - 1)


def masked_whiten(x: Tensor, mask: Tensor, shift_mean: bool = True, all_sum: AllSum = one_rank) -> Tensor:
    """Scale x to variance 1, and to mean 0 if shift_mean, over the tokens that count; 0 elsewhere."""
    mean = masked_mean(x, mask, all_sum)
    white = (x - mean) * torch.rsqrt(masked_var(x, mask, all_sum=all_sum) + 1e-8)
    return torch.where(mask.bool(), white if shift_mean else white + mean, torch.zeros_like(x))


def explained_variance(values: Tensor, returns: Tensor, mask: Tensor, all_sum: AllSum = one_rank) -> Tensor:
    """Return 1 - var(returns - values) / var(returns), a scalar; 0 where the returns do not vary."""
    total = masked_var(returns, mask, unbiased=False, all_sum=all_sum)
    left = masked_var(returns - values, mask, unbiased=False, all_sum=all_sum)
    # Equal returns have a variance of rounding errors, not of 0.
    varies = total > 1e-10 * masked_mean(returns.square(), mask, all_sum)
    return torch.where(varies, 1 - left / total, torch.zeros_like(total))


def token_rewards(scores: Tensor, mask: Tensor, kl: Tensor | None = None, kl_coefficient: float = 0.0) -> Tensor:
    """Return [B, T]: a response's score [B] at its last token, if any, less kl_coefficient * kl [B, T] at each token."""
    counts = mask.bool()
    positions = torch.arange(mask.shape[-1], device=mask.device)
    last = torch.where(counts, positions, 0).amax(dim=-1)
    rewards = scores.new_zeros(mask.shape).scatter(-1, last[:, None], scores[:, None])
    if kl is not None:
        rewards = rewards - kl_coefficient * kl
    return torch.where(counts, rewards, torch.zeros_like(rewards))


def gae(rewards: Tensor, values: Tensor, mask: Tensor, gamma: float, lam: float) -> tuple[Tensor, Tensor]:
    """Estimate (advantages, returns), [B, T], by GAE (arXiv 1506.02438); not whitened, 0 under mask 0.

    rewards [B, T] and values [B, T] share one float dtype. Where the mask is 0, as in the prompts of later turns, the
    recursion carries the next value and advantage over, so that what lies there has no influence.
    """
    counts = mask.bool()
    next_value = torch.zeros_like(values[:, 0])
    advantage = torch.zeros_like(next_value)
    advantages = torch.zeros_like(values)
    for t in reversed(range(values.shape[1])):
        here = counts[:, t]
        delta = rewards[:, t] + gamma * next_value - values[:, t]
        advantage = torch.where(here, delta + gamma * lam * advantage, advantage)
        next_value = torch.where(here, values[:, t], next_value)
        advantages[:, t] = torch.where(here, advantage, torch.zeros_like(advantage))
    return advantages, torch.where(counts, advantages + values, torch.zeros_like(values))


def _grouped(rewards: Tensor, mask: Tensor, group: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Return each row's score, the score less its group's mean, the group's number from 0, and its size: [B], float64.

    Equal scores of a group give exactly 0.
    """
    scores = torch.where(mask.bool(), rewards, torch.zeros_like(rewards)).sum(dim=-1).double()
    row = group.unique(return_inverse=True)[1]
    zeros = torch.zeros_like(scores)
    count = zeros.index_add(0, row, torch.ones_like(scores))[row]
    # Above the group's least: a mean of equal numbers rounds, a mean of zeros does not.
    least = zeros.scatter_reduce(0, row, scores, "amin", include_self=False)[row]
    mean = zeros.index_add(0, row, scores - least)[row] / count
    return scores, scores - least - mean, row, count


def grpo(rewards: Tensor, mask: Tensor, group: Tensor, normalize_by_std: bool = True, epsilon: float = 1e-6) -> Tensor:
    """Return group-relative advantages (arXiv 2402.03300), [B, T]: (score - mean) / (std + epsilon) within a group.

    rewards [B, T], added up to a score per row; group [B] integers, equal for the responses of one prompt. The std is
    unbiased. A response alone in its group has mean 0 and std 1: its score passes through. normalize_by_std False is
    Dr. GRPO (arXiv 2503.20783). Statistics are float64: scores that are equal get exactly 0.
    """
    scores, centred, row, count = _grouped(rewards, mask, group)
    compared = torch.where(count > 1, centred, scores)
    if normalize_by_std:
        variance = torch.zeros_like(scores).index_add(0, row, centred.square())[row] / (count - 1).clamp(min=1)
        compared = compared / (torch.where(count > 1, variance.sqrt(), torch.ones_like(variance)) + epsilon)
    return torch.where(mask.bool(), compared[:, None].to(rewards.dtype), torch.zeros_like(rewards))


def rloo(rewards: Tensor, mask: Tensor, group: Tensor) -> Tensor:
    """Return leave-one-out advantages (arXiv 2402.14740), [B, T]: a score less the mean of its group's others, if any."""
    scores, centred, _, count = _grouped(rewards, mask, group)
    advantages = torch.where(count > 1, centred * count / (count - 1).clamp(min=1), scores)
    return torch.where(mask.bool(), advantages[:, None].to(rewards.dtype), torch.zeros_like(rewards))


def kl(log_probs: Tensor, reference_log_probs: Tensor, estimator: KlEstimator) -> Tensor:
    """Estimate the policy's KL from the reference at each sampled token: nats, shape of the inputs.

    Estimators after http://joschu.net/blog/kl-approx.html: k1 is unbiased and may be negative, k2 is half its square,
    k3 is unbiased and never negative. k3 is clamped as in verl: its exponent to +-20, its value to +-10. A "+" keeps the
    value and takes the gradient of k2: in expectation over tokens of the policy that of the KL, where k1's is 0 and k3's
    is that of the reverse KL.
    """
    if estimator.endswith("+"):
        by_gradient = kl(log_probs, reference_log_probs, "k2")
        value = kl(log_probs, reference_log_probs, "k1" if estimator == "k1+" else "k3")
        return by_gradient - by_gradient.detach() + value.detach()
    difference = log_probs - reference_log_probs
    exponent = (-difference).clamp(min=-20, max=20)
    return {
        "k1": difference,
        "abs": difference.abs(),
        "k2": 0.5 * difference.square(),
        "k3": (exponent.exp() - exponent - 1).clamp(min=-10, max=10),
    }[estimator]


@dataclass
class KlControl:
    """The KL's coefficient: fixed where target is 0, else adapted to hold the KL near target (arXiv 1909.08593)."""

    coefficient: float
    target: float = 0.0
    horizon: int = 10_000

    def update(self, current_kl: float, sequences: int) -> None:
        """Adapt to the mean KL of a step that saw so many sequences: at most 20 % per horizon sequences."""
        if self.target:
            error = min(max(current_kl / self.target - 1, -0.2), 0.2)
            self.coefficient *= 1 + error * sequences / self.horizon
