"""Read an engine's answers: the tokens, their log-probs, and why each response ended."""

import math
from base64 import b64decode
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from harness.rollout.engine import EngineFailed

ROUTED = "routed_experts"
ABOVE_ZERO = 1e-3
"""How far rounding may take the log-prob of a certain token above 0."""


class StaleWeights(EngineFailed):
    """A response was generated with the weights of another step."""


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
    routed_experts: NDArray[np.int32] | None = None
    """The experts that each token of prompt and response but the last took: [tokens - 1, layers, experts of a
    token]."""
    weight_versions: tuple[str, ...] = ()
    """The weights that its tokens were generated with, oldest first; empty if SGLang did not tell."""

    draft_rounds: int = 0
    """How often the engine verified drafts for it; 0 without a draft model."""

    @property
    def oldest_weights(self) -> int:
        """The step whose weights its first token was generated with; -1 if unknown, or if no sync has named them."""
        return int(self.weight_versions[0]) if "".join(self.weight_versions[:1]).isdecimal() else -1


def read_responses(
    answers: Sequence[Mapping[str, Any]],
    aborted: Literal["error", "mask", "train"] = "error",
    routed_shape: tuple[int, int] | None = None,
) -> list[Response]:
    """Return the responses of SGLang's answers to generate(return_logprob=True).

    aborted: what to do with a response that was aborted or has no token. error: raise EngineFailed with SGLang's
    reason. mask: drop its tokens. train: keep the tokens it has. routed_shape: (layers, experts of a token), if the
    engine was asked for routed experts; raise EngineFailed if an answer lacks them, or if its tokens are not those that
    it has log-probs of.
    """
    responses = []
    for number, answer in enumerate(answers):
        reason = answer["meta_info"]["finish_reason"]
        tokens = answer["meta_info"].get("output_token_logprobs") or []  # None if it was aborted before the prefill
        has_tokens = bool(tokens or answer.get("output_ids"))
        is_aborted = reason["type"] == "abort" or not has_tokens
        if is_aborted and aborted == "error":
            raise EngineFailed(
                f"SGLang aborted response {number} of this rank after {len(tokens)} tokens: {reason.get('message') or reason};"
                ' set rollout.aborted = "mask" or "train" to go on with such responses'
            )
        kept = [] if is_aborted and aborted == "mask" else tokens
        if has_tokens and kept is tokens:
            check_tokens(answer, tokens, number)
        token_ids, log_probs = [int(entry[1]) for entry in kept], [float(entry[0]) for entry in kept]
        routed = None
        if routed_shape and not (is_aborted and ROUTED not in answer["meta_info"]):
            routed = read_routed_experts(answer["meta_info"], len(tokens), routed_shape, number)
        responses.append(
            Response(
                token_ids,
                log_probs,
                reason["type"] == "length",
                is_aborted,
                routed_experts=routed,
                weight_versions=read_weight_versions(answer["meta_info"]),
                draft_rounds=int(answer["meta_info"].get("spec_verify_ct") or 0) if kept else 0,
            )
        )
    return responses


def check_tokens(answer: Mapping[str, Any], scored: Sequence[Sequence[Any]], number: int) -> None:
    """Raise EngineFailed unless SGLang's answer `number` has one log-prob for each of its tokens, and they can be
    log-probs.

    scored: its (log-prob, token, ...). sglang#20799: tokens after the length limit had log-probs too, and would be
    trained on.
    """
    ids, scored_ids = answer.get("output_ids"), [int(entry[1]) for entry in scored]
    if ids is None:
        raise EngineFailed(
            f"SGLang's answer {number} has no output_ids, so nothing shows that its log-probs are those of its tokens"
        )
    counted = answer["meta_info"].get("completion_tokens", len(ids))
    if not len(scored_ids) == len(ids) == counted:
        raise EngineFailed(
            f"SGLang's answer {number} has {len(scored_ids)} output_token_logprobs for {len(ids)} output_ids and"
            f" completion_tokens {counted}; there must be one log-prob for each token"
        )
    for place, (token, scored_id, (log_prob, *_)) in enumerate(zip(ids, scored_ids, scored, strict=True)):
        where = f"SGLang's answer {number} has at token {place}"
        if token != scored_id:
            raise EngineFailed(f"{where} the log-prob of token id {scored_id}, but output_ids has {token} there")
        if log_prob is None or not -math.inf < log_prob <= ABOVE_ZERO:
            raise EngineFailed(f"{where} (id {token}) the log-prob {log_prob}; a log-prob is finite and at most 0")


def read_weight_versions(meta_info: Mapping[str, Any]) -> tuple[str, ...]:
    """Return the weight versions of an answer: of all its tokens, or, before SGLang had spans, the one at its end."""
    if spans := meta_info.get("weight_versions"):
        return tuple(span["version"] for span in spans)
    version = meta_info.get("weight_version")
    return () if version is None else (str(version),)


def check_weight_version(responses: Sequence[Response], expected: str) -> None:
    """Raise StaleWeights if a response was generated with other weights than those of this version.

    Raise EngineFailed if it names a version that no sync gives, such as SGLang's "default": which weights those were is
    not known.
    """
    for number, response in enumerate(responses):
        others = [version for version in response.weight_versions if version != expected]
        if not others:
            continue
        said = f"response {number} of this rank says that it was generated with the weights of version"
        said += f" {', '.join(response.weight_versions)}, but this step's sync brought version {expected}:"
        if any(version.isdecimal() for version in others):
            raise StaleWeights(f"{said} the weights are stale; let nothing generate while weights are updated")
        raise EngineFailed(
            f"{said} no sync gave that name. The engine did not record the version that it was told, or these are weights from before"
            " the first sync; whether they are stale is not known"
        )


def read_routed_experts(
    meta_info: Mapping[str, Any], response_tokens: int, shape: tuple[int, int], number: int
) -> NDArray[np.int32]:
    """Return the experts of SGLang's answer `number`: [tokens - 1, layers, experts of a token]; layers without experts
    have 0.

    SGLang sends int32 in base64. Raise EngineFailed if they are missing, or of another number.
    """
    if not meta_info.get(ROUTED):
        raise EngineFailed(
            f"SGLang's answer {number} has no meta_info.{ROUTED}, though the engine was built with"
            " enable_return_routed_experts and asked with return_routed_experts: this release, or a server between, loses the"
            ' flag; set rollout.routing = "off" or use another release'
        )
    found = np.frombuffer(b64decode(meta_info[ROUTED]), dtype=np.int32)
    tokens = meta_info["prompt_tokens"] + response_tokens - 1
    if found.size != tokens * shape[0] * shape[1]:
        raise EngineFailed(
            f"SGLang's answer {number} has {found.size} {ROUTED}, but {tokens} tokens x {shape[0]} layers x {shape[1]} experts"
            f' are {tokens * shape[0] * shape[1]}; set rollout.routing = "off" or use another release'
        )
    return found.reshape(tokens, *shape)
