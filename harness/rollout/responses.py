"""Read an engine's answers: the tokens, their log-probs, and why each response ended."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from harness.rollout.engine_errors import EngineFailed


@dataclass(frozen=True, slots=True)
class Response:
    """One sampled response. Only an aborted one can be without tokens."""

    token_ids: list[int]
    log_probs: list[float]
    """In nats, at the sampling temperature."""
    truncated: bool
    """Whether it reached max_new_tokens."""
    aborted: bool = False
    """Whether SGLang aborted it, or it ended before its first token."""


def read_responses(
    answers: Sequence[Mapping[str, Any]], aborted: Literal["error", "mask", "train"] = "error"
) -> list[Response]:
    """Return the responses of SGLang's answers to generate(return_logprob=True).

    aborted: what to do with a response that was aborted or has no token. error: raise EngineFailed with SGLang's
    reason. mask: drop its tokens. train: keep the tokens it has.
    """
    responses = []
    for number, answer in enumerate(answers):
        reason = answer["meta_info"]["finish_reason"]
        tokens = answer["meta_info"].get("output_token_logprobs") or []  # None if it was aborted before the prefill
        is_aborted = reason["type"] == "abort" or not tokens
        if is_aborted and aborted == "error":
            raise EngineFailed(
                f"SGLang aborted response {number} of this rank after {len(tokens)} tokens: {reason.get('message') or reason};"
                ' set rollout.aborted = "mask" or "train" to go on with such responses'
            )
        kept = [] if is_aborted and aborted == "mask" else tokens
        token_ids, log_probs = [int(entry[1]) for entry in kept], [float(entry[0]) for entry in kept]
        responses.append(Response(token_ids, log_probs, reason["type"] == "length", is_aborted))
    return responses
