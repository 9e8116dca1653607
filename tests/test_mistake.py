import time

import pytest

from harness import mistake
from harness.mistake import say_mistake


def test_rank_0_says_one_sentence_at_once(capsys: pytest.CaptureFixture[str]) -> None:
    started = time.monotonic()
    assert say_mistake(ValueError("run.steps = 0: it must be at least 1"), rank=0) == 2
    assert time.monotonic() - started < mistake.SPEAK_FIRST_SECONDS / 2
    assert capsys.readouterr() == ("", "error: run.steps = 0: it must be at least 1\n")


def test_other_ranks_let_rank_0_speak_first(capsys: pytest.CaptureFixture[str]) -> None:
    started = time.monotonic()
    assert say_mistake(ValueError("no"), rank=1) == 2
    assert time.monotonic() - started >= mistake.SPEAK_FIRST_SECONDS
    assert capsys.readouterr() == ("", "")
