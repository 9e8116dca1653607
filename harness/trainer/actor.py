"""The policy that learns, and the frozen reference it is compared with."""

from contextlib import AbstractContextManager

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh

from harness.config import schema
from harness.trainer.advantages import kl, masked_sum
from harness.trainer.batch import Batch, microbatches
from harness.trainer.learner import Learner, check_same_on_all_ranks
from harness.trainer.losses import Counts, aggregate, entropy_from_logits, log_probs_from_logits, policy_loss
from harness.trainer.offload import NOTHING, Offload, Offloaded


def token_log_probs(
    model: nn.Module, batch: Batch, temperature: float, entropy_gradient: bool = True
) -> tuple[Tensor, Tensor]:
    """Log-prob of each token and entropy of the distribution it was drawn from: [B, T], float32 or better, nats.

    Position 0, which nothing precedes, is 0. Without entropy_gradient the entropies are detached, which spares the
    memory.
    """
    output = model(input_ids=batch.input_ids, attention_mask=batch.attention_mask, use_cache=False)
    logits = output.logits[:, :-1]
    log_probs = log_probs_from_logits(logits, batch.input_ids[:, 1:], temperature)
    entropy = entropy_from_logits(logits if entropy_gradient else logits.detach(), temperature)
    return nn.functional.pad(log_probs, (1, 0)), nn.functional.pad(entropy, (1, 0))


@torch.no_grad()
def batch_log_probs(
    model: nn.Module, batch: Batch, microbatch_size: int, temperature: float, mesh: DeviceMesh, device: torch.device
) -> tuple[Tensor, Tensor]:
    """token_log_probs of a rank's batch, microbatch by microbatch, on the batch's device; a collective call.

    Raises ValueError if the ranks' batches differ in size.
    """
    check_same_on_all_ranks("the number of sequences in the batch", len(batch), mesh, device)
    model.eval()
    parts = [token_log_probs(model, part.to(device), temperature) for part in microbatches(batch, microbatch_size)]
    log_probs, entropy = (torch.cat(tensors).to(batch.input_ids.device) for tensors in zip(*parts, strict=True))
    return log_probs, entropy


class Reference:
    """A policy that does not learn. Offloaded, it has its memory only inside `on_device`."""

    def __init__(
        self,
        model: nn.Module,
        temperature: float,
        mesh: DeviceMesh,
        device: torch.device,
        offloaded: Offloaded = NOTHING,
    ) -> None:
        self.model = model.requires_grad_(False)
        self.temperature = temperature
        self.mesh = mesh
        self.device = device
        self._offload = Offload(model.parameters, offloaded.parameters)

    def on_device(self) -> AbstractContextManager[None]:
        """The parameters have their memory in here."""
        return self._offload.on_device()

    def log_probs(self, batch: Batch, microbatch_size: int) -> Tensor:
        """Log-probs [B, T] of the rank's batch; a collective call."""
        return batch_log_probs(self.model, batch, microbatch_size, self.temperature, self.mesh, self.device)[0]


class Actor:
    """The policy and its optimizer."""

    def __init__(
        self,
        model: nn.Module,
        config: schema.Actor,
        algorithm: schema.Algorithm,
        rollout: schema.Rollout,
        mesh: DeviceMesh,
        device: torch.device,
        offloaded: Offloaded = NOTHING,
    ) -> None:
        """Of the rollout section it needs the sampling temperature and the longest response."""
        self.config = config
        self.algorithm = algorithm
        self.rollout = rollout
        self.learner = Learner("actor", model, config, mesh, device, offloaded)

    @property
    def model(self) -> nn.Module:
        """The sharded model."""
        return self.learner.model

    def on_device(self) -> AbstractContextManager[None]:
        """The parameters have their memory in here: for log-probs, a sync, a checkpoint."""
        return self.learner.on_device()

    def learning(self) -> AbstractContextManager[None]:
        """Parameters and optimizer states have their memory in here: for updates."""
        return self.learner.learning()

    def log_probs(self, batch: Batch, microbatch_size: int) -> tuple[Tensor, Tensor]:
        """Log-probs and entropies, [B, T], of the rank's batch, without gradient; a collective call."""
        learner = self.learner
        return batch_log_probs(
            learner.model, batch, microbatch_size, self.rollout.temperature, learner.mesh, learner.device
        )

    def update(self, batch: Batch, generator: torch.Generator) -> dict[str, float]:
        """All optimizer steps on the rank's batch; a collective call. See Learner.update.

        The batch needs old_log_probs and advantages, and reference_log_probs where the KL is in the loss. Metrics:
        loss, policy_loss, entropy, clip_fraction, clip_fraction_lower, update_kl, grad_norm and, where it is in the
        loss, kl.
        """
        return self.learner.update(batch, generator, self.loss)

    def step(self, minibatch: Batch) -> dict[str, float]:
        """One optimizer step on a minibatch; a collective call. See Learner.step."""
        return self.learner.step(minibatch, self.loss)

    def loss(self, batch: Batch, counts: Counts) -> tuple[Tensor, dict[str, Tensor]]:
        """A microbatch's share of the minibatch's loss, and its metrics as sums over tokens."""
        config, mask = self.config, batch.response_mask
        log_probs, entropy = token_log_probs(
            self.model, batch, self.rollout.temperature, entropy_gradient=config.entropy_coefficient != 0
        )
        policy = policy_loss(
            log_probs,
            batch.require("old_log_probs"),
            batch.require("advantages"),
            config.clip_low,
            config.clip_high,
            config.dual_clip,
        )
        loss = policy.loss - config.entropy_coefficient * entropy
        metrics = {
            "policy_loss": policy.loss,
            "entropy": entropy,
            "clip_fraction": policy.clipped,
            "clip_fraction_lower": policy.clipped_lower,
            "update_kl": policy.kl,
        }
        if self.algorithm.kl_placement == "loss":
            metrics["kl"] = kl(log_probs, batch.require("reference_log_probs"), self.algorithm.estimator)
            loss = loss + self.algorithm.kl_coefficient * metrics["kl"]
        share = aggregate(loss, mask, config.loss_aggregation, counts, self.rollout.max_response_tokens)
        return share, {name: masked_sum(tokens, mask) for name, tokens in metrics.items()}
