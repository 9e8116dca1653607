"""What launch/ppo.py --dry-run and --check print. Needs neither torch, transformers nor SGLang."""

import os
import sys

from harness.cluster.mesh import ParallelDims
from harness.config.cli import Command
from harness.config.rules import warnings
from harness.runtime.units import GIB
from harness.tools.plan.memory_estimate import MemoryEstimate
from harness.tools.plan.model_shapes import UnknownShape
from harness.tools.plan.placement_plan import plan_placement

DEFAULT_GPU_GIB = 80.0


def show(command: Command) -> int:
    """Print the plan, or with --check whether the config can work; return the exit code.

    Raises ValueError for what cannot work.
    """
    config, options = command.config, command.options
    is_cpu = config.engine.device == "cpu"
    for sentence in warnings(config):
        print(f"warning: {sentence}", file=sys.stderr)
    # The shell's list is of this host: it is planned with where the plan is of one host, and no other list is given.
    from_shell = () if options.cuda_visible_devices or options.nnodes > 1 or is_cpu else _visible_here()
    plan = plan_placement(
        ParallelDims.of(config.parallel),
        nnodes=options.nnodes,
        nproc_per_node=options.nproc_per_node,
        device="cpu" if is_cpu else "cuda",  # "auto" counts as CUDA, whose placement is the harder one
        base_port=config.engine.base_port,
        visible_by_host=tuple(options.cuda_visible_devices) or from_shell,
        colocate=config.parallel.colocate,
    )
    if not options.dry_run:
        dims = plan.dims
        print(f"ok: {len(plan.ranks)} ranks, dp {dims.dp} tp {dims.tp} pp {dims.pp}, model {config.model.name}")
        return 0
    unknown, memory = "Memory is not estimated for the CPU.", None
    if not is_cpu:
        try:
            memory = MemoryEstimate(config, int((options.gpu_memory_gib or DEFAULT_GPU_GIB) * GIB))
        except UnknownShape as problem:
            unknown = f"Memory is not estimated: {problem}."
    if options.json:
        print(plan.as_json(memory=memory.as_dict() if memory else {"unknown": unknown}))
    else:
        print("\n".join(plan.as_lines()))
        if config.engine.device == "auto":
            print('engine.device = "auto" is planned as CUDA; --engine.device cpu shows the plan for CPU')
        for visible in from_shell:
            print(f"CUDA_VISIBLE_DEVICES = {visible} is this shell's; --cuda-visible-devices gives another")
        default = "an A100 or H100; another with --gpu-memory-gib, 140 for an H200"
        source = "--gpu-memory-gib" if options.gpu_memory_gib else default
        print("", *(memory.as_lines(plan.nproc_per_node, source) if memory else [unknown]), sep="\n")
    return 0 if memory is None or memory.fits else 1


def _visible_here() -> tuple[str, ...]:
    return tuple(filter(None, [os.environ.get("CUDA_VISIBLE_DEVICES")]))
