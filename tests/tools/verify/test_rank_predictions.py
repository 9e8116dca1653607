"""A layer that stands for others predicts the same as each of them does when it is traced itself."""

from tests.tools.full_size.forks import answer_of


def test_a_layer_stands_for_its_like() -> None:
    assert answer_of("tests.tools.verify.predictions:compare_predictions", "deepseek_v3", 2, 2) == 2
