"""The value model: the expected return from each token on."""

from functools import partial

import torch
from torch import Tensor, nn

from harness.trainer.advantages import explained_variance, masked_sum
from harness.trainer.batch import Batch
from harness.trainer.learner import Learner
from harness.trainer.losses import share_of_mean, value_loss
from harness.trainer.packing import align, model_inputs
from harness.trainer.rank_sums import all_sum


def token_values(model: nn.Module, batch: Batch, packed: bool = False) -> Tensor:
    """Return the value before each token is emitted: [B, T], float32 or better, 0 at position 0."""
    values = model(**model_inputs(batch, packed))[:, :-1, 0]
    return align(values.to(torch.promote_types(values.dtype, torch.float32)), batch, packed)


class Critic(Learner):
    """The value model and its optimizer."""

    role = "critic"

    def values(self, batch: Batch) -> Tensor:
        """Return the values [B, T] of the rank's batch, without gradient. A collective call."""
        packed = self.config.model.packed
        [values] = self.compute(lambda part: (token_values(self.model, part, packed),), batch)
        return values

    def update(self, batch: Batch, generator: torch.Generator) -> dict[str, float]:
        """Update as Learner does, and add the metric explained_variance, of old_values.

        The batch needs old_values and returns.
        """
        metrics = super().update(batch, generator)
        old, returns = (batch.require(name).to(self.device, torch.float64) for name in ("old_values", "returns"))
        mask = batch.response_mask.to(self.device)
        explained = explained_variance(old, returns, mask, partial(all_sum, group=self.group))
        return {**metrics, "explained_variance": float(explained)}

    def loss(self, batch: Batch, counted: int) -> tuple[Tensor, dict[str, Tensor]]:
        """Return the share of the loss, and metrics; see Learner.loss. The batch needs old_values and returns."""
        mask, clip = batch.response_mask, self.config.critic.value_clip
        values = token_values(self.model, batch, self.config.model.packed)
        tokens, clipped = value_loss(values, batch.require("old_values"), batch.require("returns"), clip)
        metrics = {"value_loss": tokens, "value_mean": values, "clip_fraction": clipped}
        return share_of_mean(tokens, mask, counted), {
            name: masked_sum(numbers, mask) for name, numbers in metrics.items()
        }
