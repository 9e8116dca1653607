"""Calls on an sglang.Engine, the same for every release, and the trainer's end of an update group.

The Engine reports most failures as a returned (False, message); here each one raises EngineRefused. Only the rank that
built the engine with node_rank 0 may call: on other nodes an Engine has no tokenizer manager.
"""

import asyncio
import atexit
import signal
import sys
import warnings
from collections.abc import Callable, Coroutine, Iterator, Mapping, Sequence
from contextlib import contextmanager
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar, cast
from unittest.mock import patch

from harness.rollout.sglang_api import source
from harness.rollout.sglang_api.probe import ENGINE, IO_STRUCT, MODEL_RUNNER, OLD_ENGINE, VERL_ENGINE, SGLangApi

if TYPE_CHECKING:
    import torch.distributed as dist

T = TypeVar("T")

UTILS = ("srt/utils/common.py", "srt/utils.py")
Engine = Any
"""An sglang.Engine, or sglang's VerlEngine where a function says so; sglang ships no types."""


class EngineRefused(RuntimeError):
    """The engine answered that a call failed."""

    def __init__(self, call: str, message: str) -> None:
        super().__init__(f"{call}: the engine refused: {message or 'no reason given'}")
        self.call = call
        self.message = message


def check_result(call: str, result: Any) -> Any:
    """Return what a successful call returned; raise EngineRefused for a failed one.

    None is success (release and resume return nothing); so is True. Of a tuple the first item decides and the second is
    the message; of an object (FlushCacheReqOutput) its `success` and `message`. Anything else raises TypeError, since a
    result that cannot be read may be a failure.
    """
    success, message = result is not False, ""
    if isinstance(result, tuple) and result and isinstance(result[0], bool):
        success, message = result[0], str(result[1]) if len(result) > 1 else ""
    elif isinstance(getattr(result, "success", None), bool):
        success, message = result.success, str(getattr(result, "message", ""))
    elif result is not None and not isinstance(result, bool):
        raise TypeError(
            f"{call} returned {type(result).__name__} {result!r:.200}: must be None, bool, (bool, message) or have .success."
        )
    if not success:
        raise EngineRefused(call, message)
    return result


def _call(engine: Engine, name: str, *arguments: Any, **named: Any) -> None:
    check_result(name, getattr(engine, name)(*arguments, **named))


def import_engine() -> None:
    """Import what building an Engine needs, for 8 to 17 s; apart, so that no other thread imports at the same time."""
    with warnings.catch_warnings():
        # Printed on import by every rank without a GPU, about formats that are not in use.
        warnings.filterwarnings("ignore", message="Only .* support .* currently")
        _engine_class()


def build_engine(args: Mapping[str, Any]) -> Engine:
    """Build an sglang.Engine; takes from 10 s to minutes, and needs the main thread until 0.5.9.

    The constructor starts one scheduler process for each local rank, so the script that leads here needs an
    `if __name__ == "__main__"`. Raises what the constructor raises; a scheduler that dies kills this process instead.
    """
    return _engine_class()(**args)


def build_own_verl_engine(api: SGLangApi, mesh: object, nnodes: int, args: Mapping[str, Any]) -> Engine:
    """Build the VerlEngine that sglang itself ships, on every rank of the 1-D CPU mesh of a TP group on nnodes hosts.

    Raises ValueError where this SGLang has none, and for arguments that VerlEngine sets itself.
    """
    if not api.own_verl_engine:
        raise ValueError(
            f"engine.implementation = sglang: sglang {api.version} ships no VerlEngine; use harness, "
            "or install a release from 0.4.3.post3 to 0.4.7.post1."
        )
    for name in ("tp_size", "node_rank", "nnodes"):
        if name in args:
            raise ValueError(f"engine.args.{name} = {args[name]!r}: sglang's VerlEngine sets it; leave it out.")
    return source.load(VERL_ENGINE, "VerlEngine")(device_mesh_cpu=mesh, nnodes=nnodes, **args)


def _engine_class() -> Any:
    """Return the class: the Engine of `import sglang` is a proxy that imports its module, for 7 s, only when called."""
    return source.load(ENGINE if source.installed("sglang").has(ENGINE) else OLD_ENGINE, "Engine")


def await_in_engine(engine: Engine, make: Callable[[Any], Coroutine[Any, Any, T]]) -> T:
    """Run `make(engine.tokenizer_manager)` to its end in the loop that the engine itself uses, without HTTP.

    The task that receives answers from the schedulers lives in that loop and is started first: until 0.5.9 flush_cache
    and check_weights do not start it themselves, and as a fresh engine's first call they would wait for ever.
    """
    manager = engine.tokenizer_manager

    async def run() -> T:
        manager.auto_create_handle_loop()
        return await make(manager)

    return _engine_loop(engine).run_until_complete(run())


def start_loop(engine: Engine) -> None:
    """Start the task that receives the schedulers' answers, with which SGLang also takes over SIGTERM and SIGQUIT."""
    await_in_engine(engine, lambda _: asyncio.sleep(0))


def remove_signal_handlers(engine: Engine, signals: Sequence[signal.Signals]) -> None:
    """Remove the handlers that SGLang set in its event loop with start_loop. Raises RuntimeError where one stays.

    Inside the loop: uvloop removes nothing while it does not run, and calls the handler again as soon as it does.
    """
    loop = _engine_loop(engine)

    async def remove() -> list[signal.Signals]:
        for number in signals:
            loop.remove_signal_handler(number)
        return [number for number in signals if loop.remove_signal_handler(number)]

    if left := loop.run_until_complete(remove()):
        names = ", ".join(number.name for number in left)
        raise RuntimeError(f"SGLang's handlers of {names} stay in the engine's event loop, {type(loop).__module__}.")


def for_another_thread(engine: Engine, call: Callable[[], T]) -> Callable[[], T]:
    """Return the call, ready to run on a thread that has no event loop: some releases look for the current one."""
    loop = _engine_loop(engine)

    def run() -> T:
        asyncio.set_event_loop(loop)
        return call()

    return run


def _engine_loop(engine: Engine) -> asyncio.AbstractEventLoop:
    """Return the event loop in which the engine's calls run; older releases take the main thread's."""
    return cast(asyncio.AbstractEventLoop, getattr(engine, "loop", None) or asyncio.get_event_loop())


def generate(engine: Engine, *, sampling_params: Mapping[str, Any], **arguments: Any) -> Any:
    """Return one answer for each prompt, in order: output_ids and meta_info.

    arguments: prompt or input_ids, return_logprob and whatever else this sglang's generate takes; None is left out.
    Repeat a prompt for several samples of it. sampling_params n > 1 is refused: SGLang then sends the samples one by
    one, and which of them share a batch, hence what a seed samples, depends on timing.
    """
    if sampling_params.get("n", 1) != 1:
        raise ValueError(f"sampling_params n = {sampling_params['n']}: must be 1; repeat the prompts instead.")
    given = {name: value for name, value in arguments.items() if value is not None}
    if "input_ids" in given:
        prompts = given["input_ids"] = [list(ids) for ids in given["input_ids"]]
        if not prompts or not all(prompts):
            raise ValueError(f"input_ids: {len(prompts)} prompts, some of them empty: every prompt needs a token.")
    return engine.generate(sampling_params=dict(sampling_params), **given)


@contextmanager
def update_session(api: SGLangApi, engine: Engine) -> Iterator[None]:
    """Open a session around all updates from tensors or a group; do nothing where SGLang has none.

    It is closed after a failure too; a second failure while closing becomes a note of the first.
    """
    if not api.update_session:
        yield
        return
    _call(engine, "begin_weight_update", **({"selector": "all"} if api.update_session_selector else {}))
    try:
        yield
    except BaseException as first:
        try:
            _call(engine, "end_weight_update")
        except Exception as second:
            first.add_note(f"closing the weight update session failed too: {second}")
        raise
    _call(engine, "end_weight_update")


def update_weights_from_tensor(
    api: SGLangApi, engine: Engine, named_tensors: Sequence[Any], *, load_format: str | None = None, flush_cache: bool
) -> None:
    """Load weights into every TP rank of the engine; inside `update_session`.

    named_tensors: for load_format None (checkpoint names), "direct" (SGLang's own names and shards) or the path of a
    custom loader, pairs of name and tensor or LocalSerializedTensor; for "flattened_bucket", one payload for each TP
    rank. Success says nothing of the names: unknown ones are ignored.
    Raises EngineRefused, and ValueError for a load_format that this SGLang does not have.
    """
    if load_format == "flattened_bucket" and not api.flattened_bucket:
        raise ValueError(f"weights.transport = bucket: sglang {api.version} has no flattened_bucket; use tensor.")
    if load_format and "." in load_format and not api.custom_weight_loader:
        raise ValueError(
            f"load_format = {load_format}: sglang {api.version} has no custom weight loaders; leave it out."
        )
    arguments = {"load_format": load_format, "flush_cache": flush_cache}
    known = {name: value for name, value in arguments.items() if name in api.tensor_update_parameters}
    _call(engine, "update_weights_from_tensor", named_tensors, **known)


def update_weights_from_disk(engine: Engine, path: str) -> None:
    """Load a checkpoint folder that every host of the engine can read; needs no session."""
    _call(engine, "update_weights_from_disk", path, "auto")  # by default the engine's own, and "dummy" would refuse


def init_weights_update_group(
    engine: Engine, *, address: str, port: int, rank_offset: int, world_size: int, group_name: str, backend: str
) -> None:
    """Join the engine's schedulers to a process group; TP rank r becomes rank_offset + r, in every pipeline stage.

    Blocks until all ranks have joined, so rank 0, the sender, must be joining at the same time.
    """
    _call(engine, "init_weights_update_group", address, port, rank_offset, world_size, group_name, backend)


def open_update_group(
    api: SGLangApi, *, address: str, port: int, world_size: int, group_name: str, backend: str, timeout_seconds: float
) -> "dist.ProcessGroup":
    """Return rank 0 of a process group outside the default one, made as SGLang makes the engine's, so that they meet.

    Blocks until all ranks have joined; group_name must be new to this process. Raises what torch raises when they have
    not after timeout_seconds, which each collective may take too.
    """
    import torch.distributed as dist

    timeout = timedelta(seconds=timeout_seconds)
    # Not by init_method: under torchrun, torch would take this rank for a client of the agent's store, which no process
    # serves. multi_tenant: after a failure the last group's store may still be alive.
    store = dist.TCPStore(address, port, world_size, is_master=True, timeout=timeout, multi_tenant=True)
    path = next(path for path in UTILS if api.tree.find_function("init_custom_process_group", path))
    group = source.load(path, "init_custom_process_group")(
        backend=backend,
        store=dist.PrefixStore(group_name, store),  # as SGLang does with a store that it makes itself
        timeout=timeout,
        world_size=world_size,
        rank=0,
        group_name=group_name,
    )
    return cast(dist.ProcessGroup, group)


def update_group_ends_in_barrier(api: SGLangApi) -> bool:
    """Return whether the engine's ranks end init_weights_update_group in a barrier on GPU number rank (to 0.4.6.post5).

    gloo refuses such a barrier, and on CUDA an engine sees no GPU of that number: such a group cannot be made.
    """
    return source.mentions(api.tree.find_function("init_weights_update_group", MODEL_RUNNER), "barrier")


def update_weights_from_distributed(
    api: SGLangApi,
    engine: Engine,
    named_shapes: Sequence[tuple[str, str, Sequence[int]]],
    *,
    group_name: str,
    flush_cache: bool,
) -> None:
    """Receive tensors by broadcast from rank 0 of the group, in order; inside `update_session`.

    named_shapes: (checkpoint name, dtype such as "bfloat16", shape). Until 0.4.8.post1 each tensor is a call of its
    own, always flushes the cache, and there is one group whatever its name.
    """
    call = "update_weights_from_distributed"
    if "name" in api.distributed_update_parameters:
        for name, dtype, shape in named_shapes:
            check_result(f"{call}({name})", engine.update_weights_from_distributed(name, dtype, list(shape)))
        return
    arguments = {
        "names": [name for name, _, _ in named_shapes],
        "dtypes": [dtype for _, dtype, _ in named_shapes],
        "shapes": [list(shape) for _, _, shape in named_shapes],
        "group_name": group_name,
        "flush_cache": flush_cache,
    }
    _call(engine, call, **{name: arguments[name] for name in arguments if name in api.distributed_update_parameters})


def destroy_weights_update_group(api: SGLangApi, engine: Engine, group_name: str) -> bool:
    """Leave the group. Returns False, having done nothing, where SGLang keeps it as long as the engine lives."""
    if api.destroys_update_group:
        _call(engine, "destroy_weights_update_group", group_name)
    return api.destroys_update_group


def release_memory_occupation(api: SGLangApi, engine: Engine, tags: Sequence[str] | None = None) -> None:
    """Free the GPU memory of `tags`, or of all. The content of weights and cache is lost. The engine must be idle."""
    _call(engine, "release_memory_occupation", **memory_arguments(api, tags))


def resume_memory_occupation(api: SGLangApi, engine: Engine, tags: Sequence[str] | None = None) -> None:
    """Take back the GPU memory of `tags`, or of all. A tag that is not released kills the scheduler from 0.5.1 on."""
    _call(engine, "resume_memory_occupation", **memory_arguments(api, tags))


def memory_arguments(api: SGLangApi, tags: Sequence[str] | None) -> dict[str, list[str]]:
    """Return the keywords for release and resume.

    Raises ValueError for tags that this SGLang lacks, and for none, which some releases read as nothing, others as all.
    """
    if tags is None:
        return {}
    if api.memory_tags is None:
        raise ValueError(
            f"tags = {list(tags)}: sglang {api.version} releases and resumes all memory at once; use None."
        )
    if not tags or any(tag not in api.memory_tags for tag in tags):
        raise ValueError(
            f"tags = {list(tags)}: sglang {api.version} has {', '.join(api.memory_tags)}; or None for all."
        )
    return {"tags": list(tags)}


def flush_cache(api: SGLangApi, engine: Engine) -> None:
    """Forget the prefix cache. Raises EngineRefused when requests are running, ValueError where SGLang cannot."""
    if not api.engine_flushes_cache:
        raise ValueError(f"flush_cache: sglang {api.version} has none on its Engine; use 0.4.5.post3 or newer.")
    check_result("flush_cache", await_in_engine(engine, lambda manager: manager.flush_cache()))


def check_weights(api: SGLangApi, engine: Engine, action: str) -> dict[int, dict[str, str]]:
    """Ask the schedulers about their own weights.

    checksum returns TP rank -> SGLang's internal (fused) name of a tensor -> 16 hex digits: on CPU the first 8 bytes of
    its SHA-256, on GPU a Triton hash, which compares with no other. Other actions return nothing: snapshot copies all
    weights to host memory, compare raises EngineRefused naming what differs from the snapshot, reset_tensors fills them
    with random values. In CPU mode compare, and before 0.5.23 checksum, raise EngineRefused: both want a GPU. Only
    pipeline stage 0 answers; in 0.5.12 only its TP rank 0. Raises ValueError for an action that this SGLang lacks.
    """
    if action not in api.weight_check_actions:
        has = ", ".join(api.weight_check_actions) or "none"
        raise ValueError(f"check_weights action = {action}: sglang {api.version} has {has}.")
    request = source.load(IO_STRUCT, "CheckWeightsReqInput")(action=action)
    result = await_in_engine(engine, lambda manager: manager.check_weights(request))
    check_result(f"check_weights({action})", result)
    checksums = {}
    answers = result[2] if isinstance(result, tuple) and len(result) > 2 else None
    for answer in answers or ():
        where = answer["parallelism_info"]  # since 0.5.21 one entry for each of target and draft models
        checksums[(where[0] if isinstance(where, list) else where)["tp_rank"]] = dict(answer["checksums"])
    return checksums


def unlink_shared_memory(engine: Engine) -> None:
    """Remove the name of the file in /dev/shm in which the schedulers report their load, since 0.5.13.

    SGLang never removes it. All who use it hold it open once the engine serves; the reader opens it at its first look.
    """
    reader = getattr(engine.tokenizer_manager, "load_snapshot_reader", None)
    path = getattr(reader, "path", None)  # none where the reports travel by ZeroMQ (dp attention)
    if reader is not None and path is not None:
        reader.read_all()
        Path(path).unlink(missing_ok=True)


def close(engine: Engine) -> None:
    """Let the engine close what it holds in this process; the caller ends its processes.

    SGLang's shutdown kills every child of this process, multiprocessing's resource tracker too: at Python's exit that
    one is started again with a warning, and knows none of the names in /dev/shm that it is then to remove.
    """
    with patch.object(sys.modules[type(engine).__module__], "kill_process_tree", lambda *_, **__: None, create=True):
        engine.shutdown()


def cancel_shutdown_at_exit(engine: Engine) -> None:
    """Leave the end of the engine's processes to the caller, also where Python exits; see close."""
    atexit.unregister(engine.shutdown)
