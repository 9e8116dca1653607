"""Sums and means over the responses of all ranks, the same on every rank.

Each function is a collective call of all ranks.
"""

import torch
import torch.distributed as dist
from torch import Tensor

from harness.cluster.world import all_gather
from harness.trainer.advantages import masked_mean
from harness.trainer.batch import Batch


def all_sum(total: Tensor, group: dist.ProcessGroup | None = None) -> Tensor:
    """Return the sum over the ranks of the group, by default over all ranks."""
    total = total.clone()
    dist.all_reduce(total, group=group)
    return total


def mean(values: Tensor) -> float:
    """Return the mean over the sequences of all ranks; values: one for each of this rank's, [B]."""
    return float(torch.cat(all_gather(values)).double().mean())


def token_mean(values: Tensor, batch: Batch) -> float:
    """Return the mean over the response tokens of all ranks; values: [B, T]."""
    return float(masked_mean(values.double(), batch.response_mask.double(), all_sum=all_sum))


def sequence_mean(values: Tensor, batch: Batch) -> float:
    """Return the mean over the sequences of all ranks of each one's mean over its response tokens, as verl's KL."""
    mask = batch.response_mask.bool()
    means = torch.where(mask, values.double(), 0.0).sum(-1) / mask.sum(-1)
    return mean(means[mask.any(-1)])
