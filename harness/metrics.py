"""The metrics of a PPO step, each over the responses of all ranks and the same on every rank.

Every function that gathers is a collective call of all ranks.
"""

import itertools
import math
from collections.abc import Sequence
from statistics import fmean

import torch

from harness.cluster.world import all_gather
from harness.rollout.responses import Response
from harness.task.data import Prompt
from harness.trainer.batch import Batch
from harness.trainer.over_ranks import mean, token_mean

Metrics = dict[str, float]


def response_metrics(batch: Batch) -> Metrics:
    """Return the mean reward, how long responses are, and the shares of responses that did not end by themselves."""
    lengths = torch.stack([batch.response_mask.sum(-1), batch.attention_mask.sum(-1)])
    responses, sequences = torch.cat(all_gather(lengths), dim=1).double()
    return {
        "reward_mean": mean(batch.require("scores")),
        "response_tokens_mean": float(responses.mean()),
        "response_tokens_min": float(responses.min()),
        "response_tokens_max": float(responses.max()),
        "response_tokens": float(responses.sum()),
        "tokens": float(sequences.sum()),  # of prompts and responses
        "truncated_share": mean(batch.require("truncated").float()),
        "aborted_share": mean(batch.require("aborted").float()),
    }


def validation_metrics(prompts: Sequence[Prompt], responses: Sequence[Response], scores: Sequence[float]) -> Metrics:
    """Return the mean reward on the validation set, overall and for each data source. The arguments are this rank's share."""
    rows = [
        (prompt.row.data_source, score, len(response.token_ids), response.truncated)
        for prompt, response, score in zip(prompts, responses, scores, strict=True)
    ]
    everyone = list(itertools.chain(*all_gather(rows)))
    found = {"accuracy": fmean(score for _, score, _, _ in everyone)}
    for name in sorted({source for source, *_ in everyone} - {""}):
        found[f"accuracy/{name}"] = fmean(score for source, score, _, _ in everyone if source == name)
    return found | {
        "response_tokens_mean": fmean(length for _, _, length, _ in everyone),
        "truncated_share": fmean(truncated for *_, truncated in everyone),
        "rows": len(everyone),
    }


def importance_clipped_share(batch: Batch, old_log_probs: torch.Tensor, cap: float) -> float:
    """Return the share of tokens whose importance weight p_trainer / p_engine is above algorithm.importance_cap; 0 if off."""
    if not cap:
        return 0.0
    log_ratio = old_log_probs - batch.require("rollout_log_probs")
    return token_mean((log_ratio > math.log(cap)).double(), batch)
