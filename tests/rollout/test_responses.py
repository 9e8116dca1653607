"""What SGLang's answers become: tokens, log-probs, whether cut off; an aborted or empty one fails with SGLang's reason."""

from typing import Any

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


@pytest.mark.parametrize("tokens", [[], [(-0.5, 7, None)]])
def test_an_aborted_response_fails_with_its_reason(tokens: list[Any]) -> None:
    reason = {"type": "abort", "message": "out of KV cache", "status_code": 500}
    good = answer({"type": "stop"}, (-0.5, 7, None))
    with pytest.raises(EngineFailed, match=f"response 1 .* aborted .* after {len(tokens)} tokens: out of KV cache"):
        read_responses([good, answer(reason, *tokens)])


def test_an_empty_response_names_why_it_ended() -> None:
    with pytest.raises(EngineFailed, match="response 0 .* has no token; .*'type': 'stop'"):
        read_responses([answer({"type": "stop", "matched": 1})])
