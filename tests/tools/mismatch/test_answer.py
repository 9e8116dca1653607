"""Which source is named, for made-up measurements."""

import json
from dataclasses import replace

import pytest

from harness.tools.mismatch.answer import HEAD, Answer, Rounding, Source
from harness.tools.mismatch.operators import Compared
from harness.tools.mismatch.sources import ENGINE_ROUTER, PRECISION
from harness.weights.log_probs import LogProbDifference, PartDifference

PART = PartDifference(bulk=0.0, mean=0.0, index=0)


def apart(mean: float) -> LogProbDifference:
    return LogProbDifference(
        mean=mean, bulk=mean, largest=mean, tokens=100, percentile_99=mean, k3=0.0, sequence=PART, position=PART
    )


def rounded(engine: float, trainer: float) -> Rounding:
    return Rounding(engine=engine, trainer=trainer, engine_bulk=engine, trainer_bulk=trainer)


def source(name: str, after: float, breadth: int = 0) -> Source:
    return Source(name=name, how="a -> b", before=apart(1.0), after=apart(after), breadth=breadth)


def answer(*sources: Source) -> Answer:
    return Answer(dtype="bfloat16", difference=apart(1.0), prefill=apart(1.0), sources=sources, first=None)


@pytest.mark.parametrize(
    ("sources", "named", "said", "is_left"),
    [
        # A narrow setting instead of the broad one that includes it, unless it removes much less.
        ((source(PRECISION, 0.12, 2), source("engine precision", 0.26, 1), source(ENGINE_ROUTER, 0.28)), ENGINE_ROUTER, "72% of the mean difference", True),
        ((source(PRECISION, 0.0, 2), source("engine precision", 0.4, 1), source(ENGINE_ROUTER, 0.5)), PRECISION, "100%", False),
        ((source(PRECISION, 0.0, 2), source("engine precision", 0.1, 1)), "engine precision", "90%", True),
        # What it leaves, if that is more than rounding.
        ((source("decode", 0.1),), "decode", "is gone, and 1.0e-01 is left", True),
        ((source("decode", 0.001),), "decode", "is gone", False),
    ],
)  # fmt: skip
def test_the_setting_that_is_named(sources: tuple[Source, ...], named: str, said: str, is_left: bool) -> None:
    found = answer(*sources)
    assert found.source == named and found.is_setting and said in found.sentence()
    assert ("left" in found.sentence()) == is_left


def test_nothing_is_named_if_no_setting_removes_half() -> None:
    cannot = Source(name="attention backend", how="a -> b", why_not="cannot be changed alone: refused")
    found = answer(source("engine precision", 0.6), cannot)
    assert found.source == "" and "SOURCE: unknown" in found.sentence() and not found.is_setting
    assert "refused" in found.table() and "could not be compared" in found.sentence()


def test_a_module_that_differs_in_another_engine_is_not_taken_for_the_runs_own() -> None:
    first = Compared(name="layers.1.mlp", error=0.5, tokens=1.0, before=0.0)
    found = replace(
        answer(source("decode", 0.9)), first=first, where="an engine with tensor parallelism tp 2 -> one rank"
    )
    assert found.source == "layers.1.mlp" and "seen in an engine with tensor parallelism" in found.sentence()


def test_an_engine_that_is_as_exact_as_the_trainer_agrees_with_it_unless_something_is_found() -> None:
    rounding = rounded(0.005, 0.006)
    small = replace(
        answer(source("decode", 0.9)), difference=apart(0.01), prefill=apart(0.01), sources=(), rounding=rounding
    )
    assert small.agrees and "is rounding: from a trainer in float32 the engine is 5.0e-03" in small.sentence()
    assert not replace(small, rounding=rounded(0.01, 0.006)).agrees
    assert not replace(small, rounding=None).agrees
    assert not replace(small, difference=apart(0.5)).agrees, "more than any precision explains"
    removes = Source(name="trainer attention", how="a -> b", before=apart(0.01), after=apart(0.004))
    assert replace(small, sources=[removes]).source == "trainer attention"
    first = Compared(name="layers.1.mlp", error=0.5, tokens=1.0, before=0.0)
    assert replace(small, first=first).source == "layers.1.mlp"


def test_a_few_tokens_that_took_other_experts_accuse_nobody() -> None:
    """Qwen3-MoE in float16 on an H100: one token of 256 took another expert and moved by 0.25."""
    rounding = Rounding(engine=1.8e-3, trainer=0.9e-3, engine_bulk=0.6e-3, trainer_bulk=0.5e-3)
    found = Answer(
        dtype="float16",
        difference=apart(2.1e-3),
        prefill=apart(2.2e-3),
        sources=(),
        first=None,
        flips=0.01,
        rounding=rounding,
    )
    assert found.agrees and "but for tokens that took other experts" in found.sentence()
    assert not replace(found, flips=0.0).agrees, "the same routing cannot be why"
    assert not replace(found, rounding=replace(rounding, engine_bulk=1.0e-3)).agrees


def test_a_side_that_computes_other_numbers_each_time_is_said() -> None:
    varies = {"engine": 1e-3, "trainer": 0.15}
    first = Compared(name="layers.0.self_attn.attn", error=0.5, tokens=1.0, before=0.0)
    found = replace(answer(source("decode", 0.9)), first=first, varies=varies)
    assert "the trainer's own log-probs differ by 1.5e-01 from one pass to the next" in found.sentence()
    assert "engine's own" not in found.sentence(), "rounding may be another one each time"
    assert "own log-probs" not in replace(found, varies={}).sentence()


def test_the_head_is_named_in_half_precision_if_rounding_cannot_be_why() -> None:
    norm = Compared(name="norm", error=0.01, tokens=0.0, before=0.01)
    found = replace(answer(source("decode", 0.9)), compared=[norm], rounding=rounded(1.0, 0.01))
    assert found.source == HEAD
    assert replace(found, rounding=rounded(1.0, 0.5)).source == ""
    assert replace(found, rounding=None).source == ""
    assert replace(found, compared=[replace(norm, name="layers.0")]).source == "", "the last norm was not compared"


def test_of_a_difference_that_is_no_number_the_setting_without_which_it_is_one_is_named() -> None:
    """An overflow in one backend, as in float16."""
    infinite = float("inf")
    sources = [
        replace(source("decode", infinite), before=apart(infinite)),
        replace(source("attention backend", 1e-4), before=apart(infinite)),
        source("KV cache", 0.5),
    ]
    found = replace(answer(*sources), difference=apart(infinite))
    assert found.source == "attention backend" and "100% of the mean difference" in found.sentence()
    assert [found.share(each) for each in sources] == [0.0, 1.0, 0.0]
    kept = json.loads(json.dumps(found.as_json(), allow_nan=False))
    assert kept["difference"]["mean"] == "inf" and kept["source"] == "attention backend"
