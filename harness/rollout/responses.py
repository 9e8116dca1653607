"""What an engine answers to a prompt: tokens, their log-probs, and why it stopped."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from harness.rollout.engine_errors import EngineFailed


@dataclass(frozen=True, slots=True)
class Response:
    """One sampled response; without a token only where it was aborted."""

    token_ids: list[int]
    log_probs: list[float]
    """Nats, at the sampling temperature."""
    truncated: bool
    """Whether it was cut off by its longest length."""
    aborted: bool = False
    """Whether SGLang gave it up, or it ended before its first token."""


def read_responses(
    answers: Sequence[Mapping[str, Any]], aborted: Literal["error", "mask", "train"] = "error"
) -> list[Response]:
    """Return the responses of SGLang's answers to generate(return_logprob=True).

    aborted: what becomes of those that were aborted, or have no token. error: raise EngineFailed, with SGLang's own reason.
    mask: their tokens are dropped. train: the tokens that they have are kept.
    """
    responses = []
    for number, answer in enumerate(answers):
        reason = answer["meta_info"]["finish_reason"]
        tokens = answer["meta_info"].get("output_token_logprobs") or []  # none at all before the prefill
        is_aborted = reason["type"] == "abort" or not tokens
        if is_aborted and aborted == "error":
            raise EngineFailed(
                f"response {number} of this rank was aborted by SGLang after {len(tokens)} tokens: {reason.get('message') or reason};"
                ' rollout.aborted = "mask" or "train" runs on with such responses'
            )
        kept = [] if is_aborted and aborted == "mask" else tokens
        token_ids, log_probs = [int(entry[1]) for entry in kept], [float(entry[0]) for entry in kept]
        responses.append(Response(token_ids, log_probs, reason["type"] == "length", is_aborted))
    return responses
