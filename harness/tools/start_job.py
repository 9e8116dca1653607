"""What every program that runs a job does on each rank, once its command line is right."""

import os
from collections.abc import Callable, Collection, Sequence

from harness.config.resolve import SECTIONS
from harness.config.schema import Config
from harness.observer import RunContext
from harness.rollout.early_start import start_early
from harness.runtime import kernel_caches
from harness.runtime.errors import UnsupportedEnvironment, report_user_error
from harness.runtime.fork_server import ForkServer, collecting_nothing
from harness.tools import preflight


def start_job(
    config: Config,
    script: str,
    arguments: Sequence[str],
    job: str | Callable[[RunContext], str],
    sections: Collection[str] = SECTIONS,
) -> int:
    """Check what can be known before a rank starts, start the engine's processes early, and run the job
    (harness.run.run).

    script, arguments: the command line, for messages. sections: those of the config that the job reads. Return the exit
    code of a rank that cannot start.
    """
    try:
        preflight.check_rank(config, script, arguments, os.environ, sections)
    except (ValueError, UnsupportedEnvironment) as error:  # only the first rank of each host looks
        return report_user_error(error, rank=0)
    os.environ.update(kernel_caches.variables(os.environ))
    # The engine takes its processes from them, wherever this run builds it.
    ForkServer.hand_over(start_early(config, preflight.device_of(config), os.environ))
    with collecting_nothing():
        from harness.run import run
        from harness.tools.observers import standard_observers
        from harness.tools.rewards.more_rewards import rewards_of

    return run(config, standard_observers(config), job, rewards=rewards_of(config))
