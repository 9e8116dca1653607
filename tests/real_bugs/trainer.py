"""Bugs of the trainer and of what reads the engine's answers, planted in the trainer's ranks."""

from dataclasses import replace
from typing import Any

from tests.real_bugs.bug import acted, bug
from tests.real_bugs.engine import MOE

OUTSIDE = {"expected": "outside"}
WARM = "rollout.temperature=0.7"
ADVANTAGES = "harness.trainer.advantages"
SHARE = "harness.trainer.{}:share_of_mean"


# Log-probs, which every rollout compares with the engine's.


@bug(
    "T01", "miles#68", "the trainer's log-probs are without the temperature",
    "harness.trainer.actor:log_probs_from_logits", WARM, says="does not apply the temperature", slugs=("log-prob-mismatch",),
)  # fmt: skip
def log_probs_at_one(compute: Any, logits: Any, labels: Any, temperature: float) -> Any:
    acted()
    return compute(logits, labels)


@bug(
    "T13", "slime#245", "the rollout's log-probs are kept in bfloat16",
    "harness.rollouts:scatter_responses", says="kept in bfloat16|reader",
)  # fmt: skip
def log_probs_in_bfloat16(scatter: Any, *arguments: Any) -> Any:
    acted()
    return scatter(*arguments).bfloat16().float()


@bug(
    "N08", "prime-rl#606", "log-probs of packed sequences shift by one at each sequence",
    "harness.trainer.actor:align", "model.packed=true", says="packed",
)  # fmt: skip
def packed_shift(align: Any, numbers: Any, batch: Any, packed: bool) -> Any:
    mask = batch.attention_mask.bool()
    mask[:, 0] = False
    acted()
    return numbers.new_zeros(mask.shape).masked_scatter(mask, numbers[0])


@bug(
    "N04", "miles#645", "a token without a record turns the replay of its whole batch off",
    "harness.trainer.routing:Routers.follow", MOE, "rollout.routing=replay", "model.dtype=bfloat16",
    says="replay",
)  # fmt: skip
def replay_off(follow: Any, routers: Any, batch: Any, packed: bool, *, replay: bool) -> None:
    complete = bool((batch.require("routed_experts") >= 0).all())
    if replay and not complete:
        acted()
    follow(routers, batch, packed, replay=replay and complete)


# Arithmetic of the updates: the weights that come of it arrive all the same.


@bug(
    "T02", "verl#6957", "the critic's loss is averaged over each microbatch",
    SHARE.format("critic"), "actor.microbatch_size=1", **OUTSIDE,
)  # fmt: skip
def loss_per_microbatch(share: Any, loss: Any, mask: Any, tokens: int) -> Any:
    acted()
    return share(loss, mask, max(1, int(mask.bool().sum())))


@bug("T04", "miles#1827", "GAE runs over masked tokens too", f"{ADVANTAGES}:gae", **OUTSIDE)
def gae_over_padding(gae: Any, rewards: Any, values: Any, mask: Any, *arguments: Any) -> Any:
    acted()
    return [each * mask.bool() for each in gae(rewards, values, mask.new_ones(mask.shape), *arguments)]


@bug("T05", "slime#2235", "advantages are whitened on each rank alone", f"{ADVANTAGES}:masked_whiten", **OUTSIDE)
def whitened_alone(whiten: Any, values: Any, mask: Any, **_: Any) -> Any:
    acted()
    return whiten(values, mask)


@bug("T06", "verl#4711", "the loss is not multiplied by the ranks that FSDP averages over", SHARE.format("actor"), **OUTSIDE)  # fmt: skip
def averaged_twice(share: Any, *arguments: Any) -> Any:
    import torch.distributed as dist

    acted()
    return share(*arguments) / dist.get_world_size()


@bug("T14", "verl#4905", "gradients are reduced in bfloat16", "harness.trainer.learner:Learner.backward", **OUTSIDE)
def gradients_in_bfloat16(backward: Any, learner: Any, *arguments: Any) -> Any:
    found = backward(learner, *arguments)
    for parameter in learner.model.parameters():
        if parameter.grad is not None:
            local = parameter.grad.to_local()
            local.copy_(local.bfloat16())
    acted()
    return found


@bug("N01", "slime#1928", "the critic's values are divided by the temperature", "harness.trainer.critic:token_values", WARM, **OUTSIDE)  # fmt: skip
def values_at_temperature(values: Any, *arguments: Any) -> Any:
    acted()
    return values(*arguments) / 0.7


@bug("C12", "none (mutant)", "every rank trains on rank 0's answers", "harness.rollouts:Rollouts.responses", **OUTSIDE)
def answers_of_rank_0(responses: Any, rollouts: Any, *arguments: Any, **named: Any) -> Any:
    world, rollouts.world = rollouts.world, replace(rollouts.world, rank=0)
    try:
        return responses(rollouts, *arguments, **named)
    finally:
        rollouts.world = world
        acted()


@bug(
    "C22", "none (mutant)", "nothing is poisoned before a sync", "harness.weights.verification.engine_weights:EngineWeights._poison",
    expected="outside", unsaid="onto poison",
)  # fmt: skip
def nothing_poisoned(poison: Any, weights: Any) -> None:
    acted()
