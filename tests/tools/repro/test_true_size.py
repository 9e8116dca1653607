"""Every case at a model's true size, one by one: what broke all their controls once broke none of the others.

A file of its own, because one worker takes a whole file.
"""

import pytest

from tests.tools.repro.test_cases import TRUE_SIZE, check


@pytest.mark.long
@pytest.mark.parametrize("slug", TRUE_SIZE)
def test_a_case_of_true_size(slug: str) -> None:
    check(slug)
