"""What launch/ppo.py --dry-run and --check print: where every rank and engine of a run would be.

Needs neither torch, transformers nor SGLang. launch/full_size.py executes what a GPU holds; --dry-run prints its
command.
"""

import os
import shlex
import sys
from collections.abc import Sequence
from importlib.util import find_spec
from typing import Literal

from harness.cluster.mesh import ParallelDims
from harness.cluster.placement import RankLocation, parse_visible
from harness.config.model_fields import is_hub_model
from harness.config.resolve import Resolved
from harness.runtime.installed import as_typed
from harness.tools.command_line import Command
from harness.tools.picture import picture


def planned_locations(
    dims: ParallelDims,
    nnodes: int,
    nproc_per_node: int,
    device: Literal["cpu", "cuda"],
    visible_by_host: Sequence[str | None] = (),
    colocate: bool = True,
) -> list[RankLocation]:
    """Return where the ranks of `torchrun --nnodes --nproc-per-node` would be, on hosts named host0, host1, ...

    visible_by_host: CUDA_VISIBLE_DEVICES of each host; one entry is for all, none means unset everywhere. Where it is
    unset, the host is taken to have as many GPUs as its ranks need.
    Raise the ValueErrors of ParallelDims.validate and parse_visible.
    """
    dims.validate(nnodes * nproc_per_node)
    values = visible_by_host if len(visible_by_host) == nnodes else (*visible_by_host, None)[:1] * nnodes
    offset = nproc_per_node if not colocate and device == "cuda" else 0
    needed = nproc_per_node + offset
    return [
        RankLocation(
            rank=node * nproc_per_node + local_rank,
            host=f"host{node}",
            local_rank=local_rank,
            visible=parse_visible(value),
            gpu_count=needed if value is None else None,
            engine_offset=offset,
        )
        for node, value in enumerate(values)
        for local_rank in range(nproc_per_node)
    ]


def show_check(command: Command, resolved: Resolved) -> int:
    """Print whether the config can work, and what could not be checked. Raise ValueError if it cannot be placed."""
    dims = ParallelDims.of(resolved.config.parallel)
    _picture(command, resolved, _visible(command))
    _warn(resolved)
    what = f"{dims.world_size} ranks, dp {dims.dp} tp {dims.tp} pp {dims.pp}, model {command.config.model.name}"
    print(f"ok, as far as it was checked: {what}" if resolved.not_checked else f"ok: {what}")
    for line in resolved.not_checked:
        print(f"not checked: {line}")
    if resolved.not_checked and find_spec("sglang") is None:
        print("to check more: `python3 launch/quickstart.py` makes the environment, and --check then uses it")
    if command.config.engine.device == "auto":
        device, other = ("GPUs", "cpu") if _device(resolved) == "cuda" else ("the CPU", "cuda")
        print(f'engine.device = "auto" means {device} on this machine; --engine.device {other} checks for the other')
    return 0


def show(command: Command, resolved: Resolved) -> None:
    """Print where every rank would be. Raise ValueError if it cannot be placed."""
    options, visible = command.options, _visible(command)
    lines = _picture(command, resolved, visible)
    _warn(resolved)
    print("\n".join(lines))
    if command.config.engine.device == "auto":
        print('engine.device = "auto" is planned as CUDA; --engine.device cpu shows the plan for the CPU')
    if _hidden_here(command):
        print("CUDA_VISIBLE_DEVICES hides every GPU from this shell; the plan is for hosts whose GPUs are visible")
    if visible and not options.cuda_visible_devices:
        print(f"CUDA_VISIBLE_DEVICES = {visible[0]} comes from this shell; --cuda-visible-devices gives another")
    if _device(resolved) == "cuda":
        print(f"\n{as_typed(memory_sentence(command))}")


def memory_sentence(command: Command) -> str:
    """Return the command that tells what each GPU of this run holds, or what it would need to be given."""
    if len(command.files) != 1 or is_hub_model(command.config.model.name):
        return (
            "Whether it fits in the GPUs is told by launch/full_size.py, which takes one TOML file, and a model whose config.json"
            " is in a folder here."
        )
    options = command.options
    hosts = ["--nnodes", str(options.nnodes), "--nproc-per-node", str(options.nproc_per_node)]
    keys = [f"--{key}={value}" for key, value in command.overrides]
    words = shlex.join(["launch/full_size.py", *command.files, *hosts, *keys])
    return f"Whether it fits in the GPUs is told by\n  python3 {words}"


def _device(resolved: Resolved) -> Literal["cpu", "cuda"]:
    return "cpu" if resolved.config.engine.device == "cpu" else "cuda"


def _picture(command: Command, resolved: Resolved, visible: tuple[str | None, ...]) -> list[str]:
    """Return the lines that show each engine's place. Raise ValueError if the ranks cannot be placed."""
    config, options, device = resolved.config, command.options, _device(resolved)
    dims, colocate = ParallelDims.of(config.parallel), config.parallel.colocate
    locations = planned_locations(dims, options.nnodes, options.nproc_per_node, device, visible, colocate)
    return picture(dims, locations, device, config.engine.base_port)


def _visible(command: Command) -> tuple[str | None, ...]:
    """Return CUDA_VISIBLE_DEVICES of the hosts: as given, or this shell's if the run has one host and uses GPUs."""
    options, here = command.options, os.environ.get("CUDA_VISIBLE_DEVICES")
    if options.cuda_visible_devices:
        return tuple(options.cuda_visible_devices)
    if not here or _hidden_here(command) or options.nnodes > 1 or command.config.engine.device == "cpu":
        return ()
    return (here,)


def _hidden_here(command: Command) -> bool:
    """Return whether this shell hides every GPU, from a plan for GPUs that does not give CUDA_VISIBLE_DEVICES
    itself.
    """
    is_hidden = os.environ.get("CUDA_VISIBLE_DEVICES", "0").strip() in ("", "-1")
    return is_hidden and not command.options.cuda_visible_devices and command.config.engine.device != "cpu"


def _warn(resolved: Resolved) -> None:
    for sentence in resolved.warnings:
        print(f"warning: {sentence}", file=sys.stderr)
