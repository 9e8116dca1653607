"""What a run says of steps that taught a model nothing."""

from collections.abc import Callable

import pytest
import torch
from torch import nn

from harness.config.schema import Config
from harness.weight_changes import WeightChanges

pytestmark = pytest.mark.usefixtures("alone")
UPDATED = {"grad_norm": 1.0, "learning_rate": 1e-6}


def movement(role: str = "actor", advantage: str = "grpo", dtype: str = "bfloat16") -> WeightChanges:
    config = Config()
    config.algorithm.advantage, config.model.dtype = advantage, dtype  # type: ignore[assignment]
    return WeightChanges(role=role, model=nn.Linear(4, 3), config=config)


def step(
    watched: WeightChanges, index: int, change: Callable[[nn.Module], object], **metrics: float
) -> dict[str, float]:
    watched.begin()
    with torch.no_grad():
        change(watched.model)
    return watched.finish(index, UPDATED | metrics)


def all_tensors(model: nn.Module) -> None:
    for each in model.parameters():
        each.add_(1.0)


def test_tensors_that_moved_are_counted() -> None:
    watched = movement()
    assert step(watched, 0, lambda model: model.bias.add_(1.0)) == {"moved_tensors": 1.0, "tensors": 2.0}
    assert step(watched, 1, all_tensors)["moved_tensors"] == 2.0
    assert watched.line(0) == watched.line(1) == ""
    assert watched.verdict() == "every step moved the actor (1 to 2 of its 2 tensors)"


@pytest.mark.parametrize(
    ("metrics", "advantage", "why"),
    [
        ({"grad_norm": 0.0}, "grpo", "no group's rewards differ"),
        ({"grad_norm": 0.0}, "gae", "every advantage is 0"),
        ({"learning_rate": 0.0}, "gae", "learning rate 0"),
        ({"learning_rate": 1e-12}, "gae", "too small for bfloat16: learning rate 1e-12"),
    ],
)
def test_an_actor_that_does_not_move_says_why(metrics: dict[str, float], advantage: str, why: str) -> None:
    watched = movement(advantage=advantage)
    for index in range(2):
        assert step(watched, index, lambda model: model.bias.add_(1e-12), **metrics)["moved_tensors"] == 0
    assert why in watched.line(0) and "actor did not move" in watched.line(0)
    assert "the ACTOR DID NOT MOVE (steps 0 to 1: " in watched.verdict() and why in watched.verdict()


@pytest.mark.parametrize(
    ("role", "advantage", "why"),
    [("actor", "grpo", "no group's rewards differ"), ("critic", "gae", "its loss has no gradient")],
)
def test_what_moves_by_weight_decay_alone_has_learned_nothing(role: str, advantage: str, why: str) -> None:
    watched = movement(role, advantage)
    step(watched, 0, all_tensors, grad_norm=0.0)
    assert f"{role} got no gradient ({why})" in watched.line(0)
    assert f"the {role.upper()} LEARNED NOTHING" in watched.verdict()


def test_warm_up_and_a_resumed_run_at_its_end() -> None:
    watched = movement()
    assert watched.verdict() == "no update of the actor was left to make"
    watched.skip(0)
    step(watched, 1, all_tensors)
    assert watched.line(0) == "actor did not move (critic_warmup)"
    assert watched.verdict() == "1 of 2 steps moved the actor (2 of its 2 tensors); not step 0: critic_warmup"
