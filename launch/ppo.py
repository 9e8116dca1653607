"""PPO over real SGLang, one process a rank, without Ray.

    torchrun --nnodes=1 --nproc-per-node=2 launch/ppo.py configs/cpu/quickstart.toml
    torchrun --nnodes=2 --nproc-per-node=8 launch/ppo.py CONFIG.toml --parallel.dp 2 --parallel.tp 8
    python launch/ppo.py CONFIG.toml --dry-run --nnodes 2 --nproc-per-node 8 [--json]

TOML files are layered left to right; --section.key VALUE comes last. --dry-run prints where every rank and engine would
be and what of each GPU's memory they would take (--gpu-memory-gib), --check only whether the config can work; both need
no GPU, no torchrun and no SGLang. Exit codes: 0 passed, 1 failed, or --dry-run found that it does not fit, 2 the command
line or config is wrong, in one sentence, 124 a phase's timeout passed, 125 this machine cannot run it, 143 SIGTERM came
and a checkpoint is saved. torchrun itself exits with 1 for each that is not 0.
"""

import os
import sys

import _checkout

_checkout.use()

from harness.runtime.errors import UnsupportedEnvironment, report_user_error
from harness.tools import preflight
from harness.tools.command_line import exit_with, parse, print_help


def main(arguments: list[str]) -> int:
    """Return the exit code; what is wrong is known before anything heavy is imported."""
    rank = int(os.environ.get("RANK", "0"))
    if {"-h", "--help"} & set(arguments):
        if rank == 0:
            print_help("launch/ppo.py", __doc__ or "")
        return 0
    try:
        command = parse(arguments)
        if command.options.dry_run or command.options.check:
            from harness.tools.plan import dry_run

            preflight.check_plan(command.config)
            return dry_run.show(command)
    except (ValueError, UnsupportedEnvironment) as error:
        return report_user_error(error, rank)
    try:
        preflight.check_rank(command.config, "launch/ppo.py", arguments, os.environ)
    except (ValueError, UnsupportedEnvironment) as error:  # only the first rank of each host looks
        return report_user_error(error, rank=0)
    from harness.run import Job, ppo, run
    from harness.tools.observers import standard_observers

    def load_job() -> Job:
        if command.config.rollout.has_both:
            return ppo()
        from harness.tools import half_run

        return half_run.learner_alone if command.config.rollout.load else half_run.engine_alone

    return run(command.config, standard_observers(command.config), load_job)


if __name__ == "__main__":
    exit_with(main, sys.argv[1:])
