"""launch/ppo.py with one fault: SGLang's own update call is never given model.layers.1.mlp.up_proj.weight. For tests only."""

import dataclasses
import sys
from collections.abc import Sequence
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

FORGOTTEN = "model.layers.1.mlp.up_proj.weight"


def forget() -> None:
    """Leave the tensor out of what is sent, but not out of what is planned, read back or saved."""
    from harness.runtime.cpu_standins import activate

    activate()
    from harness.weights import transports

    push = transports.TensorTransport.push

    def push_without(
        self: transports.TensorTransport, buckets: Sequence[transports.Bucket], gather: transports.Gather
    ) -> None:
        kept = [
            dataclasses.replace(bucket, entries=tuple(each for each in bucket.entries if each.name != FORGOTTEN))
            for bucket in buckets
        ]
        push(self, kept, gather)

    transports.TensorTransport.push = push_without  # type: ignore[method-assign]


if __name__ == "__main__":
    from harness.run import run
    from harness.tools.command_line import parse
    from harness.tools.observers import standard_observers

    config = parse(sys.argv[1:]).config
    forget()
    sys.exit(run(config, standard_observers(config)))
