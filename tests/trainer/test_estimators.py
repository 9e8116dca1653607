"""Each estimator, by its config, over the responses of two real ranks, against numbers that verl 0.9.1 computed."""

import json
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from harness.tools.command_line import parse
from harness.trainer.batch import Batch
from harness.trainer.estimate import estimate_advantages
from tests.cluster.gloo import on_ranks

VECTORS: dict[str, Any] = json.loads((Path(__file__).parent / "ppo-vectors.json").read_text())
ORDER = [3, 0, 5, 2, 4, 1]
"""Of the grpo vector's responses: the first three on rank 0, so that prompts 0 and 1 lie on both ranks."""
GROUPED = {
    "std_norm": "--algorithm.advantage grpo",
    "no_std": "--algorithm.advantage grpo --algorithm.normalize_by_std false",
    "rloo": "--algorithm.advantage rloo",
}


GAE = [vector for vector in VECTORS["gae"] if len(vector["rewards"]) == 2]
"""Those of two responses: one for each rank."""


def tensor(numbers: Any) -> Tensor:
    return torch.tensor(numbers, dtype=torch.float64)


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
