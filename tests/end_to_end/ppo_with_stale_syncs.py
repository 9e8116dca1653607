"""launch/ppo.py with one fault: from sync STALE_FROM on (0 is the first one), no sync does anything, or says so. For
tests only."""

import os
import sys
from itertools import count
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))


def do_nothing_from(first: int) -> None:
    """Let WeightSync.update_engine return at once from this call on."""
    import torch

    from harness.runtime.cpu_standins import activate

    if not torch.cuda.is_available():
        activate()
    from harness.weights.sync import WeightSync

    update_engine, calls = WeightSync.update_engine, count()

    def update(self: WeightSync) -> None:
        if next(calls) < first:
            update_engine(self)

    WeightSync.update_engine = update  # type: ignore[method-assign]


if __name__ == "__main__":
    from harness.run import run
    from harness.tools.command_line import parse
    from harness.tools.observers import standard_observers

    config = parse(sys.argv[1:]).config
    do_nothing_from(int(os.environ["STALE_FROM"]))
    sys.exit(run(config, standard_observers(config)))
