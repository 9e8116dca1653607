"""VerlEngine: the SPMD face of one SGLang engine. Every rank of its group makes the same call, with its own tensors.

One rank of each host builds the sglang.Engine there; the first rank of the group (tp 0, pp 0) calls it and broadcasts
the answer. The interface is that of the VerlEngine which sglang shipped until 0.4.7.post1.
"""

import asyncio
import atexit
import multiprocessing
import os
import shutil
import sys
import tempfile
import threading
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager, nullcontext
from functools import partial
from pathlib import Path
from typing import Any, Literal, TypeVar
from unittest.mock import patch

import psutil
import torch
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

from harness.cluster.network import bracketed, own_address
from harness.cluster.placement import gpu_of
from harness.cluster.ports import PortLease
from harness.cluster.world import child_environment, hard_exit
from harness.rollout import engine_processes, sglang_api
from harness.rollout.cpu_mode import cores_by_tp_rank, cpu_environment
from harness.rollout.defaults import Defaults, engine_defaults
from harness.rollout.engine_errors import EngineFailed
from harness.rollout.engine_processes import (
    EngineLog,
    in_one_line,
    output_to,
    restore_handlers,
    sigterm_blocked,
    started_processes,
)
from harness.rollout.engine_ranks import Group, locate_ranks
from harness.rollout.schedulers import LOADER, SchedulerChannel, load_own, seed_sampling
from harness.runtime import scratch
from harness.runtime.cpu_standins import activate
from harness.runtime.errors import say
from harness.runtime.processes import descendants, end_processes, is_resource_tracker

T = TypeVar("T")

NamedTensors = Sequence[tuple[str, torch.Tensor]]


class VerlEngine:
    """One SGLang engine, driven by all ranks of device_mesh_cpu in step."""

    _every_rank_builds = False

    def __init__(
        self,
        device_mesh_cpu: DeviceMesh,
        nnodes: int | None = None,
        *,
        log_dir: Path | None = None,
        base_port: int = 30000,
        colocate: bool = True,
        defaults: Defaults = "harness",
        on_death: Callable[[str], None] | None = None,
        **engine_args: Any,
    ) -> None:
        """Build the engine; return on every rank when it serves.

        The arguments are in README.md; of the harness's defaults, `dropped_defaults` are those that this sglang does not
        have. Raises UnknownEngineArgument for an argument that it does not have, ValueError for a placement that cannot
        work, and EngineFailed on every rank when the engine does not start.
        """
        self.api = sglang_api.probe()
        auto: Literal["cpu", "cuda"] = "cuda" if torch.cuda.is_available() else "cpu"
        self.device_type: Literal["cpu", "cuda"] = engine_args.get("device") or auto
        self._cpu = self.device_type == "cpu"
        if self._cpu:
            activate()
        checked = sglang_api.check_arguments(self.api, engine_args, engine_defaults(self.device_type, defaults))
        self.engine_args, self.dropped_defaults = checked
        self.has_memory_saver = not self._cpu and bool(self.engine_args.get("enable_memory_saver"))
        self.group = Group.of(device_mesh_cpu)
        self._locations, self.node, self.nnodes = locate_ranks(self.group, self.device_type, colocate, nnodes)
        self.device = torch.device("cpu")
        if not self._cpu:  # the GPU, as this process sees it, that its engine rank runs on
            offset = self._locations[self.group.rank].engine_offset
            self.device = torch.device("cuda", torch.cuda.current_device() + offset)
        self._removes_log = log_dir is None
        folder = log_dir or Path(tempfile.mkdtemp(prefix="harness-engine-"))
        self.log = folder / f"engine-rank{self.node.builder}.log"
        self._engine: Any = None
        self._channel = SchedulerChannel(self)
        self._in_update = False
        self._calls = ThreadPoolExecutor(1, "async_generate")
        self.has_prefixes = True
        """Whether the prefix cache may hold keys and values of the weights before an update."""
        self._lease: PortLease | None = None
        self._stop_watching = threading.Event()
        self._on_death = on_death
        self._handlers = engine_processes.own_handlers()
        self._scratch = scratch.engine_folder()
        self._log = EngineLog(self.log)
        # One key for all ranks: a scheduler fetches tensors in host memory from each trainer rank, which asks for it.
        key = self.group.broadcast(bytes(multiprocessing.current_process().authkey))
        multiprocessing.current_process().authkey = key
        if not self._cpu:
            sglang_api.patch_reductions(self.api)
        arguments = self.engine_args | self._placement_arguments(base_port)
        failure: Exception | None = None
        try:
            if self.is_builder or self._every_rank_builds:
                self._build(arguments)
        except Exception as error:
            failure = error
        for rank, message in self.group.all_gather(failure and in_one_line(failure)).items():
            if message:
                raise EngineFailed(f"engine start failed on rank {rank}: {message}") from failure

    @property
    def is_head(self) -> bool:
        """Whether this rank calls the engine."""
        return self.group.rank == self.group.head

    @property
    def is_builder(self) -> bool:
        """Whether this rank's process is the parent of this host's schedulers."""
        return self.group.rank == self.node.builder

    @property
    def visible_gpus(self) -> tuple[str, ...] | None:
        """The GPUs (indices or UUIDs) of this host whose CUDA IPC handles the schedulers here can open; None on CPU."""
        own = self.node.visible_devices
        return None if own is None else own + self.node.other_devices

    @property
    def trainer_gpu(self) -> str | None:
        """The GPU of this rank's trainer, written as in visible_gpus; None on CPU."""
        return None if self._cpu else gpu_of(self._locations[self.group.rank])

    @property
    def inner(self) -> Any:
        """The sglang.Engine of this process, None where there is none."""
        return self._engine

    @property
    def update_group_address(self) -> tuple[str, int]:
        """On the head: its host as the engine's ranks reach it, and the leased port on which it may wait for them."""
        assert self._lease is not None
        return self._own_address(), self._lease.ports.update_group_port

    def generate(
        self,
        prompt: str | Sequence[str] | None = None,
        sampling_params: Mapping[str, Any] | None = None,
        input_ids: Sequence[Sequence[int]] | None = None,
        return_logprob: bool = False,
        **arguments: Any,
    ) -> Any:
        """Return what sglang.Engine.generate answers, the same on every rank; only the head's arguments count.

        prompt (text) needs an engine with a tokenizer: skip_tokenizer_init = False. input_ids: a list of prompts; the
        answer is a list of dicts with output_ids, meta_info and, with a tokenizer, text. arguments: as this sglang
        names them. Repeat a prompt for several samples: sampling_params n > 1 makes them depend on timing.
        """
        arguments |= {"sampling_params": dict(sampling_params or {}), "return_logprob": return_logprob}
        arguments |= {"prompt": prompt} if input_ids is None else {"input_ids": [list(ids) for ids in input_ids]}
        return self._generate(arguments)

    def _generate(self, arguments: dict[str, Any]) -> Any:
        self.has_prefixes = True
        return self.on_head(lambda engine: engine.generate(**arguments))

    async def async_generate(self, *arguments: Any, **named: Any) -> Any:
        """Return what generate does, without blocking the caller's event loop.

        Several calls are answered one after the other, in the order in which they were made: the same on every rank.
        """
        call = partial(self.generate, *arguments, **named)
        return await asyncio.get_running_loop().run_in_executor(self._calls, call)

    def update_weights_from_tensor(
        self, named_tensors: NamedTensors, load_format: str | None = None, flush_cache: bool = True
    ) -> None:
        """Load full tensors under their checkpoint names; every rank passes the same names and its own copy.

        named_tensors: (name, Tensor or DTensor); a DTensor is gathered over its mesh. load_format: None sends them one
        handle each, "flattened_bucket" all in one buffer; the path of a custom loader is passed on.
        All tensors of one call arrive together: SGLang fuses some only when their other half is in the same call.
        """
        sent: Any = [(name, _full(tensor)) for name, tensor in named_tensors]
        flattened = load_format == "flattened_bucket"
        if flattened:
            sent = sglang_api.flattened_bucket(self.api, sent)
        if self.group.pp > 1:  # SGLang would give every stage the first one's tensors
            with self.weight_update():
                self.ask(load_own, sent)
            if flush_cache:
                self.flush_cache()
        else:
            whole = sglang_api.serialize(sent) if flattened else [(n, sglang_api.serialize(t)) for n, t in sent]
            payloads = self.group.gather(whole)
            self.on_head(lambda engine: self.send(engine, payloads, load_format, flush_cache))
        del sent  # the engine has answered: only now may the memory behind the handles go

    @contextmanager
    def weight_update(self) -> Iterator[None]:
        """Make all updates, and all that is asked, in here one session of SGLang's; inside another it does nothing.

        Since 0.5.21 sglang works over the whole model at the end of each session; weights lie as a loader leaves them in
        between. Before, there are no sessions. The connection for what is asked is made anew in it, by an update call:
        SGLang derives tensors anew after a session without any.
        """
        if self._in_update:
            yield
            return
        session = ExitStack()
        if self.api.update_session:
            self.on_head(lambda engine: session.enter_context(sglang_api.update_session(self.api, engine)))
            self.disconnect()
        self._in_update = True
        try:
            yield
        except BaseException:
            # Perhaps on this rank alone: the others cannot be asked to wait for an answer.
            if self.is_head:
                session.__exit__(*sys.exc_info())
            raise
        else:
            if self.api.update_session:
                self.on_head(lambda _: session.close())
                self.disconnect()
        finally:
            self._in_update = False

    def ask(self, function: Callable[[Any, Any], T], argument: object = None) -> T:
        """Run function(model, argument) in the scheduler beside each rank; return its answer. A collective call.

        function: of a module of the harness, imported there by its name. argument: this rank's own; pickled, as the
        answer is. It runs beside SGLang's own thread: the engine must be idle. What touches weights belongs in a
        weight_update(). Needs custom weight loaders (sglang 0.4.8).
        A failure raises on every rank: SchedulerFailed beside the scheduler that failed, EngineFailed elsewhere; where a
        scheduler has died, EngineFailed on the rank beside it alone.
        """
        return self._channel.ask(function, argument)

    def seed(self, number: int) -> None:
        """Seed the engine's sampling: what it generates then does not depend on what it has generated before.

        A collective call, the number the same on all ranks; before sglang 0.4.8 it does nothing.
        """
        if self.api.custom_weight_loader:
            with self.weight_update():
                self.ask(seed_sampling, number)

    @property
    def answer_seconds(self) -> float:
        """How long this rank's scheduler took for the last ask, its GPU included."""
        return self._channel.answer_seconds

    def disconnect(self) -> None:
        """Let the next ask wait until every scheduler has done what SGLang's calls asked of it before.

        SGLang answers for tp rank 0 of the first stage alone; not all of its calls end in a barrier of the tp ranks,
        and none in one of the stages.
        """
        self._channel.close()

    def release_memory_occupation(self, tags: Sequence[str] | None = None) -> None:
        """Free the GPU memory of "kv_cache", "weights" or both; their contents are lost. None: all."""
        self._move_memory("release_memory_occupation", tags)

    def resume_memory_occupation(self, tags: Sequence[str] | None = None) -> None:
        """Take the memory back. The weights must be updated before the engine generates again."""
        self._move_memory("resume_memory_occupation", tags)

    def flush_cache(self) -> None:
        """Forget the prefix cache, whose keys and values are of the old weights."""
        self.on_head(lambda engine: sglang_api.call(engine, "flush_cache"))
        self.has_prefixes = False

    def update_weights_from_disk(self, path: str) -> None:
        """Load a checkpoint folder that every host of the engine can read; it may go when this returns."""
        # By default the format is the engine's own, and "dummy" would refuse.
        self.on_head(lambda engine: sglang_api.call(engine, "update_weights_from_disk", path, "auto"))
        if self.api.custom_weight_loader and len(self.group.ranks) > 1:
            self._channel.open()  # when every scheduler has loaded it

    def shutdown(self) -> None:
        """End the engine; return on every rank when its processes are gone. Twice does no harm."""
        self.disconnect()
        self._stop()
        atexit.unregister(self._stop)
        if self._removes_log:
            shutil.rmtree(self.log.parent, ignore_errors=True)
        self.group.barrier()

    def send(self, engine: Any, payloads: Sequence[Any], load_format: str | None, flush_cache: bool) -> None:
        """Make one update call, on the head. payloads: one for each tp rank, as update_weights_from_tensor makes them."""
        update: Any = list(payloads)
        if load_format != "flattened_bucket":
            update = [
                (named[0][0], sglang_api.local_serialized_tensor(self.api, [payload for _, payload in named]))
                for named in zip(*payloads, strict=True)
            ]
        with nullcontext() if self._in_update else sglang_api.update_session(self.api, engine):
            sglang_api.call(
                engine, "update_weights_from_tensor", update, load_format=load_format, flush_cache=flush_cache
            )

    def _move_memory(self, method: str, tags: Sequence[str] | None) -> None:
        arguments = sglang_api.memory_arguments(self.api, tags)
        self.on_head(lambda engine: sglang_api.call(engine, method, **arguments))
        self.disconnect()

    def on_head(self, call: Callable[[Any], T]) -> T:
        """Run call(engine) on the head; return its value, or raise its failure, on every rank."""
        outcome: tuple[str, Any] = ("value", None)
        if self.is_head:
            try:
                outcome = ("value", sglang_api.in_its_loop(self.inner, partial(call, self.inner))())
                self._log.answered()
            except Exception as error:
                self.group.broadcast(("error", in_one_line(error)))
                raise
        kind, value = self.group.broadcast(outcome)
        if kind == "error":
            raise EngineFailed(f"on rank {self.group.head}: {value}")
        return value

    def _build(self, arguments: dict[str, Any]) -> None:
        """Build the engine of this host, and watch its processes."""
        if self.api.custom_sigquit_handler:
            arguments["custom_sigquit_handler"] = engine_processes.ignore_signal
        if self.api.custom_weight_loader:
            arguments["custom_weight_loader"] = [*arguments.get("custom_weight_loader", ()), LOADER]
        before = descendants()
        sigquit = nullcontext() if self.api.custom_sigquit_handler else engine_processes.sigquit_raises()
        with started_processes() as started:
            try:
                temporary_files = patch.object(tempfile, "tempdir", self._scratch.name)
                with (
                    child_environment(self._environment()),
                    temporary_files,
                    output_to(self.log),
                    sigquit,
                    sigterm_blocked(),
                ):
                    self._engine = self._start(arguments)
                    if self.is_head:
                        sglang_api.start_loop(self.inner, engine_processes.TAKEN)
                        sglang_api.unlink_shared_memory(self.inner)
            except Exception as error:
                failure = self._log.start_failure(error, started)
                end_processes(_children(before), patience_seconds=0)
                self._scratch.cleanup()
                raise EngineFailed(failure) from error
            finally:
                restore_handlers(self._handlers, engine_serves=self._engine is not None)
        if self.inner is not None:
            atexit.unregister(
                self.inner.shutdown
            )  # which would end more than the engine's processes: see sglang_api.close
        atexit.register(self._stop)
        self._stop_watching = engine_processes.watch_processes(_children(before), self._report_death)

    def _start(self, arguments: dict[str, Any]) -> Any:
        return sglang_api.build_engine(arguments)

    def _report_death(self, name: str, pid: int, signal_name: str) -> None:
        """Report first: to end the other processes may take seconds, in which this rank may be ended too."""
        message = self._log.death(name, pid, signal_name)
        if self._on_death:
            self._on_death(message)
        else:
            say(message + "\n")
        end_processes(_children(), patience_seconds=0)  # of no use without one of them, and they hold a GPU
        self._scratch.cleanup()
        if not self._on_death:
            scratch.remove_what_exit_would()
            hard_exit(1)  # a thread cannot raise in the main thread, which may sit in a collective for minutes

    def _stop(self) -> None:
        self._stop_watching.set()
        if self._engine is not None:
            engine = self.inner or self._engine
            end_processes(_children(), lambda: sglang_api.close(engine), patience_seconds=0)
            self._engine = None
            restore_handlers(self._handlers, engine_serves=False)
        self._scratch.cleanup()
        if self._lease:
            self._lease.close()
            self._lease = None

    def _placement_arguments(self, base_port: int) -> dict[str, Any]:
        """Lease ports on each builder, and agree on the head's address."""
        lease = self._lease = PortLease(base_port) if self.is_builder else None
        own = f"{bracketed(self._own_address())}:{lease.ports.dist_init_port}" if lease else ""
        address = self.group.broadcast(own)
        if lease is None:
            return {}
        arguments: dict[str, Any] = {
            "tp_size": self.group.tp,
            "pp_size": self.group.pp,
            "nnodes": self.nnodes,
            "node_rank": self.node.node_rank,
            "base_gpu_id": self.node.base_gpu_id,
            "dist_init_addr": address,
            "port": lease.ports.port,
            "nccl_port": lease.ports.nccl_port,  # since 0.4.9
        }
        return {name: value for name, value in arguments.items() if name in self.api.engine_arguments}

    def _own_address(self) -> str:
        """Where the engine's other hosts find this one; loopback where there are none."""
        return "127.0.0.1" if self.nnodes == 1 else own_address(os.environ)

    def _environment(self) -> dict[str, str | None]:
        """Return what this engine's processes see beside the parent's environment; None removes."""
        changes: dict[str, str | None] = {
            "SGLANG_RETURN_ORIGINAL_LOGPROB": None,  # log-probs at the sampling temperature, as the trainer's
            "SGLANG_BLOCK_NONZERO_RANK_CHILDREN": "0",  # else Engine(node_rank >= 1) never returns
            "SGLANG_ONE_VISIBLE_DEVICE_PER_PROCESS": None,  # else a scheduler can open no handle of another GPU
            **sglang_api.memory_imbalance_environment(self.api),
            **scratch.variables(Path(self._scratch.name)),
        }
        if self.node.cuda_visible_devices is not None:
            changes["CUDA_VISIBLE_DEVICES"] = self.node.cuda_visible_devices
        if self._cpu:
            # Each engine rank gets its trainer rank's share of the cores, so that engines of one host do not overlap.
            shared = cpu_environment(int(os.environ["LOCAL_WORLD_SIZE"]))
            cores = shared["SGLANG_CPU_OMP_THREADS_BIND"].split("|")
            mine = [cores[self._locations[rank].local_rank] for rank in self.node.ranks]
            if not self.api.cores_by_device:
                tp_ranks = [self.group.ranks.index(rank) % self.group.tp for rank in self.node.ranks]
                mine = cores_by_tp_rank(mine, tp_ranks, self.group.tp)
            changes |= shared | {"SGLANG_CPU_OMP_THREADS_BIND": "|".join(mine)}
        return changes


def _children(before: Collection[int] = ()) -> dict[int, psutil.Process]:
    """Return what this process has started since, but multiprocessing's resource tracker, which ends with it."""
    return {pid: child for pid, child in descendants().items() if pid not in before and not is_resource_tracker(child)}


def _full(tensor: torch.Tensor) -> torch.Tensor:
    tensor = tensor.detach()
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor
