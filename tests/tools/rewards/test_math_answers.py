"""MATH answers: with the real math-verify where it is installed, and with a stand-in for what kills a worker."""

import importlib.util
import time

import pytest

from harness.tools.rewards.math_answers import MathWorker

STAND_IN = """
import os, signal
ExprExtractionConfig = LatexExtractionConfig = tuple
def parse(text, *_, **timeouts):
    assert timeouts == {"parsing_timeout": None}
    if text == "dies": os.kill(os.getpid(), signal.SIGSEGV)
    while text == "hangs": pass
    return text
def verify(gold, found, timeout_seconds):
    return gold == "\\\\boxed{" + found + "}"
"""


@pytest.fixture
def worker():
    made = MathWorker(cpu_seconds=1.0)
    yield made
    if made._process:
        made._process.communicate()


@pytest.fixture
def stand_in(tmp_path, monkeypatch):
    (tmp_path / "math_verify.py").write_text(STAND_IN)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path), prepend=":")


def test_an_answer_that_never_ends_scores_nothing_and_the_next_is_compared(stand_in, worker):
    started = time.monotonic()
    assert [worker.reward(each, "7") for each in ("7", "8", "hangs", "7", "dies", "7")] == [1, 0, 0, 1, 0, 1]
    assert time.monotonic() - started < 60


def test_one_process_compares_many_answers_and_ends_with_its_input(stand_in, worker):
    worker.reward("1", "1")
    process = worker._process
    assert worker.reward("a\nb \ud800", "a\nb") == 0.0 and worker.reward("a\nb", "a\nb") == 1.0
    assert worker._process is process
    process.communicate()
    assert process.returncode == 0


def test_a_process_that_cannot_import_math_verify_is_an_error_not_a_score(tmp_path, monkeypatch, worker, capfd):
    (tmp_path / "math_verify.py").write_text("raise ImportError('broken')")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path), prepend=":")
    with pytest.raises(RuntimeError, match="ended with code 1"):
        worker.reward("7", "7")
    assert "broken" in capfd.readouterr().err


@pytest.mark.skipif(importlib.util.find_spec("math_verify") is None, reason="math-verify is not installed")
@pytest.mark.parametrize(
    ("response", "ground_truth", "score"),
    [
        (r"so it is $\boxed{\frac12}$", r"\frac{1}{2}", 1.0),
        (r"\boxed{0.5}", r"\dfrac{1}{2}", 1.0),
        (r"\boxed{x+1}", "1+x", 1.0),
        (r"\boxed{\text{east}}", r"\text{East}", 1.0),
        (r"\boxed{(1,2)}", "(2,1)", 0.0),
        (r"First \boxed{3}. No, it must be $\boxed{4}$.", "4", 1.0),
        ("no answer", "4", 0.0),
        ("", "4", 0.0),
        ("$" * 5000, "1", 0.0),
        (r"\boxed{9^{9^{9}}}", "9", 0.0),
    ],
)
def test_the_real_math_verify(worker, response, ground_truth, score):
    assert worker.reward(response, ground_truth) == score
