"""What an engine answers to a prompt: tokens, their log-probs, and why it stopped."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from harness.rollout.engine_errors import EngineFailed


@dataclass(frozen=True, slots=True)
class Response:
    """One sampled response, of at least one token."""

    token_ids: list[int]
    log_probs: list[float]
    """Nats, at the sampling temperature."""
    truncated: bool
    """Whether it was cut off by its longest length."""


def read_responses(answers: Sequence[Mapping[str, Any]]) -> list[Response]:
    """Return the responses of SGLang's answers to generate(return_logprob=True).

    Raises EngineFailed, with SGLang's own reason, for one that was aborted, which is no sample of the policy, or that
    has no token.
    """
    responses = []
    for number, answer in enumerate(answers):
        reason, tokens = answer["meta_info"]["finish_reason"], answer["meta_info"]["output_token_logprobs"]
        if reason["type"] == "abort":
            raise EngineFailed(
                f"response {number} of this rank was aborted by SGLang after {len(tokens)} tokens: {reason.get('message')}"
            )
        if not tokens:
            raise EngineFailed(
                f"response {number} of this rank has no token; SGLang's finish_reason is {reason!r}, but a response"
                " needs at least one token to learn from"
            )
        log_probs, token_ids = zip(*((float(entry[0]), int(entry[1])) for entry in tokens), strict=True)
        responses.append(Response(list(token_ids), list(log_probs), truncated=reason["type"] == "length"))
    return responses
