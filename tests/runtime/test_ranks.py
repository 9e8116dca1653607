import pytest

from harness.runtime.ranks import ranks_in_words, runs, values_in_words


def test_numbers_in_a_row_are_shortened() -> None:
    assert runs([0, 1, 2, 3, 8]) == "0-3, 8" and runs([0, 1]) == "0, 1" and runs([7, 6, 5]) == "7, 6, 5"
    assert ranks_in_words([3]) == "rank 3" and ranks_in_words([8, 0, 2, 1]) == "ranks 0-2, 8"


@pytest.mark.parametrize(
    ("values", "sentence"),
    [
        (["0", None, "0"], "0 on ranks 0, 2; unset on rank 1"),
        (["", "1"], '"" on rank 0; 1 on rank 1'),
        ([0, 0], "0 on ranks 0, 1"),
    ],
)
def test_values_are_grouped_by_rank(values: list[object], sentence: str) -> None:
    assert values_in_words(dict(enumerate(values))) == sentence
