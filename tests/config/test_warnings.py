"""Settings that run and do not do what their names promise are said."""

import pytest

from harness.config.rules import warnings
from harness.tools.command_line import parse

LOSS = "--algorithm.kl_placement loss"
NARROW = "--model.dtype bfloat16 --model.master_dtype bfloat16"


@pytest.mark.parametrize(
    ("words", "part"),
    [
        (f"{LOSS} --algorithm.kl_estimator k1", "expected gradient of zero"),
        (f"{LOSS} --algorithm.kl_estimator abs", "has not the gradient of the KL"),
        (NARROW, "the second moment never decays"),
    ],
)
def test_it_is_said(words: str, part: str) -> None:
    [sentence] = warnings(parse(words.split()).config)
    assert part in sentence


@pytest.mark.parametrize("words", ["", LOSS, f"{LOSS} --algorithm.kl_estimator k1+", "--model.dtype bfloat16"])
def test_defaults_need_no_warning(words: str) -> None:
    assert warnings(parse(words.split()).config) == []
