"""launch/ppo.py with one fault: SGLang's own update call is never given model.layers.1.mlp.up_proj.weight.

For tests only.
"""

import sys
from pathlib import Path
from typing import Any
from unittest.mock import patch

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

FORGOTTEN = "model.layers.1.mlp.up_proj.weight"


def forget() -> None:
    """Leave the tensor out of what is sent, but not out of what is planned, read back or saved."""
    from harness.weights.trainer_weights import TrainerWeights
    from harness.weights.transports import TensorTransport

    send = TensorTransport.send

    def send_without(self: TensorTransport, weights: TrainerWeights) -> None:
        everything = weights.gather

        def gather(bucket: Any) -> list[Any]:
            return [each for each in everything(bucket) if each[0] != FORGOTTEN]

        with patch.object(weights, "gather", gather):
            send(self, weights)

    TensorTransport.send = send_without  # type: ignore[method-assign]


if __name__ == "__main__":
    from tests.end_to_end.planted import run_with

    run_with(forget)
