"""The value model: what the rest of a response is worth."""

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh

from harness.config import schema
from harness.trainer.advantages import explained_variance, masked_sum
from harness.trainer.batch import Batch, microbatches
from harness.trainer.learner import Learner, all_sum, check_same_size
from harness.trainer.losses import Counts, aggregate, value_loss
from harness.trainer.offload import NOTHING, Offloaded


def token_values(model: nn.Module, batch: Batch) -> Tensor:
    """Return the value before each token is emitted, [B, T] in batch's alignment, float32 or better; 0 at position 0."""
    values = model(input_ids=batch.input_ids, attention_mask=batch.attention_mask)[:, :-1, 0]
    return nn.functional.pad(values.to(torch.promote_types(values.dtype, torch.float32)), (1, 0))


class Critic(Learner[schema.CriticConfig]):
    """The value model and its optimizer."""

    def __init__(
        self,
        model: nn.Module,
        config: schema.CriticConfig,
        rollout: schema.Rollout,
        mesh: DeviceMesh,
        device: torch.device,
        offloaded: Offloaded = NOTHING,
    ) -> None:
        """Build the optimizer; of the rollout section only the longest response is used."""
        super().__init__("critic", model, config, mesh, device, offloaded)
        self.rollout = rollout

    @torch.no_grad()
    def values(self, batch: Batch, microbatch_size: int) -> Tensor:
        """Return the values [B, T] of the rank's batch; a collective call.

        Raise ValueError if the ranks' batches differ in size.
        """
        check_same_size(batch, self.mesh, self.device)
        self.model.eval()
        parts = [token_values(self.model, part.to(self.device)) for part in microbatches(batch, microbatch_size)]
        return torch.cat(parts).to(batch.input_ids.device)

    def update(self, batch: Batch, generator: torch.Generator) -> dict[str, float]:
        """Update on the rank's batch, which needs old_values and returns; a collective call. See Learner.update.

        Metrics beside Learner's: value_loss, value_mean, clip_fraction, and explained_variance of the old values.
        """
        metrics = super().update(batch, generator)
        explained = explained_variance(
            batch.require("old_values").to(self.device, torch.float64),
            batch.require("returns").to(self.device, torch.float64),
            batch.response_mask.to(self.device),
            all_sum=lambda total: all_sum(total, self.mesh),
        )
        return {**metrics, "explained_variance": float(explained)}

    def loss(self, batch: Batch, counts: Counts) -> tuple[Tensor, dict[str, Tensor]]:
        """See Learner.loss."""
        mask, config = batch.response_mask, self.config
        values = token_values(self.model, batch)
        tokens, clipped = value_loss(values, batch.require("old_values"), batch.require("returns"), config.value_clip)
        share = aggregate(tokens, mask, config.loss_aggregation, counts, self.rollout.max_response_tokens)
        metrics = {"value_loss": tokens, "value_mean": values, "clip_fraction": clipped}
        return share, {name: masked_sum(numbers, mask) for name, numbers in metrics.items()}
