"""What SGLang's answers become: tokens, log-probs, whether cut off, and what becomes of an aborted one."""

import math
from base64 import b64encode
from dataclasses import replace
from typing import Any, Literal

import numpy as np
import pytest

from harness.rollout.engine import EngineFailed
from harness.rollout.responses import StaleWeights, check_weight_version, read_responses


def answer(reason: Any, *tokens: tuple[float, int, None]) -> dict[str, Any]:
    meta_info = {"finish_reason": reason, "output_token_logprobs": list(tokens), "completion_tokens": len(tokens)}
    return {"output_ids": [token for _, token, _ in tokens], "meta_info": meta_info}


def test_tokens_log_probs_whether_the_length_ended_it_and_how_often_drafts_were_verified() -> None:
    drafted = answer({"type": "stop", "matched": 1}, (-0.5, 7, None), (-1.5, 1, None))
    drafted["meta_info"]["spec_verify_ct"] = 3
    stopped, cut = read_responses([drafted, answer({"type": "length", "length": 1}, (-2.0, 9, None))])
    assert (stopped.draft_rounds, cut.draft_rounds) == (3, 0)
    assert (stopped.token_ids, stopped.log_probs, stopped.truncated) == ([7, 1], [-0.5, -1.5], False)
    assert (cut.token_ids, cut.log_probs, cut.truncated) == ([9], [-2.0], True)


ABORTED = {"type": "abort", "message": "out of KV cache", "status_code": 500}
TOKENS = [(-0.5, 7, None)]


@pytest.mark.parametrize("tokens", [[], TOKENS])
def test_an_aborted_response_fails_with_its_reason(tokens: list[Any]) -> None:
    good = answer({"type": "stop"}, *TOKENS)
    with pytest.raises(EngineFailed, match=f"SGLang aborted response 1 .* after {len(tokens)} tokens: out of KV cache"):
        read_responses([good, answer(ABORTED, *tokens)])
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


@pytest.mark.parametrize(
    ("changed", "told", "said"),
    [
        ({"output_ids": [7, 9]}, {}, "3 output_token_logprobs for 2 output_ids and completion_tokens 3"),
        ({"output_ids": [7, 9, 4, 4]}, {}, "3 output_token_logprobs for 4 output_ids"),
        ({}, {"completion_tokens": 2}, "for 3 output_ids and completion_tokens 2"),
        ({}, {"output_token_logprobs": None}, "0 output_token_logprobs for 3 output_ids"),
        ({"output_ids": [7, 8, 4]}, {}, "at token 1 the log-prob of token id 9, but output_ids has 8"),
        ({"output_ids": None}, {}, "has no output_ids"),
    ],
)
@pytest.mark.parametrize("reason", ["length", "abort"])
def test_log_probs_that_are_not_those_of_the_answer_s_own_tokens_are_an_error(
    reason: str, changed: Any, told: Any, said: str
) -> None:
    """sglang#20799 had log-probs of tokens after the length limit.

    An aborted answer that is trained on must be right too.
    """
    good = answer({"type": reason}, (-0.5, 7, None), (-1.5, 9, None), (0.0, 4, None))
    read_responses([good], "train")
    with pytest.raises(EngineFailed, match=f"^SGLang's answer 1 .*{said}"):
        read_responses([good, good | changed | {"meta_info": good["meta_info"] | told}], "train")


@pytest.mark.parametrize("log_prob", [math.nan, -math.inf, 0.5, None])
def test_numbers_that_are_no_log_probs_are_an_error(log_prob: Any) -> None:
    with pytest.raises(EngineFailed, match="at token 1 .id 9. the log-prob"):
        read_responses([answer({"type": "length"}, (-0.5, 7, None), (log_prob, 9, None))])


def routed_answer(experts: Any) -> dict[str, Any]:
    """The answer to a prompt of two tokens, with one token."""
    made = answer({"type": "stop"}, *TOKENS)
    routed = {} if experts is None else {"routed_experts": b64encode(np.array(experts, np.int32).tobytes()).decode()}
    return made | {"meta_info": made["meta_info"] | routed | {"prompt_tokens": 2}}


def test_routed_experts_are_those_of_all_tokens_but_the_last() -> None:
    [response] = read_responses([routed_answer(range(12))], routed_shape=(3, 2))
    assert response.routed_experts is not None
    assert response.routed_experts.tolist() == [[[0, 1], [2, 3], [4, 5]], [[6, 7], [8, 9], [10, 11]]]
    [unasked] = read_responses([routed_answer(range(12))])
    assert unasked.routed_experts is None
    [aborted] = read_responses([{"meta_info": {"finish_reason": ABORTED}}], "mask", (3, 2))
    assert aborted.aborted and aborted.routed_experts is None


@pytest.mark.parametrize(
    ("experts", "said"),
    [
        (None, r"answer 0 has no meta_info.routed_experts, though .*return_routed_experts: .*set rollout.routing"),
        (range(11), r"answer 0 has 11 routed_experts, but 2 tokens x 3 layers x 2 experts are 12; set rollout.routing"),
    ],
)
def test_experts_that_are_missing_or_of_another_number_are_an_error(experts: Any, said: str) -> None:
    with pytest.raises(EngineFailed, match=said):
        read_responses([routed_answer(experts)], routed_shape=(3, 2))


SPANS = [{"version": "2", "start": 0, "end": 1}, {"version": "3", "start": 1, "end": 2}]


def told(**what: Any) -> dict[str, Any]:
    made = answer({"type": "stop"}, *TOKENS)
    return made | {"meta_info": made["meta_info"] | what}


def test_a_response_of_other_weights_is_stale() -> None:
    answers = [told(), told(weight_version="3"), told(weight_version="3", weight_versions=SPANS)]
    untold, fresh, mixed = read_responses(answers)
    assert [each.weight_versions for each in (untold, fresh, mixed)] == [(), ("3",), ("2", "3")]
    check_weight_version([fresh, untold], "3")
    with pytest.raises(StaleWeights, match=r"response 1 .* version 2, 3, but this step's sync brought version 3"):
        check_weight_version([fresh, mixed], "3")
    unnamed = replace(fresh, weight_versions=("default",))
    with pytest.raises(EngineFailed, match="version default, .* whether they are stale is not known") as caught:
        check_weight_version([unnamed], "3")
    assert not isinstance(caught.value, StaleWeights)
