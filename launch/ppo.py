"""PPO over real SGLang, one process a rank, without Ray.

    torchrun --nnodes=1 --nproc-per-node=2 launch/ppo.py configs/cpu/quickstart.toml
    torchrun --nnodes=2 --nproc-per-node=8 launch/ppo.py CONFIG.toml --parallel.dp 2 --parallel.tp 8
    python launch/ppo.py CONFIG.toml --dry-run --nnodes 2 --nproc-per-node 8 [--json]

TOML files are layered left to right; --section.key VALUE comes last. --dry-run prints where every rank and engine would
be and what of each GPU's memory they would take (--gpu-memory-gib), --check only whether the config can work; both need
no GPU, no torchrun and no SGLang. Exit codes: 0 passed, 1 failed, or --dry-run found that it does not fit, 2 a mistake in
what was asked, said in one sentence, 124 a phase's deadline passed, 125 this machine cannot run it. torchrun itself
answers 1 for each that is not 0.
"""

import os
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # run from a checkout, installed or not

from harness.cluster.mesh import ParallelDims
from harness.config.command import Command, parse, print_help
from harness.config.rules import warnings
from harness.runtime.errors import UnsupportedEnvironment, report_user_error
from harness.runtime.exit import exit_with
from harness.tools import preflight
from harness.tools.plan import text
from harness.tools.plan.memory import GIB, Estimate, estimate
from harness.tools.plan.placement_plan import Plan, make_plan, plan_as_json, plan_as_lines
from harness.tools.plan.shapes import UnknownShape

DEFAULT_GPU_GIB = 80.0


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
            return show(command)
    except (ValueError, UnsupportedEnvironment) as error:
        return report_user_error(error, rank)
    try:
        preflight.check_rank(command.config, "launch/ppo.py", arguments, os.environ)
    except (ValueError, UnsupportedEnvironment) as error:  # only the first rank of each host looks
        return report_user_error(error, rank=0)
    from harness.run import run
    from harness.tools.observers import standard_observers

    return run(command.config, standard_observers(command.config))


def show(command: Command) -> int:
    """What --dry-run and --check print. Returns the exit code; raises ValueError for what cannot work."""
    options = command.options
    preflight.check_plan(command.config)
    for sentence in warnings(command.config):
        print(f"warning: {sentence}", file=sys.stderr)
    plan = plan_of(command)
    if not options.dry_run:
        dims = plan.dims
        print(f"ok: {len(plan.ranks)} ranks, dp {dims.dp} tp {dims.tp} pp {dims.pp}, model {command.config.model.name}")
        return 0
    found = estimate_of(command)
    print(as_json(plan, found) if options.json else as_text(plan, command, found))
    return 0 if isinstance(found, str) or found.fits else 1


def as_text(plan: Plan, command: Command, found: Estimate | str) -> str:
    """Picture and estimate."""
    lines = [*plan_as_lines(plan), ""]
    if command.config.engine.device == "auto":
        lines[-1:] = ['engine.device = "auto" is planned as CUDA; --engine.device cpu shows the plan for CPU', ""]
    for visible in of_this_shell(command):
        lines[-1:] = [f"CUDA_VISIBLE_DEVICES = {visible} is this shell's; --cuda-visible-devices gives another", ""]
    if isinstance(found, str):
        return "\n".join([*lines, found])
    asked = command.options.gpu_memory_gib
    source = "--gpu-memory-gib" if asked else "an A100 or H100; another with --gpu-memory-gib, 140 for an H200"
    return "\n".join([*lines, *text.as_lines(found, plan.nproc_per_node, source)])


def as_json(plan: Plan, found: Estimate | str) -> str:
    """The same as one JSON object."""
    return plan_as_json(plan, memory={"unknown": found} if isinstance(found, str) else text.as_dict(found))


def estimate_of(command: Command) -> Estimate | str:
    """What each GPU would hold, or a sentence that says why that is not known."""
    if command.config.engine.device == "cpu":
        return "Memory is not estimated for the CPU."
    try:
        return estimate(command.config, int((command.options.gpu_memory_gib or DEFAULT_GPU_GIB) * GIB))
    except UnknownShape as problem:
        return f"Memory is not estimated: {problem}."


def of_this_shell(command: Command) -> list[str]:
    """This shell's CUDA_VISIBLE_DEVICES, where the plan is for one host, which is this one then, and no other is given."""
    options = command.options
    if options.cuda_visible_devices or options.nnodes > 1 or command.config.engine.device == "cpu":
        return []
    return [value] if (value := os.environ.get("CUDA_VISIBLE_DEVICES")) else []


def plan_of(command: Command) -> Plan:
    """Where everything would be; "auto" counts as CUDA, whose placement is the harder one."""
    options = command.options
    return make_plan(
        ParallelDims.of(command.config.parallel),
        nnodes=options.nnodes,
        nproc_per_node=options.nproc_per_node,
        device="cpu" if command.config.engine.device == "cpu" else "cuda",
        base_port=command.config.engine.base_port,
        visible_by_host=tuple(options.cuda_visible_devices or of_this_shell(command)),
        colocate=command.config.parallel.colocate,
    )


if __name__ == "__main__":
    exit_with(main, sys.argv[1:])
