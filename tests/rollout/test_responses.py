"""What SGLang's answers become: tokens, log-probs, whether cut off, and what becomes of an aborted one."""

from typing import Any, Literal

import pytest

from harness.rollout.engine_errors import EngineFailed
from harness.rollout.responses import read_responses


def answer(reason: Any, *tokens: tuple[float, int, None]) -> dict[str, Any]:
    return {"meta_info": {"finish_reason": reason, "output_token_logprobs": list(tokens)}}


def test_tokens_log_probs_and_whether_the_length_ended_it() -> None:
    stopped, cut = read_responses(
        [
            answer({"type": "stop", "matched": 1}, (-0.5, 7, None), (-1.5, 1, None)),
            answer({"type": "length", "length": 1}, (-2.0, 9, None)),
        ]
    )
    assert (stopped.token_ids, stopped.log_probs, stopped.truncated) == ([7, 1], [-0.5, -1.5], False)
    assert (cut.token_ids, cut.log_probs, cut.truncated) == ([9], [-2.0], True)


ABORTED = {"type": "abort", "message": "out of KV cache", "status_code": 500}
TOKENS = [(-0.5, 7, None)]


@pytest.mark.parametrize("tokens", [[], TOKENS])
def test_an_aborted_response_fails_with_its_reason(tokens: list[Any]) -> None:
    good = answer({"type": "stop"}, *TOKENS)
    with pytest.raises(EngineFailed, match=f"SGLang aborted response 1 .* after {len(tokens)} tokens: out of KV cache"):
        read_responses([good, answer(ABORTED, *tokens)])


def test_an_empty_response_names_why_it_ended() -> None:
    with pytest.raises(EngineFailed, match="response 0 .* after 0 tokens: .*'type': 'stop'"):
        read_responses([answer({"type": "stop", "matched": 1})])


@pytest.mark.parametrize(("aborted", "kept"), [("mask", []), ("train", [7])])
def test_aborted_responses_are_marked_and_lose_their_tokens_where_that_is_asked_for(
    aborted: Literal["mask", "train"], kept: list[int]
) -> None:
    before_prefill = {"meta_info": {"finish_reason": ABORTED}}  # SGLang gives no list of log-probs then
    answers = [answer({"type": "stop"}, *TOKENS), answer(ABORTED, *TOKENS), before_prefill]
    whole, cut, empty = read_responses(answers, aborted)
    assert (whole.token_ids, whole.aborted) == ([7], False)
    assert (cut.token_ids, len(cut.log_probs), cut.aborted, cut.truncated) == (kept, len(kept), True, False)
    assert (empty.token_ids, empty.log_probs, empty.aborted) == ([], [], True)
