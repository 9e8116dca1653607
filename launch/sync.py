"""The weight sync alone, from an FSDP2 trainer to its engines: verified, or timed.

    torchrun --nproc-per-node=2 launch/sync.py configs/cpu/quickstart.toml --syncs 200
    torchrun --nproc-per-node=2 launch/sync.py configs/cpu/quickstart.toml --transports pull tensor bucket disk
    torchrun --nproc-per-node=2 launch/sync.py configs/cpu/sync.toml --bench
    torchrun --nproc-per-node=4 launch/sync.py configs/gpu/sync_qwen2_7b.toml --bench --json sync.json

Without --bench: before each of --syncs syncs every trainer tensor is changed; after it, every element that the engines
hold is read back and compared, bit for bit. With --bench: each transport, verification off, in one table beside an
all-gather of the same bytes (what the wire could do) and one tensor a call (VerlEngine's way). TOML files and
--section.key VALUE as for launch/ppo.py. Exit codes: 0 passed, 1 failed, 2 the command line or config is wrong.
"""

import os
import sys
from dataclasses import dataclass

import _checkout

_checkout.use()

from harness.config.schema import TransportName
from harness.runtime.errors import UnsupportedEnvironment, report_user_error
from harness.tools import preflight
from harness.tools.command_line import parse, read_known_options


@dataclass(kw_only=True)
class Options:
    """TOML files and --section.key VALUE follow; see launch/ppo.py --help for the keys."""

    bench: bool = False
    """Time the sync instead of verifying it."""
    syncs: int = 3
    """Verified syncs, where not --bench."""
    transports: tuple[TransportName, ...] = ()
    """Several transports one after the other, such as pull tensor bucket disk, in place of weights.transport."""
    repeats: int = 5
    """Timed syncs of --bench; the table shows their median."""
    one_by_one: bool = True
    """With --bench: also time one tensor a call; --no-one-by-one leaves it out."""
    json: str = ""
    """With --bench: write the table there too."""


def main(arguments: list[str]) -> int:
    """Return the exit code. A wrong command line is reported before anything heavy is imported."""
    rank = int(os.environ.get("RANK", "0"))
    if rank and {"-h", "--help"} & set(arguments):
        return 0
    try:
        options, rest = read_known_options(Options, "launch/sync.py", __doc__ or "", arguments)
        if options.syncs < 1 or options.repeats < 1:
            raise ValueError(f"--syncs = {options.syncs} and --repeats = {options.repeats} must each be at least 1.")
        command = parse(rest, Options)
        asked = command.options
        if asked.dry_run or asked.check or asked.json or asked.cuda_visible_devices or asked.nnodes != 1:
            raise ValueError(
                "--dry-run, --check and what belongs to them are options of launch/ppo.py; leave them out."
            )
    except ValueError as error:
        return report_user_error(error, rank)
    try:
        preflight.check_rank(command.config, "launch/sync.py", arguments, os.environ)
    except (ValueError, UnsupportedEnvironment) as error:
        return report_user_error(error, rank=0)
    from harness.run import Job, run
    from harness.tools.observers import standard_observers

    def load() -> Job:
        from harness.tools.sync.job import SyncJob

        return SyncJob(
            bench=options.bench,
            syncs=options.syncs,
            transports=options.transports,
            repeats=options.repeats,
            one_by_one=options.one_by_one,
            json=options.json,
        )

    return run(command.config, standard_observers(command.config), load)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
