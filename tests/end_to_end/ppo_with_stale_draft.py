"""launch/ppo.py with one fault: updates reach the target and not the draft model, and say nothing. For tests only."""

import sys
from collections.abc import Sequence
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))


def leave_out_the_draft() -> None:
    """Drop what only the draft model loads, the tensors of the MTP layer, from every update call."""
    import torch

    from harness.rollout.verl_engine import VerlEngine

    update = VerlEngine.update_weights_from_tensor

    def update_target(
        self: VerlEngine,
        named_tensors: Sequence[tuple[str, torch.Tensor]],
        load_format: str | None = None,
        flush_cache: bool = True,
    ) -> None:
        update(self, [each for each in named_tensors if ".layers.2." not in each[0]], load_format, flush_cache)

    VerlEngine.update_weights_from_tensor = update_target  # type: ignore[method-assign]


if __name__ == "__main__":
    from tests.end_to_end.planted import run_with

    run_with(leave_out_the_draft)
