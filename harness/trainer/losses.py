"""Losses of actor and critic, and how token losses become one number over all ranks. Pure functions of tensors.

The formulas are those of verl 0.9.1, verl/trainer/ppo/core_algos.py, whose functions are named below. Masks are [B, T]
of any dtype, nonzero where a token counts.
"""

import torch
from torch import Tensor

from harness.config.schema import DUAL_CLIP


def share_of_mean(loss: Tensor, mask: Tensor, tokens: int) -> Tensor:
    """Return this microbatch's share of the minibatch's loss, a scalar: the shares of all ranks and microbatches add up
    to it.

    loss [B, T]; tokens: those that count in the whole minibatch, over all ranks. verl: agg_loss with "token-mean".

    Gradients of the shares must be SUMMED over ranks. FSDP averages them, so the caller multiplies the share by the
    world size.
    """
    return torch.where(mask.bool(), loss, torch.zeros_like(loss)).sum() / tokens


def policy_loss(
    log_probs: Tensor,
    old_log_probs: Tensor,
    advantages: Tensor,
    clip_low: float,
    clip_high: float,
) -> tuple[Tensor, dict[str, Tensor]]:
    """Return PPO's clipped loss of each token (arXiv 1707.06347), and metrics: [B, T]. verl:
    compute_policy_loss_vanilla.

    The ratio is clipped to [1 - clip_low, 1 + clip_high]. If the advantage is negative, the loss is at most DUAL_CLIP
    times the advantage's size. The log-ratio is clamped to +-20 against overflow. clip_fraction and clip_fraction_lower
    are 1 at the tokens where the clipping of the ratio, or the dual clip, decided; update_kl is the k1 estimate of how
    far the policy has moved from old_log_probs.
    """
    log_ratio = (log_probs - old_log_probs).clamp(min=-20, max=20)
    ratio = log_ratio.exp()
    surrogate = -advantages * ratio
    clipped_surrogate = -advantages * ratio.clamp(min=1 - clip_low, max=1 + clip_high)
    loss = torch.maximum(surrogate, clipped_surrogate)
    clipped = (clipped_surrogate > surrogate).to(loss.dtype)
    bound = -advantages * DUAL_CLIP
    clipped_lower = ((loss > bound) & (advantages < 0)).to(loss.dtype)
    loss = torch.where(advantages < 0, torch.minimum(loss, bound), loss)
    return loss, {"clip_fraction": clipped, "clip_fraction_lower": clipped_lower, "update_kl": -log_ratio.detach()}


def value_loss(values: Tensor, old_values: Tensor, returns: Tensor, value_clip: float) -> tuple[Tensor, Tensor]:
    """Return half the squared error of each value, and 1 where clipping decided: [B, T] each. verl: compute_value_loss.

    It is the larger one of the errors of the value and of the value clipped to old_values +- value_clip. 0 turns
    clipping off.
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
