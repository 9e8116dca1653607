"""Real forked processes: what they return, what they raise, and one that is killed."""

import os
import signal
import time

import pytest

from harness.runtime.errors import UnsupportedEnvironment
from harness.tools.engine_class.forks import ForkEnded, Told, in_forks


def square(number: int) -> tuple[int, int]:
    return number * number, os.getpid()


def test_each_job_has_a_process_of_its_own() -> None:
    found = in_forks(square, {number: (number,) for number in range(5)}, processes=2)
    assert {number: answer for number, (answer, _) in found.items()} == {number: number**2 for number in range(5)}
    assert len({pid for _, pid in found.values()} | {os.getpid()}) == 6


def killed_or_slow(number: int) -> None:
    if number:
        os.kill(os.getpid(), signal.SIGKILL)
    time.sleep(600)


def test_a_job_that_is_killed_is_reported_and_the_others_are_ended() -> None:
    began = time.monotonic()
    with pytest.raises(ForkEnded) as caught:
        in_forks(killed_or_slow, {0: (0,), 1: (1,)}, processes=2)
    assert (caught.value.number, caught.value.code) == (1, -signal.SIGKILL)
    assert time.monotonic() - began < 60


class Unpicklable(Exception):
    def __reduce__(self) -> str:
        raise TypeError("not this one")


def failing(error: Exception) -> None:
    raise error


@pytest.mark.parametrize(
    ("error", "raised"),
    [(UnsupportedEnvironment("no such kernel"), UnsupportedEnvironment), (ValueError("x"), ValueError)],
)
def test_what_a_job_raises_is_raised_here(
    error: Exception, raised: type[Exception], capfd: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(raised, match=str(error)):
        in_forks(failing, {0: (error,)}, processes=1)
    assert ("Traceback" in capfd.readouterr().err) == (raised is ValueError)


def test_an_exception_that_cannot_be_sent_is_told_all_the_same() -> None:
    with pytest.raises(RuntimeError, match="told"):
        in_forks(failing, {0: (Unpicklable("told"),)}, processes=1)


def refused_by_sglang(statement: str) -> None:
    """Raise a sentence whose cause was raised by this statement, in the second line of a file of SGLang's."""
    try:
        exec(compile(f"\n{statement}", "/env/site-packages/sglang/srt/models/toy.py", "exec"), {"int": int})
    except Exception as error:
        raise Told(f"{type(error).__name__}: {error}") from error


@pytest.mark.parametrize(
    ("statement", "said"),
    [
        ("{{}: 1}", "TypeError: .* at sglang/srt/models/toy.py:2$"),
        ("assert int() == 1", "AssertionError at sglang/srt/models/toy.py:2"),
    ],
)
def test_a_sentence_names_the_place_in_sglang(statement: str, said: str) -> None:
    with pytest.raises(Told, match=said):
        in_forks(refused_by_sglang, {0: (statement,)}, processes=1)
