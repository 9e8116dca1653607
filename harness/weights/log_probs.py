"""How far the engine's log-probs are from the trainer's on the same tokens, where most, and what is allowed.

What is allowed follows from the dtype and from a baseline: the same difference on weights that are certainly the same.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from operator import attrgetter
from typing import Literal

import torch

from harness.cluster.world import all_gather

Precision = Literal["float32", "bfloat16", "float16", "fp8_block"]
"""In which the engine computes: model.dtype, or model.rollout_precision where that is another one."""

# A statistic below its floor is never a failure. bfloat16: one epsilon, the rounding of logits around 1; on H200 healthy models
# of 10M parameters were within 0.003, and the smallest silent failure was 0.014. float32: random errors of 7000 additions
# make sqrt(7000) = 84 epsilons, 1e-5; healthy models were within 5e-7 on CPU.
# float16: two epsilons; on CPU 18 healthy means of a tiny dense model were 0.0009 to 0.0012, where bfloat16 had 0.0084 to 0.0095.
# fp8_block: one epsilon of e4m3 too; on H200 tiny models were 0.11 to 0.15 from the same engine in bfloat16.
FLOOR = {"float32": 84 * 2.0**-23, "bfloat16": 2.0**-7, "float16": 2.0**-9, "fp8_block": 2.0**-3}
# Without a baseline, everything that may be healthy is allowed: on H200 tiny models had up to 0.011, mixtures of experts up to 0.020.
# float16 is the same, because a router that chooses another expert moves tokens by as much in any dtype: in 246 healthy rollouts
# of tiny mixtures of experts on CPU the largest mean was 0.023, and the largest bulks 0.035 (a sequence) and 0.021 (a position).
FLOOR_WITHOUT_BASELINE = {"float32": FLOOR["float32"], "bfloat16": 0.05, "float16": 0.05, "fp8_block": 0.6}
# Healthy means of one run stayed within a factor of 2 of each other; silent failures were 4.8 times and more above their
# healthy controls (0.0145 against 0.0030, 0.0139 against 0.0029).
FACTOR = 3.0
# exp(0.1) is half of PPO's usual clip range: with a larger baseline nothing could be learnt, and nothing be proven.
# An engine in FP8 is further away than that, which is what its precision costs: its log-probs prove next to nothing, and
# what arrives is shown by its bytes. Two models that have nothing in common are about 1 apart.
LARGEST_BASELINE = {"float32": 0.1, "bfloat16": 0.1, "float16": 0.1, "fp8_block": 0.6}
# A tiny bfloat16 mixture of experts on CPU had means from 0.005 to 0.014 over 38 healthy rollouts of 256 tokens, and from
# 0.0087 to 0.0116 over 8 of 1024: a router that chooses another expert moves one token by up to 0.7.
BASELINE_TOKENS, LEAST_TOKENS = 2048, 64  # each rollout counts for 64 or more: at most 32 of them
# The same jumps make the mean of a healthy sequence of 16 tokens 7 times the mean of all. Its lower three quarters have few
# of them. A part with fewer tokens than JUDGED_TOKENS is shown but not judged.
BULK = 0.75
JUDGED_TOKENS = 8
# An early choice shifts the rest of its sequence: the worst of 64 healthy bulks was up to 3.3 times the mean of all tokens.
# Over positions such shifts average out: there the worst bulk stayed under 0.7 times the mean.
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
    """Mean of the three quarters that differ least. Tokens for which a router chose another expert are seldom among them."""
    largest: float
    tokens: int
    percentile_99: float
    """99 % of the tokens are at most this far apart."""
    k3: float
    """The engine's KL from the trainer by Schulman's k3: the mean of r - 1 - log r, r = p_trainer / p_engine, as verl's."""
    sequence: PartDifference
    """The worst one: the one with the largest bulk, or with the largest mean if none is judged."""
    position: PartDifference
    """The worst one, likewise."""

    def metrics(self) -> dict[str, float]:
        found = {"mean": self.mean, "max": self.largest, "p99": self.percentile_99, "k3": self.k3}
        for what, part in (("worst_sequence", self.sequence), ("worst_position", self.position)):
            found |= {what: part.mean, f"{what}_bulk": part.bulk, f"{what}_index": part.index}
        return {f"log_prob_difference_{name}": value for name, value in found.items()}


@dataclass(frozen=True, kw_only=True, slots=True)
class Allowed:
    """The largest value of each statistic that passes, in nats: the mean of all tokens, the bulk of a sequence or position."""

    mean: float
    sequence: float
    position: float

    @classmethod
    def of(cls, precision: Precision, baseline: LogProbDifference | None, *, has_experts: bool = False) -> "Allowed":
        """Return max(floor, factor x baseline) for each statistic. A sequence or position may always be as far off as the mean.

        has_experts: the model is a mixture of experts. In float16 its routers seldom choose otherwise than the trainer's: the
        median rollout was 0.001 to 0.003, the largest up to 7 times the mean of all, so that a baseline says little about the
        next one. Their floor is then the one that holds without a baseline.
        """
        rare_jumps = has_experts and precision == "float16"
        floor = (FLOOR_WITHOUT_BASELINE if baseline is None or rare_jumps else FLOOR)[precision]
        if baseline is None:
            return cls(mean=floor, sequence=floor, position=floor)
        mean = baseline.mean
        return cls(
            mean=max(floor, FACTOR * mean),
            sequence=max(floor, FACTOR * baseline.sequence.bulk, SEQUENCE_FACTOR * mean),
            position=max(floor, FACTOR * max(baseline.position.bulk, mean)),
        )

    def violations(self, found: LogProbDifference) -> list[str]:
        """Return one phrase for each statistic that is too large or undefined."""
        checks = (
            ("in the mean", found.mean, self.mean),
            (f"in sequence {found.sequence.index}", found.sequence.bulk, self.sequence),
            (f"at response position {found.position.index}", found.position.bulk, self.position),
        )
        return [
            f"{value:.2e} {what} (allowed {allowed:.2g})" for what, value, allowed in checks if not value <= allowed
        ]


def merge(differences: Sequence[LogProbDifference]) -> LogProbDifference:
    """Merge several rollouts into one. Mean, bulk and k3 are averaged, weighted by tokens; of the rest the worst counts."""
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
