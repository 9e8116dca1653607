"""Judge the engine's record of the experts that tokens took (rollout.routing) by the log-probs that it computed with
them.
"""

import torch
from torch import Tensor

from harness.config.precision import EnginePrecision
from harness.trainer.over_ranks import all_sum
from harness.weights.log_probs import FACTOR, FLOOR

CURE = (
    'the engine\'s record of experts is wrong, not what it computes; set rollout.routing = "off" or use another release'
)


def wrong_routing_record(
    precision: EnginePrecision, engines: Tensor, own: Tensor, used: Tensor, differing: Tensor, mask: Tensor
) -> str:
    """Return what shows that the record cannot be true, or "". A collective call; the same on every rank.

    All are [B, T]. engines, own, used: log-probs of the engine, of the trainer with its own experts, and with those
    that it takes: the recorded ones in a replay. differing: in how many layers the record names others than the
    trainer's own. mask: 1 at response tokens.

    Another expert moves a log-prob by far more than float32 rounds. So where the record names others, the log-probs of
    engine and trainer cannot agree, unless the record is wrong. And to take the same experts cannot take the trainer
    further away.
    """
    mask = mask.bool().cpu()
    apart, replayed = ((engines.cpu() - each.cpu()).abs().double() for each in (own, used))
    named = mask & (differing.cpu() > 0)
    own_sums = [mask.sum(), named.sum(), apart[mask].sum(), replayed[mask].sum(), apart[named].sum()]
    tokens, others, *sums = all_sum(torch.stack([each.double() for each in own_sums])).tolist()
    before, after, there = (total / max(1, count) for total, count in zip(sums, (tokens, tokens, others), strict=True))
    if after > max(FLOOR[precision], FACTOR * before):
        return (
            f"the trainer's log-probs differ from the engine's by {before:.1e} on average, and by {after:.1e} with the experts that"
            f" the engine says it took (routing replay): {CURE}"
        )
    if precision == "float32" and others and there <= FLOOR[precision]:
        return (
            f"for {others:.0f} of {tokens:.0f} response tokens the engine's record names other experts than the trainer took, yet their"
            f" log-probs agree to {there:.1e}, and in float32 both cannot be true: {CURE}"
        )
    return ""
