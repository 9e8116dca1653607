"""The metrics of a PPO step, each over the responses of all ranks and the same on every rank.

Every function that gathers is a collective call of all ranks.
"""

import itertools
from collections.abc import Sequence
from statistics import fmean

import torch

from harness.cluster.world import all_gather
from harness.rollout.responses import Response
from harness.task.data import Prompt
from harness.trainer.batch import Batch
from harness.trainer.rank_sums import all_sum, mean, token_mean

Metrics = dict[str, float]


def response_metrics(batch: Batch) -> Metrics:
    """Return the mean reward, how long responses are, and the shares of responses that did not end by themselves."""
    lengths = torch.stack([batch.response_mask.sum(-1), batch.attention_mask.sum(-1)])
    responses, sequences = torch.cat(all_gather(lengths), dim=1).double()
    return (
        weight_version(batch)
        | accept_length(batch)
        | {
            "reward_mean": mean(batch.require("scores")),
            "response_tokens_mean": float(responses.mean()),
            "response_tokens_min": float(responses.min()),
            "response_tokens_max": float(responses.max()),
            "response_tokens": float(responses.sum()),
            "tokens": float(sequences.sum()),  # of prompts and responses
            "truncated_share": mean(batch.require("truncated").float()),
            "aborted_share": mean(batch.require("aborted").float()),
        }
    )


def weight_version(batch: Batch) -> Metrics:
    """Return the step whose weights generated the responses, the oldest one; nothing if the engine did not tell."""
    versions = torch.cat(all_gather(torch.tensor([-1]) if batch.weight_version is None else batch.weight_version))
    told = versions[versions >= 0]
    return {"weight_version": float(told.min())} if len(told) else {}


def accept_length(batch: Batch) -> Metrics:
    """Return how many tokens the engine emitted for each time that it verified drafts; nothing without a draft model.

    1 means that no draft was accepted. The first token of a response comes of its prompt, so it does not count.
    """
    if batch.draft_rounds is None:  # a rollout that was saved before there were draft models
        return {}
    drafted = batch.draft_rounds > 0
    own = torch.stack([(batch.response_mask.sum(-1) - 1)[drafted].sum(), batch.draft_rounds.sum()])
    tokens, rounds = torch.stack(all_gather(own)).sum(0).tolist()
    return {"speculation/accept_length": tokens / rounds} if rounds else {}


def validation_metrics(prompts: Sequence[Prompt], responses: Sequence[Response], scores: Sequence[float]) -> Metrics:
    """Return the mean reward on the validation set, overall and for each data source.

    The arguments are this rank's share.
    """
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


def routing_metrics(batch: Batch, differing_layers: torch.Tensor, layers: int) -> Metrics:
    """Return how often the engine and the trainer sent the tokens that responses were computed from to other experts.

    differing_layers: [B, T], of Routers.differing_layers. layers: how many have experts. token_share: of the response
    tokens, those with at least one such layer. layer_share: of all their (token, layer) pairs. Experts are compared as
    sets. compared_share: of the response tokens, those for which the engine said what it chose; the other shares are of
    these.
    """
    mask = batch.response_mask.bool()
    known = mask & (differing_layers >= 0)
    counts = [mask.sum(), known.sum(), (known & (differing_layers > 0)).sum(), differing_layers[known].sum().long()]
    everything, compared, tokens, pairs = all_sum(torch.stack(counts)).tolist()
    return {
        "routing/token_share": tokens / max(1, compared),
        "routing/layer_share": pairs / max(1, compared * layers),
        "routing/compared_share": compared / max(1, everything),
    }


def replay_metrics(batch: Batch, before: torch.Tensor, after: torch.Tensor) -> Metrics:
    """Return what the engine's experts change in the trainer's log-probs [B, T], as means of absolute differences in
    nats.

    before, after: with the trainer's own experts, and with the engine's. log_prob_difference_mean is the engine's to
    `after`.
    """
    engines = batch.require("rollout_log_probs")
    return {
        "routing/log_prob_difference_before_replay": token_mean((engines - before).abs(), batch),
        "routing/log_prob_difference_after_replay": token_mean((engines - after).abs(), batch),
        "routing/log_probs_moved_by_replay": token_mean((after - before).abs(), batch),
    }
