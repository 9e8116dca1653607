"""A second program for whole PPO updates: one process, float64, one sequence at a time. It shares only the config."""

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from transformers import AutoModel, AutoModelForCausalLM

from harness.config.schema import ActorConfig, Config


@dataclass(kw_only=True)
class FixedResponse:
    """One response: token ids, and what came with it."""

    prompt: list[int]
    response: list[int]
    rollout_log_probs: list[float]
    score: float
    group: int


@dataclass(kw_only=True)
class OptimizerStep:
    """What one optimizer step computed."""

    loss: float
    loss_scale: float
    """The same of |token loss|: what a loss that cancels is compared by."""
    grad_norm: float
    learning_rate: float
    gradients: dict[str, Tensor]
    """Clipped."""


@dataclass(kw_only=True)
class PpoStep:
    """What one PPO step computed: by sequence, its response's numbers; then every optimizer step."""

    advantages: list[Tensor]
    returns: list[Tensor] = field(default_factory=list)
    actor: list[OptimizerStep] = field(default_factory=list)
    critic: list[OptimizerStep] = field(default_factory=list)


class AdamW:
    """AdamW as arXiv 1711.05101 writes it."""

    def __init__(self, parameters: dict[str, Tensor], updates: ActorConfig, highest: float, steps: int) -> None:
        """highest: the learning rate after the warm-up."""
        self.parameters, self.updates, self.highest, self.steps, self.taken = parameters, updates, highest, steps, 0
        self.first = {name: torch.zeros_like(each) for name, each in parameters.items()}
        self.second = {name: torch.zeros_like(each) for name, each in parameters.items()}

    def learning_rate(self) -> float:
        """Return the learning rate of the next step."""
        updates, now = self.updates, self.taken
        warmup = updates.warmup_steps
        if now < warmup:
            return self.highest * now / warmup
        done = (now - warmup) / max(1, self.steps - warmup)
        shapes = {"linear": 1 - done, "cosine": (1 + math.cos(math.pi * done)) / 2}
        return self.highest * shapes.get(updates.schedule, 1.0)

    @torch.no_grad()
    def step(self, gradients: dict[str, Tensor]) -> None:
        rate, (beta, beta2) = self.learning_rate(), self.updates.betas
        self.taken += 1
        for name, parameter in self.parameters.items():
            first, second, gradient = self.first[name], self.second[name], gradients[name]
            first.mul_(beta).add_((1 - beta) * gradient)
            second.mul_(beta2).add_((1 - beta2) * gradient**2)
            unbiased = first / (1 - beta**self.taken), second / (1 - beta2**self.taken)
            parameter -= rate * self.updates.weight_decay * parameter
            parameter -= rate * unbiased[0] / (unbiased[1].sqrt() + 1e-8)


def token_mean(losses: Sequence[Tensor]) -> Tensor:
    """One number of the token losses of each sequence."""
    return torch.cat(list(losses)).mean()


class Float64Ppo:
    """Actor, critic and reference, and their updates on fixed responses."""

    def __init__(self, config: Config, path: str, value_head: Tensor | None, sequences: list[FixedResponse]) -> None:
        """path: of the saved model; value_head [1, hidden]: the critic's first."""
        self.config, self.sequences = config, sequences
        kinds = (AutoModelForCausalLM, AutoModelForCausalLM, AutoModel)
        self.actor, self.reference, backbone = (kind.from_pretrained(path, dtype=torch.float64) for kind in kinds)
        self.critic = nn.ModuleDict()
        if value_head is not None:
            head = nn.Linear(value_head.shape[1], 1, bias=False, dtype=torch.float64)
            head.load_state_dict({"weight": value_head.double()})
            self.critic = nn.ModuleDict({"backbone": backbone, "value_head": head})
        steps = {"actor": config.run.steps - config.algorithm.critic_warmup, "critic": config.run.steps}
        self.optimizers = {}
        for role, model in (("actor", self.actor), ("critic", self.critic)):
            updates, rate = config.actor, getattr(config, role).learning_rate
            each = len(sequences) // updates.minibatch_size * updates.ppo_epochs
            self.optimizers[role] = AdamW(dict(model.named_parameters()), updates, rate, steps[role] * each)

    def log_probs(self, model: Any, sequence: FixedResponse) -> tuple[Tensor, Tensor]:
        """Return the log-prob of each response token, and the entropy there."""
        ids = torch.tensor([sequence.prompt + sequence.response])
        logits = model(input_ids=ids, use_cache=False).logits[0] / self.config.rollout.temperature
        every = logits[len(sequence.prompt) - 1 : -1].log_softmax(-1)
        chosen = every[range(len(sequence.response)), sequence.response]
        return chosen, -(every.exp() * every).sum(-1)

    def values(self, sequence: FixedResponse) -> Tensor:
        """Before each response token."""
        ids = torch.tensor([sequence.prompt + sequence.response])
        states = self.critic["backbone"](input_ids=ids, use_cache=False).last_hidden_state[0]
        return self.critic["value_head"](states)[len(sequence.prompt) - 1 : -1, 0]

    def step(self, minibatches: dict[str, list[list[int]]]) -> PpoStep:
        """One PPO step whose optimizer steps see these sequences, by number."""
        with torch.no_grad():
            old = [self.log_probs(self.actor, each)[0] for each in self.sequences]
            reference = [self.log_probs(self.reference, each)[0] for each in self.sequences]
            values = [self.values(each) for each in self.sequences] if len(self.critic) else []
        done = self.advantages(old, reference, values)
        for rows in minibatches.get("critic", []):
            losses = [self.value_loss(row, values[row], done.returns[row]) for row in rows]
            done.critic.append(self.update("critic", losses))
        for rows in minibatches["actor"]:
            losses = [self.policy_loss(row, old[row], reference[row], done.advantages[row]) for row in rows]
            done.actor.append(self.update("actor", losses))
        return done

    def advantages(self, old: list[Tensor], reference: list[Tensor], values: list[Tensor]) -> PpoStep:
        algorithm = self.config.algorithm
        rewards = [torch.zeros_like(each) for each in old]
        for row, each in enumerate(self.sequences):
            if algorithm.kl_placement == "reward":
                rewards[row] -= algorithm.kl_coefficient * (old[row] - reference[row])
            rewards[row][-1] += each.score
        if not values:
            scores = [float(each.sum()) for each in rewards]
            return PpoStep(
                advantages=[torch.full_like(old[row], self.compared(row, scores)) for row in range(len(scores))]
            )
        raw = [self.gae(*each) for each in zip(rewards, values, strict=True)]
        everything = torch.cat(raw)
        mean, std = everything.mean(), everything.std()
        returns = [each + value for each, value in zip(raw, values, strict=True)]
        return PpoStep(advantages=[(each - mean) / std for each in raw], returns=returns)

    def compared(self, row: int, scores: list[float]) -> float:
        """A score against those of the same prompt."""
        group = self.sequences[row].group
        same = [each for each, sequence in zip(scores, self.sequences, strict=True) if sequence.group == group]
        if self.config.algorithm.advantage == "rloo":
            return scores[row] - (sum(same) - scores[row]) / (len(same) - 1)
        mean = sum(same) / len(same)
        spread = (sum((each - mean) ** 2 for each in same) / (len(same) - 1)) ** 0.5 + 1e-6
        return (scores[row] - mean) / (spread if self.config.algorithm.normalize_by_std else 1)

    def gae(self, rewards: Tensor, values: Tensor) -> Tensor:
        """Return the sum over l of (gamma lam)^l delta_(t + l), as GAE is defined."""
        gamma, lam = self.config.algorithm.gamma, self.config.algorithm.lam
        deltas = rewards + gamma * torch.cat([values[1:], values.new_zeros(1)]) - values
        powers = (gamma * lam) ** torch.arange(len(deltas), dtype=torch.float64)
        return torch.stack([(powers[: len(deltas) - t] * deltas[t:]).sum() for t in range(len(deltas))])

    def policy_loss(self, row: int, old: Tensor, reference: Tensor, advantages: Tensor) -> Tensor:
        """Return the loss of each response token."""
        actor, algorithm = self.config.actor, self.config.algorithm
        now, entropy = self.log_probs(self.actor, self.sequences[row])
        ratio = (now - old).exp()
        gain = torch.minimum(ratio * advantages, ratio.clamp(1 - actor.clip_low, 1 + actor.clip_high) * advantages)
        gain = torch.where(advantages < 0, torch.maximum(gain, 3.0 * advantages), gain)
        loss = -gain - actor.entropy_coefficient * entropy
        if algorithm.kl_placement == "loss":
            loss = loss + algorithm.kl_coefficient * ((reference - now).exp() - 1 - (reference - now))
        return loss

    def value_loss(self, row: int, old: Tensor, returns: Tensor) -> Tensor:
        """Return the loss of each response token."""
        now, clip = self.values(self.sequences[row]), self.config.critic.value_clip
        near = old + (now - old).clamp(-clip, clip) if clip else now
        return torch.maximum((now - returns) ** 2, (near - returns) ** 2) / 2

    def update(self, role: str, losses: list[Tensor]) -> OptimizerStep:
        optimizer, updates = self.optimizers[role], self.optimizers[role].updates
        loss = token_mean(losses)
        found = torch.autograd.grad(loss, list(optimizer.parameters.values()))
        norm = float(torch.cat([each.flatten() for each in found]).norm())
        scale = min(1.0, updates.max_grad_norm / (norm + 1e-6))
        gradients = {name: scale * each for name, each in zip(optimizer.parameters, found, strict=True)}
        rate = optimizer.learning_rate()
        optimizer.step(gradients)
        scale_of_loss = float(token_mean([each.detach().abs() for each in losses]))
        return OptimizerStep(
            loss=float(loss.detach()), loss_scale=scale_of_loss, grad_norm=norm, learning_rate=rate, gradients=gradients
        )

    def weights(self) -> dict[str, dict[str, Tensor]]:
        """By role and name."""
        found = {role: optimizer.parameters for role, optimizer in self.optimizers.items()}
        return {role: {name: each.detach() for name, each in named.items()} for role, named in found.items()}
