"""A run on one rank, from launch to exit code: the ranks meet, the job runs, and no process is left behind.

    from harness.config.schema import Config
    from harness.run import run

    raise SystemExit(run(Config()))

started with `torchrun --nnodes=1 --nproc-per-node=2`, runs PPO on a tiny model. launch/ppo.py adds the command line,
the watchdog, reports and trackers.

This file imports neither transformers nor SGLang at the top: on a CPU both need stand-ins, which run() puts on the path
where the environment does not. So train.py, which imports both, is a file of its own.
"""

import importlib
import os
import traceback
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack, nullcontext
from pathlib import Path
from typing import Any, NoReturn

import torch.distributed as dist

from harness.cluster.mesh import ParallelDims
from harness.cluster.network import NetworkError
from harness.cluster.placement import place
from harness.cluster.world import (
    Launch,
    World,
    WorldError,
    all_gather,
    choose_device,
    open_world,
    own_location,
)
from harness.config.layers import ConfigError
from harness.config.run_folder import EVENTS, make_private, make_run_folder, open_to_others, write_config
from harness.config.schema import Config
from harness.observer import Observer, Observers, RunContext
from harness.runtime.cpu_standins import activate
from harness.runtime.errors import (
    INTERRUPTED,
    Found,
    Stopped,
    UnsupportedEnvironment,
    rank_in,
    report_of,
    report_user_error,
    tell_report,
)
from harness.runtime.events import MEET, RUN, Console, EventLog, Work, unix_seconds, working
from harness.runtime.fork_server import collecting_nothing
from harness.runtime.memory_gauge import MemoryGauge
from harness.runtime.processes import descendants, end_failed, end_processes, hard_exit, start_time
from harness.task.rewards import MakeReward

STAND_INS = "sgl_kernel, torchvision, harness_sglang_cpu"
Job = Callable[[RunContext], str]
"""What a run does once its ranks have met. Returns the verdict of a run that passed, one line."""


def run(
    config: Config,
    observers: Sequence[Observer] = (),
    job: str | Job = "harness.train:train",
    *,
    rewards: Mapping[str, MakeReward] | None = None,
    engine_class: Callable[..., Any] | None = None,
) -> int:
    """Run a job on this rank, which torchrun has started. Only rank 0 prints, except for a rank that fails.

    job: "module:function", imported once the ranks have met; or a function, whose own module must then import neither
    transformers nor SGLang at the top, unless the environment is one for the CPU or has a GPU.
    rewards: rewards in addition to those of task/rewards.py, by the name that task.reward gives.
    engine_class: called in place of VerlEngine, with the same arguments.

    Return an exit code if this rank sees a mistake before it meets the others; otherwise end the process with the code.
    """
    launched, entered = _launched_at(), unix_seconds()
    try:
        launch = Launch.from_environment(os.environ)
        dims = ParallelDims.of(config.parallel)
        dims.validate(launch.world_size)
    except ValueError as error:  # on every rank
        return report_user_error(error, rank_in(os.environ))
    try:
        device = choose_device(config.engine.device, launch, config.parallel.colocate)
        own_location(device.type == "cpu", config.parallel.colocate)  # for what it refuses, before the ranks meet
    except ValueError as error:
        return report_user_error(error, launch.rank, alone=True)
    console, doing, speaking = None, Work(""), ExitStack()  # as long as this process
    if launch.rank == 0:  # a copy of standard output: descriptor 1 becomes the engine's log while the engine starts
        console = Console(os.fdopen(os.dup(1), "w", encoding="utf-8", errors="replace"), launched)
        doing = speaking.enter_context(working(f"waiting for {launch.world_size} ranks to meet", console))
    if device.type == "cuda":
        _set_nccl_variables(config)
    else:
        activate()
    observer = Observers(observers)
    observer.launched(config, launch)
    try:  # from here on a failure has its observers, a console that is closed already too
        if console:
            if device.type == "cpu":
                console.say(
                    f"CPU mode: real SGLang on the CPU, with stand-ins for packages that need a GPU ({STAND_INS})"
                )
            console.say(f"waiting for {launch.world_size} ranks to meet at {os.environ['MASTER_ADDR']}")
        observer.phase_begins(MEET, None)
        began_to_meet = unix_seconds()
        seconds, interface = config.run.timeout_seconds, config.network.interface
        with open_world(launch, device, seconds, config.parallel.colocate, interface) as world:
            folder = _make_run_folder(config)
            context = RunContext(
                config=config,
                world=world,
                dims=dims,
                events=_open_events(folder, world, console, observer),
                folder=folder,
                launched=launched,
                observer=observer,
                rewards=rewards or {},
                engine_class=engine_class,
            )
            started = start_time(os.getpid())
            context.events.span("launcher", launched, started)
            context.events.span("imports of this process", started, entered)
            context.events.span("meeting", began_to_meet, unix_seconds())
            if launch.local_rank == 0:
                tell_report(report_of(folder, world.launcher))
            doing.what = "the job, between two phases"
            code = _run_job(job, context)
    except (WorldError, NetworkError, ConfigError) as error:  # on every rank
        code = report_user_error(error, launch.rank)
    except Exception as error:  # the ranks did not meet, or one of them ended before all were ready
        _fail(launch.rank, error, observer)
    except KeyboardInterrupt:
        _end_interrupted(observer)
    observer.finished(code)
    # What is left is multiprocessing's resource tracker. It would warn about files that observers have removed.
    end_processes(descendants())
    hard_exit(code)


def check_placement(run: RunContext) -> None:
    """Raise ConfigError on every rank if the ranks and their engines cannot be placed on the GPUs of the hosts."""
    try:
        place(run.dims, run.world.locations, run.world.device_type)
    except ValueError as error:
        raise ConfigError(str(error)) from error


def _set_nccl_variables(config: Config) -> None:
    """Set what the engine will set on the rank that builds it.

    NCCL reads it when it makes a communicator, and two ranks with different settings fail in their first collective, so
    every rank sets it before any communicator exists.
    """
    from harness.rollout import sglang_api
    from harness.rollout.engine_settings import variables_of_precision

    os.environ.update(variables_of_precision(config, "cuda", os.environ))  # which an engine inherits
    os.environ.update(sglang_api.common_environment(sglang_api.probe(), config.engine.args, os.environ))


def _make_run_folder(config: Config) -> Path:
    """Make the run directory; return it, the same on every rank. A collective call of all ranks.

    Raise ConfigError on every rank if run.dir holds an earlier run, or cannot be made on some host.
    """
    folder, problem = None, ""
    if dist.get_rank() == 0:
        try:
            folder = make_run_folder(config.run.dir)
        except OSError as error:
            problem = f"cannot be made ({error.strerror}: {error.filename}); give another folder"
        else:
            problem = "" if folder else "holds an earlier run; give another folder, or remove it"
    folder, problem = all_gather((folder, problem))[0]
    if folder:
        try:
            make_private(Path(folder))  # this host may not share rank 0's disk
            if why := open_to_others(Path(folder)):
                problem = f"cannot be used on rank {dist.get_rank()}: {why}; give another folder"
        except OSError as error:
            problem = (
                f"cannot be made on rank {dist.get_rank()} ({error.strerror}: {error.filename}); give another folder"
            )
    if problem := next(filter(None, all_gather(problem)), ""):
        raise ConfigError(f"run.dir = {folder or Path(config.run.dir).resolve()} {problem}.")
    return Path(folder)


def _open_events(folder: Path, world: World, console: Console | None, observer: Observer) -> EventLog:
    gauge = MemoryGauge(world.device.index, world.engine_gpu)  # both None on the CPU
    path = folder / EVENTS / f"rank{world.rank}.jsonl"
    return EventLog(path, world.rank, world.host, console, gauge=gauge, watcher=observer)


def _run_job(job: str | Job, context: RunContext) -> int:
    """Run the job among ranks that have met. Return the exit code."""
    rank, events, observer = context.world.rank, context.events, context.observer
    try:
        observer.met(context)
        check_placement(context)
        if rank == 0:  # as given, for the report of a run that fails early; the job writes what it became
            write_config(context.folder, context.config, context.world.device_type)
        observer.phase_ends(MEET, None)
        began = unix_seconds()
        with working(f"importing {job}", importing=True) if events.console else nullcontext(), collecting_nothing():
            work = _import_job(job) if isinstance(job, str) else job
        events.span("imports of the job", began, unix_seconds())
        with events.phase(RUN):
            verdict = work(context)
        observer.passed()
        events.say(verdict)
        return 0
    except (ConfigError, UnsupportedEnvironment) as error:
        return report_user_error(error, rank, alone=True)
    except (Found, Stopped) as end:
        return report_user_error(end, rank)
    except Exception as error:
        _fail(rank, error, observer, events)
    except KeyboardInterrupt:
        _end_interrupted(observer)
    finally:
        events.close()


def _import_job(name: str) -> Job:
    """Import the job "module:function"."""
    module, _, function = name.partition(":")
    job: Job = getattr(importlib.import_module(module), function)
    return job


def _fail(rank: int, error: Exception, observer: Observer, events: EventLog | None = None) -> NoReturn:
    """End this rank with its own error: in a few lines if `events` keeps the traceback."""
    text, trace = f"{type(error).__name__}: {error}", "".join(traceback.format_exception(error))
    lines = [f"rank {rank} FAILED: {text}"]
    if events:
        frames = traceback.extract_tb(error.__traceback__)
        own = [frame for frame in frames if f"{os.sep}harness{os.sep}" in frame.filename] or frames
        where = f"{Path(own[-1].filename).name}:{own[-1].lineno} {own[-1].name}"
        lines.append(f"rank {rank}: in {where}; traceback in {events.path}")
    else:
        lines += trace.splitlines()
    announce = events.fail if events else observer.failed  # events tell the observers too
    end_failed("\n".join(lines), text, trace, announce)


def _end_interrupted(observer: Observer) -> NoReturn:
    """End this rank after Ctrl-C; the launcher and the watchdog say so."""
    observer.interrupted("SIGINT")
    end_processes(descendants())
    hard_exit(INTERRUPTED)


def _launched_at() -> float:
    """Return the UNIX time at which torchrun started; without torchrun, at which this process did."""
    return start_time(os.getppid() if "TORCHELASTIC_RUN_ID" in os.environ else os.getpid())
