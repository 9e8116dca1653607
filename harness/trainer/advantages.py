"""From rewards to advantages: masked statistics, GAE, GRPO, RLOO and the KL to the reference.

Pure functions of tensors. Masks are [B, T] of any dtype, nonzero where a token counts. The formulas are those of verl
0.9.1 (verl/trainer/ppo/core_algos.py and verl/utils/torch_functional.py) with the same epsilons, so that numbers can be
compared; the functions there are named below. `all_sum` adds a tensor up over the ranks, for a statistic of all of
them.
"""

from collections.abc import Callable
from typing import Literal

import torch
from torch import Tensor

AllSum = Callable[[Tensor], Tensor]


def one_rank(total: Tensor) -> Tensor:
    """Return the total as it is: the `all_sum` of a single rank."""
    return total


def masked_sum(x: Tensor, mask: Tensor, all_sum: AllSum = one_rank) -> Tensor:
    """Return the sum of x where mask is nonzero, a scalar. Values under a zero mask do not matter, even if NaN."""
    return all_sum(torch.where(mask.bool(), x, torch.zeros_like(x)).sum())


def masked_mean(x: Tensor, mask: Tensor, all_sum: AllSum = one_rank) -> Tensor:
    """Return the mean of x where mask is nonzero, a scalar: sum / (n + 1e-8), so 0 for an empty mask."""
    return masked_sum(x, mask, all_sum) / (all_sum(mask.bool().sum().to(x.dtype)) + 1e-8)


def masked_var(x: Tensor, mask: Tensor, unbiased: bool = True, all_sum: AllSum = one_rank) -> Tensor:
    """Return the variance of x where mask is nonzero, a scalar. unbiased: divide by n - 1.

    Raise ValueError if it is unbiased and fewer than two tokens count.
    """
    mean = masked_mean(x, mask, all_sum)
    variance = masked_mean((x - mean).square(), mask, all_sum)
    if not unbiased:
        return variance
    count = all_sum(mask.bool().sum().to(x.dtype))
    if count < 2:
        raise ValueError(f"an unbiased variance needs at least 2 tokens in the mask, got {int(count)}")
    return variance * count / (count - 1)


def masked_whiten(x: Tensor, mask: Tensor, all_sum: AllSum = one_rank) -> Tensor:
    """Return x scaled to variance 1 and to mean 0 over the tokens that count; 0 elsewhere."""
    mean = masked_mean(x, mask, all_sum)
    white = (x - mean) * torch.rsqrt(masked_var(x, mask, all_sum=all_sum) + 1e-8)
    return torch.where(mask.bool(), white, torch.zeros_like(x))


def explained_variance(values: Tensor, returns: Tensor, mask: Tensor, all_sum: AllSum = one_rank) -> Tensor:
    """Return 1 - var(returns - values) / var(returns), a scalar; 0 if the returns do not vary."""
    total = masked_var(returns, mask, unbiased=False, all_sum=all_sum)
    left = masked_var(returns - values, mask, unbiased=False, all_sum=all_sum)
    # The variance of equal returns is not 0, but of the size of rounding errors: of the returns, and of the values that
    # GAE subtracts and adds again.
    varies = total > 1e-10 * masked_mean(returns.square() + values.square(), mask, all_sum)
    return torch.where(varies, 1 - left / total, torch.zeros_like(total))


def token_rewards(scores: Tensor, mask: Tensor, kl: Tensor | None = None, kl_coefficient: float = 0.0) -> Tensor:
    """Return [B, T]: the score [B] at the last token of each response that has any, minus kl_coefficient * kl [B, T] at
    each token.

    verl: apply_kl_penalty in ray_trainer.py.
    """
    counts = mask.bool()
    positions = torch.arange(mask.shape[-1], device=mask.device)
    last = torch.where(counts, positions, 0).amax(dim=-1)
    rewards = scores.new_zeros(mask.shape).scatter(-1, last[:, None], scores[:, None])
    if kl is not None:
        rewards = rewards - kl_coefficient * kl
    return torch.where(counts, rewards, torch.zeros_like(rewards))


def gae(rewards: Tensor, values: Tensor, mask: Tensor, gamma: float, lam: float) -> tuple[Tensor, Tensor]:
    """Return advantages and returns by GAE (arXiv 1506.02438), [B, T]: not whitened, 0 where the mask is 0.

        delta[t] = rewards[t] + gamma * values[t + 1] - values[t]
        advantages[t] = delta[t] + gamma * lam * advantages[t + 1],  returns[t] = advantages[t] + values[t]

    rewards [B, T] and values [B, T] have one float dtype. A token with mask 0 is skipped: t + 1 is the next token that
    counts. verl: compute_gae_advantage_return.
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
    """Return for each row its score, the score minus its group's mean, the group's number, and the group's size: [B]
    each.

    All are float64 but the number, which counts from 0. Equal scores of a group give exactly 0.
    """
    scores = torch.where(mask.bool(), rewards, torch.zeros_like(rewards)).sum(dim=-1).double()
    row = group.unique(return_inverse=True)[1]
    zeros = torch.zeros_like(scores)
    count = zeros.index_add(0, row, torch.ones_like(scores))[row]
    # The mean of equal numbers is rounded, the mean of zeros is not: so take the mean above the group's least score.
    least = zeros.scatter_reduce(0, row, scores, "amin", include_self=False)[row]
    mean = zeros.index_add(0, row, scores - least)[row] / count
    return scores, scores - least - mean, row, count


def grpo(rewards: Tensor, mask: Tensor, group: Tensor, normalize_by_std: bool = True, epsilon: float = 1e-6) -> Tensor:
    """Return GRPO's advantages (arXiv 2402.03300), [B, T]: (score - mean) / (std + epsilon) within each group.

    rewards [B, T] are summed to one score for each row. group [B] has one integer for all responses of a prompt. The
    std is unbiased. A response that is alone in its group keeps its score. Without normalize_by_std it is Dr. GRPO
    (arXiv 2503.20783). Statistics are float64, so that equal scores get exactly 0. verl:
    compute_grpo_outcome_advantage.
    """
    scores, centred, row, count = _grouped(rewards, mask, group)
    compared = torch.where(count > 1, centred, scores)
    if normalize_by_std:
        variance = torch.zeros_like(scores).index_add(0, row, centred.square())[row] / (count - 1).clamp(min=1)
        compared = compared / (torch.where(count > 1, variance.sqrt(), torch.ones_like(variance)) + epsilon)
    return torch.where(mask.bool(), compared[:, None].to(rewards.dtype), torch.zeros_like(rewards))


def rloo(rewards: Tensor, mask: Tensor, group: Tensor) -> Tensor:
    """Return RLOO's advantages (arXiv 2402.14740), [B, T]: a score minus the mean of the others in its group, if there
    are any.

    verl: compute_rloo_outcome_advantage.
    """
    scores, centred, _, count = _grouped(rewards, mask, group)
    advantages = torch.where(count > 1, centred * count / (count - 1).clamp(min=1), scores)
    return torch.where(mask.bool(), advantages[:, None].to(rewards.dtype), torch.zeros_like(rewards))


def kl(log_probs: Tensor, reference_log_probs: Tensor, placement: Literal["reward", "loss"]) -> Tensor:
    """Return an estimate of the KL of the policy from the reference at each sampled token, in nats; shapes as the
    inputs'.

    With d = log_probs - reference_log_probs (http://joschu.net/blog/kl-approx.html; verl: kl_penalty):

        reward: k1   d                  unbiased, may be negative; as a loss its gradient would have expectation 0
        loss:   k3   exp(-d) - 1 + d    unbiased, never negative; clamped as in verl: -d to +-20, the value to +-10
    """
    difference = log_probs - reference_log_probs
    if placement == "reward":
        return difference
    exponent = (-difference).clamp(min=-20, max=20)
    return (exponent.exp() - exponent - 1).clamp(min=-10, max=10)
