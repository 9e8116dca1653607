"""Which failures count as one, by their words and by the place that a traceback names."""

from typing import Any

import pytest

from harness.tools.trial.failure import LogFailure, pattern_for, same_cause
from tests.tools.bisection.planned import failed

WORK, OTHER = "moving/core.py:work", "moving/core.py:other"

SAME = [
    (("RuntimeError: size 8 at 0x7f12 in /tmp/a/b.py", WORK), ("RuntimeError: size 64 at 0x9a in /opt/c.py", WORK)),
    (("ValueError: request 3f2b8c1e-77aa failed", WORK), ("ValueError: request 99ab01cd-1234 failed", WORK)),
    (("KeyError: 'weights'", WORK), ("KeyError: 'weights'", "")),
    (
        ("RuntimeError: no such group of ranks", "moving/a.py:join"),
        ("RuntimeError: no such group of ranks", "moving/b.py:join"),
    ),
    (("ValueError: the batch size must be positive", WORK), ("AssertionError: the batch size must be positive", WORK)),
    (("", "", -11), ("", "", -11)),
    (("AssertionError", WORK, 1, "", "assert a"), ("AssertionError", WORK, 1, "", "assert a")),
    (("KeyError: 'weights'", WORK, 1, "", "x[a]"), ("KeyError: 'weights'", WORK, 1, "", "x[b]")),
]
OTHERWISE = [
    (("RuntimeError: The size of tensor a (8) must match b (4)", WORK), ("RuntimeError: CUDA error: an illegal memory access", WORK)),
    (("RuntimeError: CUDA error: an illegal memory access", WORK), ("RuntimeError: CUDA error: an illegal memory access", OTHER)),
    (("AssertionError", WORK), ("AssertionError", OTHER)),
    (("AssertionError", WORK, 1, "", "assert a"), ("AssertionError", WORK, 1, "", "assert b")),
    (("ModuleNotFoundError: No module named 'moving.fp8'", "s.py:<module>"), ("ModuleNotFoundError: No module named 'moving.fp4'", "s.py:<module>")),
    (("ImportError: cannot import name 'a' from 'moving'", "s.py:<module>"), ("ModuleNotFoundError: No module named 'moving'", "s.py:<module>")),
    (("TypeError: f() got an unexpected keyword argument 'a'", WORK), ("TypeError: f() got an unexpected keyword argument 'b'", WORK)),
    (("TypeError: f() got an unexpected keyword argument 'a'", WORK), ("TypeError: f() missing 1 required positional argument: 'a'", WORK)),
    (("KeyError: 'weights'", WORK), ("KeyError: 'scales'", WORK)),
    (("", "", -11), ("", "", -6)),
    (("", "", -11), ("RuntimeError: it is over", WORK)),
    (("", "", 3), ("", "", 4)),
]  # fmt: skip


@pytest.mark.parametrize(
    ("one", "other", "same"), [*((*pair, True) for pair in SAME), *((*pair, False) for pair in OTHERWISE)]
)
def test_one_cause_or_two(one: tuple[Any, ...], other: tuple[Any, ...], same: bool) -> None:
    assert bool(same_cause(failed(*one).failure, failed(*other).failure)) == same
    assert bool(same_cause(failed(*other).failure, failed(*one).failure)) == same


def test_what_to_match_finds_the_one_and_not_the_other() -> None:
    texts = ("size of tensor a (8)", "CUDA error: an illegal access")
    size, access = (LogFailure(text=f"RuntimeError: {text}") for text in texts)
    assert pattern_for(access, size) == "RuntimeError: CUDA error: an illegal access"
    assert pattern_for(size, access) == "RuntimeError: size of tensor a"
    assert pattern_for(size, size) == ""
    assert pattern_for(LogFailure(text="x", slug="known"), size) == "known"
