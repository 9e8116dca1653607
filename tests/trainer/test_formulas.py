"""Advantages, losses and estimators over two ranks, against numbers that verl 0.9.1 computed."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from harness.tools.command_line import parse
from harness.trainer import advantages as a
from harness.trainer.batch import Batch
from harness.trainer.estimate import estimate_advantages
from harness.trainer.losses import (
    entropy_from_logits,
    log_probs_from_logits,
    policy_loss,
    share_of_mean,
    value_loss,
)
from tests.cluster.gloo import on_ranks

VECTORS: dict[str, Any] = json.loads((Path(__file__).parent / "ppo-vectors.json").read_text())
ORDER = [3, 0, 5, 2, 4, 1]
"""Of the grpo vector's responses: the first three on rank 0, so that prompts 0 and 1 lie on both ranks."""


def tensor(numbers: Any) -> Tensor:
    return torch.tensor(numbers, dtype=torch.float64)


def close(actual: Tensor, expected: Any) -> None:
    torch.testing.assert_close(actual, tensor(expected), atol=1e-9, rtol=0)


@pytest.mark.parametrize("garbage", [0.0, 1e9, float("nan"), float("inf")])
@pytest.mark.parametrize("vector", VECTORS["gae"])
def test_gae_which_does_not_read_masked_positions(vector: dict[str, Any], garbage: float) -> None:
    mask = tensor(vector["mask"])
    rewards, values = (tensor(vector[name]).masked_fill(mask == 0, garbage) for name in ("rewards", "values"))
    raw, returns = a.gae(rewards, values, mask, vector["gamma"], vector["lam"])
    close(raw, vector["raw_adv_masked"])
    close(returns, vector["returns_masked"])
    close(a.masked_whiten(raw, mask), vector["whitened_adv_masked"])


def test_masked_statistics_which_do_not_read_masked_positions() -> None:
    vector = VECTORS["masked"]
    mask = tensor(vector["mask"])
    x = tensor(vector["x"]).masked_fill(mask == 0, float("nan"))
    close(a.masked_mean(x, mask), vector["mean"])
    close(a.masked_var(x, mask), vector["var_unbiased"])
    close(a.masked_var(x, mask, unbiased=False), vector["var_biased"])
    close(a.masked_whiten(x, mask), vector["whiten"])


def test_masked_whiten_over_ranks_is_that_of_all_their_tokens() -> None:
    vector = VECTORS["masked"]
    x, mask = tensor(vector["x"]), tensor(vector["mask"])
    # Rank 0 has the first row. The sums that all_sum must return to it are those of both rows, in the order asked for.
    asked: list[Tensor] = []

    def record(total: Tensor) -> Tensor:
        asked.append(total)
        return total

    a.masked_whiten(x, mask, all_sum=record)
    whole = iter(asked)
    close(a.masked_whiten(x[:1], mask[:1], all_sum=lambda _: next(whole)), vector["whiten"][:1])


@pytest.mark.parametrize("count", [0, 1])
def test_unbiased_variance_needs_two_tokens(count: int) -> None:
    with pytest.raises(ValueError, match=f"at least 2 tokens .* got {count}"):
        a.masked_var(torch.ones(1, 3), (torch.arange(3) < count)[None])


def test_group_advantages_need_no_order_and_keep_to_the_mask() -> None:
    vector = VECTORS["grpo"]
    rewards, group = tensor(vector["token_rewards"]), torch.tensor(vector["index"]) * 7 - 3
    mask = torch.ones_like(rewards)
    mask[0, 0] = 0
    for order in (sorted(ORDER), ORDER):
        given = rewards[order], mask[order], group[order]
        found = {"std_norm": a.grpo(*given), "no_std": a.grpo(*given, normalize_by_std=False), "rloo": a.rloo(*given)}
        for name, result in found.items():
            close(result, (tensor(vector[name])[:, None] * mask)[order].tolist())


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_a_group_of_equal_rewards_has_advantages_of_exactly_0(dtype: torch.dtype) -> None:
    cases = [(size, i / n) for size in range(2, 17) for n in range(1, 17) for i in range(1, n + 1)]
    scores = torch.cat([torch.full((size,), score, dtype=dtype) for size, score in cases])[:, None]
    group = torch.cat([torch.full((size,), number) for number, (size, _) in enumerate(cases)])
    mask = torch.ones_like(scores)
    for result in (a.grpo(scores, mask, group), a.grpo(scores, mask, group, False), a.rloo(scores, mask, group)):
        assert result.dtype == dtype and not result.any()


def test_kl() -> None:
    vector = VECTORS["kl"]
    log_probs, reference = tensor(vector["logp"]), tensor(vector["ref"])
    close(a.kl(log_probs, reference, "reward"), vector["k1"])
    close(a.kl(log_probs, reference, "loss"), vector["k3"])


def test_as_a_loss_the_estimate_pulls_towards_the_reference_as_the_kl_does() -> None:
    draw = torch.Generator().manual_seed(0)
    logits, reference = (torch.randn(20, generator=draw, dtype=torch.float64) for _ in range(2))
    logits.requires_grad_()
    log_probs, reference = logits.log_softmax(-1), reference.log_softmax(-1)
    expected = (log_probs.detach().exp() * a.kl(log_probs, reference, "loss")).sum()
    (found,) = torch.autograd.grad(expected, logits, retain_graph=True)
    (right,) = torch.autograd.grad((log_probs.exp() * (log_probs - reference)).sum(), logits)
    assert torch.cosine_similarity(found, right, dim=0) > 0.5


def test_token_rewards_stand_at_the_last_token() -> None:
    mask = torch.tensor([[0, 1, 1, 0], [1, 0, 1, 1]])
    rewards = a.token_rewards(tensor([2.0, -1.0]), mask, kl=torch.ones(2, 4, dtype=torch.float64), kl_coefficient=0.1)
    close(rewards, [[0, -0.1, 1.9, 0], [-0.1, 0, -0.1, -1.1]])
    close(a.token_rewards(tensor([2.0, -1.0]), mask), [[0, 0, 2.0, 0], [0, 0, 0, -1.0]])


def test_explained_variance() -> None:
    returns, mask = tensor([[1.0, 2.0, 3.0, 50.0]]), tensor([[1, 1, 1, 0]])
    assert float(a.explained_variance(returns, returns, mask)) == 1.0
    assert float(a.explained_variance(tensor([[7.0, 7, 7, 0]]), returns, mask)) == pytest.approx(0.0)
    assert float(a.explained_variance(-returns, returns, mask)) == pytest.approx(-3.0)
    assert float(a.explained_variance(returns, torch.full_like(returns, 0.1), mask)) == 0.0
    # Without rewards, and with gamma = lam = 1, all returns are 0 up to rounding (2e-7). Their variance is noise.
    values, mask = torch.randn(4, 16, generator=torch.Generator().manual_seed(0)), torch.ones(4, 16)
    _, returns = a.gae(torch.zeros(4, 16), values, mask, 1.0, 1.0)
    assert 0 < float(returns.abs().max()) < 1e-5
    assert float(a.explained_variance(values, returns, mask)) == 0.0


def token_mean(loss: Tensor, mask: Tensor) -> Tensor:
    return share_of_mean(loss, mask, int(mask.bool().sum()))


@pytest.mark.parametrize("vector", VECTORS["policy"])
def test_policy_loss(vector: dict[str, Any]) -> None:
    mask = tensor(vector["mask"])
    loss, metrics = policy_loss(
        tensor(vector["new"]), tensor(vector["old"]), tensor(vector["adv"]), vector["low"], vector["high"]
    )
    close(token_mean(loss, mask), vector["loss"])
    for name, expected in (
        ("clip_fraction", "clipfrac"),
        ("clip_fraction_lower", "clipfrac_lower"),
        ("update_kl", "ppo_kl"),
    ):
        close(a.masked_mean(metrics[name], mask), vector[expected])


def test_policy_loss_survives_extreme_ratios() -> None:
    loss, _ = policy_loss(tensor([[0.0, -900.0]]), tensor([[-900.0, 0.0]]), tensor([[1.0, -1.0]]), 0.2, 0.2)
    close(loss, [[-1.2, 0.8]])


@pytest.mark.parametrize("vector", VECTORS["value"])
def test_value_loss(vector: dict[str, Any]) -> None:
    values, old_values, returns = (tensor(vector[name]) for name in ("vpreds", "values", "returns"))
    mask = torch.ones_like(values)
    loss, clipped = value_loss(values, old_values, returns, vector["cliprange"])
    close(token_mean(loss, mask), vector["loss"])
    close(a.masked_mean(clipped, mask), vector["clipfrac"])


def test_value_loss_without_clip() -> None:
    loss, clipped = value_loss(tensor([[0.5, 9.0]]), tensor([[0.0, 0.0]]), tensor([[1.0, 1.0]]), value_clip=0)
    close(loss, [[0.125, 32.0]])
    assert not clipped.any()


def test_entropy() -> None:
    vector = VECTORS["entropy"]
    entropy = entropy_from_logits(tensor(vector["logits"]))
    close(entropy, vector["token"])
    close(token_mean(entropy, torch.ones_like(entropy)), vector["token_mean"])
    close(entropy_from_logits(2 * tensor(vector["logits"]), temperature=2.0), vector["token"])


def test_log_probs() -> None:
    logits = torch.randn(3, 4, 11, generator=torch.Generator().manual_seed(0), dtype=torch.float64) * 9
    labels = torch.randint(11, (3, 4), generator=torch.Generator().manual_seed(1))
    expected = (logits / 0.7).log_softmax(-1).gather(-1, labels[..., None])[..., 0]
    close(log_probs_from_logits(logits, labels, temperature=0.7), expected.tolist())
    assert log_probs_from_logits(logits.bfloat16(), labels).dtype == torch.float32


def test_shares_of_a_mean_add_up_and_what_does_not_count_does_not_matter() -> None:
    loss, mask = tensor(VECTORS["agg_in"]["loss"]), tensor(VECTORS["agg_in"]["mask"])
    close(token_mean(loss, mask), VECTORS["agg"]["token-mean"])
    close(token_mean(loss.masked_fill(mask == 0, float("nan")), mask), VECTORS["agg"]["token-mean"])
    shares = [share_of_mean(loss[row : row + 1], mask[row : row + 1], 6) for row in range(2)]
    close(shares[0] + shares[1], VECTORS["agg"]["token-mean"])


GROUPED = {
    "std_norm": "--algorithm.advantage grpo",
    "no_std": "--algorithm.advantage grpo --algorithm.normalize_by_std false",
    "rloo": "--algorithm.advantage rloo",
}


GAE = [vector for vector in VECTORS["gae"] if len(vector["rewards"]) == 2]
"""Those of two responses: one for each rank."""


def estimate(rank: int, words: str, rewards: Tensor, mask: Tensor, **parts: Tensor) -> Batch:
    """What Ppo makes of this rank's part of these token rewards [B, T], which come to it as KL with a coefficient of
    1."""
    share = len(rewards) // 2
    everything = Batch(
        input_ids=mask.long(),
        attention_mask=mask.long(),
        response_mask=mask.long(),
        scores=torch.zeros(len(rewards), dtype=torch.float64),
        old_log_probs=torch.zeros_like(rewards),
        reference_log_probs=rewards,
        **parts,
    )
    mine = everything.select(slice(rank * share, rank * share + share))
    return estimate_advantages(mine, parse([*words.split(), "--algorithm.kl_coefficient", "1"]).config)[0]


def estimates(rank: int) -> dict[str, list[Tensor]]:
    found: dict[str, list[Tensor]] = {"gae": []}
    for vector in GAE:
        words = f"--algorithm.gamma {vector['gamma']} --algorithm.lam {vector['lam']}"
        values = tensor(vector["values"])
        done = estimate(rank, words, tensor(vector["rewards"]), tensor(vector["mask"]), old_values=values)
        found["gae"] += [done.require("advantages"), done.require("returns")]
    grouped = VECTORS["grpo"]
    rewards, group = tensor(grouped["token_rewards"])[ORDER], torch.tensor(grouped["index"])[ORDER]
    for name, words in GROUPED.items():
        found[name] = [estimate(rank, words, rewards, torch.ones_like(rewards), group=group).require("advantages")]
    return found


def test_each_estimator_over_two_ranks_is_verls(tmp_path: Path) -> None:
    ranks = on_ranks(estimates, 2, tmp_path)
    exact = {"gae": [v[name] for v in GAE for name in ("whitened_adv_masked", "returns_masked")]}
    exact |= {name: [[[number] * 2 for number in tensor(VECTORS["grpo"][name])[ORDER].tolist()]] for name in GROUPED}
    found = {name: [torch.cat(parts) for parts in zip(*(rank[name] for rank in ranks), strict=True)] for name in exact}
    for name, expected in exact.items():
        for ours, theirs in zip(found[name], expected, strict=True):
            torch.testing.assert_close(ours, tensor(theirs), atol=1e-9, rtol=0)
