"""Losses of actor and critic, and how token losses become one number over all ranks. Pure functions of tensors.

Formulas follow verl 0.9.1 (core_algos.py). Masks are [B, T], any dtype, nonzero where a token counts.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from harness.config.schema import LossAggregation


@dataclass(frozen=True, slots=True)
class Counts:
    """What a minibatch holds over ALL ranks and ALL microbatches: the denominators of its loss."""

    tokens: int
    """Response tokens."""
    sequences: int
    """Sequences with at least one response token."""


def local_counts(mask: Tensor) -> Tensor:
    """Return (tokens, sequences) of one rank's mask [B, T], int64 [2]; summed over ranks they are Counts."""
    counts = mask.bool()
    return torch.stack([counts.sum(), counts.any(dim=-1).sum()])


def aggregate(loss: Tensor, mask: Tensor, mode: LossAggregation, counts: Counts, horizon: int) -> Tensor:
    """Return this microbatch's share of the minibatch's loss, a scalar: the shares of all ranks add up to the loss.

    loss [B, T]; counts of the whole minibatch over all ranks; horizon is the number of tokens that
    seq-mean-token-sum-norm divides by (the longest response allowed), unused by the other modes.
    Gradients of these shares must be SUMMED over ranks. FSDP averages them, so its caller multiplies the share by the
    world size.
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
    """Return PPO's clipped loss (arXiv 1707.06347) with separate bounds and a dual clip (arXiv 1912.09729), and metrics.

    The ratio is clipped to [1 - clip_low, 1 + clip_high]; where the advantage is negative, the loss is at most
    dual_clip times its size (0 turns that off). The log-ratio is clamped to +-20 against overflow. All [B, T]; metrics
    are 1 where the ratio's clipping, or the dual clip, decided, and the k1 estimate of how far the policy has moved.
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
    """Return min(p_old / p_rollout, cap) of each token, [B, T], detached: truncated importance sampling.

    After https://fengyao.notion.site/off-policy-rl and verl (tis_imp_ratio_cap, later rollout_is = "token"), which
    multiply it into the policy's loss after its clipping. The log-ratio is clamped to +-20.
    """
    return (old_log_probs - rollout_log_probs).clamp(min=-20, max=20).exp().clamp(max=cap).detach()


def value_loss(values: Tensor, old_values: Tensor, returns: Tensor, value_clip: float) -> tuple[Tensor, Tensor]:
    """Return half the squared error of the values, per token, and 1 where clipping decided: ([B, T], [B, T]).

    The loss is the larger of the errors of the values and of the values clipped to old_values +- value_clip; 0 turns
    clipping off.
    """
    error = (values - returns).square()
    if value_clip == 0:
        return 0.5 * error, torch.zeros_like(error)
    clipped_error = (torch.clamp(values, old_values - value_clip, old_values + value_clip) - returns).square()
    return 0.5 * torch.maximum(error, clipped_error), (clipped_error > error).to(error.dtype)


def log_probs_from_logits(logits: Tensor, labels: Tensor, temperature: float = 1.0) -> Tensor:
    """Return the log-prob of each label: logits [..., V], labels [...] int64 -> [...], nats, float32 or better."""
    scaled = _at_temperature(logits, temperature)
    return scaled.gather(-1, labels[..., None]).squeeze(-1) - scaled.logsumexp(dim=-1)


def entropy_from_logits(logits: Tensor, temperature: float = 1.0) -> Tensor:
    """Return the entropy over the vocabulary: logits [..., V] -> [...], nats, float32 or better."""
    scaled = _at_temperature(logits, temperature)
    return scaled.logsumexp(dim=-1) - (scaled.softmax(dim=-1) * scaled).sum(dim=-1)


def _at_temperature(logits: Tensor, temperature: float) -> Tensor:
    return logits.to(torch.promote_types(logits.dtype, torch.float32)) / temperature
