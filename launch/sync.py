"""The weight sync alone, from an FSDP2 trainer to its engines: verified, or timed.

    torchrun --nproc-per-node=2 launch/sync.py configs/cpu/quickstart.toml --syncs 200
    torchrun --nproc-per-node=2 launch/sync.py configs/cpu/quickstart.toml --transports pull tensor bucket disk
    torchrun --nproc-per-node=2 launch/sync.py configs/cpu/sync.toml --bench
    torchrun --nproc-per-node=4 launch/sync.py configs/gpu/sync_qwen2_7b.toml --bench

Without --bench, every trainer tensor is changed before each of --syncs syncs; after it, every element that the engines
hold is read back and compared, bit for bit. With --bench, each transport is timed without verification, in one table
with an all-gather of the same bytes (what the links could do). TOML files and --section.key VALUE as for launch/ppo.py.
Exit codes: 0 passed, 1 failed, 2 the command line or config is wrong.
"""

import os
import sys
from dataclasses import dataclass

import _checkout

_checkout.use()

from harness.config.resolve import SYNC_SECTIONS
from harness.config.schema import TransportName
from harness.observer import RunContext
from harness.runtime.errors import rank_in, report_user_error
from harness.tools.command_line import exit_with, read_command, read_known_options, refuse_plan_options
from harness.tools.start_job import start_job


@dataclass(kw_only=True)
class Options:
    """TOML files and --section.key VALUE follow; see launch/ppo.py --help for the keys."""

    bench: bool = False
    """Time the sync instead of verifying it."""
    syncs: int = 3
    """Verified syncs (without --bench)."""
    transports: tuple[TransportName, ...] = ()
    """Several transports one after the other, such as pull tensor bucket disk, instead of weights.transport."""
    repeats: int = 5
    """Timed syncs of --bench; the table shows their median."""


def main(arguments: list[str]) -> int:
    """Return the exit code. A wrong command line is reported before anything heavy is imported."""
    rank = rank_in(os.environ)
    if rank and {"-h", "--help"} & set(arguments):
        return 0
    try:
        options, rest = read_known_options(Options, "launch/sync.py", __doc__ or "", arguments)
        if options.syncs < 1 or options.repeats < 1:
            raise ValueError(f"--syncs = {options.syncs} and --repeats = {options.repeats} must each be at least 1.")
        command = read_command(rest, Options)
        refuse_plan_options(command.options)
    except ValueError as error:
        return report_user_error(error, rank)

    def job(context: RunContext) -> str:
        from harness.tools.sync.job import SyncJob  # imports transformers, so only now

        return SyncJob(
            bench=options.bench,
            syncs=options.syncs,
            transports=options.transports,
            repeats=options.repeats,
        )(context)

    return start_job(command, "launch/sync.py", arguments, job, SYNC_SECTIONS)


if __name__ == "__main__":
    exit_with(main, sys.argv[1:])
