"""Start the import of SGLang for an engine's processes when the rank starts, before this rank itself imports torch.

What is started here are fork servers (harness/runtime/fork_server.py); VerlEngine takes its processes from them.
"""

import os
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Literal

from harness.cluster.mesh import ParallelDims
from harness.cluster.placement import EngineNode, RankLocation, parse_visible, place
from harness.config.schema import Config
from harness.rollout import sglang_api
from harness.rollout.cpu_mode import CPU_MODE
from harness.rollout.defaults import engine_defaults
from harness.rollout.graph_memory import variables_of_graphs
from harness.runtime.child_environment import engine_environment
from harness.runtime.cpu_standins import activate, installed_folder
from harness.runtime.fork_server import ForkServer

ENGINE_MODULES = ("sglang.srt.entrypoints.engine", "sglang.srt.model_executor.model_runner")
"""What the processes of an engine import."""
CPU_MODULES = (*ENGINE_MODULES, "sglang.srt.models.registry")
"""ENGINE_MODULES and all model classes. Some of these read variables that SGLang sets on a GPU once it knows the
model."""
PRELOADED = "torch_memory_saver_hook_mode_preload"
"""The library of torch_memory_saver that SGLang has its schedulers preload."""

Device = Literal["cpu", "cuda"]


def variables_of_engine(device: Device) -> dict[str, str | None]:
    """Return the variables that every engine gets in addition to its rank's; None removes one."""
    changes: dict[str, str | None] = {
        # Processes are started by `python -c`, which would import from the current folder first.
        "PYTHONSAFEPATH": "1",
        "SGLANG_RETURN_ORIGINAL_LOGPROB": None,  # log-probs at the sampling temperature, as the trainer's
        "SGLANG_BLOCK_NONZERO_RANK_CHILDREN": "0",  # otherwise Engine(node_rank >= 1) never returns
        "SGLANG_ONE_VISIBLE_DEVICE_PER_PROCESS": None,  # otherwise a scheduler cannot open handles of other GPUs
        **sglang_api.memory_imbalance_environment(),
    }
    return changes | (CPU_MODE if device == "cpu" else {})


def variables_of_precision(config: Config, device: Device, environment: Mapping[str, str]) -> dict[str, str]:
    """Return the variables that an engine of this precision needs and that the user has not set."""
    quantized = config.model.precision.quantized
    if quantized is None or device == "cpu":
        return {}
    return {name: value for name, value in quantized.variables.items() if name not in environment}


def start_early(config: Config, device: Device, environment: Mapping[str, str]) -> list[ForkServer]:
    """Return the servers for the engine that this rank builds; none if it builds none, or if SGLang is to start its
    own.

    device: where the engine will run. environment: this rank's, with torchrun's variables. Imports nothing heavy.
    """
    given = ForkServer.handed_over()
    if config.rollout.load or config.engine.start == "spawn":
        for server in given:
            server.close()
        return []
    return given or start_servers(config, device, environment)


def start_servers(config: Config, device: Device, environment: Mapping[str, str]) -> list[ForkServer]:
    """Start servers for the engine of this config, if this rank builds it; return none otherwise.

    Arguments as for start_early.
    """
    node = expected_node(config, device, environment)
    if node is None:
        return []
    changes = variables_of_engine(device) | variables_of_precision(config, device, environment)
    if device == "cpu":
        activate()
        return [ForkServer.start(CPU_MODULES, engine_environment(os.environ, changes))]
    # SGLang sets these before it starts its own.
    api, arguments = sglang_api.probe(), engine_defaults("cuda", config.engine.preset) | config.engine.args
    changes |= sglang_api.common_environment(api, config.engine.args, environment)
    changes |= variables_of_graphs(api, arguments, environment)
    changes["CUDA_VISIBLE_DEVICES"] = node.cuda_visible_devices
    of_scheduler = engine_environment(environment, changes | preload_of_memory_saver(config, environment))
    schedulers = [ForkServer.start(ENGINE_MODULES, of_scheduler) for _ in node.ranks]
    return [*schedulers, ForkServer.start(ENGINE_MODULES, engine_environment(environment, changes))]


def expected_node(config: Config, device: Device, environment: Mapping[str, str]) -> EngineNode | None:
    """Return the share of an engine that this rank will build, if every host has as many ranks as this one; else None.

    Once the ranks have met, the engine finds out for certain. A process that was started for something else is not
    used.
    """
    rank, here = int(environment["RANK"]), int(environment["LOCAL_WORLD_SIZE"])
    on_gpu = device == "cuda"
    try:
        visible = parse_visible(environment.get("CUDA_VISIBLE_DEVICES")) if on_gpu else None
        locations = [
            RankLocation(
                rank=each,
                host=str(each // here),
                local_rank=each % here,
                visible=visible,
                gpu_count=count_gpus() if on_gpu else None,
                engine_offset=here if on_gpu and not config.parallel.colocate else 0,
            )
            for each in range(int(environment["WORLD_SIZE"]))
        ]
        engines = place(ParallelDims.of(config.parallel), locations, device)
    except ValueError:  # which the ranks will report once they have met
        return None
    return next((node for engine in engines for node in engine.nodes if node.builder == rank), None)


def count_gpus() -> int:
    """Return the number of NVIDIA GPUs of this host, without importing torch."""
    return sum(file.name[6:].isdecimal() for file in Path("/dev").glob("nvidia*"))


def preload_of_memory_saver(config: Config, environment: Mapping[str, str]) -> dict[str, str | None]:
    """Return LD_PRELOAD as SGLang sets it for schedulers with the memory saver; nothing if the library is not found."""
    folder, torch = installed_folder("torch_memory_saver"), installed_folder("torch")
    if not config.engine.args.get("enable_memory_saver", True) or folder is None or torch is None:
        return {}
    found = re.search(r"^cuda\b.*= *'(\d+)", (torch / "version.py").read_text(encoding="utf-8"), re.MULTILINE)
    pattern = f"{PRELOADED}_cu{found[1]}.*.so" if found else f"{PRELOADED}.*.so"
    libraries: Sequence[Path] = [*folder.glob(pattern)] or [*folder.parent.glob(pattern)]
    if len(libraries) != 1:
        return {}
    return {"LD_PRELOAD": ":".join(filter(None, [str(libraries[0]), environment.get("LD_PRELOAD", "")]))}
