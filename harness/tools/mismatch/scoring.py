"""The trainer's log-probs of given tokens, at any temperature and in any microbatches."""

from dataclasses import replace

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh

from harness.config.schema import Config
from harness.trainer.actor import Reference
from harness.trainer.batch import Batch


def trainer_scores(
    model: nn.Module,
    config: Config,
    mesh: DeviceMesh,
    device: torch.device,
    batch: Batch,
    *,
    temperature: float = 1.0,
    alone: bool = False,
) -> Tensor:
    """Return the trainer's log-probs of the batch, float [B, T]. A collective call of all ranks.

    alone: compute each sequence in a microbatch by itself.
    """
    config = replace(config, rollout=replace(config.rollout, temperature=temperature))
    if alone:
        config = replace(config, actor=replace(config.actor, microbatch_size=1, tokens_per_microbatch=0))
    return Reference(model, config, mesh, device).log_probs(batch)[0].float()
