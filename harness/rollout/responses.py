"""What an engine answers to a prompt: tokens, their log-probs, and why it stopped."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from harness.rollout.errors import EngineFailed


@dataclass(frozen=True, slots=True)
class Response:
    """One sampled response, of at least one token."""

    token_ids: list[int]
    log_probs: list[float]
    """Nats, at the sampling temperature."""
    truncated: bool
    """Whether it was cut off by its longest length."""


def read_responses(answers: Sequence[Mapping[str, Any]]) -> list[Response]:
    """SGLang's answers to generate(return_logprob=True).

    Raises EngineFailed, with SGLang's own reason, for one that was aborted, which is no sample of the policy, or that
    has no token.
    """
    return [_response(number, answer["meta_info"]) for number, answer in enumerate(answers)]


def _response(number: int, meta: Mapping[str, Any]) -> Response:
    reason = meta.get("finish_reason")
    # A dict since 0.4.3; {"type": "abort", "message": ..., "status_code": ...} has the words of what went wrong.
    kind = reason.get("type") if isinstance(reason, Mapping) else reason
    tokens = meta["output_token_logprobs"]
    if kind == "abort":
        words = reason.get("message") if isinstance(reason, Mapping) else None
        raise EngineFailed(
            f"response {number} of this rank was aborted by SGLang after {len(tokens)} tokens: {words or 'it gives no message'}"
        )
    if not tokens:
        raise EngineFailed(
            f"response {number} of this rank has no token; SGLang's finish_reason is {reason!r}, but a response needs at"
            " least one token to learn from"
        )
    return Response(
        token_ids=[int(entry[1]) for entry in tokens],
        log_probs=[float(entry[0]) for entry in tokens],
        truncated=kind == "length",
    )
