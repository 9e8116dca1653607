"""VerlEngine: one sglang.Engine in the trainer's own processes, used by a group of ranks in step (SPMD).

Every rank of the group makes the same call with its own tensors. One rank of each host builds the sglang.Engine there
(HostEngine). The group's first rank, the head, calls it and broadcasts the answer. The interface is that of the
VerlEngine which sglang shipped until 0.4.7.post1.
"""

import atexit
import multiprocessing
import os
import shutil
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from functools import partial
from pathlib import Path
from typing import Any, Literal, TypeVar

import torch
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

from harness.cluster.network import bracketed, own_address
from harness.cluster.placement import gpu_of
from harness.config.draft_rules import sends_mtp_layer
from harness.rollout import sglang_api
from harness.rollout.engine import EngineFailed, EngineRecord, NamedTensors, Starts, in_one_line
from harness.rollout.engine_ranks import Group, gather_failures, locate_ranks
from harness.rollout.engine_settings import (
    Preset,
    cores_by_tp_rank,
    cpu_environment,
    engine_defaults,
    holds_graphs,
    variables_of_engine,
    variables_of_graphs,
    without_models_code,
)
from harness.rollout.host_engine import HostEngine
from harness.rollout.schedulers import LOADER, SchedulerChannel, load_own, seed_sampling
from harness.rollout.update_group import UpdateGroup
from harness.runtime.cpu_standins import activate
from harness.runtime.errors import rank_in
from harness.runtime.events import working
from harness.runtime.fork_server import ForkServer

T = TypeVar("T")

RecordCall = Callable[[str, float, bool], None]
"""record(name, seconds, succeeded), after each call of the engine and each `ask`."""


class VerlEngine:
    """One SGLang engine of tp (x pp) ranks. Implements RolloutEngine; every method is a collective call of its ranks.

    Args:
        device_mesh_cpu: mesh of the engine's ranks, with the axis tp, or the axes tp and pp.
        nnodes: number of hosts that the ranks must be on; None accepts any number.
        log_dir: folder for the output of the engine's processes; None makes a temporary one.
        base_port: the first port to try. Each engine of a host takes a block of free ports from here upwards.
        colocate: whether an engine rank shares the GPU of its trainer rank. If not, it takes one of the host's GPUs that
            no trainer uses.
        preset: "reproducible" applies rollout/engine_settings.py; "sglang" leaves attention and sampling backends, CUDA graphs and
            fusions on a GPU to SGLang.
        on_death: called with a message when a process of the engine dies, on a thread, or when SGLang fails in this
            process. By default the message is printed and this process exits with code 1.
        record_call: called after each call of the engine (on the head) and each `ask` (on every rank).
        engine_args: all other arguments go to sglang.Engine.

    Raises:
        UnknownEngineArgument: this sglang does not have one of engine_args.
        ValueError: the placement cannot work.
        EngineFailed: the engine did not start (raised on every rank).
    """

    can_ask = True

    def __init__(
        self,
        device_mesh_cpu: DeviceMesh,
        nnodes: int | None = None,
        *,
        log_dir: Path | None = None,
        base_port: int = 30000,
        colocate: bool = True,
        preset: Preset = "reproducible",
        on_death: Callable[[str], None] | None = None,
        record_call: RecordCall = lambda name, seconds, succeeded: None,
        **engine_args: Any,
    ) -> None:
        """Build the engine. Return on every rank when it serves."""
        self.api = sglang_api.probe()
        auto: Literal["cpu", "cuda"] = "cuda" if torch.cuda.is_available() else "cpu"
        self.device_type: Literal["cpu", "cuda"] = engine_args.get("device") or auto
        defaults = engine_defaults(self.device_type, preset)
        if engine_args.get("enable_dp_attention"):
            defaults.pop("sleep_on_idle", None)  # idle schedulers would poll each other for a second at each call
        checked = sglang_api.check_arguments(self.api, engine_args, defaults)
        self.engine_args, self.dropped_defaults = without_models_code(checked[0]), checked[1]
        self.group = Group.of(device_mesh_cpu)
        self._locations, self.node, self.nnodes = locate_ranks(self.group, self.device_type, colocate, nnodes)
        self.has_prefixes = True
        """Whether the prefix cache may hold keys and values that were computed with older weights."""
        self._in_update = False
        self._update_group: UpdateGroup | None = None  # the head's
        self._record_call = record_call
        folder = log_dir or Path(tempfile.mkdtemp(prefix="harness-engine-"))
        self._remove_log = partial(shutil.rmtree, folder, ignore_errors=True) if log_dir is None else None
        if self._remove_log:
            atexit.register(self._remove_log)  # an interrupt may come before shutdown()
        self.log = folder / f"engine-rank{self.node.builder}.log"
        self._prepare_process()
        self._host: HostEngine | None = None
        speaks = rank_in(os.environ) == 0
        try:
            with working("waiting for SGLang's engine to start") if speaks else nullcontext():
                self._host = self._prepare_host(base_port, on_death)
                self._channel = self._make_channel()
                self._start()
        except EngineFailed:
            if self._remove_log:
                atexit.unregister(self._remove_log)  # the message names the log
            raise
        finally:
            for server in ForkServer.handed_over():  # for an engine that this rank does not build
                server.close()

    def _prepare_process(self) -> None:
        """Make this process able to hand tensors to the schedulers."""
        if self.device_type == "cpu":
            activate()
        else:
            sglang_api.patch_reductions()
        # A scheduler fetches a tensor in host memory from the rank that sent it, which asks for its key. The schedulers
        # inherit the key of the rank that built them, so all ranks must have the same one.
        key = self.group.broadcast(bytes(multiprocessing.current_process().authkey))
        multiprocessing.current_process().authkey = key

    def _prepare_host(self, base_port: int, on_death: Callable[[str], None] | None) -> HostEngine | None:
        """Return what builds this host's engine, on the rank that builds it; None on the others."""
        host, failure = None, None
        if self.is_builder:
            try:
                host = HostEngine(self.log, base_port, on_death)
            except Exception as error:
                failure = error
        try:
            self._raise_failures(failure)
        except EngineFailed:
            if host:
                host.stop()
            raise
        return host

    def _make_channel(self) -> SchedulerChannel:
        """Return this rank's channel, in the folder of the engine that this rank or another one builds on this host."""
        folders = self.group.all_gather(self._host.folder if self._host else None)
        folder, models = folders[self.node.builder], 2 if sends_mtp_layer(self.engine_args) else 1
        assert folder is not None, "a builder has a folder"
        return SchedulerChannel(self.group, self._send, folder, self.log, models)

    def _start(self) -> None:
        failure: Exception | None = None
        own = f"{bracketed(self._own_address())}:{self._host.ports.dist_init_port}" if self._host else None
        address = self.group.broadcast(own)
        if self._host:
            try:
                arguments = self._arguments(self._host, address)
                self._host.start(arguments, self._environment(), serves=self.is_head)
            except Exception as error:
                failure = error
        self._raise_failures(failure, self._host.fail if self._host and self.nnodes > 1 else None)

    def _raise_failures(self, failure: Exception | None, give_up: Callable[[str], None] | None = None) -> None:
        """Raise EngineFailed on every rank if one has a failure. give_up: see gather_failures."""
        for rank, message in gather_failures(self.group, failure, give_up).items():
            if message:
                raise EngineFailed(f"engine start failed on rank {rank}: {message}") from failure

    def _arguments(self, host: HostEngine, address: str | None) -> dict[str, Any]:
        """Return the arguments of this host's sglang.Engine. address: where its first node listens for the others."""
        return self.engine_args | {
            "custom_weight_loader": [*self.engine_args.get("custom_weight_loader", ()), LOADER],
            "tp_size": self.group.tp,
            "pp_size": self.group.pp,
            "nnodes": self.nnodes,
            "node_rank": self.node.node_rank,
            "base_gpu_id": self.node.base_gpu_id,
            "dist_init_addr": address,
            "port": host.ports.port,
            "nccl_port": host.ports.nccl_port,
        }

    def _environment(self) -> dict[str, str | None]:
        """Return the variables that the engine's processes see in addition to this process's; None removes one."""
        changes = variables_of_engine(self.device_type)
        if self.device_type == "cuda":
            changes |= variables_of_graphs(self.api, self.engine_args, os.environ)
        if self.node.cuda_visible_devices is not None:
            changes["CUDA_VISIBLE_DEVICES"] = self.node.cuda_visible_devices
        if self.device_type == "cpu":
            changes |= self._cpu_environment()
        return changes

    def _cpu_environment(self) -> dict[str, str]:
        """Return SGLang's CPU mode.

        Each engine rank gets its trainer rank's cores, so that engines do not share any.
        """
        numbers = [self._locations[rank].local_rank for rank in self.node.ranks]
        if len(set(numbers)) < len(numbers):  # ranks of several launchers
            numbers = list(range(len(numbers)))
        shared = cpu_environment(max(len(numbers), int(os.environ["LOCAL_WORLD_SIZE"])))
        cores = shared["SGLANG_CPU_OMP_THREADS_BIND"].split("|")
        mine = [cores[number] for number in numbers]
        if not self.api.cores_by_device:
            tp_ranks = [self.group.ranks.index(rank) % self.group.tp for rank in self.node.ranks]
            mine = cores_by_tp_rank(mine, tp_ranks, self.group.tp)
        return shared | {"SGLANG_CPU_OMP_THREADS_BIND": "|".join(mine)}

    def _own_address(self) -> str:
        """Return the address at which the engine's other hosts find this one; loopback if there are none."""
        return "127.0.0.1" if self.nnodes == 1 else own_address(os.environ)

    @property
    def version(self) -> str:
        return self.api.version

    @property
    def has_memory_saver(self) -> bool:
        return self.device_type == "cuda" and bool(self.engine_args.get("enable_memory_saver"))

    @property
    def holds_graphs(self) -> bool:
        return self.has_memory_saver and holds_graphs(self.api, self.engine_args, os.environ)

    def record(self) -> EngineRecord:
        """Return the arguments, the harness's defaults among them, and how the processes on this host were started."""
        return EngineRecord(arguments=self.engine_args, dropped_defaults=self.dropped_defaults, starts=self.starts)

    @property
    def starts(self) -> Starts:
        """How the processes of the engine on this host were started; counted on the rank that builds it."""
        return self._host.starts if self._host else Starts()

    @property
    def is_head(self) -> bool:
        """Whether this rank calls the engine."""
        return self.group.rank == self.group.head

    @property
    def is_builder(self) -> bool:
        """Whether this rank's process is the parent of the schedulers on this host."""
        return self.group.rank == self.node.builder

    @property
    def device(self) -> torch.device:
        """The device of this rank's engine rank, as this process numbers devices."""
        if self.device_type == "cpu":
            return torch.device("cpu")
        return torch.device("cuda", torch.cuda.current_device() + self._locations[self.group.rank].engine_offset)

    @property
    def host(self) -> str:
        return self.node.host

    @property
    def visible_gpus(self) -> tuple[str, ...] | None:
        own = self.node.visible_devices
        return None if own is None else own + self.node.other_devices

    @property
    def trainer_gpu(self) -> str | None:
        return None if self.device_type == "cpu" else gpu_of(self._locations[self.group.rank])

    def generate(
        self,
        prompt: str | Sequence[str] | None = None,
        sampling_params: Mapping[str, Any] | None = None,
        input_ids: Sequence[Sequence[int]] | None = None,
        return_logprob: bool = False,
        **arguments: Any,
    ) -> Any:
        """Return what sglang.Engine.generate answers, the same on every rank. Only the head's arguments count.

        prompt: text; the engine needs skip_tokenizer_init=False. input_ids: a list of prompts; the answer is a list of
        dicts with output_ids, meta_info and, if the engine has a tokenizer, text. arguments: others of SGLang's.

        To get several samples, repeat the prompt: with n > 1 in sampling_params they would depend on timing.
        """
        arguments |= {"sampling_params": dict(sampling_params or {}), "return_logprob": return_logprob}
        arguments |= {"prompt": prompt} if input_ids is None else {"input_ids": [list(ids) for ids in input_ids]}
        self.has_prefixes = True
        return self._on_head(lambda: self._recorded("generate", partial(self._engine.generate, **arguments)))

    def set_weight_version(self, version: str) -> None:
        call = partial(self._recorded, "set_weight_version")
        self._on_head(lambda: call(partial(sglang_api.set_weight_version, self._engine, version)))

    def seed(self, number: int) -> None:
        """Make the responses from here on depend on this number alone. Pass the same number on all ranks."""
        self._become_idle()  # a batch that is still computed would draw random numbers after it
        with self.weight_update():
            self.ask(seed_sampling, number)

    @contextmanager
    def weight_update(self) -> Iterator[None]:
        """Group the updates and asks in this block into one SGLang update session (no-op when nested).

        Before 0.5.21 SGLang has no sessions. Since then it refuses updates outside of one, and at the end of each it
        works over the whole model. Inside, weights lie as a loader leaves them.
        """
        if self._in_update:
            yield
            return
        self._in_update = True
        try:
            with self._session():
                yield
        finally:
            self._in_update = False

    @contextmanager
    def _session(self) -> Iterator[None]:
        if not self.api.update_session:
            yield
            return
        self._call("begin_weight_update")
        # Asks in this block need a new connection, which is made by an update call. Without any update call in the
        # session, SGLang would recompute derived tensors from what it held before the session.
        self.disconnect()
        try:
            yield
        except BaseException as first:
            # Only this rank may have failed, so this must not be a collective call: the head closes the session alone.
            if self.is_head:
                try:
                    sglang_api.call(self._engine, "end_weight_update")
                except Exception as second:
                    first.add_note(f"closing the update session failed too: {second}")
            raise
        self._call("end_weight_update")
        self.disconnect()

    def update_weights_from_tensor(
        self, named_tensors: NamedTensors, load_format: str | None = None, flush_cache: bool = True
    ) -> None:
        """Load full tensors under their checkpoint names. Every rank passes the same names and its own copy.

        named_tensors: (name, Tensor or DTensor); a DTensor is gathered over its mesh. load_format: None for one handle
        each, "flattened_bucket" for all tensors in one buffer; the path of a custom loader is passed on.
        SGLang fuses some tensors as it loads them; pass those that fuse in one call.
        """
        self._become_idle(flush_cache)
        sent: Any = [(name, _full(tensor)) for name, tensor in named_tensors]
        flattened = load_format == "flattened_bucket"
        if flattened:
            sent = sglang_api.flattened_bucket(sent)
        if self.group.pp > 1:
            # SGLang would open the first stage's handles on every stage, so each scheduler loads from its own rank.
            with self.weight_update():
                self.ask(load_own, sent)
            if flush_cache:
                self.flush_cache()
        else:
            payload = sglang_api.serialize(sent) if flattened else [(n, sglang_api.serialize(t)) for n, t in sent]
            self._send(self.group.gather(payload), load_format, flush_cache)
        del sent  # the memory behind the handles must live until here, when the engine has answered

    def _send(self, payloads: Sequence[Any], load_format: str | None, flush_cache: bool) -> None:
        """Make one update call. payloads: the head's, one for each TP rank."""
        update: Any = list(payloads)
        if self.is_head and load_format != "flattened_bucket":  # other ranks need not import SGLang for it
            update = [
                (named[0][0], sglang_api.local_serialized_tensor(self.api, [payload for _, payload in named]))
                for named in zip(*payloads, strict=True)
            ]
        with self.weight_update():
            self._call("update_weights_from_tensor", update, load_format=load_format, flush_cache=flush_cache)

    def update_weights_from_distributed(self, named_tensors: NamedTensors, flush_cache: bool = True) -> None:
        """Broadcast contiguous tensors from the head to the TP ranks, which may be on other GPUs and hosts.

        The process group is opened by the first call and kept until shutdown.
        """
        if self.group.pp > 1:
            raise ValueError(
                f"parallel.pp must be 1 with an update group, got {self.group.pp}: SGLang gives every pipeline stage the"
                " same ranks in it. Use another transport."
            )
        self._become_idle(flush_cache)
        with self.weight_update():
            self._on_head(lambda: self._head_of_update_group().broadcast(named_tensors, flush_cache))
        self.disconnect()

    def _head_of_update_group(self) -> UpdateGroup:
        if self._update_group is None:
            assert self._host is not None, "the head builds its host's engine"
            address = self._own_address(), self._host.ports.update_group_port
            backend = "gloo" if self.device_type == "cpu" else "nccl"
            self._update_group = UpdateGroup(self._call_here, address, self.group.tp, backend)
        return self._update_group

    def update_weights_from_disk(self, path: str) -> None:
        self._become_idle()
        # "auto" is the checkpoint's own format. The default is the engine's, and "dummy" would load nothing.
        self._call("update_weights_from_disk", path, "auto")
        if len(self.group.ranks) > 1:
            self._channel.open()  # returns when every scheduler has loaded, not only the one that answered

    def flush_cache(self) -> None:
        """Forget the prefix cache: its keys and values were computed with the old weights.

        Does nothing if nothing was generated since the last flush: the call takes longer than a pull of all weights.
        """
        if self.has_prefixes:
            self._on_head(lambda: self._recorded("flush_cache", partial(sglang_api.flush_cache, self._engine)))
            self.has_prefixes = False

    def _become_idle(self, flushes: bool = True) -> None:
        """Wait until the scheduler has computed its last batch. Use it before calls that need an idle engine.

        SGLang does not wait in them: it asserts that the engine is idle, and the scheduler dies if it is not. flushes:
        False for an update that leaves the prefix cache alone; SGLang asserts nothing there.
        """
        if flushes:
            self.flush_cache()

    def release_memory_occupation(self, tags: Sequence[str] | None = None) -> None:
        self._become_idle()
        self._call("release_memory_occupation", tags=None if tags is None else list(tags))
        self.disconnect()

    def resume_memory_occupation(self, tags: Sequence[str] | None = None) -> None:
        self._call("resume_memory_occupation", tags=None if tags is None else list(tags))
        self.disconnect()

    def ask(self, function: Callable[[Any, Any], T], argument: object = None) -> T:
        """Run function(model, argument) in the scheduler next to each rank, and return its answer.

        function: of a module of the harness; the scheduler imports it by name. argument: this rank's own. Argument and
        answer are pickled. The function does not run on SGLang's own thread, so the engine must be idle. Call it inside
        weight_update() if it touches weights.

        A failure raises on every rank: SchedulerFailed on the rank whose scheduler failed, EngineFailed on the others.
        If a scheduler has died, only the rank next to it raises EngineFailed.
        """
        return self._recorded("ask", partial(self._channel.ask, function, argument))

    def disconnect(self) -> None:
        """Make the next ask wait until every scheduler has done all that SGLang was asked before.

        SGLang answers as soon as TP rank 0 of the first stage is done; the others may still be working. A new
        connection is made by a call that stands behind all earlier ones in each scheduler's queue. So close the old one
        here.
        """
        self._channel.close()

    def call_engine(self, function: Callable[[Any], T]) -> T:
        """Run function(sglang.Engine) on the head and return its value on every rank.

        For what no method here offers.
        """
        self.has_prefixes = True
        return self._on_head(lambda: function(self._engine))

    def shutdown(self) -> None:
        self.disconnect()
        try:
            if self._update_group:
                self._update_group.close()
        finally:
            if self._host:
                self._host.stop()
            self._update_group = None
            if self._remove_log:
                self._remove_log()
                atexit.unregister(self._remove_log)
            self.group.barrier()

    @property
    def _engine(self) -> Any:
        """The sglang.Engine of this process. On the head alone it can be called."""
        assert self._host is not None
        return self._host.engine

    def _call(self, method: str, *arguments: Any, **named: Any) -> None:
        """Call a method of sglang.Engine on the head.

        Raise EngineRefused there, EngineFailed elsewhere, if it fails.
        """
        self._on_head(lambda: self._call_here(method, *arguments, **named))

    def _call_here(self, method: str, *arguments: Any, **named: Any) -> None:
        self._recorded(method, partial(sglang_api.call, self._engine, method, *arguments, **named))

    def _on_head(self, work: Callable[[], T]) -> T:
        """Run work() on the head. Return its value, or raise its failure, on every rank."""
        outcome: tuple[str, Any] = ("value", None)
        if self.is_head:
            try:
                outcome = ("value", work())
            except Exception as error:
                self.group.broadcast(("error", in_one_line(error)))
                raise
            assert self._host is not None
            self._host.log.answered()
        kind, value = self.group.broadcast(outcome)
        if kind == "error":
            raise EngineFailed(f"on rank {self.group.head}: {value}")
        return value

    def _recorded(self, name: str, call: Callable[[], T]) -> T:
        started, succeeded = time.monotonic(), False
        try:
            value = call()
            succeeded = True
            return value
        finally:
            self._record_call(name, time.monotonic() - started, succeeded)


def _full(tensor: torch.Tensor) -> torch.Tensor:
    tensor = tensor.detach()
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor
