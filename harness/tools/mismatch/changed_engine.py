"""An engine with one setting changed: its start, calls of it that its death cannot block, and its end.

When a process of the run's own engine dies, HostEngine's watcher ends the rank. When one of a changed engine dies, the
rest of the search goes on: the call that waits for it raises, and all ranks learn of it together.
"""

import asyncio
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, NoReturn, TypeVar

from torch.distributed.device_mesh import DeviceMesh

from harness.build import make_engine
from harness.cluster.mesh import ParallelDims, build_meshes
from harness.cluster.placement import place
from harness.cluster.world import all_gather
from harness.observer import RunContext
from harness.rollout import sglang_api
from harness.rollout.engine import EngineFailed, PeerGone, RolloutEngine
from harness.rollout.engine_ranks import Group, together
from harness.rollout.schedulers import WATCH_SECONDS
from harness.rollout.verl_engine import VerlEngine
from harness.runtime.fork_server import ForkServer, ServerGone
from harness.tools.mismatch.sources import EngineChange

T = TypeVar("T")


class CannotBeMeasured(Exception):
    """The engine with a change did not start, or has died; the message says why. Raised on all ranks alike."""


class Death:
    """What this rank knows of the death of a process of a changed engine.

    Call it with the message: it is an on_death.
    """

    def __init__(self) -> None:
        self.message = ""
        self.noted = threading.Event()
        self._noted_on: threading.Thread | None = None
        self._loop: asyncio.AbstractEventLoop | None = None

    def __call__(self, message: str) -> None:
        """Note the death, and interrupt the call of the engine that waits for an answer."""
        self.message, self._noted_on = message, threading.current_thread()
        self.noted.set()
        self._interrupt()

    def watch_calls(self, engine: Any) -> None:
        """Interrupt the calls of this sglang.Engine when it dies, or has died already."""
        self._loop = engine.loop
        if self.noted.is_set():
            self._interrupt()

    def is_noted(self) -> bool:
        """Return whether this rank has noted a death. Where it builds the engine, give the watcher time to see one."""
        return self.noted.wait(WATCH_SECONDS) if self._loop else self.noted.is_set()

    def settle(self) -> None:
        """Wait until HostEngine has ended the processes of this rank: it must not find those of the next engine."""
        if self._noted_on and self._noted_on is not threading.current_thread():
            self._noted_on.join()

    def _interrupt(self) -> None:
        if self._loop:
            self._loop.call_soon_threadsafe(self._stop)

    def _stop(self) -> None:
        """Have the call that runs the loop raise RuntimeError, and every later call too.

        There is a later one: VerlEngine closes its update session after a failure inside it.
        """
        assert self._loop
        self._loop.stop()
        self._loop.call_soon(self._stop)


@dataclass(frozen=True, kw_only=True, slots=True)
class ChangedEngine:
    """A changed engine that is up. On a rank that has no part in it, `engine` is None."""

    engine: RolloutEngine | None
    death: Death

    def call(self, work: Callable[[RolloutEngine], T]) -> T | None:
        """Return work(engine); None on a rank without one. A collective call of all ranks.

        Raise CannotBeMeasured on all ranks if the engine has died. Any other failure is raised as `together` does.
        """
        try:
            return together(partial(self._on_this_rank, work))
        except Exception as error:
            messages = all_gather(self.death.message if self.death.is_noted() else "")
            if message := next(filter(None, messages), ""):
                raise CannotBeMeasured(f"the engine with this change died: {message}") from error
            raise

    def _on_this_rank(self, work: Callable[[RolloutEngine], T]) -> T | None:
        if not self.engine:
            return None
        try:
            return work(self.engine)
        except EngineFailed as error:
            if isinstance(error.__cause__, PeerGone):
                # It was raised on this rank alone; the other ranks of the engine still wait for this one in `together`.
                together(partial(_fail, error), self.engine.group.process_group)
            raise


def _fail(error: Exception) -> NoReturn:
    raise error


def cloned(servers: Sequence[ForkServer]) -> list[ForkServer]:
    """Return copies of these fork servers for one engine, so that the next engine can have copies too.

    The list is empty on a GPU, where no server can fork, and after the death of an engine, which ends the servers as
    well. Then SGLang starts the engine's processes itself.
    """
    found = []
    for server in servers:
        with suppress(ServerGone):
            found.append(server.clone())
    return found


@contextmanager
def changed_engine(
    run: RunContext,
    change: EngineChange,
    weights: Path,
    log_dir: Path,
    *,
    is_used: bool,
) -> Iterator[ChangedEngine]:
    """Start an engine for this block, and shut it down. A collective call of all ranks.

    weights: the checkpoint that it loads. log_dir: for the output of its processes. is_used: whether this rank has an
    engine. Raise CannotBeMeasured on all ranks if it does not start on one of them.
    """
    config = replace(change.config, engine=replace(change.config.engine, initial_weights="checkpoint"))
    run = replace(run, config=config, dims=ParallelDims.of(config.parallel))
    death = Death()
    if not run.engine_class:
        run = replace(run, engine_class=partial(_build, run, death, log_dir))
    engine, why_not = _start(run, weights) if is_used else _stay_out(run)
    why_not = next(filter(None, all_gather(why_not)), "")
    try:
        if why_not:
            raise CannotBeMeasured(f"cannot be changed alone: {why_not}")
        yield ChangedEngine(engine=engine, death=death)
    except CannotBeMeasured:
        _shut_down(engine, death)
        raise
    # Any other failure ends the run. It may be this rank's alone, and shutdown would wait for the other ranks.
    _shut_down(engine, death)


def _shut_down(engine: RolloutEngine | None, death: Death) -> None:
    death.settle()
    if engine:
        engine.shutdown()
        death.settle()
    if death.noted.is_set():
        # All engines of a process share its event loop, and this one stops at once from now on.
        asyncio.set_event_loop(asyncio.new_event_loop())


def _start(run: RunContext, weights: Path) -> tuple[RolloutEngine | None, str]:
    """Return this rank's engine, or why it did not start."""
    try:
        return make_engine(run, _engine_mesh(run), weights), ""
    except (EngineFailed, sglang_api.UnknownEngineArgument, ValueError) as error:
        return None, str(error)


def _stay_out(run: RunContext) -> tuple[None, str]:
    """Do what a rank without an engine must do while others start theirs."""
    # The names of later groups count the earlier ones, so every rank must make as many.
    Group.of(_engine_mesh(run)["tp"])
    for server in ForkServer.handed_over():
        server.close()
    return None, ""


def _engine_mesh(run: RunContext) -> DeviceMesh:
    return build_meshes(run.dims, run.world.device.type).engines


def _build(run: RunContext, death: Death, own_log_dir: Path, mesh: DeviceMesh, **arguments: Any) -> VerlEngine:
    """Return the engine that `make_engine` asks for, with a log of its own, and with `death` as its on_death."""
    placed = place(run.dims, run.world.locations, run.world.device_type)[run.dims.coordinates(run.world.rank).dp]
    if placed.nnodes == 1:  # from another host nobody could interrupt the head's call, so there a death ends the run
        arguments["on_death"] = death
    engine = VerlEngine(mesh, **arguments | {"log_dir": own_log_dir})
    engine.call_engine(death.watch_calls)
    return engine
