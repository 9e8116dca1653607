"""A run from launch to verdict, on one rank: a clean start, the steps, a verdict, and nothing left behind.

Nothing heavy is imported at the top: on CPU the stand-ins must be on the path before transformers and SGLang are.
"""

import json
import os
import platform
import traceback
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any, NoReturn

import psutil
import torch
import torch.distributed as dist

from harness.cluster.mesh import ParallelDims
from harness.cluster.network import check_interface, own_address
from harness.cluster.picture import picture_of
from harness.cluster.placement import host_name, place
from harness.cluster.world import (
    Launch,
    World,
    WorldError,
    all_gather,
    behaviour,
    check_agreement,
    choose_device,
    hard_exit,
    host_identity,
    open_world,
    own_location,
)
from harness.config.layers import ConfigError, digest
from harness.config.schema import Config
from harness.rollout import scratch
from harness.rollout.cpu.activate import activate
from harness.runtime.errors import UnsupportedEnvironment, report_user_error
from harness.runtime.events import Console, EventLog
from harness.runtime.memory_gauge import Gauge
from harness.runtime.phases import MEET, RUN, deadline
from harness.runtime.processes import descendants, end_processes
from harness.runtime.run_folder import EVENTS, FOLDER_MODE, make_run_folder, write_config
from harness.tools.hosts.phase_client import phase_observer
from harness.tools.inject import Injector
from harness.tools.report.run_report import installed_versions
from harness.tools.watchdog.guard import Guard
from harness.tools.watchdog.processes import say

FAILED = 1
FLIGHT_RECORDS = "2000"
"""How many collectives torch's flight recorder keeps."""

Job = Callable[[Config, World, ParallelDims, EventLog, Path, float], int]
"""What a run does once its ranks have met; returns the exit code."""


def ppo() -> Job:
    """The main job. Imported late: it pulls in transformers and torch.distributed's heavier half."""
    from harness.assemble import conduct

    return conduct


def run(config: Config, load_job: Callable[[], Job] = ppo) -> int:
    """Run a job on this rank; only rank 0 prints, save for the rank that fails. Returns the exit code where the ranks never
    met; once they have, the process ends with it here (see hard_exit)."""
    launched = _launched_at()
    try:
        launch = Launch.from_environment(os.environ)
    except WorldError as error:
        return report_user_error(error, rank=0)
    try:
        ParallelDims.of(config.parallel).validate(launch.world_size)
    except ValueError as error:
        return report_user_error(error, launch.rank)
    try:
        colocate = config.parallel.colocate
        device = choose_device(config.engine.device, launch, colocate)
        own_location(device.type == "cpu", colocate)
        check_interface(config.network.interface, os.environ)
    except ValueError as error:
        return report_user_error(error, launch.rank, alone=True)  # rank 0 may know nothing of it
    console = _console(launched) if launch.rank == 0 else None
    stand_ins = activate() if device.type == "cpu" else []
    _agree_with_engine(config, device)
    guard = _guard(config, launch)
    scratch.enter(guard.post.watchdog)
    guard.begins(MEET)
    injector = Injector.of(config.run.inject, launch.rank, guard.flush)
    injector.announce = guard.injected
    try:
        if console:
            if stand_ins:
                names = ", ".join(sentence.partition(":")[0] for sentence in stand_ins)
                console.say(f"CPU mode: real SGLang on the CPU; what only GPUs have is stood in for ({names})")
            console.say(f"waiting for {launch.world_size} ranks to meet at {os.environ['MASTER_ADDR']}")
        injector.begins(MEET, None)
        with open_world(launch, device, config.run.timeout_seconds, colocate, config.network.interface) as world:
            code = _in_world(config, load_job, world, console, launched, guard, injector)
    except Exception as error:  # they did not meet, or one of them ended before they were ready
        _tell_failure(launch.rank, error)
        _end_early(guard.failed, error)
    guard.bye(code)
    end_processes(
        descendants(), patience_seconds=0
    )  # the resource tracker, which would warn of what the watchdog removes
    hard_exit(code)


def _in_world(
    config: Config,
    load_job: Callable[[], Job],
    world: World,
    console: Console | None,
    launched: float,
    guard: Guard,
    injector: Injector,
) -> int:
    folder = _run_folder(config)
    if folder is None:
        given = Path(config.run.dir).resolve()
        error = ConfigError(f"run.dir = {given} holds an earlier run; give another folder, or remove it.")
        return report_user_error(error, world.rank)
    guard.meet(all_gather(guard.post_at(own_address(os.environ))), folder)
    if config.run.inject:
        try:
            injector.check_disk(folder)
        except UnsupportedEnvironment as error:
            return report_user_error(error, world.rank)
    gauge = _gauge(world)
    events = EventLog(folder / EVENTS / f"rank{world.rank}.jsonl", world.rank, world.host, console, gauge.end)
    injector.fact = events.fact
    events.builds.append(injector.built)
    events.phase_begins.append(injector.come_late)
    events.phase_begins.append(lambda name, step: gauge.begin())
    events.phase_begins.append(guard.begins)  # before anyone is hurt at the phase
    events.phase_ends.append(guard.ends)
    events.endings.append(guard.failed)
    guard.on_leave.append(events.close)
    if world.device.type == "cuda":
        guard.on_deadline.append(lambda folder: _dump_flight_records(folder, world.rank))
    if phase_client := phase_observer(os.environ, world.rank):
        events.phase_begins += [guard.flush, phase_client]
    events.phase_begins.append(injector.begins)
    events.phase_ends.append(injector.ends)
    try:
        differences = check_agreement(digest(config), os.environ)
        dims = ParallelDims.of(config.parallel)
        placements = place(dims, world.locations, world.device_type)
    except ValueError as error:
        return report_user_error(error, world.rank)
    for sentence in differences:
        events.say(f"warning: {sentence}")
    facts = all_gather(_rank_facts(world))
    drawn = picture_of(world, dims)
    events.fact("placement", engines=[repr(placement) for placement in placements], picture=drawn)
    if console:
        console.show("\n".join(drawn))
    if world.rank == 0:
        write_config(folder, config, world.device_type)
        (folder / "environment.json").write_text(json.dumps(facts, indent=1), encoding="utf-8")
    guard.ends(MEET)
    job = load_job()
    try:
        with events.phase(RUN):
            code = job(config, world, dims, events, folder, launched)
        return code or _all_happened(config, world, injector)
    except (ConfigError, UnsupportedEnvironment) as error:
        return report_user_error(error, world.rank, alone=True)
    except Exception as error:
        _tell_failure(world.rank, error, events)
        _end_early(events.fail, error)
    except KeyboardInterrupt:
        guard.interrupted("SIGINT")
        raise
    finally:
        events.close()


def _all_happened(config: Config, world: World, injector: Injector) -> int:
    """The exit code of a run that passed: a fault that was asked for and never came is a mistake."""
    if not config.run.inject:
        return 0
    never = [str(fault) for pending in all_gather(injector.pending) for fault in pending]
    if not never:
        return 0
    error = ConfigError(f"run.inject: {', '.join(never)} never happened, because this run has no such phase.")
    return report_user_error(error, world.rank)


def _rank_facts(world: World) -> dict[str, Any]:
    """What environment.json says of one rank."""
    return {
        "rank": world.rank,
        "host": world.host,
        "device": torch.cuda.get_device_name(world.device)
        if world.device.type == "cuda"
        else platform.processor() or "cpu",
        "platform": platform.platform(),
        "versions": installed_versions(),
        "environment": behaviour(os.environ),
    }


def _tell_failure(rank: int, error: Exception, events: EventLog | None = None) -> None:
    """This rank's own word; the watchdog has the last one."""
    lines = [f"rank {rank} FAILED: {type(error).__name__}: {error}"]
    if events:
        lines.append(f"rank {rank}: in {_where(error)}; traceback in {events.path}")
    else:
        lines += "".join(traceback.format_exception(error)).splitlines()
    if torch.cuda.is_initialized():
        with suppress(
            RuntimeError
        ):  # after an illegal access every call of CUDA fails, and the first one has been told
            free, total = torch.cuda.mem_get_info()
            lines.append(f"rank {rank}: {free >> 20} of its GPU's {total >> 20} MiB are free")
    say("\n".join(lines) + "\n")


def _end_early(tell: Callable[[str, str], None], error: Exception) -> NoReturn:
    """Tell the watchdog, which ends this process and the engine's; where there is none, end both here. Peers may sit in a
    collective that will never end, and so may our own threads."""
    tell(f"{type(error).__name__}: {error}", "".join(traceback.format_exception(error)))
    end_processes(descendants(), patience_seconds=0)
    hard_exit(FAILED)


def _guard(config: Config, launch: Launch) -> Guard:
    """This rank's line to the watchdog of its host."""
    limits = config.run
    return Guard.open(
        rank=launch.rank,
        world_size=launch.world_size,
        local_rank=launch.local_rank,
        local_world_size=launch.local_world_size,
        host=host_name(host_identity()),
        deadline=lambda phase: deadline(phase, limits.phase_timeouts, limits.timeout_seconds),
        idle_seconds=limits.timeout_seconds,
        heartbeat_timeout=limits.heartbeat_timeout,
    )


def _where(error: Exception) -> str:
    """File, line and function that raised, the last of ours."""
    frames = traceback.extract_tb(error.__traceback__)
    ours = [frame for frame in frames if f"{os.sep}harness{os.sep}" in frame.filename] or frames
    return f"{Path(ours[-1].filename).name}:{ours[-1].lineno} {ours[-1].name}"


def _agree_with_engine(config: Config, device: torch.device) -> None:
    """Give this rank what the engine will set on the rank that builds it: NCCL communicators are made lazily, and two
    ranks with different settings fail in their first collective after the engine is up."""
    if device.type != "cuda":
        return
    from harness.rollout import sglang_api

    api = sglang_api.probe()
    rules = sglang_api.engine_environment_rules(api)
    os.environ.update(sglang_api.common_environment(rules, config.engine.args, os.environ))
    os.environ.setdefault(flight_recorder_variable(torch.__version__), FLIGHT_RECORDS)  # before there is a communicator


def flight_recorder_variable(version: str) -> str:
    """Return the name under which this torch reads FLIGHT_RECORDS; since 2.8 it warns of the older one, in lines of every rank."""
    release = tuple(int(part) for part in version.split(".")[:2])
    return "TORCH_FR_BUFFER_SIZE" if release >= (2, 8) else "TORCH_NCCL_TRACE_BUFFER_SIZE"


def _dump_flight_records(folder: Path, rank: int) -> None:
    """NCCL's last collectives on this rank, as torch keeps them: read by torch's `torchfrtrace`."""
    dump = getattr(torch._C._distributed_c10d, "_dump_nccl_trace", None)  # only in a torch that is built with NCCL
    if dump:
        (folder / f"flight-record-rank{rank}.pickle").write_bytes(dump())


def _run_folder(config: Config) -> Path | None:
    """Return run.dir, or a new runs/<date>-<time> as rank 0 makes it; the same on every rank. None where run.dir holds a run."""
    made = [make_run_folder(config.run.dir) if dist.get_rank() == 0 else None]
    dist.broadcast_object_list(made, src=0)
    if made[0] is None:
        return None
    Path(made[0]).mkdir(FOLDER_MODE, parents=True, exist_ok=True)  # where this host sees another disk
    return Path(made[0])


def _launched_at() -> float:
    """When torchrun started, in UNIX seconds; without it, when this process did."""
    parent = psutil.Process().parent()
    is_torchrun = parent is not None and "TORCHELASTIC_RUN_ID" in os.environ
    return float((parent if is_torchrun and parent else psutil.Process()).create_time())


def _console(launched: float) -> Console:
    """A stream of its own: descriptor 1 is the engine's log while the engine starts."""
    return Console(os.fdopen(os.dup(1), "w", encoding="utf-8", errors="replace"), launched)


def _gauge(world: World) -> Gauge:
    """Reads this rank's memory; made before there is an engine."""
    return Gauge(world.device.index if world.device.type == "cuda" else None, world.engine_gpu)
