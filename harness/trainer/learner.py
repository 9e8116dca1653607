"""What actor and critic share: minibatch steps whose loss is right over all ranks, and metrics equal on all ranks."""

import math
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Generic, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh

from harness.config import schema
from harness.trainer.batch import Batch, microbatches, minibatches
from harness.trainer.losses import Counts, local_counts
from harness.trainer.offload import Gradients, HostGradients, Offload, Offloaded, local


def all_sum(tensor: Tensor, mesh: DeviceMesh) -> Tensor:
    """Add the tensor up over the mesh's ranks, in place, and return it; the same on every rank."""
    dist.all_reduce(tensor, group=mesh.get_group())
    return tensor


def numbers_by_rank(number: int, mesh: DeviceMesh, device: torch.device) -> list[int]:
    """Return every rank's number; a collective call."""
    numbers = torch.zeros(mesh.size(), dtype=torch.int64, device=device)
    numbers[mesh.get_local_rank()] = number
    return all_sum(numbers, mesh).tolist()


def check_same_size(batch: Batch, mesh: DeviceMesh, device: torch.device) -> None:
    """Raise ValueError, on every rank, if the ranks' batches differ in size: ranks would run other collectives."""
    sizes = numbers_by_rank(len(batch), mesh, device)
    if len(set(sizes)) > 1:
        raise ValueError(
            f"the number of sequences in the batch must be the same on every rank, got {sizes} on ranks 0 to"
            f" {mesh.size() - 1}"
        )


Config = TypeVar("Config", bound=schema.Updates)


class Learner(Generic[Config]):
    """A sharded model, its AdamW, and the loop of epochs, minibatches and microbatches.

    What is offloaded has its memory only inside `on_device` and `learning`.
    """

    def __init__(
        self,
        name: str,
        model: nn.Module,
        config: Config,
        mesh: DeviceMesh,
        device: torch.device,
        offloaded: Offloaded,
    ) -> None:
        """Raise ValueError if the minibatch does not divide over the mesh's ranks."""
        if config.minibatch_size % mesh.size():
            raise ValueError(
                f"{name}.minibatch_size must be a multiple of the {mesh.size()} ranks, got {config.minibatch_size}"
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
        self._parameters = Offload(model.parameters, offloaded.parameters)
        self._moments = Offload(self.moments, offloaded.optimizer)

    def loss(self, batch: Batch, counts: Counts) -> tuple[Tensor, dict[str, Tensor]]:
        """Return a microbatch's share of its minibatch's loss, and its metrics as sums over tokens.

        counts: of the minibatch over all ranks.
        """
        raise NotImplementedError

    def on_device(self) -> AbstractContextManager[None]:
        """Give the parameters their memory inside this context: for a forward, a sync, a checkpoint."""
        return self._parameters.on_device()

    @contextmanager
    def learning(self) -> Iterator[None]:
        """Give parameters and optimizer states their memory inside this context: for updates."""
        with self.on_device(), self._moments.on_device():
            yield

    def update(self, batch: Batch, generator: torch.Generator) -> dict[str, float]:
        """Run every epoch over the rank's batch, in minibatches of the generator's order; a collective call.

        The generator, on the CPU, must have the same state on every rank. Return metrics, the same on every rank: means
        weighted by tokens; for loss and grad_norm, means over optimizer steps. Raise ValueError if the ranks' batches
        differ in size.
        """
        check_same_size(batch, self.mesh, self.device)
        size = self.config.minibatch_size // self.mesh.size()
        steps = [
            self.step(minibatch)
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

    def step(self, minibatch: Batch) -> dict[str, float]:
        """Take one optimizer step on this rank's part of a minibatch; a collective call. Return metrics and `tokens`.

        Every microbatch's gradient is reduced at once: it costs a reduce-scatter each, and no rank holds an unsharded
        gradient. Raise ValueError if no rank has a response token, FloatingPointError if the gradient is not finite;
        the model is then as before.
        """
        counts = self._global_counts(minibatch.response_mask)
        self.model.train()
        self.gradients.clear()
        share_of_loss = torch.zeros((), dtype=torch.float64, device=self.device)
        sums: dict[str, Tensor] = {}
        for microbatch in microbatches(minibatch.to(self.device), self.config.microbatch_size):
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
        scale = min(1.0, self.config.max_grad_norm / (grad_norm + 1e-6))
        for parameters in self.gradients.pieces(last=True):
            for parameter in parameters:
                local(parameter.grad).mul_(scale)  # type: ignore[arg-type]
            self.optimizer.step()  # AdamW steps each parameter that has a gradient
        means = (all_sum(torch.stack(list(sums.values())), self.mesh) / counts.tokens).tolist()
        loss = float(all_sum(share_of_loss, self.mesh))
        return {
            **dict(zip(sums, means, strict=True)),
            "loss": loss,
            "grad_norm": grad_norm,
            "tokens": float(counts.tokens),
        }

    def moments(self) -> Iterator[Tensor]:
        """Yield AdamW's moments: none before the first step. Its step counts stay where they are."""
        for state in self.optimizer.state.values():
            yield from (value for name, value in state.items() if name != "step")

    def _global_counts(self, response_mask: Tensor) -> Counts:
        tokens, sequences = all_sum(local_counts(response_mask.to(self.device)), self.mesh).tolist()
        if tokens == 0:
            raise ValueError(
                "the minibatch must have at least 1 response token over all ranks, got 0; where rollout.truncated ="
                ' "mask" left none, raise rollout.max_response_tokens'
            )
        return Counts(tokens=tokens, sequences=sequences)

    @torch.no_grad()
    def _gradient_norm(self) -> float:
        """Return the norm of the gradient over all parameters and ranks.

        Not torch.nn.utils.get_total_norm: that adds squares up in float32, in an order that depends on how gradients
        are sharded; offloaded gradients must come piece by piece; and a gradient that is not finite names its ranks.
        """
        norms: dict[Tensor, Tensor] = {}
        for parameters in self.gradients.pieces():
            for parameter in parameters:
                norms[parameter] = torch.linalg.vector_norm(local(parameter.grad), dtype=torch.float32)  # type: ignore[arg-type]
        squares = [norms[parameter].double().square() for parameter in self.gradients.parameters if parameter in norms]
        own = torch.stack(squares).sum()
        grad_norm = float(all_sum(own.clone(), self.mesh).sqrt())
        if math.isfinite(grad_norm):
            return grad_norm
        self.gradients.clear()
        is_wrong = numbers_by_rank(0 if torch.isfinite(own) else 1, self.mesh, self.device)
        ranks = ", ".join(str(rank) for rank, wrong in enumerate(is_wrong) if wrong)  # none where only the sum is not
        where = f": it is not on rank{'s' if sum(is_wrong) > 1 else ''} {ranks}" if ranks else ""
        raise FloatingPointError(f"the gradient norm of the {self.name} is {grad_norm}, but must be finite{where}")
