import math

from hypothesis import given, settings
from hypothesis import strategies as st

from harness.tools.bisection.search import (
    Edge,
    Verdict,
    find_edges,
    longest_unrun,
    next_candidate,
    next_two,
)


@st.composite
def patterns(draw: st.DrawFn) -> tuple[list[Verdict], set[int], int]:
    """What each candidate would say, which of them cannot be installed, and where the one edge is: the first bad one."""
    count = draw(st.integers(2, 130))
    edge = draw(st.integers(1, count - 1))
    truth: list[Verdict] = ["good"] * edge + ["bad"] * (count - edge)
    inner = st.sets(st.integers(1, count - 2)) if count > 2 else st.just(set())
    for index in draw(inner):
        truth[index] = draw(st.sampled_from(["skip", "other"]))
    return truth, draw(inner), edge


def search(truth: list[Verdict], closed: set[int]) -> tuple[list[Edge], dict[int, Verdict]]:
    verdicts: dict[int, Verdict] = {0: truth[0], len(truth) - 1: truth[-1]}
    while (index := next_candidate(verdicts, closed)) is not None:
        assert index not in verdicts and index not in closed
        verdicts[index] = truth[index]
    return find_edges(verdicts), verdicts


@settings(max_examples=100)
@given(patterns())
def test_the_answer_contains_the_edge_within_the_bound(pattern: tuple[list[Verdict], set[int], int]) -> None:
    truth, closed, first_bad = pattern
    found, verdicts = search(truth, closed)
    assert len(found) == 1
    assert first_bad in found[0].answer
    skips = sum(verdict in ("skip", "other") for verdict in verdicts.values())
    assert len(verdicts) <= math.ceil(math.log2(len(truth))) + 2 + skips
    inside = [index for index in found[0].answer if index != found[0].after]
    assert all(truth[index] not in ("good", "bad") or index in closed for index in inside)


@given(patterns())
def test_what_comes_next_is_among_the_two_that_are_installed_ahead(
    pattern: tuple[list[Verdict], set[int], int],
) -> None:
    truth, closed, _ = pattern
    verdicts: dict[int, Verdict] = {0: truth[0], len(truth) - 1: truth[-1]}
    while (index := next_candidate(verdicts, closed)) is not None:
        ahead = next_two(verdicts, index, closed)
        verdicts[index] = truth[index]
        after = next_candidate(verdicts, closed)
        if truth[index] in ("good", "bad"):
            assert after is None or after in ahead


def test_the_reverse_pattern_is_searched_alike() -> None:
    found, verdicts = search(["bad"] * 7 + ["good"] * 13, set())
    assert found == [Edge(6, 7)] and len(verdicts) <= 7


def test_it_steps_away_from_a_cluster_of_skips_where_the_bound_allows() -> None:
    truth: list[Verdict] = ["good"] * 40 + ["bad"] * 61
    for index in range(46, 56):
        truth[index] = "skip"
    _, verdicts = search(truth, set())
    assert sum(verdict == "skip" for verdict in verdicts.values()) <= 5  # of ten


def test_every_change_of_verdict_is_an_edge_and_each_is_narrowed() -> None:
    truth: list[Verdict] = ["good"] * 4 + ["bad"] * 3 + ["good"] * 5 + ["bad"] * 4
    verdicts: dict[int, Verdict] = {0: "good", 5: "bad", 9: "good", 15: "bad"}
    while (index := next_candidate(verdicts)) is not None:
        verdicts[index] = truth[index]
    assert find_edges(verdicts) == [Edge(3, 4), Edge(6, 7), Edge(11, 12)]


def test_where_a_second_edge_could_hide() -> None:
    verdicts: dict[int, Verdict] = {0: "good", 5: "good", 6: "bad", 9: "bad"}
    assert longest_unrun(10, verdicts, {2}, Edge(5, 6)) == [1, 3, 4]
