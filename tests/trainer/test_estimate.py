"""From scores to advantages on one rank, as the config says; several ranks are in test_estimators.py."""

import pytest
import torch

from harness.config.schema import Config
from harness.tools.command_line import parse
from harness.trainer.batch import Batch, from_sequences
from harness.trainer.estimate import estimate_advantages

pytestmark = pytest.mark.usefixtures("alone")


def config(words: str) -> Config:
    return parse(words.split()).config


def batch(third: tuple[int, ...] = (5, 6)) -> Batch:
    """Four responses of two prompts, of 1, 3, 2 and 4 tokens; the second was cut off."""
    made = from_sequences([[2]] * 4, [[5], [5, 6, 7], third, [5, 6, 7, 8]], pad_id=0)
    return made.replace(
        group=torch.tensor([0, 0, 1, 1]),
        scores=torch.tensor([1.0, 0.0, 0.5, 0.5]),
        truncated=torch.tensor([False, True, False, False]),
    )


def test_the_kl_is_the_mean_over_sequences_of_their_means() -> None:
    log_probs = {"old_log_probs": torch.arange(20.0).view(4, 5) / 10, "reference_log_probs": torch.zeros(4, 5)}
    _, metrics = estimate_advantages(batch().replace(**log_probs), config("--algorithm.advantage grpo"))
    means = [0.1, (0.6 + 0.7 + 0.8) / 3, (1.1 + 1.2) / 2, (1.6 + 1.7 + 1.8 + 1.9) / 4]
    assert metrics["reference_kl"] == pytest.approx(sum(means) / 4)


@pytest.mark.parametrize(("name", "first"), [("grpo", 0.5 / 0.5**0.5), ("rloo", 1.0)])
def test_the_config_chooses_how_responses_are_compared(name: str, first: float) -> None:
    words = f"--algorithm.advantage {name} --algorithm.kl_placement none"
    done, metrics = estimate_advantages(batch(), config(words))
    found = done.require("advantages")
    assert found[0, 1] == pytest.approx(first, rel=1e-5) and found[1, 1] == -found[0, 1]
    assert not found[2:].any(), "equal scores of a group"
    assert metrics == {}, "there is no reference"


@pytest.mark.parametrize(("words", "tokens"), [("", [1, 3, 2, 4]), ("--rollout.truncated mask", [1, 0, 2, 4])])
def test_truncated_responses_are_compared_and_not_trained_on_if_the_config_says_so(
    words: str, tokens: list[int]
) -> None:
    words = f"--algorithm.advantage rloo {words}"
    done, _ = estimate_advantages(batch(), config(words))
    assert done.response_mask.sum(-1).tolist() == tokens
    assert done.require("advantages")[0, 1] == 1.0


@pytest.mark.parametrize("words", ["", "--algorithm.advantage grpo", "--algorithm.advantage rloo"])
def test_a_response_without_a_token_harms_no_other(words: str) -> None:
    zeros = {name: torch.zeros(4, 5) for name in ("old_log_probs", "reference_log_probs", "old_values")}
    done, metrics = estimate_advantages(batch(third=()).replace(**zeros), config(words))
    assert done.require("advantages").isfinite().all() and metrics["reference_kl"] == 0.0
    assert not done.require("advantages")[2].any()
    if words:  # the fourth is alone in its group then: it is not compared with the score of the third
        assert done.require("advantages")[3, 1] == pytest.approx(0.5, rel=1e-5)
