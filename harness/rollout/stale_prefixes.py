"""Find keys and values in the engine's prefix cache that were computed with older weights.

After an update in flight the cache keeps what the paused requests have computed (sglang#27886): it cannot be flushed
while they run. A prompt that begins as they do is then answered from a mix of old and new weights.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from harness.rollout.verl_engine import VerlEngine


@dataclass(frozen=True, kw_only=True, slots=True)
class PrefixCheck:
    """A prompt's log-probs from cached keys and values, compared with those after a flush."""

    cached_tokens: int
    """Tokens of the prompt that came from the cache. 0: the check shows nothing."""
    difference: float
    """The largest difference of a log-prob, in nats."""


def check_prefix(engine: VerlEngine, prompt: Sequence[int], shared: int) -> PrefixCheck:
    """Compare the log-probs of a prompt's last tokens, which follow a prefix of `shared` tokens, with those after a
    flush.

    The engine must be idle; its prefix cache is flushed. A collective call of its ranks.
    """
    cached_tokens, cached = _log_probs(engine, prompt, shared)
    engine.flush_cache()
    _, fresh = _log_probs(engine, prompt, shared)
    difference = max(abs(one - other) for one, other in zip(cached, fresh, strict=True))
    return PrefixCheck(cached_tokens=cached_tokens, difference=difference)


def _log_probs(engine: VerlEngine, prompt: Sequence[int], shared: int) -> tuple[int, list[float]]:
    """Return how many tokens came from the cache, and the log-probs of the prompt's tokens from `shared` + 1 on."""
    [answer] = engine.generate(
        input_ids=[prompt],
        sampling_params={"max_new_tokens": 1, "temperature": 0.0},
        return_logprob=True,
        logprob_start_len=shared,  # SGLang takes no more than this from the cache, and gives the first one no log-prob
    )
    found = answer["meta_info"]
    return found["cached_tokens"], [entry[0] for entry in found["input_token_logprobs"] if entry[0] is not None]
