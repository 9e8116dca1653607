"""Calls on an sglang.Engine, the same for every release; what travels in them; the trainer's end of an update group.

The Engine reports most failures as a returned (False, message); `call` raises EngineRefused. Only the rank that built the
engine with node_rank 0 may call: on other nodes an Engine has no tokenizer manager.
"""

import asyncio
import pickle
import signal
import sys
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from datetime import timedelta
from multiprocessing.reduction import ForkingPickler
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar, cast
from unittest.mock import patch

from harness.rollout.sglang_api import source
from harness.rollout.sglang_api.probe import BUCKET, ENGINE, SGLangApi

if TYPE_CHECKING:
    import torch.distributed as dist

T = TypeVar("T")

MODEL_RUNNER = "srt/model_executor/model_runner.py"
WEIGHT_UPDATER = "srt/model_executor/model_runner_components/weight_updater.py"
Engine = Any
"""An sglang.Engine; sglang ships no types."""


class EngineRefused(RuntimeError):
    """The engine answered that a call failed."""


def call(engine: Engine, method: str, *arguments: Any, **named: Any) -> None:
    """Call a method of the engine; raise EngineRefused where its result says that it failed.

    None is success (release and resume return nothing); so is True. Of a tuple the first item decides and the second is
    the message; of an object (FlushCacheReqOutput) its `success` and `message`. What cannot be read may be a failure, so
    it is one.
    """
    result = getattr(engine, method)(*arguments, **named)
    if isinstance(result, tuple):
        success, message = (*result, "", "")[:2]
    else:
        success, message = getattr(result, "success", result), getattr(result, "message", "")
    if success is not None and success is not True:
        raise EngineRefused(f"{method}: the engine refused: {message or f'it returned {result!r:.200}'}")


def import_engine() -> None:
    """Import what building an Engine needs, for 8 to 17 s; apart, so that no other thread imports at the same time."""
    with warnings.catch_warnings():
        # Printed on import by every rank without a GPU, about formats that are not in use.
        warnings.filterwarnings("ignore", message="Only .* support .* currently")
        source.load(ENGINE, "Engine")


def build_engine(args: Mapping[str, Any]) -> Engine:
    """Build an sglang.Engine; takes from 10 s to minutes, and needs the main thread until 0.5.9.

    The constructor starts one scheduler process for each local rank, so the script that leads here needs an
    `if __name__ == "__main__"`. Raises what the constructor raises; a scheduler that dies kills this process instead.
    """
    return source.load(ENGINE, "Engine")(**args)


def start_loop(engine: Engine, signals: Sequence[signal.Signals]) -> None:
    """Start the task that receives the schedulers' answers, and remove the signal handlers that SGLang sets with it.

    Until 0.5.9 flush_cache does not start the task itself, and as a fresh engine's first call would wait for ever. The
    handlers go inside the loop: uvloop removes nothing while it does not run, and calls them again as soon as it does.
    Older releases keep no event loop, and are given the main thread's.
    """
    loop = engine.loop = getattr(engine, "loop", None) or asyncio.get_event_loop()

    async def start() -> None:
        engine.tokenizer_manager.auto_create_handle_loop()
        await asyncio.sleep(0)
        for number in signals:
            loop.remove_signal_handler(number)

    loop.run_until_complete(start())


def in_its_loop(engine: Engine, call: Callable[[], T]) -> Callable[[], T]:
    """Return the call, ready to run on any thread, and after the caller's asyncio.run: older releases, which keep no event
    loop, look for the thread's.
    """

    def run() -> T:
        if loop := getattr(engine, "loop", None):
            asyncio.set_event_loop(loop)
        return call()

    return run


@contextmanager
def update_session(api: SGLangApi, engine: Engine) -> Iterator[None]:
    """Open a session around all updates from tensors or a group; do nothing where SGLang has none.

    It is closed after a failure too; a second failure while closing becomes a note of the first.
    """
    if not api.update_session:
        yield
        return
    call(engine, "begin_weight_update")
    try:
        yield
    except BaseException as first:
        try:
            call(engine, "end_weight_update")
        except Exception as second:
            first.add_note(f"closing the weight update session failed too: {second}")
        raise
    call(engine, "end_weight_update")


def open_update_group(
    address: str, port: int, *, world_size: int, group_name: str, backend: str, timeout_seconds: float
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
    group = source.load("srt/utils", "init_custom_process_group")(
        backend=backend,
        store=dist.PrefixStore(group_name, store),  # as SGLang does with a store that it makes itself
        timeout=timeout,
        world_size=world_size,
        rank=0,
        group_name=group_name,
    )
    return cast(dist.ProcessGroup, group)


def memory_arguments(api: SGLangApi, tags: Sequence[str] | None) -> dict[str, list[str]]:
    """Return the keywords for release and resume.

    Raises ValueError for tags that this SGLang lacks, and for none, which some releases read as nothing, others as all.
    """
    if tags is None:
        return {}
    if not tags or not set(tags) <= set(api.memory_tags or ()):
        has = ", ".join(api.memory_tags or ()) or "no tags"
        raise ValueError(f"tags = {list(tags)}: sglang {api.version} has {has}; or None for all memory at once.")
    return {"tags": list(tags)}


def unlink_shared_memory(engine: Engine) -> None:
    """Remove the name of the file in /dev/shm in which the schedulers report their load, since 0.5.13.

    SGLang never removes it. All who use it hold it open once the engine serves; the reader opens it at its first look.
    """
    reader: Any = getattr(engine.tokenizer_manager, "load_snapshot_reader", None)
    if path := getattr(reader, "path", None):  # none where the reports travel by ZeroMQ (dp attention)
        reader.read_all()
        Path(path).unlink(missing_ok=True)


def close(engine: Engine) -> None:
    """Let the engine close what it holds in this process; the caller ends its processes.

    SGLang's shutdown kills every child of this process, multiprocessing's resource tracker too: at Python's exit that
    one is started again with a warning, and knows none of the names in /dev/shm that it is then to remove.
    """
    with patch.object(sys.modules[type(engine).__module__], "kill_process_tree", lambda *_, **__: None, create=True):
        engine.shutdown()


def serialize(obj: object) -> bytes:
    """Return what sglang's MultiprocessingSerializer.serialize(obj) returns: a pickle by ForkingPickler.

    torch.multiprocessing has registered with it how tensors share memory: on a GPU by a CUDA IPC handle, so the sender's
    memory must live until the engine has answered; on CPU by a file descriptor that can be fetched once, so each scheduler
    needs a payload of its own. As bytes: its base64 form is for HTTP alone.
    """
    import torch.multiprocessing  # noqa: F401 - registers the reducers of tensors

    return bytes(ForkingPickler.dumps(obj))


def deserialize(payload: bytes) -> Any:
    """Return what `serialize` was given; for payloads of our own trainer, since a pickle may do anything."""
    return pickle.loads(payload)


def local_serialized_tensor(api: SGLangApi, values: Sequence[bytes]) -> Any:
    """Return what stands for one tensor of which TP rank r opens values[r], serialized by the trainer rank beside it."""
    has_class = api.tree.find_class("LocalSerializedTensor", WEIGHT_UPDATER) is not None
    return source.load(WEIGHT_UPDATER if has_class else MODEL_RUNNER, "LocalSerializedTensor")(values=list(values))


def flattened_bucket(api: SGLangApi, named_tensors: Sequence[tuple[str, Any]]) -> dict[str, Any]:
    """Return what load_format="flattened_bucket" wants: a copy of all tensors in one, on their device, and metadata."""
    if not api.bucket_mixes_dtypes:
        raise ValueError(f"weights.transport = bucket: sglang {api.version} has no buckets of any dtypes; use tensor.")
    bucket = source.load(BUCKET, "FlattenedTensorBucket")(named_tensors=list(named_tensors))
    return {"flattened_tensor": bucket.get_flattened_tensor(), "metadata": bucket.get_metadata()}


def tensors_of_bucket(bucket: dict[str, Any]) -> list[tuple[str, Any]]:
    """Return the named tensors of what `flattened_bucket` returned: views of its one tensor."""
    return list(source.load(BUCKET, "FlattenedTensorBucket")(**bucket).reconstruct_tensors())


def patch_reductions(api: SGLangApi) -> None:
    """Make CUDA IPC handles carry the GPU's UUID, not its index: sender and scheduler may number GPUs differently.

    Call before `serialize` on every rank that sends GPU tensors; twice does no harm.
    """
    moved = "srt/utils/patch_torch.py"  # since 0.5.3
    source.load(moved if api.tree.has(moved) else "srt/patch_torch.py", "monkey_patch_torch_reductions")()
