"""How far the engine's log-probs are from the trainer's on the same tokens, where most, and what is allowed.

What is allowed is measured, and not taken from the engine: it is a small factor times the trainer's own rounding, the
distance between its log-probs in model.dtype and in float32 on the same tokens. In float32 nothing is rounded but sums.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from operator import attrgetter

import torch

from harness.cluster.world import all_gather
from harness.config.precision import QUANTIZED, EnginePrecision, Quantized

# A mean below its floor is rounding. float32: random errors of 7000 additions make sqrt(7000) = 84 epsilons, 1e-5;
# healthy models were within 5e-7 on CPU. bfloat16: one epsilon, the rounding of logits around 1. float16: two epsilons.
FLOOR: dict[EnginePrecision, float] = {"float32": 84 * 2.0**-23, "bfloat16": 2.0**-7, "float16": 2.0**-9}
FLOOR |= {each.name: each.floor for each in QUANTIZED.values()}
# What passes, as a multiple of the trainer's own rounding. In 300 healthy rollouts of 256 tokens by tiny engines on a
# CPU (six models, bfloat16 and float16, tp 1 and 2) both sides rounded, and the engine was 1.1 to 1.4 times as far from
# the trainer as the trainer from itself in float32; in a single rollout up to 1.4 times for dense models, and up to
# 1.75 for the bulk of a mixture of experts.
FACTOR = 2.0
# A router that chooses another expert moves a token by up to 0.7 nats, in float16 as much as in bfloat16, and an early
# choice shifts the rest of its sequence. Which tokens it meets is chance, so the trainer's own rounding says little
# about the next rollout. In 246 healthy rollouts of tiny mixtures of experts in float16 the largest mean was 0.023, the
# largest bulk of a sequence 0.035 and of a position 0.021. The bulk of all tokens has few of them, and is held to
# FACTOR.
JUMPS = 0.05
# How far a quantized engine may be from the trainer is taken from its own first load: the trainer has no such numbers
# to round to.
FACTOR_OF_FIRST_LOAD = 3.0
# exp(0.1) is half of PPO's usual clip range: with a larger difference nothing could be learnt, and nothing be proven.
LARGEST_BASELINE: dict[EnginePrecision, float] = {"float32": 0.1, "bfloat16": 0.1, "float16": 0.1}
LARGEST_BASELINE |= {each.name: each.largest_baseline for each in QUANTIZED.values()}
# A tiny bfloat16 mixture of experts on CPU had means from 0.005 to 0.014 over 38 healthy rollouts of 256 tokens, and from
# 0.0087 to 0.0116 over 8 of 1024: a router that chooses another expert moves one token by up to 0.7.
BASELINE_TOKENS, LEAST_TOKENS = 2048, 64  # each rollout counts for 64 or more: at most 32 of them
# The same jumps make the mean of a healthy sequence of 16 tokens 7 times the mean of all. Its lower three quarters have
# few of them. A part with fewer tokens than JUDGED_TOKENS is shown but not judged.
BULK = 0.75
JUDGED_TOKENS = 8
# A short sequence may be noisier than all together: the worst of 64 healthy bulks was up to 3.3 times the mean of all
# tokens. Over positions that averages out: there the worst bulk stayed under 0.7 times the mean.
SEQUENCE_FACTOR = 6.0
BADNESS = attrgetter("bulk", "mean")


@dataclass(frozen=True, kw_only=True, slots=True)
class PartDifference:
    """One sequence, or one response position over all sequences."""

    bulk: float
    """Mean of its lower three quarters, by which it is judged; 0 if it has too few tokens for that."""
    mean: float
    """Mean |difference| of its tokens, in nats."""
    index: int
    """Number of the sequence, counted over all ranks; or of the position, 0 at the first token of a response."""


@dataclass(frozen=True, kw_only=True, slots=True)
class LogProbDifference:
    """|engine log-prob - trainer log-prob| over the response tokens of all ranks, in nats; infinite if one is NaN."""

    mean: float
    bulk: float
    """Mean of the three quarters that differ least. Tokens for which a router chose another expert are seldom among
    them."""
    largest: float
    tokens: int
    percentile_99: float
    """99 % of the tokens are at most this far apart."""
    k3: float
    """The engine's KL from the trainer by Schulman's k3: the mean of r - 1 - log r, r = p_trainer / p_engine, as
    verl's."""
    sequence: PartDifference
    """The worst one: the one with the largest bulk, or with the largest mean if none is judged."""
    position: PartDifference
    """The worst one, likewise."""

    def metrics(self) -> dict[str, float]:
        found = {"mean": self.mean, "bulk": self.bulk, "max": self.largest, "p99": self.percentile_99, "k3": self.k3}
        for what, part in (("worst_sequence", self.sequence), ("worst_position", self.position)):
            found |= {what: part.mean, f"{what}_bulk": part.bulk, f"{what}_index": part.index}
        return {f"log_prob_difference_{name}": value for name, value in found.items()}


@dataclass(frozen=True, kw_only=True, slots=True)
class Allowed:
    """The largest value of each statistic that passes, in nats: mean and bulk of all tokens, bulk of a sequence or
    position.
    """

    mean: float
    bulk: float
    sequence: float
    position: float
    rounding: float = 0.0
    """The mean of the trainer's own rounding, if these are multiples of it."""

    @classmethod
    def of(cls, rounding: LogProbDifference | None, *, has_experts: bool = False) -> "Allowed":
        """Return what an engine may be off that computes in the trainer's dtype.

        rounding: how far the trainer is from itself in float32; None: it computes in float32. has_experts: the model is
        a mixture of experts, and a few tokens may jump.
        """
        floor = FLOOR["float32"]
        if rounding is None:
            return cls(mean=floor, bulk=floor, sequence=floor, position=floor)
        least = max(floor, JUMPS if has_experts else 0.0)
        mean = rounding.mean
        return cls(
            mean=max(least, FACTOR * mean),
            bulk=max(floor, FACTOR * rounding.bulk),
            sequence=max(least, FACTOR * rounding.sequence.bulk, SEQUENCE_FACTOR * mean),
            position=max(least, FACTOR * max(rounding.position.bulk, mean)),
            rounding=mean,
        )

    @classmethod
    def of_quantized(cls, quantized: Quantized, baseline: LogProbDifference | None) -> "Allowed":
        """Return what a quantized engine may be off. baseline: the difference on its own first load; None: there was
        none.
        """
        if baseline is None:
            most = quantized.largest_baseline
            return cls(mean=most, bulk=most, sequence=most, position=most)
        mean, floor = baseline.mean, quantized.floor
        return cls(
            mean=max(floor, FACTOR_OF_FIRST_LOAD * mean),
            bulk=max(floor, FACTOR_OF_FIRST_LOAD * mean),
            sequence=max(floor, FACTOR_OF_FIRST_LOAD * baseline.sequence.bulk, SEQUENCE_FACTOR * mean),
            position=max(floor, FACTOR_OF_FIRST_LOAD * max(baseline.position.bulk, mean)),
        )

    def __str__(self) -> str:
        """Return the mean that passes, and the rounding that it follows from."""
        return f"{self.mean:.2g}" + (f" (the trainer's own rounding is {self.rounding:.1e})" if self.rounding else "")

    def violations(self, found: LogProbDifference) -> list[str]:
        """Return one phrase for each statistic that is too large or undefined."""
        checks = (
            ("in the mean", found.mean, self.mean),
            ("in the mean of the three quarters that differ least", found.bulk, self.bulk),
            (f"in sequence {found.sequence.index}", found.sequence.bulk, self.sequence),
            (f"at response position {found.position.index}", found.position.bulk, self.position),
        )
        return [
            f"{value:.2e} {what} (allowed {allowed:.2g})" for what, value, allowed in checks if not value <= allowed
        ]


def merge(differences: Sequence[LogProbDifference]) -> LogProbDifference:
    """Merge several rollouts into one.

    Mean, bulk and k3 are averaged, weighted by tokens; of the rest the worst counts.
    """
    tokens = sum(each.tokens for each in differences)
    return LogProbDifference(
        mean=sum(each.mean * each.tokens for each in differences) / tokens,
        bulk=sum(each.bulk * each.tokens for each in differences) / tokens,
        largest=max(each.largest for each in differences),
        tokens=tokens,
        percentile_99=max(each.percentile_99 for each in differences),
        k3=sum(each.k3 * each.tokens for each in differences) / tokens,
        sequence=max((each.sequence for each in differences), key=BADNESS),
        position=max((each.position for each in differences), key=BADNESS),
    )


def log_prob_difference(engine: torch.Tensor, trainer: torch.Tensor, mask: torch.Tensor) -> LogProbDifference:
    """Compare float [B, T]; mask: [B, T], 1 at response tokens. A collective call; the same on every rank.

    Raise ValueError when no rank has a response token.
    """
    log_ratios = trainer.cpu().double() - engine.cpu().double()
    log_ratios = torch.where(log_ratios.isnan(), torch.inf, log_ratios)  # a NaN compares as small as anything
    rows = [row[kept] for row, kept in zip(log_ratios, mask.bool().cpu(), strict=True)]
    # By sequence, in the order of ranks; a row is as long as its response.
    gathered = [row for rank in all_gather(rows) for row in rank]
    sequences = [row.abs() for row in gathered]
    if not any(map(len, sequences)):
        raise ValueError("the batch must have a response token on some rank, got none: nothing can be compared.")
    longest = max(map(len, sequences))
    positions = [torch.stack([row[t] for row in sequences if len(row) > t]) for t in range(longest)]
    everything = torch.cat(sequences)
    log_ratios = torch.cat(gathered).clamp(min=-20, max=20)
    return LogProbDifference(
        mean=float(everything.mean()),
        bulk=_bulk(everything),
        largest=float(everything.max()),
        tokens=len(everything),
        percentile_99=float(everything.kthvalue(math.ceil(0.99 * len(everything))).values),
        k3=float((log_ratios.exp() - 1 - log_ratios).mean()),
        sequence=_worst(sequences),
        position=_worst(positions),
    )


def _worst(parts: list[torch.Tensor]) -> PartDifference:
    found = []
    for index, gaps in enumerate(parts):
        bulk = _bulk(gaps) if len(gaps) >= JUDGED_TOKENS else 0.0
        if len(gaps):
            found.append(PartDifference(index=index, mean=float(gaps.mean()), bulk=bulk))
    return max(found, key=BADNESS)


def _bulk(gaps: torch.Tensor) -> float:
    """Return the mean of the lower three quarters, of one token at least."""
    return float(gaps.sort().values[: max(1, int(len(gaps) * BULK))].mean())
