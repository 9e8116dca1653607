"""What a trainer rank holds, executed on fake tensors: against plain sums, and against the execution of every layer.

Each is executed in a fork of its own, because the fake process group lasts as long as the process.
"""

from typing import Any

import pytest

from harness.tools.full_size.trainer_memory import Repeats, repeats_of
from tests.tools.full_size.forks import answer_of

pytestmark = pytest.mark.slow


def peaks(
    name: str, overrides: dict[str, Any] | None = None, *, ranks: int = 8, role: str = "actor", every: bool = False,
    **keys: dict[str, Any],
) -> dict[str, int]:  # fmt: skip
    return dict(answer_of("tests.tools.full_size.asked:peaks", name, overrides or {}, keys, ranks, role, every))


@pytest.mark.parametrize(
    ("kinds", "expected"),
    [
        ("a" * 61, Repeats(2, 1, 59)),
        ("aaa" + "b" * 58, Repeats(5, 1, 56)),
        ("ab" * 24, Repeats(4, 2, 22)),
        ("sssf" * 16, Repeats(8, 4, 14)),
        ("a" + "sf" * 10 + "s", Repeats(6, 2, 8)),
        ("abcdefg", Repeats(7, 0, 0)),
        ("aa", Repeats(2, 0, 0)),
    ],
)
def test_layers_that_repeat_are_executed_a_few_times(kinds: str, expected: Repeats) -> None:
    found = repeats_of(kinds)
    assert found == expected
    assert found.first + found.period * found.times == len(kinds)
    assert kinds[found.first - found.period : found.first] == kinds[len(kinds) - found.period :]


@pytest.mark.long
def test_a_few_layers_tell_what_all_of_them_hold() -> None:
    keys = {"actor": {"gradient_checkpointing": True}}
    few, all_of_them = (peaks("qwen2", {"num_hidden_layers": 11}, every=every, **keys) for every in (False, True))
    assert few == all_of_them


@pytest.mark.long
def test_256_experts_on_512_ranks_are_gathered_with_as_much_padding() -> None:
    sizes = {"num_local_experts": 64, "num_experts": 64, "moe_intermediate_size": 512, "hidden_size": 256}
    even, padded = (peaks("qwen3_moe", sizes, ranks=ranks) for ranks in (64, 128))
    expert = 3 * 512 * 256 * 2
    assert padded["forward"] - even["forward"] >= 2 * 64 * expert, "the buffer, and what is copied out of it"
    assert padded["parameters"] > even["parameters"] * 0.9, "rank 0 has a whole expert of each layer either way"


@pytest.mark.long
def test_experts_are_gathered_by_themselves() -> None:
    """A layer of experts and the layer around it are never there in two copies each."""
    sizes = {
        "num_local_experts": 64,
        "num_experts": 64,
        "moe_intermediate_size": 4096,
        "hidden_size": 256,
        "num_hidden_layers": 6,
    }
    found = peaks("qwen3_moe", sizes, ranks=64)
    experts = 64 * 3 * 4096 * 256 * 2
    assert 2 * experts < found["forward"] < 2.5 * experts
    assert 3 * experts < found["update"] < 4.5 * experts, "gradients in bfloat16, and in float32 to reduce them"


@pytest.mark.long
def test_the_optimizer_and_the_roles() -> None:
    actor, critic, reference = (peaks("qwen2", role=role) for role in ("actor", "critic", "reference"))
    assert actor["optimizer"] >= actor["parameters"] * 0.9, "AdamW computes on all tensors at once"
    assert critic["parameters"] < actor["parameters"] and critic["update"] < actor["update"], "it has no head"
    assert reference["update"] == reference["optimizer"] == 0
    assert reference["parameters"] == pytest.approx(actor["parameters"] / 2, rel=0.01), "bfloat16, as it computes"


@pytest.mark.long
def test_attention_keeps_no_scores_and_eager_does() -> None:
    long = {
        "task": {"max_prompt_tokens": 1024},
        "rollout": {"max_response_tokens": 1024},
        "actor": {"microbatch_size": 1},
    }
    sizes = {"vocab_size": 512}
    kept, scores = (peaks("llama", sizes, model={"attention": attention}, **long) for attention in ("sdpa", "eager"))
    heads = 4
    assert scores["forward"] - kept["forward"] > heads * 2048 * 2048 * 2
