"""What ranks say together: which of their findings are problems, padding, or passed over by design."""

from collections.abc import Mapping
from typing import Any, get_origin, get_type_hints

import torch

from harness.tools.engine_class.engine_answer import EngineAnswer
from harness.tools.engine_class.traced_ranks import EngineRank
from harness.weights.fusing import FusingGroup
from harness.weights.traced.coverage import LoadCoverage, LoaderCopy
from tests.weights.toy_model import view_of

SCALE, NORM, EXPERTS = "layers.1.attn.k_scale", "layers.1.norm.weight", "layers.1.mlp.experts.w13_weight"


def rank(number: int, missing: Mapping[str, tuple[int, int]], *, sent: tuple[str, ...] = ("w",), unknown: tuple[str, ...] = (),
         **fields: Any) -> EngineRank:  # fmt: skip
    """A rank that loads every tensor that is sent, except unknown ones; missing: of its parameters, and of how many."""
    views = [view_of(name, (4,), dtype=torch.bfloat16) for name in sent]
    copies = [[LoaderCopy(view, view.name, view.dtype)] if view.name not in unknown else [] for view in views]
    coverage = LoadCoverage(rank=number, copies=copies, unknown=list(unknown), missing=dict(missing))
    known = {
        "rank": number, "coverage": coverage, "groups": tuple(FusingGroup(views=(view,)) for view in views),
        "layers": frozenset({-1, 1}), **fields,
    }  # fmt: skip
    unread = {name: hint for name, hint in get_type_hints(EngineRank).items() if name not in known}
    return EngineRank(**known, **{name: (get_origin(hint) or hint)() for name, hint in unread.items()})


def kinds(answer: EngineAnswer) -> list[tuple[str, str]]:
    return [(each.kind, each.tensor) for each in answer.findings]


def test_scales_of_a_kv_cache_are_a_note_and_other_parameters_a_problem_of_all_layers_that_are_alike() -> None:
    answer = EngineAnswer.of([rank(0, {SCALE: (1, 1), NORM: (4, 4)}, alike={1: (2, 3)})])
    assert answer.kv_cache_scales and kinds(answer) == [("unfilled", NORM)]
    assert answer.findings[0].layers == (2, 3)


def test_a_name_that_is_passed_over_by_design_is_no_problem_and_one_that_is_not_is() -> None:
    ranks = [rank(0, {}, sent=("w", "table", "other"), unknown=("table", "other"))]
    answer = EngineAnswer.of(ranks, passed_over=("table",))
    assert kinds(answer) == [("unknown", "other")] and [each.tensor for each in answer.passed_over] == ["table"]


def test_what_the_last_rank_lacks_in_every_layer_is_padding_and_a_whole_expert_is_not() -> None:
    whole = rank(0, {EXPERTS: (0, 64), NORM: (0, 8)})
    padded = EngineAnswer.of([whole, rank(1, {EXPERTS: (16, 64), NORM: (0, 8)})])
    assert padded.findings == () and [(each.tensor, each.ranks) for each in padded.padding] == [(EXPERTS, (1,))]
    lost = EngineAnswer.of([whole, rank(1, {EXPERTS: (16, 64)}, moe_ep_rank=1, untouched_experts={EXPERTS: 1})])
    assert kinds(lost) == [("expert lost", EXPERTS)] and lost.findings[0].ranks == (1,)
    excused = lost.excusing([EXPERTS])
    assert excused.findings == () and [each.tensor for each in excused.padding] == [EXPERTS]
