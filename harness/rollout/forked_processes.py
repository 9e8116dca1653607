"""Fork SGLang's processes from a server that has imported SGLang, where SGLang itself would start and import anew.

SGLang starts its schedulers and its detokenizer by multiprocessing with the method "spawn". In `forking` those starts
become requests to a fork server. Everything else stays SGLang's: the same functions run with the same arguments and
environment, and each process is a child of the one that builds the engine.
"""

import io
import multiprocessing.context
import os
import pickle
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from multiprocessing import process, reduction, resource_tracker, spawn, util
from multiprocessing.context import set_spawning_popen
from typing import Any
from unittest.mock import patch

from harness.rollout import sglang_api
from harness.runtime.fork_server import ForkedChild, ForkServer, ServerGone, Task

_passed: list[int] = []
"""In a forked process: the descriptors that its arguments refer to."""


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
            pid = server.fork(Task(f"{__name__}:run_process", payload.getvalue(), ends_with_parent=True), passed)
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


@dataclass(slots=True)
class Starts:
    """How the processes of an engine were started."""

    forked: int = 0
    spawned: int = 0
    why_spawned: str = ""
    """Why SGLang's own start was left in place, for the last process for which it was; "" if there was no server."""
    imports: list[tuple[float, float]] = field(default_factory=list)
    """When the imports of each server that forked began and ended, in UNIX seconds."""


@contextmanager
def forking(servers: Sequence[ForkServer]) -> Iterator[Starts]:
    """Fork the processes that multiprocessing spawns in this block, where a server can, and count them."""
    starts = Starts()
    spawn_process: Any = multiprocessing.context.SpawnProcess
    spawned = spawn_process._Popen

    def start(process_object: Any) -> Any:
        why = ""
        # SGLang can bind a process to a NUMA node, by another program in front of Python.
        if os.fsdecode(spawn.get_executable()) != sys.executable:
            why = f"SGLang starts it by {os.fsdecode(spawn.get_executable())}"
        for server in [] if why else servers:
            why = "every process that was started early is in use"
            if not server.used_up:
                why = server.obstacle(os.environ, sglang_api.meaning)
            if not why:
                try:
                    forked = ForkedProcess(server, process_object)
                except ServerGone as error:
                    why = str(error)
                    continue
                imported = server.imported()
                if not starts.forked:
                    os.write(2, imported.printed)  # to the engine's log, as though each process had printed it
                starts.forked += 1
                if (span := (imported.began, imported.began + imported.seconds)) not in starts.imports:
                    starts.imports.append(span)
                return forked
        starts.spawned += 1
        starts.why_spawned = why
        return spawned(process_object)

    with patch.object(spawn_process, "_Popen", staticmethod(start)):
        yield starts
