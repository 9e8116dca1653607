"""Examine ranks, hosts and links before a run, in half a minute, and name what would make it fail.

    torchrun --nnodes=2 --nproc-per-node=8 ... launch/doctor.py [CONFIG.toml ...] [--section.key VALUE ...]

Start it exactly as you will start the run. The config gives the mesh, so that groups, engines and ports are those of
the run; without a config, all ranks form one engine. Prints a table of the hosts, then OK or a numbered list: what is
wrong, on which rank and host, and what to do. Does not start an engine or import SGLang. Exit codes: 0 OK, perhaps with
warnings; 1 there are faults; 2 the command line or the config is wrong; 125 it cannot run here (torchrun itself exits
with 1 for all but 0).
"""

import os
import sys

import _checkout

_checkout.use()

from harness.config.schema import Config
from harness.runtime.errors import UnsupportedEnvironment, rank_in, report_user_error
from harness.runtime.installed import as_typed
from harness.tools import preflight
from harness.tools.command_line import parse, refuse_plan_options


def main(arguments: list[str]) -> int:
    """Return the exit code; what is wrong with the command line is known before anything heavy is imported."""
    rank = rank_in(os.environ)
    if {"-h", "--help"} & set(arguments):
        if rank == 0:
            print(as_typed(__doc__))
        return 0
    try:
        config = read(arguments, os.environ.get("WORLD_SIZE", ""))
        preflight.check_started(config, "launch/doctor.py", arguments, os.environ)
        return look(config)
    except (ValueError, UnsupportedEnvironment) as error:
        return report_user_error(error, rank)


def read(words: list[str], world_size: str) -> Config:
    """Return the config of the run to come; if it names no mesh, one engine of all ranks."""
    command = parse(words)
    refuse_plan_options(command.options)
    names_mesh = any(word.endswith(".toml") or word.startswith("--parallel.") for word in words)
    if not names_mesh and world_size.isdecimal():
        command.config.parallel.tp = int(world_size)
    return command.config


def look(config: Config) -> int:
    """Examine, and end the process (see hard_exit). Raise UnsupportedEnvironment without torch."""
    try:
        from harness.cluster.world import Launch
        from harness.runtime.processes import hard_exit
        from harness.tools.doctor.examine import examine
    except ImportError as error:
        raise UnsupportedEnvironment(f"{sys.executable} cannot import what the doctor needs: {error}.") from error
    launch = Launch.from_environment(os.environ)
    hard_exit(examine(config, launch, os.environ))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
