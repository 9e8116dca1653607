"""What SGLang's answers become: tokens, log-probs, whether cut off, and what becomes of an aborted one."""

from base64 import b64encode
from dataclasses import replace
from typing import Any, Literal

import numpy as np
import pytest

from harness.rollout.engine_errors import EngineFailed
from harness.rollout.responses import StaleWeights, check_weight_version, read_responses


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


def test_how_often_drafts_were_verified() -> None:
    drafted, plain = answer({"type": "stop"}, *TOKENS), answer({"type": "stop"}, *TOKENS)
    drafted["meta_info"]["spec_verify_ct"] = 3
    assert [each.draft_rounds for each in read_responses([drafted, plain])] == [3, 0]


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


def routed_answer(experts: Any) -> dict[str, Any]:
    """The answer to a prompt of two tokens, with one token."""
    made = answer({"type": "stop"}, *TOKENS)
    routed = {} if experts is None else {"routed_experts": b64encode(np.array(experts, np.int32).tobytes()).decode()}
    return {"meta_info": made["meta_info"] | routed | {"prompt_tokens": 2}}


def test_routed_experts_are_those_of_all_tokens_but_the_last() -> None:
    [response] = read_responses([routed_answer(range(12))], routed_shape=(3, 2))
    assert response.routed_experts is not None
    assert response.routed_experts.tolist() == [[[0, 1], [2, 3], [4, 5]], [[6, 7], [8, 9], [10, 11]]]
    [unasked] = read_responses([routed_answer(range(12))])
    assert unasked.routed_experts is None


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


def test_an_aborted_response_may_lack_its_experts() -> None:
    [response] = read_responses([{"meta_info": {"finish_reason": ABORTED}}], "mask", (3, 2))
    assert response.aborted and response.routed_experts is None


SPANS = [{"version": "2", "start": 0, "end": 1}, {"version": "3", "start": 1, "end": 2}]


@pytest.mark.parametrize(
    ("told", "versions"),
    [
        ({}, ()),
        ({"weight_version": "3"}, ("3",)),
        ({"weight_version": "3", "weight_versions": SPANS}, ("2", "3")),
    ],
)
def test_the_versions_of_all_tokens_are_read_where_sglang_tells_them(told: Any, versions: tuple[str, ...]) -> None:
    made = answer({"type": "stop"}, *TOKENS)
    [response] = read_responses([{"meta_info": made["meta_info"] | told}])
    assert response.weight_versions == versions


def test_a_response_of_other_weights_is_stale() -> None:
    made = answer({"type": "stop"}, *TOKENS)["meta_info"]
    fresh, mixed = read_responses(
        [{"meta_info": made | {"weight_version": "3"}}, {"meta_info": made | {"weight_versions": SPANS}}]
    )
    check_weight_version([fresh], "3")
    check_weight_version(read_responses([{"meta_info": made}]), "3")  # a release that does not tell
    with pytest.raises(StaleWeights, match=r"response 1 .* version 2, 3, but this step's sync brought version 3"):
        check_weight_version([fresh, mixed], "3")
    unnamed = replace(fresh, weight_versions=("default",))
    with pytest.raises(EngineFailed, match="version default, .* whether they are stale is not known") as caught:
        check_weight_version([unnamed], "3")
    assert not isinstance(caught.value, StaleWeights)
