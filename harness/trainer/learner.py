"""What actor, critic and reference share (ShardedModel), and the optimizer steps of actor and critic (Learner)."""

import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from typing import ClassVar, Literal

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from transformers import get_scheduler

from harness.cluster.world import all_gather
from harness.config import schema
from harness.trainer.batch import Batch
from harness.trainer.microbatches import make_microbatches
from harness.trainer.model import named_tensors
from harness.trainer.offload import Offload, local
from harness.trainer.rank_sums import all_sum

LOSS_SCALE = 2.0**16
"""The loss is multiplied by this before a backward in float16. torch's GradScaler starts with the same number.

Without it, gradients below 6e-8 become 0. Measured on a CPU with a tiny Qwen3-MoE (vocabulary of 32,000, loss averaged
over 131,072 tokens): 45 % of the gradient's elements were lost, an error of 0.13 in its norm. With this scale the error
is 0.02.
"""
LOSS_SCALE_STEP = 4.0
"""By which the scale is divided after a gradient that is not finite, before the backward is run again."""


class ShardedModel:
    """A sharded model in one role.

    If it is offloaded, it has memory on the device only inside `on_device` and `learning`.
    """

    role: ClassVar[Literal["actor", "critic", "reference"]]

    def __init__(self, model: nn.Module, config: schema.Config, mesh: DeviceMesh, device: torch.device) -> None:
        self.model, self.config, self.mesh, self.device = model, config, mesh, device
        self._parameters = Offload(model.parameters, self.role in config.memory.offload_parameters)

    def on_device(self) -> AbstractContextManager[None]:
        """Have the parameters on the device inside this context: for a forward, a sync or a checkpoint."""
        return self._parameters.on_device()

    @torch.no_grad()
    def compute(
        self,
        forward: Callable[[Batch], tuple[Tensor, ...]],
        batch: Batch,
        also: Sequence[str] = (),
    ) -> list[Tensor]:
        """Run a forward over the rank's batch in microbatches, without gradient. A collective call.

        forward returns one or more tensors [b, t] for a microbatch; the result has each of them as [B, T], on the
        batch's device. With a token budget, the rank that has the fewest tokens computes a sequence, whoever holds it.
        also: the batch's fields that forward needs besides ids and masks.
        """
        self.model.eval()
        ids = batch.input_ids
        tokens = Batch(input_ids=ids, attention_mask=batch.attention_mask, response_mask=batch.response_mask)
        tokens = tokens.replace(**{name: batch.require(name) for name in also})
        microbatches = make_microbatches(tokens, self.mesh, self.device, self.config.actor, self.config.model.packed)
        by_kind = zip(*(forward(part) for part in microbatches.parts), strict=True)
        return [microbatches.bring_back(results).to(ids.device) for results in by_kind]


class Learner(ShardedModel):
    """A sharded model with AdamW and a schedule, and the loop over epochs, minibatches and microbatches."""

    role: ClassVar[Literal["actor", "critic"]]

    def __init__(self, model: nn.Module, config: schema.Config, mesh: DeviceMesh, device: torch.device) -> None:
        super().__init__(model, config, mesh, device)
        self.group = mesh.get_group()
        self.updates = config.actor  # of the critic too
        self.optimizer = torch.optim.AdamW(
            model.parameters(),
            lr=getattr(config, self.role).learning_rate,
            betas=self.updates.betas,
            weight_decay=self.updates.weight_decay,
        )
        steps = config.optimizer_steps(self.role)
        self.schedule = get_scheduler(self.updates.schedule, self.optimizer, self.updates.warmup_steps, steps)
        self.after_backward: list[Callable[[], None]] = []
        """Called after each microbatch's backward. Fault injection uses it."""
        self.is_scaled = config.model.dtype == "float16"
        self.loss_scale = torch.tensor(LOSS_SCALE if self.is_scaled else 1.0)
        """A power of two on the CPU, the same on every rank. It falls where float16 overflows, and never rises
        again."""
        self._moments = Offload(self.moments, self.role in config.memory.offload_optimizer)

    def loss(self, batch: Batch, counted: int) -> tuple[Tensor, dict[str, Tensor]]:
        """Return a microbatch's share of its minibatch's loss, a scalar, and its metrics as sums over response tokens.

        counted: the response tokens of the whole minibatch, over all ranks.
        """
        raise NotImplementedError

    @contextmanager
    def learning(self) -> Iterator[None]:
        """Have parameters and optimizer states on the device inside this context: for updates."""
        with self.on_device(), self._moments.on_device():
            yield

    def update(self, batch: Batch, generator: torch.Generator) -> dict[str, float]:
        """Run every epoch over all ranks' batches, in minibatches of random order. A collective call.

        The generator, on the CPU, must have the same state on every rank: it draws the minibatches from the sequences
        of all ranks, so that one seed gives the same minibatches at any world size. All batches must have the same
        number of sequences. Return metrics, the same on every rank: means weighted by tokens; loss and grad_norm are
        means over optimizer steps, and learning_rate, and loss_scale in float16, are those of the last step. A
        minibatch without a response token that counts makes no optimizer step. Raise ValueError if no minibatch has
        one.
        """
        sequences = len(batch) * self.mesh.size()
        steps = []
        for _ in range(self.updates.ppo_epochs):
            for rows in torch.randperm(sequences, generator=generator).split(self.updates.minibatch_size):
                steps.append(self.step(batch, rows.tolist()))
        steps = [step for step in steps if step]  # a minibatch without a token that counts makes none
        if not steps:
            raise ValueError(
                "the batch must have at least 1 response token over all ranks, got 0; if rollout.truncated = "
                '"mask" left none, raise rollout.max_response_tokens; if all were aborted, see the engine\'s log'
            )
        tokens = sum(step["tokens"] for step in steps)
        metrics = {
            name: sum(step[name] * step["tokens"] for step in steps) / tokens
            for name in steps[0]
            if name not in ("tokens", "loss", "grad_norm", "loss_scale")
        }
        for name in ("loss", "grad_norm"):
            metrics[name] = sum(step[name] for step in steps) / len(steps)
        metrics["optimizer_steps"] = float(len(steps))
        return metrics | {name: value for name, value in steps[-1].items() if name in ("learning_rate", "loss_scale")}

    def step(self, batch: Batch, rows: Sequence[int] | None = None) -> dict[str, float]:
        """Take one optimizer step on these rows of all ranks' batches (None: all). A collective call.

        Return the step's metrics, and as `tokens` how many response tokens counted. If no rank has any, take no step
        and return {}. Every microbatch's gradient is reduced at once, so that no rank holds an unsharded gradient; the price
        is one reduce-scatter for each microbatch. Raise FloatingPointError if the gradient is not finite. The model is
        then as before. In float16 the backward is first run again with smaller loss scales, because a gradient that
        overflows is finite with one of them.
        """
        packed = self.config.model.packed
        microbatches = make_microbatches(batch, self.mesh, self.device, self.updates, packed, rows).parts
        counted = int(
            all_sum(torch.stack([part.response_mask.bool().sum() for part in microbatches]).sum(), self.group)
        )
        if counted == 0:
            return {}
        while True:
            share_of_loss, sums = self.backward(microbatches, counted)
            loss = float(all_sum(share_of_loss, self.group))
            try:
                grad_norm = self._gradient_norm()
                break
            except FloatingPointError:
                if self.loss_scale <= 1 or not math.isfinite(loss):
                    raise
                self.loss_scale /= LOSS_SCALE_STEP
        learning_rate = self.schedule.get_last_lr()[0]
        self._apply_gradient(min(1.0, self.updates.max_grad_norm / (grad_norm + 1e-6)) / float(self.loss_scale))
        means = (all_sum(torch.stack(list(sums.values())), self.group) / counted).tolist()
        metrics = dict(zip(sums, means, strict=True))
        if self.is_scaled:
            metrics["loss_scale"] = float(self.loss_scale)
        return metrics | dict(loss=loss, grad_norm=grad_norm, tokens=counted, learning_rate=learning_rate)

    def backward(self, microbatches: Sequence[Batch], counted: int) -> tuple[Tensor, dict[str, Tensor]]:
        """Add up the gradient over this rank's microbatches, times loss_scale.

        Return its share of the loss and its metrics, float64 scalars, both without loss_scale.
        """
        self.model.train()
        self.optimizer.zero_grad()
        loss = torch.zeros((), dtype=torch.float64, device=self.device)
        sums: dict[str, Tensor] = {}
        for microbatch in microbatches:
            share, totals = self.loss(microbatch, counted)
            # FSDP averages gradients over ranks, but the shares must add up to the loss.
            (share * self.mesh.size() * float(self.loss_scale)).backward()
            for call in list(self.after_backward):
                call()
            loss += share.detach().double()
            for name, total in totals.items():
                sums[name] = total.detach().double() + sums.get(name, 0.0)
        return loss, sums

    @torch.no_grad()
    def _apply_gradient(self, scale: float) -> None:
        """Step AdamW and its schedule with the gradient times `scale`, and forget the gradient.

        The scale is that of torch.nn.utils.clip_grad_norm_, divided by loss_scale.
        """
        for gradient in self._gradients():
            gradient.mul_(scale)
        self.optimizer.step()
        self.optimizer.zero_grad()
        self.schedule.step()

    def _gradients(self) -> list[Tensor]:
        """Return this rank's shards of all gradients."""
        return [local(parameter.grad) for parameter in self.model.parameters() if parameter.grad is not None]

    def tensors(self) -> dict[str, Tensor]:
        """Return the tensors of a checkpoint by name: parameters, buffers, AdamW's states, in float16 the loss scale.

        They are not copied.

        AdamW makes its states at its first step; before that they are made here, which has memory only inside
        `learning`.
        """
        held: dict[str, Tensor] = {f"{self.role}/loss_scale": self.loss_scale} if self.is_scaled else {}
        for name, tensor in named_tensors(self.model):
            held[f"{self.role}/model/{name}"] = tensor.detach()
            if not tensor.requires_grad:
                continue
            state = self.optimizer.state[tensor]
            if not state:
                state |= {"step": torch.tensor(0.0)}
                state |= {moment: torch.zeros_like(tensor.detach()) for moment in ("exp_avg", "exp_avg_sq")}
            held |= {f"{self.role}/{kind}/{name}": each for kind, each in state.items()}
        return held

    def moments(self) -> Iterator[Tensor]:
        """Yield AdamW's moments; there are none before the first step. Its step counts are never offloaded."""
        for state in self.optimizer.state.values():
            yield from (value for name, value in state.items() if name != "step")

    @torch.no_grad()
    def _gradient_norm(self) -> float:
        """Return the norm of the gradient, without loss_scale, over all parameters and ranks.

        Raise FloatingPointError if it is not finite.

        torch.nn.utils.get_total_norm is not used, for two reasons. It adds squares up in float32, in an order that
        depends on the sharding. And the error must name the ranks whose gradient is not finite.
        """
        norms = [torch.linalg.vector_norm(gradient, dtype=torch.float32) for gradient in self._gradients()]
        own = torch.stack([norm.double().square() for norm in norms]).sum()
        grad_norm = float(all_sum(own, self.group).sqrt()) / float(self.loss_scale)
        if not math.isfinite(grad_norm):
            self.optimizer.zero_grad()
            wrong = [str(rank) for rank, fine in enumerate(all_gather(math.isfinite(own))) if not fine]
            where = f"; it is not on rank{'s' if len(wrong) > 1 else ''} {', '.join(wrong)}" if wrong else ""
            if self.is_scaled:
                where += f' (model.dtype = "float16", loss scale {float(self.loss_scale):g})'
            raise FloatingPointError(f"the gradient norm of the {self.role} must be finite, got {grad_norm}{where}")
        return grad_norm
