"""What actor, critic and reference share, and the optimizer steps of actor and critic, right over all ranks."""

import itertools
import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from typing import ClassVar, Literal

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.nn.functional import pad
from transformers import get_scheduler

from harness.cluster.world import all_gather
from harness.config import schema
from harness.trainer.batch import Batch, plan_microbatches, redistribute
from harness.trainer.losses import Counts, local_counts
from harness.trainer.model import named_tensors
from harness.trainer.offload import Gradients, Offload


class ShardedModel:
    """A sharded model in one role. What memory.offload_* names has its memory only inside `on_device` and `learning`."""

    role: ClassVar[Literal["actor", "critic", "reference"]]

    def __init__(self, model: nn.Module, config: schema.Config, mesh: DeviceMesh, device: torch.device) -> None:
        self.model, self.config, self.mesh, self.device = model, config, mesh, device
        self._parameters = Offload(model.parameters, self.role in config.memory.offload_parameters)

    def on_device(self) -> AbstractContextManager[None]:
        """Give the parameters their memory inside this context: for a forward, a sync, a checkpoint."""
        return self._parameters.on_device()

    @torch.no_grad()
    def by_microbatches(
        self, forward: Callable[[Batch], tuple[Tensor, ...]], batch: Batch, updates: schema.Updates
    ) -> tuple[Tensor, ...]:
        """Return what forward makes of the rank's batch, [B, T] each, by microbatches, on the batch's device.

        A collective call: under a token budget, sequences are computed on the rank that has fewest tokens.
        """
        self.model.eval()
        ids = batch.input_ids
        read = Batch(input_ids=ids, attention_mask=batch.attention_mask, response_mask=batch.response_mask)
        parts, bring_back = self.microbatches(read, updates)
        results = zip(*(forward(part) for part in parts), strict=True)
        return tuple(each.to(ids.device) for each in bring_back(results))

    def microbatches(
        self, batch: Batch, updates: schema.Updates, rows: Sequence[int] | None = None
    ) -> tuple[list[Batch], Callable[[Iterable[Sequence[Tensor]]], list[Tensor]]]:
        """Return this rank's microbatches of these rows of all ranks' batches (None: all), each as wide as its longest.

        A collective call; the batches must be of one size. With all rows, the function takes a kind of result of each
        microbatch, [b, t], and returns those of the rank's own batch, [B, T]; also a collective call.
        """
        group, ranks, here = self.mesh.get_group(), self.mesh.size(), batch.to(self.device)
        own = here.attention_mask.sum(-1)
        everyone = [torch.empty_like(own) for _ in range(ranks)]
        dist.all_gather(everyone, own, group=group)
        lengths = torch.cat(everyone).tolist()
        held = [list(range(rank * len(batch), (rank + 1) * len(batch))) for rank in range(ranks)]
        planned = plan_microbatches(rows or range(len(lengths)), lengths, ranks, updates, self.config.model.packed)
        wanted = [[row for parts in planned for row in parts[rank]] for rank in range(ranks)]
        rank, longest = self.mesh.get_local_rank(), max(lengths)
        fields = here.as_wide_as(longest).tensors()
        moved = Batch(**dict(zip(fields, redistribute(list(fields.values()), held, wanted, group), strict=True)))
        sizes, widths = zip(
            *((len(part[rank]), max(lengths[row] for row in part[rank])) for part in planned), strict=True
        )
        starts = itertools.accumulate(sizes, initial=0)
        parts = [
            moved.select(slice(start, start + size)).as_wide_as(width)
            for start, size, width in zip(starts, sizes, widths, strict=False)
        ]

        def bring_back(results: Iterable[Sequence[Tensor]]) -> list[Tensor]:
            wide = [torch.cat([pad(each, (0, longest - each.shape[1])) for each in kind]) for kind in results]
            width = batch.input_ids.shape[1]
            return [pad(each, (0, width - longest)) for each in redistribute(wide, wanted, held, group)]

        return parts, bring_back


class Learner(ShardedModel):
    """A sharded model, its AdamW and schedule, and the loop of epochs, minibatches and microbatches."""

    role: ClassVar[Literal["actor", "critic"]]

    def __init__(self, model: nn.Module, config: schema.Config, mesh: DeviceMesh, device: torch.device) -> None:
        super().__init__(model, config, mesh, device)
        self.updates: schema.Updates = getattr(config, self.role)
        self.optimizer = torch.optim.AdamW(
            model.parameters(),
            lr=self.updates.learning_rate,
            betas=self.updates.betas,
            weight_decay=self.updates.weight_decay,
        )
        steps = config.optimizer_steps(self.role)
        warmup = self.updates.warmup_steps or int(self.updates.warmup_ratio * steps)
        self.schedule = get_scheduler(self.updates.schedule, self.optimizer, warmup, steps)
        self.after_backward: list[Callable[[], None]] = []
        """Called after each microbatch's backward, before its gradient is added up."""
        self.gradients = Gradients(model.parameters(), self.role in config.memory.offload_gradients)
        self._moments = Offload(self.moments, self.role in config.memory.offload_optimizer)

    def loss(self, batch: Batch, counts: Counts) -> tuple[Tensor, dict[str, Tensor]]:
        """Return a microbatch's share of its minibatch's loss, and its metrics as sums over tokens.

        counts: of the minibatch over all ranks.
        """
        raise NotImplementedError

    @contextmanager
    def learning(self) -> Iterator[None]:
        """Give parameters and optimizer states their memory inside this context: for updates."""
        with self.on_device(), self._moments.on_device():
            yield

    def all_sum(self, tensor: Tensor) -> Tensor:
        """Add the tensor up over the ranks, in place, and return it; the same on every rank."""
        dist.all_reduce(tensor, group=self.mesh.get_group())
        return tensor

    def update(self, batch: Batch, generator: torch.Generator) -> dict[str, float]:
        """Run every epoch over all ranks' batches, in minibatches of the generator's order; a collective call.

        A minibatch has the same sequences however they lie on however many ranks. The generator, on the CPU, must have the
        same state on every rank, and the batches must be of one size. Return metrics, the same on every rank: means
        weighted by tokens; for loss and grad_norm, means over optimizer steps; the last
        one's learning_rate.
        """
        sequences = len(batch) * self.mesh.size()
        steps = [
            self.step(batch, rows.tolist())
            for _ in range(self.updates.ppo_epochs)
            for rows in torch.randperm(sequences, generator=generator).split(self.updates.minibatch_size)
        ]
        tokens = sum(step["tokens"] for step in steps)
        metrics = {
            name: sum(step[name] * step["tokens"] for step in steps) / tokens
            for name in steps[0]
            if name not in ("tokens", "loss", "grad_norm")
        }
        for name in ("loss", "grad_norm"):
            metrics[name] = sum(step[name] for step in steps) / len(steps)
        return {**metrics, "optimizer_steps": float(len(steps)), "learning_rate": steps[-1]["learning_rate"]}

    def step(self, batch: Batch, rows: Sequence[int] | None = None) -> dict[str, float]:
        """Take one optimizer step on these rows of all ranks' batches (None: all); a collective call. Return metrics and
        `tokens`.

        Every microbatch's gradient is reduced at once: it costs a reduce-scatter each, and no rank holds an unsharded
        gradient. Raise ValueError if no rank has a response token, FloatingPointError if the gradient is not finite;
        the model is then as before.
        """
        microbatches, _ = self.microbatches(batch, self.updates, rows)
        own = torch.stack([local_counts(part.response_mask) for part in microbatches]).sum(0)
        counts = Counts(*self.all_sum(own).tolist())
        if counts.tokens == 0:
            raise ValueError(
                "the minibatch must have at least 1 response token over all ranks, got 0; where rollout.truncated ="
                ' "mask" left none, raise rollout.max_response_tokens; where all were aborted, see the engine\'s log'
            )
        self.model.train()
        self.gradients.clear()
        share_of_loss = torch.zeros((), dtype=torch.float64, device=self.device)
        sums: dict[str, Tensor] = {}
        for microbatch in microbatches:
            share, totals = self.loss(microbatch, counts)
            # FSDP averages gradients over ranks, but the shares of the loss are to be added up.
            (share * self.mesh.size()).backward()
            for observe in list(self.after_backward):
                observe()
            self.gradients.add()
            share_of_loss += share.detach().double()
            for name, total in totals.items():
                sums[name] = total.detach().double() + sums.get(name, 0.0)
        grad_norm = self._gradient_norm()
        # As torch.nn.utils.clip_grad_norm_ scales.
        scale = min(1.0, self.updates.max_grad_norm / (grad_norm + 1e-6))
        for gradients in self.gradients.pieces():
            for gradient in gradients:
                gradient.mul_(scale)
            self.optimizer.step()  # AdamW steps each parameter that has a gradient
        self.gradients.clear()
        learning_rate = self.schedule.get_last_lr()[0]
        self.schedule.step()
        means = (self.all_sum(torch.stack(list(sums.values()))) / counts.tokens).tolist()
        metrics = dict(zip(sums, means, strict=True))
        loss = float(self.all_sum(share_of_loss))
        return metrics | dict(loss=loss, grad_norm=grad_norm, tokens=counts.tokens, learning_rate=learning_rate)

    def tensors(self) -> dict[str, Tensor]:
        """Return what a checkpoint has of this model: its parameters, buffers and AdamW's states, the live ones, by name.

        States that AdamW would make at its first step are made here, in memory that they have inside `learning` only.
        """
        held: dict[str, Tensor] = {}
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
        """Yield AdamW's moments: none before the first step. Its step counts stay where they are."""
        for state in self.optimizer.state.values():
            yield from (value for name, value in state.items() if name != "step")

    @torch.no_grad()
    def _gradient_norm(self) -> float:
        """Return the norm of the gradient over all parameters and ranks.

        Not torch.nn.utils.get_total_norm: that adds squares up in float32, in an order that depends on how gradients
        are sharded; offloaded gradients must come piece by piece; and a gradient that is not finite names its ranks.
        """
        gradients = (gradient for piece in self.gradients.pieces() for gradient in piece)
        norms = [torch.linalg.vector_norm(gradient, dtype=torch.float32) for gradient in gradients]
        own = torch.stack([norm.double().square() for norm in norms]).sum()
        grad_norm = float(self.all_sum(own.clone()).sqrt())
        if not math.isfinite(grad_norm):
            self.gradients.clear()
            wrong = [str(rank) for rank, fine in enumerate(all_gather(math.isfinite(own))) if not fine]
            where = f": it is not on rank{'s' if len(wrong) > 1 else ''} {', '.join(wrong)}" if wrong else ""
            raise FloatingPointError(f"the gradient norm of the {self.role} is {grad_norm}, but must be finite{where}")
        return grad_norm
