import math

from hypothesis import given, settings
from hypothesis import strategies as st

from harness.tools.bisection.search import (
    Edge,
    Verdict,
    find_edges,
    next_candidate,
)


@st.composite
def patterns(draw: st.DrawFn) -> tuple[list[Verdict], int]:
    """What each candidate would say, and where the one edge is: the first bad one."""
    count = draw(st.integers(2, 130))
    edge = draw(st.integers(1, count - 1))
    truth: list[Verdict] = ["good"] * edge + ["bad"] * (count - edge)
    for index in draw(st.sets(st.integers(1, count - 2)) if count > 2 else st.just(set())):
        truth[index] = draw(st.sampled_from(["skip", "other"]))
    return truth, edge


def search(truth: list[Verdict]) -> tuple[list[Edge], dict[int, Verdict]]:
    verdicts: dict[int, Verdict] = {0: truth[0], len(truth) - 1: truth[-1]}
    while (index := next_candidate(verdicts)) is not None:
        assert index not in verdicts
        verdicts[index] = truth[index]
    return find_edges(verdicts), verdicts


@settings(max_examples=100)
@given(patterns())
def test_the_answer_contains_the_edge_within_the_bound(pattern: tuple[list[Verdict], int]) -> None:
    truth, first_bad = pattern
    found, verdicts = search(truth)
    assert len(found) == 1
    assert first_bad in found[0].answer
    skips = sum(verdict in ("skip", "other") for verdict in verdicts.values())
    assert len(verdicts) <= math.ceil(math.log2(len(truth))) + 2 + skips
    assert all(truth[index] not in ("good", "bad") for index in range(found[0].before + 1, found[0].after))


def test_the_reverse_pattern_is_searched_alike() -> None:
    found, verdicts = search(["bad"] * 7 + ["good"] * 13)
    assert found == [Edge(6, 7)] and len(verdicts) <= 7


def test_it_steps_away_from_a_cluster_of_skips_where_the_bound_allows() -> None:
    truth: list[Verdict] = ["good"] * 40 + ["bad"] * 61
    for index in range(46, 56):
        truth[index] = "skip"
    _, verdicts = search(truth)
    assert sum(verdict == "skip" for verdict in verdicts.values()) <= 5  # of ten


def test_every_change_of_verdict_is_an_edge_and_each_is_narrowed() -> None:
    truth: list[Verdict] = ["good"] * 4 + ["bad"] * 3 + ["good"] * 5 + ["bad"] * 4
    verdicts: dict[int, Verdict] = {0: "good", 5: "bad", 9: "good", 15: "bad"}
    while (index := next_candidate(verdicts)) is not None:
        verdicts[index] = truth[index]
    assert find_edges(verdicts) == [Edge(3, 4), Edge(6, 7), Edge(11, 12)]
