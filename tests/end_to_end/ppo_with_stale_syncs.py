"""launch/ppo.py with one fault: from sync STALE_FROM on (0 is the first one), no sync does anything, or says so.

For tests only.
"""

import os
import sys
from functools import partial
from itertools import count
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))


def do_nothing_from(first: int) -> None:
    """Let WeightSync.update_engine return at once from this call on."""
    from harness.weights.sync import WeightSync

    update_engine, calls = WeightSync.update_engine, count()

    def update(self: WeightSync) -> None:
        if next(calls) < first:
            update_engine(self)

    WeightSync.update_engine = update  # type: ignore[method-assign]


if __name__ == "__main__":
    from tests.end_to_end.planted import run_with

    run_with(partial(do_nothing_from, int(os.environ["STALE_FROM"])))
