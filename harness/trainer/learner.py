"""What actor and critic share: minibatch steps whose loss is right over all ranks, and metrics that are the same on all
ranks.
"""

import math
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh

from harness.config import schema
from harness.trainer.batch import Batch, microbatches, minibatches
from harness.trainer.losses import Counts, local_counts
from harness.trainer.offload import Gradients, HostGradients, Offload, Offloaded, local

MicrobatchLoss = Callable[[Batch, Counts], tuple[Tensor, dict[str, Tensor]]]
"""(microbatch, counts of its minibatch over all ranks) -> (this microbatch's share of the loss, sums over its tokens by
metric).
"""


def all_sum(tensor: Tensor, mesh: DeviceMesh) -> Tensor:
    """The tensor added up over the mesh's ranks, in place and returned; the same on every rank."""
    dist.all_reduce(tensor, group=mesh.get_group())
    return tensor


def check_same_on_all_ranks(what: str, number: int, mesh: DeviceMesh, device: torch.device) -> None:
    """Raises ValueError, on every rank, if the ranks disagree on a number that decides how many collectives they will
    run.
    """
    numbers = torch.zeros(mesh.size(), dtype=torch.int64, device=device)
    numbers[mesh.get_local_rank()] = number
    everyone = all_sum(numbers, mesh).tolist()
    if len(set(everyone)) > 1:
        raise ValueError(f"{what} is {everyone} on ranks 0 to {mesh.size() - 1}, but must be the same on every rank")


@dataclass
class Tally:
    """Sums over tokens of one rank, gathered microbatch by microbatch."""

    sums: dict[str, Tensor]
    tokens: int

    def add(self, sums: dict[str, Tensor]) -> None:
        """Add a microbatch's sums, kept in float64."""
        for name, total in sums.items():
            self.sums[name] = (
                self.sums.get(name, torch.zeros_like(total, dtype=torch.float64)) + total.detach().double()
            )

    def means(self, mesh: DeviceMesh) -> dict[str, float]:
        """Sums over all ranks, divided by the tokens of all ranks: `tokens` is that total already."""
        totals = all_sum(torch.stack(list(self.sums.values())), mesh).tolist()
        return {name: total / self.tokens for name, total in zip(self.sums, totals, strict=True)}


class Learner:
    """A sharded model, its AdamW, and the loop of epochs, minibatches and microbatches.

    What is offloaded has its memory only inside `on_device` and `learning`.
    """

    def __init__(
        self,
        name: str,
        model: nn.Module,
        config: schema.Actor | schema.Critic,
        mesh: DeviceMesh,
        device: torch.device,
        offloaded: Offloaded,
    ) -> None:
        """Raises ValueError if the minibatch does not divide over the mesh's ranks."""
        if config.minibatch_size % mesh.size():
            raise ValueError(
                f"{name}.minibatch_size is {config.minibatch_size}, but must be a multiple of the {mesh.size()} ranks"
            )
        self.name = name
        self.model = model
        self.config = config
        self.mesh = mesh
        self.device = device
        self.optimizer = torch.optim.AdamW(
            model.parameters(), lr=config.learning_rate, weight_decay=config.weight_decay
        )
        self.after_backward: list[Callable[[], None]] = []
        """Called after each microbatch's backward, before its gradient is added up."""
        self.gradients = (HostGradients if offloaded.gradients else Gradients)(model.parameters())
        self.parameters_offload = Offload(model.parameters, offloaded.parameters)
        self.optimizer_offload = Offload(self._optimizer_states, offloaded.optimizer)

    def on_device(self) -> AbstractContextManager[None]:
        """The parameters have their memory in here."""
        return self.parameters_offload.on_device()

    @contextmanager
    def learning(self) -> Iterator[None]:
        """Parameters and optimizer states have their memory in here."""
        with self.on_device(), self.optimizer_offload.on_device():
            yield

    def update(self, batch: Batch, generator: torch.Generator, loss: MicrobatchLoss) -> dict[str, float]:
        """Every epoch over the rank's batch, in minibatches of the generator's order; a collective call.

        The generator, on the CPU, must have the same state on every rank. Returns metrics, the same on every rank:
        means weighted by tokens; for loss and grad_norm, means over optimizer steps. Raises ValueError if the ranks'
        batches differ in size.
        """
        check_same_on_all_ranks("the number of sequences in the batch", len(batch), self.mesh, self.device)
        size = self.config.minibatch_size // self.mesh.size()
        steps = [
            self.step(minibatch, loss)
            for _ in range(self.config.ppo_epochs)
            for minibatch in minibatches(batch, size, generator)
        ]
        tokens = sum(step["tokens"] for step in steps)
        metrics = {
            name: sum(step[name] * step["tokens"] for step in steps) / tokens
            for name in steps[0]
            if name not in ("tokens", "loss", "grad_norm")
        }
        for name in ("loss", "grad_norm"):
            metrics[name] = sum(step[name] for step in steps) / len(steps)
        return {**metrics, "optimizer_steps": float(len(steps)), "learning_rate": self.config.learning_rate}

    def step(self, minibatch: Batch, loss: MicrobatchLoss) -> dict[str, float]:
        """One optimizer step on this rank's part of a minibatch; a collective call. Returns metrics, `tokens` included.

        Every microbatch's gradient is reduced at once: it costs a reduce-scatter each, and no rank holds an unsharded
        gradient. Raises ValueError if no rank has a response token, FloatingPointError if the gradient is not finite;
        the model is then as before.
        """
        counts = self._global_counts(minibatch.response_mask)
        minibatch = minibatch.to(self.device)
        tally = Tally(sums={}, tokens=counts.tokens)
        self.model.train()
        self.gradients.clear()
        share_of_loss = torch.zeros((), dtype=torch.float64, device=self.device)
        for microbatch in microbatches(minibatch, self.config.microbatch_size):
            share, sums = loss(microbatch, counts)
            # FSDP averages gradients over ranks, but the shares of the loss are to be added up.
            (share * self.mesh.size()).backward()
            for observe in list(self.after_backward):
                observe()
            self.gradients.add()
            share_of_loss += share.detach().double()
            tally.add(sums)
        grad_norm = self._gradient_norm()
        # As torch.nn.utils.clip_grad_norm_ scales.
        scale = min(1.0, self.config.max_grad_norm / (grad_norm + 1e-6))
        for parameters in self.gradients.pieces(last=True):
            for parameter in parameters:
                local(parameter.grad).mul_(scale)  # type: ignore[arg-type]
            self.optimizer.step()  # AdamW steps each parameter that has a gradient, by itself
        total_loss = float(all_sum(share_of_loss, self.mesh))
        return {**tally.means(self.mesh), "loss": total_loss, "grad_norm": grad_norm, "tokens": float(counts.tokens)}

    def _global_counts(self, response_mask: Tensor) -> Counts:
        """Tokens and sequences of the minibatch over all ranks."""
        tokens, sequences = all_sum(local_counts(response_mask.to(self.device)), self.mesh).tolist()
        if tokens == 0:
            raise ValueError(
                "the minibatch has 0 response tokens over all ranks, but a loss needs at least 1; where rollout.truncated ="
                ' "mask" left none, raise rollout.max_response_tokens'
            )
        return Counts(tokens=tokens, sequences=sequences)

    @torch.no_grad()
    def _gradient_norm(self) -> float:
        """Norm of the gradient over all parameters and ranks."""
        norms: dict[Tensor, Tensor] = {}
        for parameters in self.gradients.pieces():
            for parameter in parameters:
                norms[parameter] = torch.linalg.vector_norm(local(parameter.grad), dtype=torch.float32)  # type: ignore[arg-type]
        squares = [norms[parameter].double().square() for parameter in self.gradients.parameters if parameter in norms]
        own = torch.stack(squares).sum()
        grad_norm = float(all_sum(own.clone(), self.mesh).sqrt())
        if not math.isfinite(grad_norm):
            self.gradients.clear()
            raise FloatingPointError(
                f"the gradient norm of the {self.name} is {grad_norm}, but must be finite{self._not_finite(own)}"
            )
        return grad_norm

    def _not_finite(self, own: Tensor) -> str:
        """Whose part is not; "" where all parts are, and only their sum is too large. A collective call."""
        parts = torch.zeros(self.mesh.size(), dtype=torch.int64, device=self.device)
        parts[self.mesh.get_local_rank()] = 0 if torch.isfinite(own) else 1
        wrong = [str(rank) for rank, is_wrong in enumerate(all_sum(parts, self.mesh).tolist()) if is_wrong]
        return f": it is not on rank{'s' if len(wrong) > 1 else ''} {', '.join(wrong)}" if wrong else ""

    def _optimizer_states(self) -> Iterator[Tensor]:
        """AdamW's moments: none before the first step. Its step counts stay where they are."""
        for state in self.optimizer.state.values():
            yield from (value for name, value in state.items() if name != "step")
