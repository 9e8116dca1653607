"""Run all phases of a PPO run with an all-reduce in each, under harness.run, without SGLang.

It starts in seconds, and a test can harm it in any phase. Arguments: those of launch/ppo.py.
"""

import sys
import time

from harness.observer import RunContext
from harness.runtime.events import MEET, PHASES, RUN
from harness.tools.command_line import parse

IN_PHASE_SECONDS = 0.05


def phases_only(context: RunContext) -> str:
    """A job of harness.run."""
    import torch
    import torch.distributed as dist

    for step in range(context.config.run.steps):
        for name in PHASES:
            if name not in (MEET, RUN):
                with context.events.in_step(step), context.events.phase(name):
                    dist.all_reduce(torch.ones(1))
                    time.sleep(IN_PHASE_SECONDS)
                    dist.all_reduce(torch.ones(1))
    return "PASSED: all phases"


if __name__ == "__main__":
    from harness.run import run
    from harness.tools.observers import standard_observers

    config = parse(sys.argv[1:]).config
    sys.exit(run(config, standard_observers(config), phases_only))
