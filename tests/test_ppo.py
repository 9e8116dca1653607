"""The arithmetic of a PPO step between its phases, on one rank."""

from collections.abc import Iterator
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist

from harness.ppo import Ppo
from harness.tools.command_line import parse
from harness.tools.verification.levels import ReadBackVerification
from harness.trainer import advantages
from harness.trainer.batch import Batch, from_sequences


@pytest.fixture(autouse=True)
def alone(tmp_path: Path) -> Iterator[None]:
    """This process is the only rank."""
    dist.init_process_group("gloo", init_method=f"file://{tmp_path}/store", rank=0, world_size=1)
    yield
    dist.destroy_process_group()


def ppo(words: str, kl_control: Any = None, reference: Any = None) -> Ppo:
    """Only with what advantages need."""
    names = (
        "dims",
        "events",
        "engine",
        "memory",
        "sync",
        "verification",
        "actor",
        "critic",
        "prompts",
        "reward",
        "tokenizer",
    )
    missing: dict[str, Any] = dict.fromkeys(names)
    world: Any = SimpleNamespace(rank=0)
    return Ppo(config=parse(words.split()).config, world=world, kl_control=kl_control, reference=reference, **missing)


def batch() -> Batch:
    """Four responses of two prompts, of 1, 3, 2 and 4 tokens; the second was cut off."""
    made = from_sequences([[2]] * 4, [[5], [5, 6, 7], [5, 6], [5, 6, 7, 8]], pad_id=0)
    return made.replace(
        group=torch.tensor([0, 0, 1, 1]),
        scores=torch.tensor([1.0, 0.0, 0.5, 0.5]),
        truncated=torch.tensor([False, True, False, False]),
        old_log_probs=torch.arange(20.0).view(4, 5) / 10,
        reference_log_probs=torch.zeros(4, 5),
    )


def test_the_kl_that_adapts_is_the_mean_over_sequences_of_their_means() -> None:
    control = advantages.KlControl(0.1, target=0.5, horizon=100)
    words = "--algorithm.advantage grpo --algorithm.kl_target 0.5"
    _, metrics = ppo(words, control, reference=object()).estimate_advantages(batch())
    means = [0.1, (0.6 + 0.7 + 0.8) / 3, (1.1 + 1.2) / 2, (1.6 + 1.7 + 1.8 + 1.9) / 4]
    assert metrics["reference_kl"] == pytest.approx(sum(means) / 4)
    assert control.coefficient == pytest.approx(0.1 * (1 + 0.2 * 16 / 100))


@pytest.mark.parametrize(("name", "first"), [("grpo", 0.5 / 0.5**0.5), ("rloo", 1.0)])
def test_the_config_chooses_how_responses_are_compared(name: str, first: float) -> None:
    words = f"--algorithm.advantage {name} --algorithm.kl_placement none"
    done, _ = ppo(words, advantages.KlControl(0)).estimate_advantages(batch())
    found = done.require("advantages")
    assert found[0, 1] == pytest.approx(first, rel=1e-5) and found[1, 1] == -found[0, 1]
    assert not found[2:].any(), "equal scores of a group"


@pytest.mark.parametrize(("words", "tokens"), [("", [1, 3, 2, 4]), ("--rollout.truncated mask", [1, 0, 2, 4])])
def test_truncated_responses_are_masked_where_that_is_asked_for(words: str, tokens: list[int]) -> None:
    assert ppo(words).masked(batch()).response_mask.sum(-1).tolist() == tokens


def with_an_empty_one() -> Batch:
    """The third response, of the second prompt, has no token."""
    made = from_sequences([[2]] * 4, [[5], [5, 6, 7], [], [5, 6, 7, 8]], pad_id=0)
    given = {name: batch().require(name) for name in ("group", "scores", "truncated")}
    zeros = {name: torch.zeros(4, 5) for name in ("old_log_probs", "reference_log_probs", "old_values")}
    return made.replace(**given, **zeros, aborted=torch.tensor([False, False, True, False]))


@pytest.mark.parametrize("words", ["", "--algorithm.advantage grpo", "--algorithm.advantage rloo"])
def test_a_response_without_a_token_harms_no_other(words: str) -> None:
    part: Any = object()
    step = ppo(words, advantages.KlControl(0.1), reference=part)
    step.critic = None if words else part
    done, metrics = step.estimate_advantages(with_an_empty_one())
    assert done.require("advantages").isfinite().all() and metrics["reference_kl"] == 0.0
    assert not done.require("advantages")[2].any()
    if words:  # as in a group of its own: else 0.5 would be compared with its 0
        assert done.require("advantages")[3, 1] == pytest.approx(0.5, rel=1e-5)


def test_a_steps_metrics_tell_how_long_responses_are_and_how_many_did_not_end() -> None:
    assert ppo("").response_metrics(with_an_empty_one()) == {
        "reward_mean": 0.5,
        "response_tokens_mean": 2.0,
        "response_tokens_min": 0.0,
        "response_tokens_max": 4.0,
        "response_tokens": 8.0,
        "tokens": 12.0,
        "truncated_share": 0.25,
        "aborted_share": 0.25,
    }


@pytest.mark.parametrize(
    ("words", "due"),
    [
        ("", []),
        ("--validation.source arithmetic", [6]),
        ("--validation.source arithmetic --validation.every 4", [4, 6]),
        ("--validation.source arithmetic --validation.every 3 --validation.before_train true", [0, 3, 6]),
    ],
)
def test_when_to_validate(words: str, due: list[int]) -> None:
    validation = parse(words.split()).config.validation
    assert [index for index in range(7) if validation.is_due(index, steps=6)] == due


@pytest.mark.parametrize("rows", [1, 5])
def test_each_engine_answers_its_share_of_the_validation_set(rows: int) -> None:
    sources = ["a", "b", "b", "b", "b"][:rows]
    prompts: Any = [
        SimpleNamespace(input_ids=[number], row=SimpleNamespace(data_source=source))
        for number, source in enumerate(sources)
    ]
    asked: list[Any] = []

    def generate(input_ids: Any, sampling_params: Any, return_logprob: bool) -> list[Any]:
        asked.append((input_ids, sampling_params["temperature"]))
        end = {
            "finish_reason": {"type": "length"},
            "output_token_logprobs": [(0.0, ids[0], None) for ids in input_ids][:1],
        }
        return [{"meta_info": end} for _ in input_ids]

    step = ppo("--parallel.tp 1")
    step.validation_prompts = prompts
    step.engine = SimpleNamespace(generate=generate)  # type: ignore[assignment]
    step.tokenizer = SimpleNamespace(batch_decode=lambda ids, **_: [""] * len(ids))
    step.events = SimpleNamespace(say=lambda text: None)  # type: ignore[assignment]
    step.reward = lambda text, row: float(row.data_source == "a")
    step.dims = SimpleNamespace(  # type: ignore[assignment]
        dp=2, engine_size=1, coordinates=lambda rank: SimpleNamespace(dp=0), engine_rank=lambda rank: 0
    )
    found = step.validate(3)
    assert asked == [([[0], [2], [4]][: (rows + 1) // 2], 0.0)], "every other prompt: the other engine has the rest"
    expected = (
        {"accuracy": 1.0, "accuracy/a": 1.0} if rows == 1 else {"accuracy": 1 / 3, "accuracy/a": 1.0, "accuracy/b": 0.0}
    )
    assert {name: value for name, value in found.items() if name.startswith("accuracy")} == pytest.approx(expected)
    assert (found["rows"], found["truncated_share"]) == ((rows + 1) // 2, 1.0)


def test_movement_is_measured_on_text_that_the_update_does_not_train_on() -> None:
    seen: list[Batch] = []

    def log_probs(given: Batch) -> tuple[torch.Tensor, None]:
        seen.append(given)
        return torch.full(given.response_mask.shape, -float(len(seen))), None

    step = ppo("--rollout.responses_per_prompt 2 --actor.microbatch_size 3")
    step.actor = SimpleNamespace(log_probs=log_probs)  # type: ignore[assignment]
    checks: Any = SimpleNamespace(
        config=step.config, reaches=lambda level: True, timed=lambda *words: nullcontext(), movement=0.0
    )
    ids = {7: ([2], [2]), 8: ([3, 4], [9])}
    prompts = {step: [SimpleNamespace(input_ids=each) for each in given] for step, given in ids.items()}
    step.prompts = SimpleNamespace(batch=prompts.get)  # type: ignore[assignment]
    step.dims = SimpleNamespace(dp=1, coordinates=lambda rank: SimpleNamespace(dp=0))  # type: ignore[assignment]
    with ReadBackVerification.measured_update(checks, step, 7, batch()):
        assert len(seen) == 1, "before the update"
    assert seen[0] is seen[1] and checks.movement == pytest.approx(1.0)
    assert [ids[mask.bool()].tolist() for ids, mask in zip(seen[0].input_ids, seen[0].attention_mask, strict=True)] == [
        [3, 4, 5],
        [9, 5, 6, 7],
        [3, 4, 5, 6],
    ]
