"""Losses of actor and critic, and how token losses become one number over all ranks. Pure functions of tensors.

The formulas are those of verl 0.9.1, verl/trainer/ppo/core_algos.py, whose functions are named below. Masks are [B, T] of any
dtype, nonzero where a token counts.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from harness.config.schema import LossAggregation


@dataclass(frozen=True, slots=True)
class Counts:
    """The denominators of a minibatch's loss: counts over ALL ranks and ALL microbatches."""

    tokens: int
    """Response tokens."""
    sequences: int
    """Sequences with at least one response token."""


def local_counts(mask: Tensor) -> Tensor:
    """Return (tokens, sequences) of one rank's mask [B, T]: int64 [2]. Summed over ranks they are Counts."""
    counts = mask.bool()
    return torch.stack([counts.sum(), counts.any(dim=-1).sum()])


def aggregate(loss: Tensor, mask: Tensor, mode: LossAggregation, counts: Counts, horizon: int) -> Tensor:
    """Return this microbatch's share of the minibatch's loss, a scalar. The shares of all ranks and microbatches add up to it.

    loss [B, T]; counts of the whole minibatch over all ranks; horizon is the longest response allowed, by which
    seq-mean-token-sum-norm divides (Dr. GRPO, arXiv 2503.20783). verl: agg_loss.

    Gradients of the shares must be SUMMED over ranks. FSDP averages them, so the caller multiplies the share by the world size.
    """
    tokens = torch.where(mask.bool(), loss, torch.zeros_like(loss))
    if mode == "seq-mean-token-mean":
        lengths = mask.bool().sum(dim=-1).to(loss.dtype)
        return (tokens.sum(dim=-1) / (lengths + 1e-8)).sum() / counts.sequences
    total = tokens.sum()
    return {
        "token-mean": total / counts.tokens,
        "token-sum": total,
        "seq-mean-token-sum": total / counts.sequences,
        "seq-mean-token-sum-norm": total / counts.sequences / horizon,
    }[mode]


def policy_loss(
    log_probs: Tensor,
    old_log_probs: Tensor,
    advantages: Tensor,
    clip_low: float,
    clip_high: float,
    dual_clip: float,
) -> tuple[Tensor, dict[str, Tensor]]:
    """Return PPO's clipped loss of each token (arXiv 1707.06347), and metrics: [B, T]. verl: compute_policy_loss_vanilla.

    The ratio is clipped to [1 - clip_low, 1 + clip_high]. If the advantage is negative, the loss is at most dual_clip times the
    advantage's size (arXiv 1912.09729; 0 turns it off). The log-ratio is clamped to +-20 against overflow. clip_fraction and
    clip_fraction_lower are 1 at the tokens where the clipping of the ratio, or the dual clip, decided; update_kl is the k1
    estimate of how far the policy has moved from old_log_probs.
    """
    log_ratio = (log_probs - old_log_probs).clamp(min=-20, max=20)
    ratio = log_ratio.exp()
    surrogate = -advantages * ratio
    clipped_surrogate = -advantages * ratio.clamp(min=1 - clip_low, max=1 + clip_high)
    loss = torch.maximum(surrogate, clipped_surrogate)
    clipped = (clipped_surrogate > surrogate).to(loss.dtype)
    clipped_lower = torch.zeros_like(loss)
    if dual_clip:
        dual_clip_bound = -advantages * dual_clip
        clipped_lower = ((loss > dual_clip_bound) & (advantages < 0)).to(loss.dtype)
        loss = torch.where(advantages < 0, torch.minimum(loss, dual_clip_bound), loss)
    return loss, {"clip_fraction": clipped, "clip_fraction_lower": clipped_lower, "update_kl": -log_ratio.detach()}


def importance_weights(old_log_probs: Tensor, rollout_log_probs: Tensor, cap: float) -> Tensor:
    """Return min(p_old / p_rollout, cap) of each token, detached: [B, T]. It weights the policy's loss after its clipping.

    Truncated importance sampling, for an engine whose probabilities differ from the trainer's:
    https://fengyao.notion.site/off-policy-rl. verl: tis_imp_ratio_cap in 0.5, rollout_is = "token" since 0.6. The log-ratio is
    clamped to +-20.
    """
    return (old_log_probs - rollout_log_probs).clamp(min=-20, max=20).exp().clamp(max=cap).detach()


def value_loss(values: Tensor, old_values: Tensor, returns: Tensor, value_clip: float) -> tuple[Tensor, Tensor]:
    """Return half the squared error of each value, and 1 where clipping decided: [B, T] each. verl: compute_value_loss.

    It is the larger one of the errors of the value and of the value clipped to old_values +- value_clip. 0 turns clipping off.
    """
    error = (values - returns).square()
    if value_clip == 0:
        return 0.5 * error, torch.zeros_like(error)
    clipped_error = (torch.clamp(values, old_values - value_clip, old_values + value_clip) - returns).square()
    return 0.5 * torch.maximum(error, clipped_error), (clipped_error > error).to(error.dtype)


def log_probs_from_logits(logits: Tensor, labels: Tensor, temperature: float = 1.0) -> Tensor:
    """Return the log-prob of each label in nats: logits [..., V], labels [...] int64 -> [...], float32 or better."""
    scaled = _at_temperature(logits, temperature)
    return scaled.gather(-1, labels[..., None]).squeeze(-1) - scaled.logsumexp(dim=-1)


def entropy_from_logits(logits: Tensor, temperature: float = 1.0) -> Tensor:
    """Return the entropy over the vocabulary in nats: logits [..., V] -> [...], float32 or better."""
    scaled = _at_temperature(logits, temperature)
    return scaled.logsumexp(dim=-1) - (scaled.softmax(dim=-1) * scaled).sum(dim=-1)


def _at_temperature(logits: Tensor, temperature: float) -> Tensor:
    """Return logits / temperature in float32 or better, as the engine samples."""
    return logits.to(torch.promote_types(logits.dtype, torch.float32)) / temperature
