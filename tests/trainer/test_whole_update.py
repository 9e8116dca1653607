"""Ppo.learn over several PPO steps, in float32 on one to four ranks, padded, packed, by a token budget and offloaded,
equals a float64 program of one process.
"""

from collections.abc import Iterable
from pathlib import Path

import pytest
import torch
from torch import Tensor

from harness.task.tiny_models import tiny_config, tiny_model
from harness.tools.command_line import parse
from tests.cluster.gloo import on_ranks
from tests.trainer.float64 import Float64Ppo, OptimizerStep
from tests.trainer.whole_update import fixed_responses, run_harness

pytestmark = pytest.mark.slow

COMMON = """--parallel.tp 1 --rollout.prompts_per_step 4 --rollout.responses_per_prompt 2 --rollout.max_response_tokens 12
 --rollout.temperature 0.7 --actor.minibatch_size 4 --actor.microbatch_size 1 --actor.ppo_epochs 2 --actor.clip_high 0.28
 --actor.learning_rate 2e-4 --actor.max_grad_norm 0.5 --actor.weight_decay 0.1 --actor.betas 0.8,0.95
 --critic.learning_rate 5e-5"""
CASES = {
    "gae": """--run.steps 3 --algorithm.critic_warmup 1 --algorithm.kl_coefficient 0.05 --actor.schedule cosine
 --actor.warmup_steps 2 --actor.entropy_coefficient 0.01 --critic.value_clip 0.1
 --memory.offload_parameters actor,reference --memory.offload_optimizer critic""",
    "grpo": """--run.steps 2 --algorithm.advantage grpo --algorithm.kl_placement loss --algorithm.kl_coefficient 0.05
 --actor.schedule constant_with_warmup --actor.warmup_steps 1""",
    "packed, dynamic, offloaded": """--run.steps 2 --model.packed true --task.max_prompt_tokens 9
 --actor.tokens_per_microbatch 24 --memory.offload_parameters actor,critic,reference
 --memory.offload_optimizer actor,critic""",
    "rloo": "--run.steps 2 --algorithm.advantage rloo --actor.schedule linear",
}


RANKS = {"packed, dynamic, offloaded": (1, 4)}
"""Of the other cases one number of ranks says enough: they differ in arithmetic that knows nothing of ranks."""
TOLERANCE = 5e-6
"""Relative. Measured: advantages and losses 1e-6, gradient norms 9e-7, gradients 2e-6 (float32 rounds them so)."""


def flat(tensors: dict[str, Tensor], names: Iterable[str]) -> Tensor:
    return torch.cat([tensors[name].flatten() for name in names])


def apart(ours: Tensor, exact: Tensor) -> float:
    """Norm of the difference over the norm."""
    return float((ours.double() - exact).norm() / exact.norm())


def check_optimizer_step(ours: OptimizerStep, exact: OptimizerStep) -> None:
    assert ours.learning_rate == pytest.approx(exact.learning_rate, rel=1e-12, abs=0)
    assert abs(ours.loss - exact.loss) < TOLERANCE * exact.loss_scale
    assert ours.grad_norm == pytest.approx(exact.grad_norm, rel=TOLERANCE)
    names = exact.gradients
    assert apart(flat(ours.gradients, names), flat(exact.gradients, names)) < TOLERANCE


@pytest.mark.parametrize(
    ("case", "ranks"),
    [
        pytest.param(case, ranks, marks=[] if case == "gae" else pytest.mark.long)
        for case in CASES
        for ranks in RANKS.get(case, (2,))
    ],
)
def test_updates_are_those_of_the_float64_program(case: str, ranks: int, tmp_path: Path) -> None:
    config = parse(f"{COMMON} {CASES[case]}".split()).config
    path = str(tmp_path / "model")
    overrides = {"initializer_range": 0.05, "tie_word_embeddings": case == "gae"}
    tiny_model(tiny_config("qwen2", overrides=overrides), seed=0).save_pretrained(path)
    rows = fixed_responses(config, path)
    found = on_ranks(run_harness, ranks, tmp_path, config, path, rows)[0]
    exact = Float64Ppo(config, path, found["before"].get("critic", {}).get("value_head.weight"), rows)
    for ours, minibatches in zip(found["steps"], found["minibatches"], strict=True):
        theirs = exact.step(minibatches)
        for what in ("advantages", "returns"):
            if wanted := getattr(theirs, what):
                assert apart(torch.cat(getattr(ours, what)), torch.cat(wanted)) < TOLERANCE
        for role in ("actor", "critic"):
            for pair in zip(getattr(ours, role), getattr(theirs, role), strict=True):
                check_optimizer_step(*pair)
    for role, before in found["before"].items():
        after, right = flat(found["after"][role], before), flat(exact.weights()[role], before)
        assert apart(after, right) < 1e-6 < 1e-3 < apart(after, flat(before, before).double())
    taken = [len(step.actor) for step in found["steps"]]
    assert taken == [0] * config.algorithm.critic_warmup + [4] * (len(taken) - config.algorithm.critic_warmup)
    assert any(metrics.get("actor/clip_fraction") for metrics in found["metrics"])
    assert found["metrics"][-1]["actor/learning_rate"] == found["steps"][-1].actor[-1].learning_rate
    for old, step, metrics in zip(found["old_values"], found["steps"], found["metrics"], strict=True):
        if old:
            returns, error = torch.cat(step.returns).double(), torch.cat(step.returns).double() - torch.cat(old)
            explained = 1 - error.var(unbiased=False) / returns.var(unbiased=False)
            assert metrics["critic/explained_variance"] == pytest.approx(float(explained), abs=1e-6)
    memory = config.memory
    for role, (parameters, moments, gradients) in found["idle"].items():
        assert (parameters == 0) == (role in memory.offload_parameters) and gradients == 0, role
        assert (moments == 0) == (role in memory.offload_optimizer or role == "reference"), role
