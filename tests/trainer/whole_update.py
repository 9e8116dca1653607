"""Ppo.learn on fixed responses, on real ranks, and what its optimizers did; against float64.py."""

from contextlib import nullcontext
from types import SimpleNamespace
from typing import Any, cast

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor
from transformers import AutoConfig

from harness.cluster.world import all_gather
from harness.config.schema import Config
from harness.learning import Learning
from harness.trainer.actor import Actor, Reference
from harness.trainer.batch import Batch, from_sequences, scatter_responses
from harness.trainer.critic import Critic
from harness.trainer.estimate import estimate_advantages
from harness.trainer.learner import Learner, ShardedModel
from harness.trainer.model import choose_attention, load_causal_lm
from harness.trainer.offload import local
from harness.weight_changes import WeightChanges
from tests.trainer.float64 import FixedResponse, Float64Ppo, OptimizerStep, PpoStep
from tests.trainer.sequences import sequences

CPU = torch.device("cpu")


def fixed_responses(config: Config, path: str) -> list[FixedResponse]:
    """Eight responses to four prompts, and log-probs of an engine that is some tenths of a nat off."""
    draw = torch.Generator().manual_seed(3)
    made = [
        FixedResponse(prompt=prompt, response=response, rollout_log_probs=[], score=float(score), group=number % 4)
        for number, (prompt, response, score) in enumerate(
            zip(*sequences(), torch.randn(8, generator=draw).tolist(), strict=True)
        )
    ]
    reference = Float64Ppo(config, path, None, made)
    for each in made:
        with torch.no_grad():
            exact = reference.log_probs(reference.actor, each)[0]
        each.rollout_log_probs = (exact + 0.3 * torch.randn(len(exact), generator=draw)).float().tolist()
    return made


def local_batch(rows: list[FixedResponse]) -> Batch:
    """This rank's sequences as a rollout hands them on."""
    batch = from_sequences([each.prompt for each in rows], [each.response for each in rows], pad_id=0)
    return batch.replace(
        group=torch.tensor([each.group for each in rows]),
        scores=torch.tensor([each.score for each in rows]),
        truncated=torch.zeros(len(rows), dtype=torch.bool),
        rollout_log_probs=scatter_responses([each.rollout_log_probs for each in rows], batch),
    )


def build(config: Config, path: str, mesh: DeviceMesh) -> Learning:
    """Only with what learns."""
    attention, _ = choose_attention(AutoConfig.from_pretrained(path), "auto", config.model.packed)
    load: dict[str, Any] = {"path": path, "dtype": torch.float32, "device": CPU, "mesh": mesh, "attention": attention}
    critic = Critic(load_causal_lm(**load, value_head=True), config, mesh, CPU) if config.algorithm.has_critic else None
    actor = Actor(load_causal_lm(**load, gradient_checkpointing=True), config, mesh, CPU)
    reference = Reference(load_causal_lm(**load), config, mesh, CPU)
    learners = {each.role: each for each in (actor, critic) if each}
    return Learning(
        config=config,
        world=cast(Any, SimpleNamespace(rank=dist.get_rank())),
        events=cast(Any, SimpleNamespace(phase=lambda *words: nullcontext())),
        actor=actor,
        critic=critic,
        reference=reference,
        weight_changes={
            role: WeightChanges(role=role, model=each.model, config=config) for role, each in learners.items()
        },
    )


def whole(tensor: Tensor) -> Tensor:
    return (tensor.full_tensor() if isinstance(tensor, DTensor) else tensor).detach().clone()


def weights(learner: Learner) -> dict[str, Tensor]:
    with learner.on_device():
        return {name: whole(parameter) for name, parameter in learner.model.named_parameters()}


def of_responses(tensor: Tensor, batch: Batch) -> list[Tensor]:
    """A [B, T] field as each response's numbers."""
    return [row[mask.bool()] for row, mask in zip(tensor, batch.response_mask, strict=True)]


class Recorder:
    """What a learner's optimizer steps saw and did."""

    def __init__(self, learner: Learner) -> None:
        self.minibatches: list[list[int]] = []
        self.steps: list[OptimizerStep] = []
        self.gradients: dict[str, Tensor] = {}
        self.learner, self.step = learner, learner.step
        learner.step = self.recorded  # type: ignore[method-assign]
        learner.optimizer.register_step_pre_hook(self.take_gradients)

    def take_gradients(self, *_: Any) -> None:
        parameters = self.learner.model.named_parameters()
        self.gradients = {name: whole(each.grad) for name, each in parameters if each.grad is not None}

    def recorded(self, batch: Batch, rows: list[int]) -> dict[str, float]:
        self.minibatches.append(rows)
        self.gradients = {}
        found = self.step(batch, rows)
        named = {name: found[name] for name in ("loss", "grad_norm", "learning_rate")}
        self.steps.append(OptimizerStep(loss_scale=0.0, gradients=self.gradients, **named))
        return found


def run_harness(rank: int, config: Config, path: str, rows: list[FixedResponse]) -> dict[str, Any]:
    """On each rank: every PPO step's results and minibatches, and the weights before and after."""
    ranks = dist.get_world_size()
    torch.set_num_threads(1)
    ppo = build(config, path, init_device_mesh("cpu", (ranks,)))
    learners = {"actor": ppo.actor, "critic": ppo.critic} if ppo.critic else {"actor": ppo.actor}
    share = len(rows) // ranks
    batch = local_batch(rows[rank * share : (rank + 1) * share])
    recorders = {role: Recorder(learner) for role, learner in learners.items()}
    before = {role: weights(learner) for role, learner in learners.items()}
    steps, old_values, metrics = [], [], []
    minibatches: list[dict[str, list[list[int]]]] = []
    for index in range(config.run.steps):
        with ppo.actor.on_device():
            rollout = batch.replace(old_log_probs=ppo.actor.log_probs(batch)[0])
        step, old = estimated(ppo, rollout)
        steps.append(step)
        old_values.append(old)
        metrics.append(ppo.learn(index, rollout))
        for role, recorder in recorders.items():
            setattr(steps[-1], role, recorder.steps)
        minibatches.append({role: recorder.minibatches for role, recorder in recorders.items()})
        for recorder in recorders.values():
            recorder.steps, recorder.minibatches = [], []
    idle = {each.role: at_rest(each) for each in (*learners.values(), ppo.reference) if each}
    after = {role: weights(learner) for role, learner in learners.items()}
    found = {"steps": steps, "old_values": old_values, "minibatches": minibatches, "metrics": metrics, "idle": idle}
    return found | {"before": before, "after": after}


def at_rest(model: ShardedModel) -> tuple[int, int, int]:
    """Bytes that this rank's shards of the parameters and of AdamW's moments have between uses, and the gradients."""
    moments = model.moments() if isinstance(model, Learner) else ()
    parameters = list(model.model.parameters())
    held, of_moments = (sum(local(each).untyped_storage().nbytes() for each in some) for some in (parameters, moments))
    return held, of_moments, sum(each.grad is not None for each in parameters)


def estimated(ppo: Learning, batch: Batch) -> tuple[PpoStep, list[Tensor]]:
    """The advantages of all ranks' responses; with a critic also the returns, and its values before the update."""
    assert ppo.reference
    with ppo.reference.on_device():
        given = batch.replace(reference_log_probs=ppo.reference.log_probs(batch)[0])
    if ppo.critic:
        with ppo.critic.on_device():
            given = given.replace(old_values=ppo.critic.values(batch))
    done = estimate_advantages(given, ppo.config)[0].tensors()
    names = [name for name in ("advantages", "returns", "old_values") if name in done]
    gathered = all_gather({name: of_responses(done[name], batch) for name in names})
    found = {name: [row for each in gathered for row in each[name]] for name in names}
    old = found.pop("old_values", [])
    return PpoStep(**found), old
