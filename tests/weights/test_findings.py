"""Findings as sentences, lines of what is alike, and records of a file."""

import json

from harness.weights.findings import Finding, grouped, shown

LACKING = Finding(kind="unfilled", tensor="model.layers.3.norm.weight", layers=(4, 6))


def test_a_layer_that_stands_for_others_counts_for_all_of_them() -> None:
    assert LACKING.every == [f"model.layers.{layer}.norm.weight" for layer in (3, 4, 6)]
    [line] = grouped([LACKING, Finding(kind="unfilled", tensor="model.layers.5.norm.weight")])
    assert line.count == 4 and line.layers == [3, 4, 5, 6]
    assert str(line).startswith("model.layers.3.norm.weight: ") and str(line).endswith("; and 3 like it (layers 3-6)")


def test_what_is_said_of_another_kind_rank_or_expert_is_a_line_of_its_own() -> None:
    counts = {"missing": 4, "elements": 8, "experts": 0}
    found = [
        LACKING,
        Finding(kind="unknown", tensor="model.layers.4.norm.weight"),
        *(
            Finding(kind="lacking", tensor="model.layers.4.norm.weight", ranks=(rank,), counts=counts)
            for rank in (0, 1)
        ),
        Finding(kind="refused", tensor="model.layers.4.q.weight", counts={"error": "KeyError: model.layers.4.q"}),
        Finding(kind="refused", tensor="model.layers.5.q.weight", counts={"error": "KeyError: model.layers.5.q"}),
    ]
    lines = grouped(found)
    assert [line.count for line in lines] == [3, 1, 1, 1, 2]
    assert shown(lines, 2) == [*map(str, lines[:2]), "... and 3 more lines like these"]


def test_several_tensors_together_begin_one_sentence() -> None:
    both = Finding(kind="refused", tensor="a", names=("b",), counts={"error": "ValueError: {no}"})
    assert str(both) == "a, b: the engine's loader refuses it: ValueError: {no}" and both.every == ["a", "b"]


def test_a_finding_is_read_back_from_its_record() -> None:
    assert Finding.of_table(json.loads(json.dumps(LACKING.table()))) == LACKING
