import pytest

from harness.weights.verification.disk_reload import Output, output_difference

A: Output = [(-1.0, 5), (-2.0, 6), (-1.5, 7)]


@pytest.mark.parametrize(
    ("before", "after", "mean"),
    [
        ([A, A], [A, A], 0.0),
        ([A], [[(-1.0, 5), (-2.25, 6), (-1.75, 7)]], 0.5 / 3),
        ([A], [[(-1.0, 5), (-2.5, 9), (-9.0, 7)]], 0.25),  # what follows another token says nothing
    ],
)
def test_outputs_differ_by_the_mean_up_to_the_first_other_token(
    before: list[Output], after: list[Output], mean: float
) -> None:
    assert output_difference(before, after) == pytest.approx(mean)
