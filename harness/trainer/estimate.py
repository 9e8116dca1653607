"""From the scores of a step's responses to advantages, as the config says. The arithmetic is in advantages.py."""

import torch
import torch.distributed as dist
from torch import Tensor

from harness.cluster.world import all_gather
from harness.config.schema import Config
from harness.trainer import advantages
from harness.trainer.batch import Batch
from harness.trainer.rank_sums import all_sum, sequence_mean


def estimate_advantages(batch: Batch, config: Config) -> tuple[Batch, dict[str, float]]:
    """Return the batch with advantages, by GAE or by comparing the responses of a prompt, and metrics of the KL.

    A collective call of all ranks. The batch needs scores and group; with a reference also reference_log_probs and
    old_log_probs, with a critic also old_values.
    """
    rewards, metrics = _token_rewards(batch, config)
    by = _by_gae if config.algorithm.has_critic else _by_comparison
    batch = by(batch, rewards, config)
    if config.rollout.truncated == "mask":  # truncated responses count in advantages, and are not trained on
        batch = batch.replace(response_mask=batch.response_mask * ~batch.require("truncated")[:, None])
    return batch, metrics


def _token_rewards(batch: Batch, config: Config) -> tuple[Tensor, dict[str, float]]:
    """Return [B, T]: each score at its response's last token, less the KL to the reference if it counts in the
    reward.
    """
    scores, mask, reference = batch.require("scores"), batch.response_mask, batch.reference_log_probs
    if reference is None:
        return advantages.token_rewards(scores, mask), {}
    in_loss = config.algorithm.kl_placement == "loss"
    kl = advantages.kl(batch.require("old_log_probs"), reference, "loss" if in_loss else "reward")
    metrics = {"reference_kl": sequence_mean(kl, batch)}
    if in_loss:
        return advantages.token_rewards(scores, mask), metrics
    return advantages.token_rewards(scores, mask, kl, config.algorithm.kl_coefficient), metrics


def _by_gae(batch: Batch, rewards: Tensor, config: Config) -> Batch:
    """Return the batch with GAE's advantages, whitened over all ranks, and the returns that the critic learns."""
    mask, algorithm = batch.response_mask, config.algorithm
    raw, returns = advantages.gae(rewards, batch.require("old_values"), mask, algorithm.gamma, algorithm.lam)
    whitened = advantages.masked_whiten(raw, mask, all_sum=all_sum)
    return batch.replace(advantages=whitened * mask, returns=returns)


def _by_comparison(batch: Batch, rewards: Tensor, config: Config) -> Batch:
    """Return the batch with each response's score compared with those of its prompt's other responses, by GRPO or
    RLOO.
    """
    rank, mask, algorithm = dist.get_rank(), batch.response_mask, config.algorithm
    # The responses of one prompt may lie on several ranks, so every rank compares all of them. A response without a
    # token gets its own group, numbered below 0, so that it is compared with nothing.
    alone = -1 - rank * len(batch) - torch.arange(len(batch))
    gathered = all_gather((rewards.sum(-1), torch.where(mask.any(-1), batch.require("group"), alone)))
    scores, groups = (torch.cat(parts) for parts in zip(*gathered, strict=True))
    column, everywhere = scores[:, None], torch.ones_like(scores)[:, None]
    if algorithm.advantage == "rloo":
        compared = advantages.rloo(column, everywhere, groups)
    else:
        compared = advantages.grpo(column, everywhere, groups, algorithm.normalize_by_std)
    mine = compared.split([len(scores) for scores, _ in gathered])[rank]
    return batch.replace(advantages=mine * mask)
