"""launch/torchrun.py on a host without a GPU, which imports next to nothing, so that tests need not wait for
it."""

import os
import sys
from pathlib import Path

sys.path[0] = str(Path(__file__).resolve().parents[3])

from harness.tools import forked_ranks  # noqa: E402

if __name__ == "__main__":
    forked_ranks.no_gpu = lambda: True
    forked_ranks.RANK_MODULES = tuple(os.environ.get("CHEAP_IMPORTS", "json setproctitle").split())
    sys.exit(forked_ranks.run_torchrun())
