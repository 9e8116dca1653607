"""Where a difference between the log-probs of engine and trainer comes from.

    torchrun --nproc-per-node=2 launch/mismatch.py configs/cpu/quickstart.toml
    torchrun --nproc-per-node=2 launch/mismatch.py CONFIG.toml --engine.args.enable_dp_attention true --engine.args.dp_size 2

First the weights and the tokens are proven equal. Then one setting at a time is changed on these weights and tokens
(mesh, precision, batches, prefix cache, decode or prefill, temperature, attention, and each of engine.args), and the
outputs of the modules are compared. The last line names the largest source with its share, or the first module that
differs; mismatch.json and a program to attach to an issue are in the run directory. TOML files and --section.key VALUE
as for launch/ppo.py. Exit codes: 0 engine and trainer agree, 1 they do not, 2 the command line or config is wrong, 125
this machine cannot run it.
"""

import os
import sys
from dataclasses import dataclass

import _checkout

_checkout.use()

from harness.runtime.errors import rank_in, report_user_error
from harness.tools.command_line import exit_with, read_command, read_known_options, refuse_plan_options
from harness.tools.start_job import start_job


@dataclass(kw_only=True)
class Options:
    """TOML files and --section.key VALUE follow; see launch/ppo.py --help for the keys."""


def main(arguments: list[str]) -> int:
    """Return the exit code. A wrong command line is reported before anything heavy is imported."""
    rank = rank_in(os.environ)
    if rank and {"-h", "--help"} & set(arguments):
        return 0
    try:
        _, rest = read_known_options(Options, "launch/mismatch.py", __doc__ or "", arguments)
        command = read_command(rest, Options)
        refuse_plan_options(command.options)
        if not command.config.rollout.has_both:
            raise ValueError("rollout.load and rollout.only run half of what is to be compared; leave them out.")
    except ValueError as error:
        return report_user_error(error, rank)
    return start_job(command, "launch/mismatch.py", arguments, "harness.tools.mismatch.source_search:find_mismatch")


if __name__ == "__main__":
    exit_with(main, sys.argv[1:])
