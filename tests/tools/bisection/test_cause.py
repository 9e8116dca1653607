"""Which failures count as one, by their words and by the place that a traceback names."""

from pathlib import Path

import pytest

from harness.tools.bisection.answer import sentences
from harness.tools.bisection.causes import cause_of, pattern_for, same_cause
from harness.tools.bisection.installation import Environment
from harness.tools.bisection.question import Options
from harness.tools.bisection.state import Attempt
from tests.tools.bisection.test_confidence import Anything, Drawn, Silent, state_of

WORK, OTHER = "moving/core.py:work", "moving/core.py:other"


def failed(text: str, place: str = "", code: int = 1, slug: str = "") -> Attempt:
    return Attempt(code=code, timed_out=False, seconds=1.0, verdict="bad", log="", failure=text, place=place, slug=slug)


SAME = [
    (("RuntimeError: size 8 at 0x7f12 in /tmp/a/b.py", WORK), ("RuntimeError: size 64 at 0x9a in /opt/c.py", WORK)),
    (("ValueError: request 3f2b8c1e-77aa failed", WORK), ("ValueError: request 99ab01cd-1234 failed", WORK)),
    (("KeyError: 'weights'", WORK), ("KeyError: 'weights'", "")),
    (
        ("RuntimeError: no such group of ranks", "moving/a.py:join"),
        ("RuntimeError: no such group of ranks", "moving/b.py:join"),
    ),
    (("ValueError: the batch size must be positive", WORK), ("AssertionError: the batch size must be positive", WORK)),
    (("TypeError: the batch must be a list of ints", WORK), ("TypeError: the batch must be a list of tensors", WORK)),
    (
        ("TypeError: Args.__init__() got an unexpected keyword argument 'max_bs'", "s.py:<module>"),
        ("TypeError: Unexpected keyword argument 'max_bs'", "s.py:<module>"),
    ),
    (("", "", -11), ("", "", -11)),
]
OTHERWISE = [
    (("RuntimeError: The size of tensor a (8) must match b (4)", WORK), ("RuntimeError: CUDA error: an illegal memory access", WORK)),
    (("RuntimeError: CUDA error: an illegal memory access", WORK), ("RuntimeError: CUDA error: an illegal memory access", OTHER)),
    (("AssertionError", WORK), ("AssertionError", OTHER)),
    (("ModuleNotFoundError: No module named 'moving.fp8'", "s.py:<module>"), ("ModuleNotFoundError: No module named 'moving.fp4'", "s.py:<module>")),
    (("ImportError: cannot import name 'a' from 'moving'", "s.py:<module>"), ("ModuleNotFoundError: No module named 'moving'", "s.py:<module>")),
    (("TypeError: f() got an unexpected keyword argument 'a'", WORK), ("TypeError: f() got an unexpected keyword argument 'b'", WORK)),
    (("TypeError: f() got an unexpected keyword argument 'a'", WORK), ("TypeError: f() missing 1 required positional argument: 'a'", WORK)),
    (("KeyError: 'weights'", WORK), ("KeyError: 'scales'", WORK)),
    (("", "", -11), ("", "", -6)),
    (("", "", -11), ("RuntimeError: it is over", WORK)),
    (("", "", 3), ("", "", 4)),
]  # fmt: skip


@pytest.mark.parametrize(("one", "other"), SAME)
def test_one_cause(one: tuple[str, str], other: tuple[str, str]) -> None:
    assert same_cause(cause_of(failed(*one)), cause_of(failed(*other)))
    assert same_cause(cause_of(failed(*other)), cause_of(failed(*one)))


@pytest.mark.parametrize(("one", "other"), OTHERWISE)
def test_two_causes(one: tuple[str, str], other: tuple[str, str]) -> None:
    assert not same_cause(cause_of(failed(*one)), cause_of(failed(*other)))
    assert not same_cause(cause_of(failed(*other)), cause_of(failed(*one)))


def test_what_to_match_finds_the_one_and_not_the_other() -> None:
    size, access = (
        failed(f"RuntimeError: {text}") for text in ("size of tensor a (8)", "CUDA error: an illegal access")
    )
    assert pattern_for(access, size) == "RuntimeError: CUDA error: an illegal access"
    assert pattern_for(size, access) == "RuntimeError: size of tensor a"
    assert pattern_for(size, size) == ""
    assert pattern_for(failed("x", slug="known"), size) == "known"


class Planned(Drawn):
    """Each candidate fails as is planned for it, or passes."""

    failures: list[str]

    def _run_once(self, index: int, environment: Environment, number: int) -> Attempt:
        text = self.failures[index]
        made = failed(text, code=int(bool(text)))
        made.verdict, made.reason = ("bad" if text else "good"), text
        return made


def test_what_hides_it_all_along_is_named() -> None:
    failures = [""] * 5 + ["KeyError: 'a'"] * 6 + ["ValueError: off"] * 7
    state = state_of(Options(good="1.0", bad="1.17", package="moving", probe="none"), 18)
    state.resolved = True
    bisection = Planned(state, Path("/nowhere"), Anything(), Silent(), 0, True)
    bisection.failures = failures
    answer = bisection.run()
    assert answer.kind == "several" and answer.second and answer.second.seen == 11
    told = " ".join(sentences(state, answer))
    assert "first seen at 1.11" in told and "may hide it: 1.5, " in told and "--match 'ValueError: off' looks" in told
