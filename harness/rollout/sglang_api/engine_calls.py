"""Call an sglang.Engine in the same way for every release, and make what travels in the calls.

The Engine reports most failures as a returned (False, message); `call` raises EngineRefused instead. Only the process
that built the engine with node_rank 0 may call it: on other nodes an Engine has no tokenizer manager.
"""

import asyncio
import inspect
import pickle
import signal
import sys
import threading
import time
import warnings
from collections.abc import Awaitable, Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from datetime import timedelta
from multiprocessing.reduction import ForkingPickler
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING, Any, cast
from unittest.mock import patch

from harness.rollout.sglang_api.probe import BUCKET, ENGINE, IO_STRUCT, SGLangApi, load

if TYPE_CHECKING:
    import torch.distributed as dist

MODEL_RUNNER = "srt/model_executor/model_runner.py"
WEIGHT_UPDATER = "srt/model_executor/model_runner_components/weight_updater.py"
GUARD = "print_exception_wrapper"
"""SGLang's function that runs a task of the tokenizer manager, and ends the process if the task fails."""
Engine = Any
"""An sglang.Engine. SGLang ships no types."""
IDLE_SECONDS, LOOK_SECONDS = 60.0, 0.005
"""How long a batch may go on after the last answer, and how often is looked whether it has ended."""


class EngineRefused(RuntimeError):
    """The engine answered that a call failed."""


def call(engine: Engine, method: str, *arguments: Any, **named: Any) -> None:
    """Call a method of the engine. Raise EngineRefused if its result says that it failed.

    None and True mean success. In a tuple the first item decides and the second is the message; an object
    (FlushCacheReqOutput) has `success` and `message`. Any other result counts as a failure.
    """
    result = getattr(engine, method)(*arguments, **named)
    if isinstance(result, tuple):
        success, message = (*result, "", "")[:2]
    else:
        success, message = getattr(result, "success", result), getattr(result, "message", "")
    if success is not None and success is not True:
        raise EngineRefused(f"{method}: the engine refused: {message or f'it returned {result!r:.200}'}")


def flush_cache(engine: Engine) -> None:
    """Empty the prefix cache as soon as the engine is idle. Raise EngineRefused if it is not within IDLE_SECONDS.

    With overlapped scheduling, which is SGLang's default on a GPU, a scheduler still computes one batch after it has
    sent the last answer, and refuses until that is done.
    """
    end = time.monotonic() + IDLE_SECONDS
    while True:
        try:
            return call(engine, "flush_cache")
        except EngineRefused:
            if time.monotonic() > end:
                raise
        time.sleep(LOOK_SECONDS)


def import_engine() -> None:
    """Import all that building an Engine needs, which takes 8 to 17 s.

    A step of its own so that no other thread imports at the same time.
    """
    with warnings.catch_warnings():
        # On import every rank without a GPU warns about quantization formats that it does not use.
        warnings.filterwarnings("ignore", message="Only .* support .* currently")
        load(ENGINE, "Engine")


def build_engine(args: Mapping[str, Any]) -> Engine:
    """Build an sglang.Engine. It takes from 10 s to minutes.

    The constructor spawns one scheduler process per local rank, so the main script needs `if __name__ == "__main__"`.
    """
    return load(ENGINE, "Engine")(**args)


def start_loop(
    engine: Engine, signals: Sequence[signal.Signals], on_failure: Callable[[str, Exception], object]
) -> None:
    """Start the tasks that receive the schedulers' answers, and remove the signal handlers that SGLang sets with them.

    SGLang would do both at its first call, at an unforeseen time for the signals. The handlers are removed inside the
    loop because uvloop cannot remove them while it does not run, and calls them again as soon as it does.

    on_failure: called with the name of a task and its exception. SGLang would dump for a minute, and then SIGKILL this
    process and its children.
    """
    create = engine.tokenizer_manager.auto_create_handle_loop

    async def report_failure(task: Callable[[], Awaitable[None]]) -> None:
        try:
            await task()
        except Exception as error:
            on_failure(getattr(task, "__qualname__", repr(task)), error)
            engine.loop.stop()  # the call that waits for an answer raises

    async def start() -> None:
        with patch.object(sys.modules[create.__module__], GUARD, report_failure):
            create()
        await asyncio.sleep(0)
        for number in signals:
            engine.loop.remove_signal_handler(number)

    engine.loop.run_until_complete(start())


def why_no_update(model: Any) -> str:
    """Return why SGLang refuses to update a scheduler's model, in its own words; "" if it does not.

    Its update calls ask the same. On some GPUs it computes with what it has derived from weights, and no update reaches
    that.
    """
    # A scheduler has imported it, in releases that have such copies.
    updater = sys.modules.get("sglang.srt.model_executor.model_runner_components.weight_updater")
    refusal = getattr(updater, "_unsupported_derived_weight_cache_error", None)
    if refusal is None:
        return ""
    arguments = [model] if inspect.signature(refusal).parameters else []
    return refusal(*arguments) or ""


@contextmanager
def update_session(api: SGLangApi, engine: Engine) -> Iterator[None]:
    """Open an update session (since 0.5.21) and close it, also after a failure. Before 0.5.21, do nothing.

    A failure to close it after another failure becomes a note of the first one.
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
    """Join the engine's update group as rank 0, and return it. It is made as SGLang makes the engine's end.

    Blocks until all ranks have joined. group_name must be new to this process. timeout_seconds holds for joining, and
    for each collective; torch raises when it is over.
    """
    import torch.distributed as dist

    timeout = timedelta(seconds=timeout_seconds)
    # Not by init_method: under torchrun, torch would make this rank a client of the agent's store, and nobody would
    # serve this one. multi_tenant: after a failure the store of the last group may still be alive.
    store = dist.TCPStore(address, port, world_size, is_master=True, timeout=timeout, multi_tenant=True)
    group = load("srt/utils", "init_custom_process_group")(
        backend=backend,
        store=dist.PrefixStore(group_name, store),  # as SGLang does with its own store
        timeout=timeout,
        world_size=world_size,
        rank=0,
        group_name=group_name,
    )
    return cast(dist.ProcessGroup, group)


def unlink_shared_memory(engine: Engine) -> None:
    """Unlink the file in /dev/shm in which the schedulers report their load (since 0.5.13): SGLang never does.

    Its users keep it open once the engine serves. The reader opens it at its first look, so let it look first.
    """
    reader: Any = getattr(engine.tokenizer_manager, "load_snapshot_reader", None)
    if path := getattr(reader, "path", None):  # None with DP attention, which reports over ZeroMQ
        reader.read_all()
        Path(path).unlink(missing_ok=True)


def close(engine: Engine) -> None:
    """Let the engine close what it holds in this process, without ending any process: the caller does that.

    SGLang's shutdown would kill every child of this process, also multiprocessing's resource tracker. Python starts
    that again at exit, with a warning, and then it does not know which names in /dev/shm to remove.
    """
    with patch.object(sys.modules[type(engine).__module__], "kill_process_tree", lambda *_, **__: None, create=True):
        engine.shutdown()


def serialize(obj: object) -> bytes:
    """Pickle as SGLang's MultiprocessingSerializer does: tensors are passed as handles of shared memory.

    On a GPU the handle is a CUDA IPC handle, so the sender's memory must live until the engine has answered. On the CPU
    it is a file descriptor that can be fetched once, so each scheduler needs a payload of its own.
    """
    import torch.multiprocessing  # noqa: F401 - registers the reducers of tensors

    return bytes(ForkingPickler.dumps(obj))


def deserialize(payload: bytes) -> Any:
    """Return the object that `serialize` was given. Only for payloads of our own trainer: a pickle can run any code."""
    return pickle.loads(payload)


def local_serialized_tensor(api: SGLangApi, values: Sequence[bytes]) -> Any:
    """Return SGLang's placeholder for one tensor: TP rank r opens values[r], which the trainer rank next to it
    serialized.
    """
    has_class = api.tree.find_class("LocalSerializedTensor", WEIGHT_UPDATER) is not None
    return load(WEIGHT_UPDATER if has_class else MODEL_RUNNER, "LocalSerializedTensor")(values=list(values))


def flattened_bucket(named_tensors: Sequence[tuple[str, Any]]) -> dict[str, Any]:
    """Return the payload of load_format="flattened_bucket": a copy of all tensors in one buffer, and its metadata.

    Tensors of wide elements come first, since SGLang leaves no gaps and refuses a tensor that is not aligned.
    """
    ordered = sorted(named_tensors, key=lambda named: -named[1].itemsize)
    bucket = load(BUCKET, "FlattenedTensorBucket")(named_tensors=ordered)
    return {"flattened_tensor": bucket.get_flattened_tensor(), "metadata": bucket.get_metadata()}


def tensors_of_bucket(bucket: dict[str, Any]) -> list[tuple[str, Any]]:
    """Return the named tensors of a flattened bucket: views of its one buffer."""
    return list(load(BUCKET, "FlattenedTensorBucket")(**bucket).reconstruct_tensors())


def patch_reductions() -> None:
    """Make CUDA IPC handles carry the GPU's UUID in place of its index: sender and scheduler may number GPUs
    differently.

    Call before `serialize` on every rank that sends GPU tensors. A second call does nothing.
    """
    load("srt/utils/patch_torch.py", "monkey_patch_torch_reductions")()


def set_weight_version(engine: Engine, version: str) -> None:
    """Name the weights that the engine holds.

    Engine's own update methods take no version, though the requests they make do.

    Newer releases tell the schedulers, and each answer has the versions of all its tokens (meta_info.weight_versions).
    Before, only the tokenizer manager knows it, and an answer has the version at its end.
    """
    manager = engine.tokenizer_manager
    if hasattr(manager, "update_weight_version"):
        request = load(IO_STRUCT, "UpdateWeightVersionReqInput")(new_version=version, abort_all_requests=False)
        engine.loop.run_until_complete(manager.update_weight_version(request))
    else:
        manager._update_weight_version_if_provided(version)


def cached_prefix_tokens(model: Any, _: None = None) -> int | None:
    """Return the tokens of prompts and responses in this scheduler's prefix cache; None if its cache cannot be found.

    It runs in the scheduler's process, on another thread than SGLang's.
    """
    cache = getattr(_scheduler(), "tree_cache", None)
    if cache is None:
        return None
    # A cache for sliding-window attention counts the tokens of two pools.
    return sum(_total(getattr(cache, name)()) for name in ("evictable_size", "protected_size"))


def _total(size: Any) -> int:
    return sum(size) if isinstance(size, tuple) else int(size)


def _scheduler() -> Any:
    """Return the Scheduler whose event loop SGLang's thread runs: a variable of run_scheduler_process."""
    frame: FrameType | None = sys._current_frames().get(threading.main_thread().ident or 0)
    while frame and frame.f_code.co_name != "run_scheduler_process":
        frame = frame.f_back
    return frame.f_locals.get("scheduler") if frame else None
