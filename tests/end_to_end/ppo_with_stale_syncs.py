"""launch/ppo.py with one fault: from the sync of step STALE_FROM on, no sync does anything, or says so.

For tests only.
"""

import os
import sys
from functools import partial
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))


def do_nothing_from(first: int) -> None:
    """Let WeightSync.update_engine return at once from the sync of this step on."""
    from harness.ppo import Ppo
    from harness.weights.sync import WeightSync

    sync_weights = Ppo.sync_weights

    def sync(self: Ppo, index: int) -> None:
        if index >= first:
            WeightSync.update_engine = lambda self: None  # type: ignore[method-assign]
        sync_weights(self, index)

    Ppo.sync_weights = sync  # type: ignore[method-assign]


if __name__ == "__main__":
    from tests.end_to_end.planted import run_with

    run_with(partial(do_nothing_from, int(os.environ["STALE_FROM"])))
