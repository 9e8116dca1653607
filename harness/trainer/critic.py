"""The value model: what the rest of a response is worth."""

from contextlib import AbstractContextManager

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh

from harness.config import schema
from harness.trainer.advantages import explained_variance, masked_sum
from harness.trainer.batch import Batch, microbatches
from harness.trainer.learner import Learner, all_sum, check_same_on_all_ranks
from harness.trainer.losses import Counts, aggregate, value_loss
from harness.trainer.offload import NOTHING, Offloaded


def token_values(model: nn.Module, batch: Batch) -> Tensor:
    """The value before each token is emitted, [B, T] in batch's alignment, float32 or better; position 0 is 0."""
    values = model(input_ids=batch.input_ids, attention_mask=batch.attention_mask)[:, :-1, 0]
    return nn.functional.pad(values.to(torch.promote_types(values.dtype, torch.float32)), (1, 0))


class Critic:
    """The value model and its optimizer."""

    def __init__(
        self,
        model: nn.Module,
        config: schema.Critic,
        rollout: schema.Rollout,
        mesh: DeviceMesh,
        device: torch.device,
        offloaded: Offloaded = NOTHING,
    ) -> None:
        """Of the rollout section it needs the longest response."""
        self.config = config
        self.rollout = rollout
        self.learner = Learner("critic", model, config, mesh, device, offloaded)

    @property
    def model(self) -> nn.Module:
        """The sharded model."""
        return self.learner.model

    def on_device(self) -> AbstractContextManager[None]:
        """The parameters have their memory in here: for values."""
        return self.learner.on_device()

    def learning(self) -> AbstractContextManager[None]:
        """Parameters and optimizer states have their memory in here: for updates."""
        return self.learner.learning()

    @torch.no_grad()
    def values(self, batch: Batch, microbatch_size: int) -> Tensor:
        """Values [B, T] of the rank's batch, without gradient; a collective call.

        Raises ValueError if the ranks' batches differ in size.
        """
        learner = self.learner
        check_same_on_all_ranks("the number of sequences in the batch", len(batch), learner.mesh, learner.device)
        learner.model.eval()
        parts = [token_values(learner.model, part.to(learner.device)) for part in microbatches(batch, microbatch_size)]
        return torch.cat(parts).to(batch.input_ids.device)

    def update(self, batch: Batch, generator: torch.Generator) -> dict[str, float]:
        """All optimizer steps on the rank's batch, which needs old_values and returns; a collective call. See
        Learner.update.

        Metrics: loss, value_loss, value_mean, clip_fraction, grad_norm, and explained_variance, of the values before
        the update.
        """
        learner = self.learner
        metrics = learner.update(batch, generator, self.loss)
        explained = explained_variance(
            batch.require("old_values").to(learner.device, torch.float64),
            batch.require("returns").to(learner.device, torch.float64),
            batch.response_mask.to(learner.device),
            all_sum=lambda total: all_sum(total, learner.mesh),
        )
        return {**metrics, "explained_variance": float(explained)}

    def step(self, minibatch: Batch) -> dict[str, float]:
        """One optimizer step on a minibatch; a collective call. See Learner.step."""
        return self.learner.step(minibatch, self.loss)

    def loss(self, batch: Batch, counts: Counts) -> tuple[Tensor, dict[str, Tensor]]:
        """A microbatch's share of the minibatch's loss, and its metrics as sums over tokens."""
        mask = batch.response_mask
        values = token_values(self.model, batch)
        tokens, clipped = value_loss(
            values, batch.require("old_values"), batch.require("returns"), self.config.value_clip
        )
        share = aggregate(tokens, mask, self.config.loss_aggregation, counts, self.rollout.max_response_tokens)
        metrics = {"value_loss": tokens, "value_mean": values, "clip_fraction": clipped}
        return share, {name: masked_sum(numbers, mask) for name, numbers in metrics.items()}
