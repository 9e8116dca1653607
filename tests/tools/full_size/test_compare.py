"""What differs between two answers: planted differences, and two real releases."""

import copy
import json
import sys
from pathlib import Path
from typing import Any

import pytest

from harness.config.layers import ConfigError
from harness.runtime.errors import UnsupportedEnvironment
from harness.tools.full_size.command import run
from harness.tools.full_size.compare import Comparison, ask, compare, lines_of
from harness.tools.full_size.model_and_options import Options
from harness.tools.trial.environment import Environment
from harness.weights.findings import Finding, grouped

LAYERS = range(3)
EXPERTS = range(4)


def answer(sglang: str = "1.0") -> dict[str, Any]:
    """The table of a model with three layers of four experts, on two ranks."""
    sent = {f"model.layers.{n}.mlp.experts.{e}.up_proj.weight": ["bfloat16", [8, 4]] for n in LAYERS for e in EXPERTS}
    held = {f"model.layers.{n}.mlp.experts.w13_weight": ["bfloat16", [4, 8, 4]] for n in LAYERS}
    return {
        "versions": {"sglang": sglang, "transformers": "5"},
        "cannot_build": "",
        "sent": sent | {"model.norm.weight": ["bfloat16", [4]]},
        "ranks": [{"rank": rank, "parameters": 4, "bytes": 2_000_000_000} for rank in (0, 1)],
        "held": [{"ranks": [0, 1], "parameters": held | {"model.norm.weight": ["bfloat16", [4]]}}],
        "findings": [],
        "not_followed": [],
    }


def compared(change: Any) -> Comparison:
    """Compare an answer with one of a newer release that was changed in place."""
    newer = copy.deepcopy(answer("2.0"))
    change(newer)
    return compare(answer(), newer)


def test_equal_answers_differ_in_nothing() -> None:
    found = compared(lambda _: None)
    assert found.arrives == () and found.holds == () and not list(lines_of(found))
    assert found.verdict().endswith("no more of them are lost; their engines hold equal parameters")


def test_a_name_that_only_one_trainer_sends_is_said_once_for_all_layers_and_experts() -> None:
    def rename(table: dict[str, Any]) -> None:
        table["sent"] = {name.replace("up_proj", "w3"): each for name, each in table["sent"].items()}

    found = compared(rename)
    old, new = found.arrives
    for line, name, release in ((old, "up_proj", "1.0"), (new, "w3", "2.0")):
        assert line.startswith(f"model.layers.0.mlp.experts.0.{name}.weight: sent only to sglang {release} ")
        assert line.endswith("bfloat16 [8, 4]; and 11 like it (layers 0-2)")
    assert found.verdict().startswith("VERDICT: what arrives differs between sglang 1.0")


def unknown(*names: str) -> list[dict[str, Any]]:
    return [Finding(kind="unknown", tensor=name).table() for name in names]


def test_a_name_that_is_lost_in_the_newer_release_alone_is_named_once_for_all_ranks() -> None:
    def lose(table: dict[str, Any]) -> None:
        counts = {"missing": 1, "elements": 2, "experts": 1}
        table["findings"] = [
            Finding(kind="expert lost", tensor=f"model.layers.{n}.w13_weight", ranks=(rank,), counts=counts).table()
            for n in (0, 2) for rank in (2, 3)
        ]  # fmt: skip

    [line] = compared(lose).arrives
    assert line.startswith(
        "with sglang 2.0 with transformers 5: model.layers.0.w13_weight: on engine rank 2, 3 nothing"
    )
    assert line.endswith("; and 1 like it (layers 0, 2)")


def test_a_name_that_is_lost_in_both_is_no_difference_and_one_that_arrives_again_is() -> None:
    older, newer = answer("1.0"), answer("2.0")
    older["findings"] = unknown("model.norm.weight", "lm_head.weight")
    newer["findings"] = [Finding(kind="twice", tensor="model.norm.weight", counts={"times": 2}).table()]
    [line] = compare(older, newer).arrives
    assert line.startswith("with sglang 1.0 with transformers 5: lm_head.weight: ")


def test_parameters_that_differ_are_printed_with_their_ranks_and_do_not_matter_for_arriving() -> None:
    def pad(table: dict[str, Any]) -> None:
        held = table["held"][0]["parameters"]
        padded = {name: ["bfloat16", [4, 16, 4]] if "w13" in name else each for name, each in held.items()}
        table["held"] = [{"ranks": [0], "parameters": held}, {"ranks": [1], "parameters": padded}]

    found = compared(pad)
    assert found.arrives == ()
    [line] = found.holds
    assert line.startswith("model.layers.0.mlp.experts.w13_weight: bfloat16 [4, 8, 4] -> bfloat16 [4, 16, 4]")
    assert line.endswith("; on engine ranks 1; and 2 like it (layers 0-2)")
    assert "their engines hold other parameters" in found.verdict()


NEWER = "sglang 2.0 with transformers 5"


@pytest.mark.parametrize(
    ("change", "arrives", "holds"),
    [
        (
            lambda table: table["sent"].update({"model.norm.weight": ["float32", [4]]}),
            ("model.norm.weight: bfloat16 [4] -> float32 [4]",),
            (),
        ),
        (
            lambda table: table["not_followed"].append("model.norm.weight"),
            (f"model.norm.weight: cannot be followed with {NEWER}",),
            (),
        ),
        (
            lambda table: table["held"][0]["parameters"].update({"lm_head.weight": ["bfloat16", [16, 4]]}),
            (),
            (f"lm_head.weight: held only by {NEWER}, bfloat16 [16, 4]",),
        ),
        (
            lambda table: table.update(cannot_build="ValueError: 192 is not divisible by 128", held=[], ranks=[]),
            (f"{NEWER} cannot build the engine: ValueError: 192 is not divisible by 128",),
            (),
        ),
    ],
)
def test_what_differs_is_named(change: Any, arrives: tuple[str, ...], holds: tuple[str, ...]) -> None:
    found = compared(change)
    assert (found.arrives, found.holds) == (arrives, holds)


def test_one_line_for_what_is_alike() -> None:
    found = unknown("a.layers.1.b", "a.layers.2.b")
    other = Finding(kind="twice", tensor="a.layers.3.b", counts={"times": 2})
    alike, single = grouped([*map(Finding.of_table, json.loads(json.dumps(found))), other])
    assert alike.count == 2 and alike.layers == [1, 2] and str(single) == str(other)
    assert str(alike).startswith("a.layers.1.b: ") and str(alike).endswith("; and 1 like it (layers 1, 2)")


@pytest.mark.slow
def test_an_answer_that_a_release_cannot_give_has_its_words(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps({"architectures": ["NobodysForCausalLM"], "model_type": "llama"}))
    with pytest.raises(UnsupportedEnvironment, match=r"exit code 125\): sglang .* has no class for NobodysForCausalLM"):
        ask(Environment(python=sys.executable), [str(tmp_path)])


@pytest.mark.parametrize(
    ("options", "said"),
    [({"nnodes": 2}, "--against compares one engine"), ({"page": "page.html"}, "--page shows one answer")],
)
def test_what_cannot_be_compared_is_one_sentence(options: dict[str, Any], said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        run("qwen3_30b_a3b", Options(against="0.5.17", tp=4, **options))
