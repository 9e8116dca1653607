"""When another trainer is not built: what is known before any rank waits for another one."""

import torch

from harness.runtime import GIB
from harness.tools.mismatch.changes import free_bytes, no_room


def test_a_trainer_whose_parameters_do_not_fit_beside_the_runs_own_is_refused_with_both_sizes() -> None:
    """A model of 14.8 billion parameters takes 55 GiB in float32. A GPU of 80 GB has no room for two of them."""
    assert no_room(55 * GIB, 60.0 * GIB) == ""
    assert no_room(55 * GIB, free_bytes(torch.device("cpu"))) == ""
    sentence = no_room(55 * GIB, 24.5 * GIB)
    assert "55.0 GiB" in sentence and "24.5" in sentence
