"""What every program that runs a job does on each rank, once its command line is right."""

import os
from collections.abc import Callable, Collection, Sequence
from contextlib import nullcontext

from harness.config.resolve import SECTIONS, resolve
from harness.observer import RunContext
from harness.rollout.early_start import start_early
from harness.runtime.errors import UnsupportedEnvironment, rank_in, report_user_error
from harness.runtime.events import working
from harness.runtime.fork_server import ForkServer, collecting_nothing
from harness.tools import kernel_caches, preflight
from harness.tools.command_line import Command


def start_job(
    command: Command,
    script: str,
    arguments: Sequence[str],
    job: str | Callable[[RunContext], str],
    sections: Collection[str] = SECTIONS,
) -> int:
    """Check what can be known before a rank starts, start the engine's processes early, and run the job
    (harness.run.run).

    command: what was read from the command line. script, arguments: its words, for messages. sections: those of the config that the job reads. Return the exit
    code of a rank that cannot start.
    """
    config, rank = command.config, rank_in(os.environ)
    try:
        if rank:  # rank 0 tells what is wrong with the command line, together with what its host lacks
            resolve(config, sections=sections, reading=command.reading)
    except (ValueError, UnsupportedEnvironment) as error:
        return report_user_error(error, rank)
    try:
        preflight.check_rank(config, script, arguments, os.environ, sections, command.reading)
    except (ValueError, UnsupportedEnvironment) as error:  # only the first rank of each host looks
        return report_user_error(error, rank=0)
    os.environ.update(kernel_caches.variables(os.environ))
    # The engine takes its processes from them, wherever this run builds it.
    ForkServer.hand_over(start_early(config, preflight.device_of(config), os.environ))
    speaks = rank_in(os.environ) == 0
    with working("importing torch", importing=True) if speaks else nullcontext(), collecting_nothing():
        from harness.run import run
        from harness.tools.observers import standard_observers
        from harness.tools.rewards.more_rewards import rewards_of

    return run(config, standard_observers(config), job, rewards=rewards_of(config))
