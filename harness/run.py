"""A run on one rank, from launch to exit code: a clean start, the job, a verdict, and no process left behind.

Observers are handed in; this file knows none of them. Nothing heavy is imported at the top: on CPU the stand-ins must be
on the path before transformers and SGLang are imported.
"""

import os
import traceback
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import NoReturn

import psutil
import torch.distributed as dist

from harness.cluster.mesh import ParallelDims
from harness.cluster.placement import place
from harness.cluster.world import (
    Launch,
    World,
    WorldError,
    choose_device,
    hard_exit,
    open_world,
    own_location,
)
from harness.config.layers import ConfigError
from harness.config.run_folder import EVENTS, FOLDER_MODE, make_run_folder, write_config
from harness.config.schema import Config
from harness.runtime.cpu_standins import activate
from harness.runtime.errors import Stopped, UnsupportedEnvironment, report_user_error, say
from harness.runtime.events import Console, EventLog
from harness.runtime.observer import Observer, Observers, RunContext
from harness.runtime.phases import MEET, RUN
from harness.runtime.processes import descendants, end_processes

FAILED = 1

Job = Callable[[RunContext], str]
"""What a run does once its ranks have met; returns the verdict of a run that passed."""


def ppo() -> Job:
    """Import and return the main job: it imports transformers, which on CPU must come after the stand-ins."""
    from harness.train import train

    return train


def run(config: Config, observers: Sequence[Observer] = (), load_job: Callable[[], Job] = ppo) -> int:
    """Run a job on this rank; only rank 0 prints, except for the rank that fails.

    load_job: imports and returns the job, which may be heavy. Return the exit code where the ranks never met; once they
    have, the process exits in here.
    """
    launched = _launched_at()
    try:
        launch = Launch.from_environment(os.environ)
    except WorldError as error:
        return report_user_error(error, rank=0)
    colocate, alone = config.parallel.colocate, False
    try:
        ParallelDims.of(config.parallel).validate(launch.world_size)
        alone = True  # rank 0 may not have the errors below
        device = choose_device(config.engine.device, launch, colocate)
        own_location(device.type == "cpu", colocate)
    except ValueError as error:
        return report_user_error(error, launch.rank, alone)
    console = None
    if launch.rank == 0:  # on a copy of descriptor 1, which becomes the engine's log while the engine starts
        console = Console(os.fdopen(os.dup(1), "w", encoding="utf-8", errors="replace"), launched)
    stand_ins = activate() if device.type == "cpu" else []
    if device.type == "cuda":
        # What the engine will set on the rank that builds it: NCCL communicators are made lazily, and two ranks with
        # different settings fail in their first collective after the engine has started.
        from harness.rollout import sglang_api

        os.environ.update(sglang_api.common_environment(sglang_api.probe(), config.engine.args, os.environ))
    observer = Observers(observers)
    observer.launched(config, launch)
    try:
        if console:
            if stand_ins:
                names = ", ".join(stand_ins)
                console.say(f"CPU mode: real SGLang on the CPU, with stand-ins for what only GPUs have ({names})")
            console.say(f"waiting for {launch.world_size} ranks to meet at {os.environ['MASTER_ADDR']}")
        observer.phase_begins(MEET, None)
        with open_world(launch, device, config.run.timeout_seconds, colocate, config.network.interface) as world:
            code = _in_world(config, load_job, world, console, launched, observer)
    except Exception as error:  # they did not meet, or one of them ended before they were ready
        _print_failure(launch.rank, error)
        _end_early(observer.failed, error)
    observer.finished(code)
    end_processes(descendants(), patience_seconds=0)  # the resource tracker, which would warn of what observers remove
    hard_exit(code)


def _in_world(
    config: Config,
    load_job: Callable[[], Job],
    world: World,
    console: Console | None,
    launched: float,
    observer: Observer,
) -> int:
    """Run the job among ranks that have met. Return the exit code."""
    folder = _run_folder(config)
    if folder is None:
        held = f"run.dir = {Path(config.run.dir).resolve()} holds an earlier run; give another folder, or remove it."
        return report_user_error(ConfigError(held), world.rank)
    path = folder / EVENTS / f"rank{world.rank}.jsonl"
    events = EventLog(path, world.rank, world.host, console, observer=observer)
    dims = ParallelDims.of(config.parallel)
    context = RunContext(config=config, world=world, dims=dims, events=events, folder=folder, launched=launched)
    try:
        observer.met(context)
        place(dims, world.locations, world.device_type)  # raises where an engine cannot be placed
    except (ValueError, UnsupportedEnvironment) as error:
        return report_user_error(error, world.rank)
    if world.rank == 0:
        write_config(folder, config, world.device_type)
    observer.phase_ends(MEET, None)
    job = load_job()
    try:
        with events.phase(RUN):
            verdict = job(context)
        observer.passed()
        events.say(verdict)
        return 0
    except (ConfigError, UnsupportedEnvironment) as error:
        return report_user_error(error, world.rank, alone=True)
    except Stopped as stop:
        return report_user_error(stop, world.rank)
    except Exception as error:
        _print_failure(world.rank, error, events)
        _end_early(events.fail, error)
    except KeyboardInterrupt:
        observer.interrupted("SIGINT")
        raise
    finally:
        events.close()


def _print_failure(rank: int, error: Exception, events: EventLog | None = None) -> None:
    """Print this rank's own error; the watchdog prints the run's first failure later."""
    lines = [f"rank {rank} FAILED: {type(error).__name__}: {error}"]
    if events:
        frames = traceback.extract_tb(error.__traceback__)
        ours = [frame for frame in frames if f"{os.sep}harness{os.sep}" in frame.filename] or frames
        where = f"{Path(ours[-1].filename).name}:{ours[-1].lineno} {ours[-1].name}"
        lines.append(f"rank {rank}: in {where}; traceback in {events.path}")
    else:
        lines += "".join(traceback.format_exception(error)).splitlines()
    say("\n".join(lines) + "\n")


def _end_early(announce: Callable[[str, str], None], error: Exception) -> NoReturn:
    """Announce the error, then end the engine's processes and this one, as other ranks and threads may sit in collectives
    that never end. Where a watchdog observes, it ends this process inside announce.
    """
    announce(f"{type(error).__name__}: {error}", "".join(traceback.format_exception(error)))
    end_processes(descendants(), patience_seconds=0)
    hard_exit(FAILED)


def _run_folder(config: Config) -> Path | None:
    """Return the run directory that rank 0 made, the same on every rank; None where run.dir holds an earlier run."""
    made = [make_run_folder(config.run.dir) if dist.get_rank() == 0 else None]
    dist.broadcast_object_list(made, src=0)
    if made[0] is None:
        return None
    Path(made[0]).mkdir(FOLDER_MODE, parents=True, exist_ok=True)  # this host may not share rank 0's disk
    return Path(made[0])


def _launched_at() -> float:
    """Return when torchrun started, in UNIX seconds; without it, when this process did."""
    this = psutil.Process()
    return float((("TORCHELASTIC_RUN_ID" in os.environ and this.parent()) or this).create_time())
