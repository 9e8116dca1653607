"""The policy that learns, and the frozen reference that it is compared with."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh

from harness.config import schema
from harness.trainer.advantages import kl, masked_sum
from harness.trainer.batch import Batch
from harness.trainer.learner import Learner, ShardedModel
from harness.trainer.losses import entropy_from_logits, log_probs_from_logits, policy_loss, share_of_mean
from harness.trainer.model import computing_in
from harness.trainer.packing import align, model_inputs
from harness.trainer.routing import Routers


def token_log_probs(
    model: nn.Module, batch: Batch, temperature: float, entropy_gradient: bool = True, packed: bool = False
) -> tuple[Tensor, Tensor]:
    """Return each token's log-prob and the entropy of its distribution: [B, T], float32 or better, nats.

    Position 0, which no token precedes, is 0. Without entropy_gradient the entropies are detached, which saves memory.
    packed: compute the batch as one row without padding; the model's attention must be one of packing.py.
    """
    inputs = model_inputs(batch, packed)
    logits = model(**inputs, use_cache=False).logits[:, :-1]
    log_probs = log_probs_from_logits(logits, inputs["input_ids"][:, 1:], temperature)
    entropy = entropy_from_logits(logits if entropy_gradient else logits.detach(), temperature)
    return align(log_probs, batch, packed), align(entropy, batch, packed)


def policy_log_probs(policy: ShardedModel, batch: Batch, temperature: float | None = None) -> tuple[Tensor, Tensor]:
    """Return log-probs and entropies, [B, T], of the rank's batch, without gradient. A collective call.

    temperature: None for that of sampling.
    """
    temperature = policy.config.rollout.temperature if temperature is None else temperature
    packed = policy.config.model.packed
    log_probs, entropy = policy.compute(
        lambda part: token_log_probs(policy.model, part, temperature, packed=packed), batch
    )
    return log_probs, entropy


class Reference(ShardedModel):
    """A policy that does not learn."""

    role = "reference"

    def __init__(self, model: nn.Module, config: schema.Config, mesh: DeviceMesh, device: torch.device) -> None:
        super().__init__(model.requires_grad_(False), config, mesh, device)

    def log_probs(self, batch: Batch) -> tuple[Tensor, Tensor]:
        """Return log-probs and entropies, [B, T]; see policy_log_probs."""
        return policy_log_probs(self, batch)


@dataclass(kw_only=True, slots=True)
class OldLogProbs:
    """What the actor computes for the responses before the step's updates. [B, T] each; response tokens count."""

    log_probs: Tensor
    """With the experts that the engine took, if rollout.routing is "replay"."""
    entropy: Tensor
    own: Tensor
    """With the actor's own experts; the same tensor as log_probs unless they are replayed."""
    differing: Tensor | None
    """In how many layers a token's experts are others than the engine's; None if the engine was not asked."""


class Actor(Learner):
    """The policy and its optimizer."""

    role = "actor"

    def __init__(self, model: nn.Module, config: schema.Config, mesh: DeviceMesh, device: torch.device) -> None:
        super().__init__(model, config, mesh, device)
        self.routers = Routers(model) if config.rollout.routing != "off" else None
        self._replays = config.rollout.routing == "replay"

    def computing_in(self, dtype: torch.dtype) -> "Actor":
        """Return a second actor that computes in another dtype on the values that this one computes with; see
        model.computing_in.

        A collective call. It takes as much memory as the parameters in that dtype, and is not for training.
        """
        config = self.config.model
        held = getattr(torch, config.dtype)
        with self.on_device():
            model = computing_in(self.model, dtype, held, self.mesh, self.device, config.packed)
        return Actor(model, self.config, self.mesh, self.device)

    def log_probs(self, batch: Batch) -> tuple[Tensor, Tensor]:
        """Return log-probs and entropies, [B, T]; see policy_log_probs.

        In a replay tokens take the engine's experts.
        """
        if not self._replays:
            return policy_log_probs(self, batch)
        log_probs, entropy, _ = self._routed_log_probs(batch, replay=True)
        return log_probs, entropy

    def old_log_probs(self, batch: Batch) -> OldLogProbs:
        """Return this model's log-probs of the responses, also where tokens take the experts that it chooses itself.

        They are "old" for the updates that follow: a ratio of PPO compares a token's new log-prob with its old one. A
        collective call, without gradient. With rollout.routing the batch needs routed_experts.
        """
        if self.routers is None:
            log_probs, entropy = policy_log_probs(self, batch)
            return OldLogProbs(log_probs=log_probs, entropy=entropy, own=log_probs, differing=None)
        own, entropy, differing = self._routed_log_probs(batch, replay=False)
        log_probs = own
        if self._replays:
            log_probs, entropy, _ = self._routed_log_probs(batch, replay=True)
        return OldLogProbs(log_probs=log_probs, entropy=entropy, own=own, differing=differing)

    def _routed_log_probs(self, batch: Batch, *, replay: bool) -> tuple[Tensor, Tensor, Tensor]:
        routers, temperature, packed = self.routers, self.config.rollout.temperature, self.config.model.packed
        assert routers, "rollout.routing is off"

        def forward(part: Batch) -> tuple[Tensor, ...]:
            routers.follow(part, packed, replay=replay)
            numbers = token_log_probs(self.model, part, temperature, packed=packed)
            return *numbers, routers.differing_layers(part, packed)

        try:
            log_probs, entropy, differing = self.compute(forward, batch, ("routed_experts",))
        finally:
            routers.rest()
        return log_probs, entropy, differing

    def backward(self, microbatches: Sequence[Batch], counted: int) -> tuple[Tensor, dict[str, Tensor]]:
        """Add up the gradient over this rank's microbatches; see Learner.backward."""
        try:
            return super().backward(microbatches, counted)
        finally:
            if self.routers:
                self.routers.rest()

    def loss(self, batch: Batch, counted: int) -> tuple[Tensor, dict[str, Tensor]]:
        """Return the share of the loss, and metrics; see Learner.loss.

        The batch needs old_log_probs and advantages; with the KL in the loss also reference_log_probs.
        """
        config, algorithm, mask = self.config.actor, self.config.algorithm, batch.response_mask
        if self.routers and self._replays:
            # Until the next microbatch: with gradient checkpointing the backward pass computes the routers again.
            self.routers.follow(batch, self.config.model.packed, replay=True)
        log_probs, entropy = token_log_probs(
            self.model,
            batch,
            self.config.rollout.temperature,
            config.entropy_coefficient != 0,
            self.config.model.packed,
        )
        old, advantages = batch.require("old_log_probs"), batch.require("advantages")
        policy, clipping = policy_loss(log_probs, old, advantages, config.clip_low, config.clip_high)
        loss = policy - config.entropy_coefficient * entropy
        metrics = {"policy_loss": policy, "entropy": entropy, **clipping}
        if algorithm.kl_placement == "loss":
            metrics["kl"] = kl(log_probs, batch.require("reference_log_probs"), "loss")
            loss = loss + algorithm.kl_coefficient * metrics["kl"]
        return share_of_mean(loss, mask, counted), {name: masked_sum(tokens, mask) for name, tokens in metrics.items()}
