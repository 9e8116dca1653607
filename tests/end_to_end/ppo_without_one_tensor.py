"""launch/ppo.py with one fault: the sync forgets model.layers.1.mlp.up_proj.weight. For tests only."""

import dataclasses
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

FORGOTTEN = "model.layers.1.mlp.up_proj.weight"


def forget() -> None:
    """Leave the tensor out of every bucket that is sent, but not out of the checkpoint that the suspects come from."""
    from harness.rollout.cpu.activate import activate

    activate()
    from harness.weights import sync

    push = sync.WeightSync.push

    def push_without(self: sync.WeightSync) -> None:
        whole = self.buckets
        self.buckets = tuple(
            dataclasses.replace(bucket, tensors=tuple(each for each in bucket.tensors if each.name != FORGOTTEN))
            for bucket in whole
        )
        try:
            push(self)
        finally:
            self.buckets = whole

    sync.WeightSync.push = push_without  # type: ignore[method-assign]


if __name__ == "__main__":
    from harness.config.command import parse
    from harness.run import run

    config = parse(sys.argv[1:]).config
    forget()
    sys.exit(run(config))
