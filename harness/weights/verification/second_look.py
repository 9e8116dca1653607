"""A second look at tokens whose log-probs differ: the trainer in another dtype, and the engine once more from an empty
cache.

A difference alone has no name. Where it is gone on a second look says what it can have been, and what it cannot.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from harness.rollout.engine import RolloutEngine
from harness.trainer.actor import Actor, policy_log_probs
from harness.trainer.batch import Batch
from harness.weights.log_probs import FLOOR, Allowed, LogProbDifference, log_prob_difference, merge
from harness.weights.verification.engine_scores import How, calling, engine_scores

STALE_CACHE = "cache-not-flushed"
"""The failure's name in the catalogue of launch/diagnose.py."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Scored:
    """Responses of the engine, with the trainer's log-probs of them. Every method is a collective call of all ranks."""

    batches: Sequence[Batch]
    """With rollout_log_probs."""
    trained: Sequence[Tensor]
    """As the run compares them, float [B, T]: at the sampling temperature, in a replay with the engine's experts."""
    actor: Actor

    def difference(self) -> LogProbDifference:
        """Return how far the engine's log-probs are from the trainer's."""
        return self._apart([batch.require("rollout_log_probs") for batch in self.batches], self.trained)

    def rounding(self, dtype: torch.dtype) -> LogProbDifference:
        """Return how far the trainer's log-probs are from its own, computed in another dtype on the same values."""
        self.actor.optimizer.zero_grad()  # the memory of the gradients is enough for a second set of parameters
        second = self.actor.computing_in(dtype)
        with second.on_device():
            other = [second.log_probs(batch)[0] for batch in self.batches]
        return self._apart(other, self.trained)

    def look_again(self, engine: RolloutEngine) -> "SecondLook":
        """Return what engine and trainer compute for the same tokens now.

        The engine must serve with the same weights.
        """
        reported = [batch.require("rollout_log_probs") for batch in self.batches]
        with self.actor.on_device():
            plain = [policy_log_probs(self.actor, batch, temperature=1.0)[0] for batch in self.batches]
        cached = self._engine_scores(engine, "cache as it is")  # first: all others flush it
        return SecondLook(
            fresh=self._apart(self._engine_scores(engine, "together"), plain),
            cached=self._apart(cached, plain),
            reported=self._apart(reported, plain),
            moved=self._apart(plain, self.trained).mean,
        )

    def _engine_scores(self, engine: RolloutEngine, how: How) -> list[Tensor]:
        return [engine_scores(engine.group, calling(engine), batch, how).log_probs for batch in self.batches]

    def _apart(self, some: Sequence[Tensor], others: Sequence[Tensor]) -> LogProbDifference:
        pairs = zip(some, others, self.batches, strict=True)
        return merge([log_prob_difference(one, other, batch.response_mask) for one, other, batch in pairs])


@dataclass(frozen=True, kw_only=True, slots=True)
class SecondLook:
    """Differences of log-probs of the same tokens; the trainer's are at temperature 1 and with its own experts."""

    fresh: LogProbDifference
    """Of what the engine computes when it is given all tokens at once, and uses no cached prefix."""
    cached: LogProbDifference
    """Of what it computes from the prefixes that its cache held."""
    reported: LogProbDifference
    """Of what it reported as it generated them."""
    moved: float
    """By how much the temperature, or a replay, changes the trainer's log-probs in the mean."""

    def sentence(self, allowed: Allowed, temperature: float, replays: bool, earlier: str) -> str:
        """Return what these differences say about the failure, and no more than that.

        temperature: that of sampling. replays: the trainer took the engine's record of experts. earlier: on what the
        two agreed before, in words; "" if on nothing yet.
        """
        again = "given the same tokens once more, all at once and without its prefix cache, the engine"
        if allowed.violations(self.fresh):
            rest = f"{again} is off as well, by {self.fresh.mean:.1e} at temperature 1"
            if not earlier:
                return f"{rest}: what the two compute differs, not only what is reported or cached"
            return (
                f"{rest}, but {earlier} they agreed: so it is neither the head nor the temperature; what an update should have"
                " changed is old, or was not sent as the trainer holds it"
            )
        agrees = f"{again} agrees with the trainer ({self.fresh.mean:.1e} at temperature 1)"
        return f"{agrees}: {self._what_was_generated(allowed, temperature, replays, earlier)}"

    def _what_was_generated(self, allowed: Allowed, temperature: float, replays: bool, earlier: str) -> str:
        """Return what is wrong with the log-probs as they were reported, if the engine computes the right ones now."""
        if temperature != 1 and not replays and self.moved <= FLOOR["float32"]:
            return f"the trainer's log-probs are the same at temperature {temperature:g} and at 1: it does not apply the temperature"
        if temperature != 1 and not allowed.violations(self.reported):
            return f"what it reported are log-probs at temperature 1, and they were sampled at {temperature:g}"
        if temperature == 1 and replays and not allowed.violations(self.reported):
            return "with its own experts the trainer agrees with what was reported: the engine's record of experts is wrong"
        if allowed.violations(self.cached):
            return (
                f"but from the prefixes that its cache holds it is off by {self.cached.mean:.1e}: they were computed with other"
                f" weights ({STALE_CACHE})"
            )
        if earlier:
            return (
                f"and {earlier} they agreed. So it generated with old prefixes ({STALE_CACHE}?), or its weights changed"
                " meanwhile"
            )
        return (
            "so both compute the same model on the same weights, and what the engine reported while it generated is wrong: how it"
            " decodes, or how it makes log-probs of that"
        )
