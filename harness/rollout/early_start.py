"""Fork an engine's processes from one that has imported SGLang, or start their imports together with the rank.

`start_early` makes the servers (harness/runtime/fork_server.py). On a CPU the rank that will build an engine imports all
that its schedulers need and forks a server. On GPUs it starts a Python for each scheduler and for the detokenizer, which
import while it imports itself. SGLang starts its schedulers and its detokenizer by multiprocessing with the method
"spawn". In `forking` those starts become requests to the servers. Everything else stays SGLang's: the same functions
run with the same arguments and environment, and each process is a child of the one that builds the engine.
"""

import io
import multiprocessing.context
import os
import pickle
import re
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext, suppress
from multiprocessing import process, reduction, resource_tracker, spawn, util
from multiprocessing.context import set_spawning_popen
from pathlib import Path
from typing import Any
from unittest.mock import patch

from harness.cluster.mesh import ParallelDims
from harness.cluster.placement import EngineNode, RankLocation, parse_visible, place
from harness.config.schema import Config
from harness.rollout import sglang_api
from harness.rollout.engine import Starts
from harness.rollout.engine_settings import (
    Device,
    engine_defaults,
    engine_environment,
    variables_of_engine,
    variables_of_graphs,
    variables_of_precision,
)
from harness.runtime.cpu_standins import activate, installed_folder
from harness.runtime.events import working
from harness.runtime.fork_server import ForkedChild, ForkServer, ServerGone, Task, import_once, may_fork, printed

ENGINE_MODULES = ("sglang.srt.entrypoints.engine", "sglang.srt.model_executor.model_runner")
"""What the processes of an engine import."""
CPU_MODULES = (*ENGINE_MODULES, "sglang.srt.models.registry")
"""ENGINE_MODULES and all model classes. Some of these read variables that SGLang sets on a GPU once it knows the
model."""
PRELOADED = "torch_memory_saver_hook_mode_preload"
"""The library of torch_memory_saver that SGLang has its schedulers preload."""
IMPORTING = "importing torch, transformers and SGLang"
MEANING = f"{sglang_api.__name__}:meaning"

_passed: list[int] = []
"""In a forked process: the descriptors that its arguments refer to."""


def start_early(config: Config, device: Device, environment: Mapping[str, str]) -> list[ForkServer]:
    """Return the servers for the engine that this rank builds; none if it builds none, or if SGLang is to start its
    own processes.

    A rank that was forked has been given one. device: where the engine will run. environment: this rank's, with
    torchrun's variables. Call it before anything else imports torch. An import that fails is left to whoever needs it,
    to fail again.
    """
    node, given = expected_node(config, device, environment), ForkServer.handed_over()
    if node is None or config.rollout.load or config.engine.start == "spawn":
        for server in given:
            server.close()
        return []
    if given:
        return given
    changes = variables_of_engine(device) | variables_of_precision(config, device, environment)
    if device == "cpu":
        activate()
        speaks = environment["RANK"] == "0"
        with suppress(Exception), working(IMPORTING, importing=True) if speaks else nullcontext():
            import_once(CPU_MODULES, engine_environment(os.environ, changes))
        return [ForkServer.here()] if may_fork() else []
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


class PassedDescriptor:
    """A descriptor among the arguments of a process, while they are pickled."""

    def __init__(self, index: int) -> None:
        self.index = index

    def detach(self) -> int:
        """Return the descriptor, in the process to which it was passed."""
        return _passed[self.index]


class ForkedProcess(ForkedChild):
    """What multiprocessing keeps for a process that was started, as for one of the method "spawn"."""

    DupFd = PassedDescriptor

    def __init__(self, server: ForkServer, process_object: Any) -> None:
        """Fork a process that runs a multiprocessing.Process."""
        util._flush_std_streams()  # type: ignore[attr-defined]
        self._descriptors: list[int] = []
        payload = io.BytesIO()
        set_spawning_popen(self)  # type: ignore[arg-type]
        try:
            reduction.dump(spawn.get_preparation_data(process_object._name), payload)
            reduction.dump(process_object, payload)
        finally:
            set_spawning_popen(None)
        sentinel, held_by_child = os.pipe()
        parent_sentinel, held_by_parent = os.pipe()
        tracker: Any = resource_tracker.getfd()
        passed = [0, 1, 2, tracker, parent_sentinel, held_by_child, *self._descriptors]
        try:
            run = f"{__name__}:run_process"
            pid = server.fork(Task(run, payload.getvalue(), meaning=MEANING, ends_with_parent=True), passed)
        except BaseException:
            os.close(sentinel)
            os.close(held_by_parent)
            raise
        finally:
            os.close(held_by_child)
            os.close(parent_sentinel)
        super().__init__(pid, sentinel)
        self.finalizer = util.Finalize(self, _close, (held_by_parent, sentinel))

    def duplicate_for_child(self, descriptor: int) -> int:
        """Pass a descriptor to the process; return its index. multiprocessing calls it for each that it pickles."""
        self._descriptors.append(descriptor)
        return len(self._descriptors) - 1


def _close(*descriptors: int) -> None:
    for descriptor in descriptors:
        os.close(descriptor)


def run_process(payload: bytes, descriptors: Sequence[int]) -> None:
    """Run a multiprocessing.Process in the process that was forked for it."""
    tracker, parent_sentinel, _, *_passed[:] = descriptors
    resource_tracker._resource_tracker._fd = tracker  # type: ignore[attr-defined]
    stream = io.BytesIO(payload)
    process.current_process()._inheriting = True  # type: ignore[attr-defined]
    try:
        spawn.prepare(pickle.load(stream))
        process_object: Any = pickle.load(stream)
    finally:
        del process.current_process()._inheriting  # type: ignore[attr-defined]
    sys.exit(process_object._bootstrap(parent_sentinel))


@contextmanager
def forking(servers: Sequence[ForkServer]) -> Iterator[Starts]:
    """Fork the processes that multiprocessing spawns in this block, where a server can, and count them."""
    starts = Starts()
    spawn_process: Any = multiprocessing.context.SpawnProcess
    spawned = spawn_process._Popen

    def start(process_object: Any) -> Any:
        program = os.fsdecode(spawn.get_executable())
        for server in servers:
            try:
                # SGLang can bind a process to a NUMA node, by another program in front of Python.
                if program != sys.executable:
                    raise ServerGone(f"SGLang starts it by {program}")
                forked = ForkedProcess(server, process_object)
            except ServerGone as error:
                starts.why_spawned = str(error)
            else:
                if not starts.forked:
                    os.write(2, printed())  # to the engine's log, as though each process had printed it
                starts.forked += 1
                return forked
        starts.spawned += 1
        return spawned(process_object)

    with patch.object(spawn_process, "_Popen", staticmethod(start)):
        yield starts
