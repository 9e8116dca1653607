"""PPO over real SGLang, one process a rank, without Ray.

    torchrun --nnodes=1 --nproc-per-node=2 launch/ppo.py configs/cpu/quickstart.toml
    torchrun --nnodes=2 --nproc-per-node=8 launch/ppo.py CONFIG.toml --parallel.dp 2 --parallel.tp 8
    python launch/ppo.py CONFIG.toml --dry-run --nnodes 2 --nproc-per-node 8 [--json]

TOML files are layered left to right; --section.key VALUE comes last. --dry-run prints where every rank and engine would
be, --check only whether the config can work; both need no GPU, no torchrun and no SGLang. Exit codes: 0 passed,
1 failed, 2 a mistake in what was asked, said in one sentence.
"""

import os
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # run from a checkout, installed or not

from harness.cluster.mesh import ParallelDims
from harness.cluster.plan import Plan, make_plan, plan_as_json, plan_as_table
from harness.config.command import Command, parse, print_help
from harness.mistake import say_mistake


def main(arguments: list[str]) -> int:
    """A mistake must be known before anything heavy is imported."""
    rank = int(os.environ.get("RANK", "0"))
    if {"-h", "--help"} & set(arguments):
        if rank == 0:
            print_help("launch/ppo.py", __doc__ or "")
        return 0
    try:
        command = parse(arguments)
        if command.options.dry_run or command.options.check:
            plan = plan_of(command)
            if command.options.dry_run:
                print(plan_as_json(plan) if command.options.json else plan_as_table(plan))
            return 0
    except ValueError as error:
        return say_mistake(error, rank)
    from harness.run import run

    return run(command.config)


def plan_of(command: Command) -> Plan:
    """Where everything would be; "auto" counts as CUDA, whose placement is the harder one."""
    options = command.options
    return make_plan(
        ParallelDims.of(command.config.parallel),
        nnodes=options.nnodes,
        nproc_per_node=options.nproc_per_node,
        device="cpu" if command.config.engine.device == "cpu" else "cuda",
        base_port=command.config.engine.base_port,
        visible_by_host=tuple(options.cuda_visible_devices),
        engine_gpus=command.config.parallel.engine_gpus,
    )


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
