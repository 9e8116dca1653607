"""The policy that learns, and the frozen reference it is compared with."""

from contextlib import AbstractContextManager

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh

from harness.config import schema
from harness.trainer.advantages import kl, masked_sum
from harness.trainer.batch import Batch, microbatches
from harness.trainer.learner import Learner, check_same_size
from harness.trainer.losses import Counts, aggregate, entropy_from_logits, log_probs_from_logits, policy_loss
from harness.trainer.offload import NOTHING, Offload, Offloaded


def token_log_probs(
    model: nn.Module, batch: Batch, temperature: float, entropy_gradient: bool = True
) -> tuple[Tensor, Tensor]:
    """Return each token's log-prob and the entropy of its distribution: [B, T], float32 or better, nats.

    Position 0, which nothing precedes, is 0. Without entropy_gradient the entropies are detached, which spares memory.
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
    """Return token_log_probs of a rank's batch, by microbatches, on the batch's device; a collective call.

    Raise ValueError if the ranks' batches differ in size.
    """
    check_same_size(batch, mesh, device)
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
        """Give the parameters their memory inside this context."""
        return self._offload.on_device()

    def log_probs(self, batch: Batch, microbatch_size: int) -> Tensor:
        """Return the log-probs [B, T] of the rank's batch; a collective call."""
        return batch_log_probs(self.model, batch, microbatch_size, self.temperature, self.mesh, self.device)[0]


class Actor(Learner[schema.ActorConfig]):
    """The policy and its optimizer."""

    def __init__(
        self,
        model: nn.Module,
        config: schema.ActorConfig,
        algorithm: schema.Algorithm,
        rollout: schema.Rollout,
        mesh: DeviceMesh,
        device: torch.device,
        offloaded: Offloaded = NOTHING,
    ) -> None:
        """Build the optimizer; of the rollout section temperature and longest response are used."""
        super().__init__("actor", model, config, mesh, device, offloaded)
        self.algorithm = algorithm
        self.rollout = rollout

    def log_probs(self, batch: Batch, microbatch_size: int) -> tuple[Tensor, Tensor]:
        """Return log-probs and entropies, [B, T], of the rank's batch, without gradient; a collective call."""
        return batch_log_probs(self.model, batch, microbatch_size, self.rollout.temperature, self.mesh, self.device)

    def loss(self, batch: Batch, counts: Counts) -> tuple[Tensor, dict[str, Tensor]]:
        """See Learner.loss. The batch needs old_log_probs, advantages and, with the KL in the loss, reference_log_probs.

        Metrics: policy_loss, entropy, clip_fraction, clip_fraction_lower, update_kl and, where it is in the loss, kl.
        """
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
