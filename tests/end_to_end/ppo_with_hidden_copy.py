"""launch/ppo.py with one fault: a layer of the engine computes with a hidden copy of its first weight.

For tests only.
"""

import sys
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

LAYER = "model.layers.1.mlp.down_proj"


def hide_a_copy() -> None:
    """Have every engine make the copy at its first forward pass."""
    import torch

    from harness.rollout.verl_engine import VerlEngine
    from tests.weights.faults_in_scheduler import HIDE

    start = VerlEngine.__init__

    def start_and_hide(self: VerlEngine, *arguments: Any, **named: Any) -> None:
        start(self, *arguments, custom_weight_loader=[HIDE], **named)
        self.update_weights_from_tensor([(LAYER, torch.zeros(1))], load_format=HIDE)

    VerlEngine.__init__ = start_and_hide  # type: ignore[method-assign]


if __name__ == "__main__":
    from tests.end_to_end.planted import run_with

    run_with(hide_a_copy)
