"""launch/ppo.py with one fault: a projection of the engine copies its weight as the engine starts. For tests only."""

import sys
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from tests.weights.faults_in_scheduler import KEEP

KEEPS = "model.layers.0.self_attn.qkv_proj"


def copy_at_the_start() -> None:
    """Have every engine that starts keep the copy, as one does that captures CUDA graphs."""
    import torch

    import harness.build

    start = harness.build.start_engine

    def start_and_copy(*arguments: Any) -> Any:
        engine: Any = start(*arguments)
        engine.update_weights_from_tensor([(KEEPS, torch.zeros(1))], load_format=KEEP)
        engine.disconnect()  # so that the next question waits until every scheduler has done it
        return engine

    harness.build.start_engine = start_and_copy


if __name__ == "__main__":
    from tests.end_to_end.planted import run_with

    run_with(copy_at_the_start, custom_weight_loader=[KEEP])
