"""Run PPO over real SGLang, with one process for each rank and without Ray.

    torchrun --nnodes=1 --nproc-per-node=2 launch/ppo.py configs/cpu/quickstart.toml
    torchrun --nnodes=2 --nproc-per-node=8 launch/ppo.py CONFIG.toml --parallel.dp 2 --parallel.tp 8
    python launch/ppo.py CONFIG.toml --dry-run --nnodes 2 --nproc-per-node 8

Later TOML files override earlier ones, and --section.key VALUE overrides them all. --check says whether the config can
work, and --dry-run where every rank and engine would be; both work without a GPU and without torchrun. Exit codes: 0
passed; 1 failed; 2 the command line or the config is wrong, which one sentence explains; 124 a timeout; 125 this
machine cannot run it; 143 SIGTERM ended the run after a checkpoint was saved. torchrun itself exits with 1 for all of
these but 0.
"""

import os
import sys

import _checkout

_checkout.use()  # this checkout's harness, and the environment that it made, whatever Python started this

from harness.runtime.errors import UnsupportedEnvironment, rank_in, report_user_error
from harness.tools import preflight
from harness.tools.command_line import Command, exit_with, print_help, read_command, refuse_numbers_of_ranks
from harness.tools.start_job import start_job


def plan(command: Command) -> int:
    """Do what --dry-run and --check ask for. Return the exit code; raise ValueError or UnsupportedEnvironment."""
    from harness.tools.plan import dry_run

    options, reading = command.options, command.reading
    ranks = range(options.nproc_per_node)
    if options.dry_run:
        dry_run.show(command, preflight.check_plan(command.config, whole=False, ranks=ranks, reading=reading))
        return 0
    preflight.go_on_in_environment()
    device = preflight.device_of(command.config)
    resolved = preflight.check_plan(command.config, device=device, ranks=ranks, reading=reading, environment=os.environ)
    return dry_run.show_check(command, resolved)


def main(arguments: list[str]) -> int:
    """Return the exit code; what is wrong is known before anything heavy is imported."""
    rank = rank_in(os.environ)
    if {"-h", "--help"} & set(arguments):
        if rank == 0:
            print_help("launch/ppo.py", __doc__ or "")
        return 0
    try:
        command = read_command(arguments)
        if command.options.dry_run or command.options.check:
            return plan(command)
        refuse_numbers_of_ranks(arguments, "add one of these, or give it to torchrun")
    except (ValueError, UnsupportedEnvironment) as error:
        return report_user_error(error, rank)
    return start_job(command, "launch/ppo.py", arguments, "harness.train:train")


if __name__ == "__main__":
    exit_with(main, sys.argv[1:])
