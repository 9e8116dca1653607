"""Ranks that are told by their neighbours read what they would read if they were built."""

from collections.abc import Sequence
from dataclasses import replace

import pytest
import torch

from harness.tools.engine_class.ranks_in_line import RanksInLine
from harness.weights.fusing import FusingGroup, fusing_groups
from harness.weights.tensor_view import TensorView
from harness.weights.traced.coverage import LoadCoverage, LoaderCopy
from tests.weights.toy_model import view_of

RANKS = 6
EXPERTS = [f"mlp.experts.{number}.w.weight" for number in range(2 * RANKS)]
NAMES = {"attn.q.weight": (2 * RANKS, 4), "attn.o.weight": (4, 3 * RANKS), "norm.weight": (4,)}
LAYOUT = (
    *(view_of(name, shape) for name, shape in NAMES.items()),
    *(replace(view_of(name, (3, 4)), offset=12 * number) for number, name in enumerate(EXPERTS)),  # of one fused tensor
)


def reads(view: TensorView, rank: int) -> TensorView | None:
    """Rows of q, columns of o, the whole norm, and two experts for each rank."""
    if "attn.q" in view.name:
        return replace(view, shape=(2, 4), offset=view.offset + 8 * rank)
    if "attn.o" in view.name:
        return replace(view, shape=(4, 3), offset=view.offset + 3 * rank)
    return view if "norm" in view.name or int(view.name.split(".")[2]) // 2 == rank else None


def loaded(groups: Sequence[FusingGroup], rank: int) -> LoadCoverage:
    copies, unknown = [], []
    for group in groups:
        found = {view.name: reads(view, rank) for view in group.views}
        copies.append([LoaderCopy(each, "engine's", torch.float32) for each in found.values() if each])
        unknown += [name for name, each in found.items() if not each]
    return LoadCoverage(rank=8 + rank, copies=copies, unknown=unknown)


def line_of(groups: Sequence[FusingGroup]) -> RanksInLine | None:
    return RanksInLine.of(groups, *(loaded(groups, rank) for rank in (0, 1, RANKS - 1)))


def test_ranks_between_read_what_lies_on_the_line() -> None:
    groups = fusing_groups(LAYOUT)
    line = line_of(groups)
    assert line
    for rank in range(RANKS):
        assert line.at(rank) == loaded(groups, rank)


@pytest.mark.parametrize("fault", ["lost", "shorter"])
def test_an_expert_that_breaks_the_line_is_seen_on_its_rank(fault: str) -> None:
    changed = [replace(view, shape=(2, 4)) if view.name == EXPERTS[6] else view for view in LAYOUT]
    groups = fusing_groups(view for view in changed if fault == "shorter" or view.name != EXPERTS[6])
    line = line_of(groups)
    assert line and line.at(3) is None and line.at(2) == loaded(groups, 2)


def test_what_the_last_rank_does_otherwise_is_no_line() -> None:
    groups = fusing_groups(LAYOUT)
    found = [loaded(groups, rank) for rank in (0, 1, RANKS - 1)]
    assert RanksInLine.of(groups, *found[:2], replace(found[2], missing={"w": (2, 4)})) is None
    assert RanksInLine.of(groups, *found[:2], replace(found[1], rank=found[2].rank)) is None
