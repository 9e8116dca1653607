"""launch/mismatch.py with the source that PLANT names planted in the trainer's process."""

import os
import sys
from pathlib import Path

sys.path[:0] = [str(Path(__file__).parent / "plants"), str(Path(__file__).resolve().parents[3])]

import planted_sources  # noqa: E402

from harness.observer import RunContext  # noqa: E402
from harness.rollout.early_start import start_early  # noqa: E402
from harness.run import run  # noqa: E402
from harness.runtime.fork_server import ForkServer  # noqa: E402
from harness.tools import preflight  # noqa: E402
from harness.tools.command_line import parse  # noqa: E402
from harness.tools.observers import standard_observers  # noqa: E402


def job(context: RunContext) -> str:
    planted_sources.register_in_trainer()
    from harness.tools.mismatch.source_search import find_mismatch  # imports transformers

    return find_mismatch(context)


if __name__ == "__main__":
    config = parse(sys.argv[1:]).config
    ForkServer.hand_over(start_early(config, preflight.device_of(config), os.environ))
    sys.exit(run(config, standard_observers(config), job))
