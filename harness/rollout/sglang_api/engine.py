"""Calls on an sglang.Engine, the same for every release.

The Engine reports most failures as a returned (False, message) and goes on; here each one raises EngineRefused. Only
the rank that built the engine with node_rank 0 may call: on other nodes an Engine has no tokenizer manager.
"""

import atexit
import sys
import warnings
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

from harness.rollout.sglang_api import source
from harness.rollout.sglang_api.loop import await_in_engine
from harness.rollout.sglang_api.probe import ENGINE, IO_STRUCT, OLD_ENGINE, VERL_ENGINE, SGLangApi

T = TypeVar("T")

Engine = Any
"""An sglang.Engine, or sglang's VerlEngine where a function says so; sglang ships no types."""


class EngineRefused(RuntimeError):
    """The engine answered that a call failed."""

    def __init__(self, call: str, message: str) -> None:
        super().__init__(f"{call}: the engine refused: {message or 'no reason given'}")
        self.call = call
        self.message = message


@dataclass(frozen=True, kw_only=True)
class RankChecksum:
    """The weights that one scheduler holds, as that scheduler hashed them. Names are SGLang's internal (fused) ones."""

    tp_rank: int
    pp_rank: int
    tensors: Mapping[str, str]
    """Parameter or buffer name -> 16 hex digits: on CPU the first 8 bytes of its SHA-256, on GPU a Triton hash. The two
    do not compare, and a GPU hash is no function a trainer can compute elsewhere."""
    total: str | None
    """SHA-256 over the sorted names and hashes; None in 0.5.12, which has none."""


def check_result(call: str, result: object) -> object:
    """Return what a successful call returned; raise EngineRefused for a failed one.

    None is success (release, resume, collective_rpc return nothing); so is True. Of a tuple the first item decides and
    the second is the message; of an object (FlushCacheReqOutput) its `success` and `message`. Anything else raises
    TypeError, since a result that nobody can read may be a failure.
    """
    success, message = _success_and_message(call, result)
    if not success:
        raise EngineRefused(call, message)
    return result


def import_engine() -> None:
    """Import what building an Engine needs, which takes 8 to 17 s: apart from building it, so that it can be timed and
    so that no other thread imports at the same time."""
    with warnings.catch_warnings():
        # Said on import by every rank without a GPU, of formats that nobody asked for.
        warnings.filterwarnings("ignore", message="Only .* support .* currently")
        _engine_class()


def build_engine(args: Mapping[str, Any]) -> Engine:
    """Build an sglang.Engine; takes from 10 s to minutes, and needs the main thread until 0.5.9.

    The constructor starts one scheduler process for each local rank, so the script that leads here needs an
    `if __name__ == "__main__"`. Raises what the constructor raises; a scheduler that dies kills this process instead.
    """
    return _engine_class()(**args)


def build_own_verl_engine(api: SGLangApi, mesh: object, nnodes: int, args: Mapping[str, Any]) -> Engine:
    """Build the VerlEngine that sglang itself ships, on every rank of `mesh`.

    mesh: the one-dimensional CPU device mesh of the TP group. nnodes: hosts of this TP group. Raises ValueError where
    this SGLang has none, and for arguments that VerlEngine fills in itself.
    """
    if not api.own_verl_engine:
        raise ValueError(
            f"engine.implementation = sglang: sglang {api.version} ships no VerlEngine; use harness, "
            "or install a release from 0.4.3.post3 to 0.4.7.post1."
        )
    for name in ("tp_size", "node_rank", "nnodes"):
        if name in args:
            raise ValueError(f"engine.args.{name} = {args[name]!r}: sglang's VerlEngine sets it; leave it out.")
    verl_engine = source.load(VERL_ENGINE, "VerlEngine")
    return verl_engine(device_mesh_cpu=mesh, nnodes=nnodes, **args)


def generate(engine: Engine, *, sampling_params: Mapping[str, Any], **arguments: Any) -> Any:
    """One answer for each prompt, in order: output_ids and meta_info (output_token_logprobs: (log-prob, token, None)).

    arguments: prompt or input_ids, return_logprob and whatever else this sglang's generate takes; None is left out.
    Repeat a prompt for several samples of it. sampling_params n > 1 is refused: SGLang then sends the samples one by one,
    and which of them share a batch, hence what a seed samples, depends on timing. Raises ValueError for an empty prompt.
    """
    if sampling_params.get("n", 1) != 1:
        raise ValueError(f"sampling_params n = {sampling_params['n']}: must be 1; repeat the prompts instead.")
    given = {name: value for name, value in arguments.items() if value is not None}
    if "input_ids" in given:
        given["input_ids"] = _token_ids(given["input_ids"])
    return engine.generate(sampling_params=dict(sampling_params), **given)


@contextmanager
def update_session(api: SGLangApi, engine: Engine, selector: str = "all") -> Iterator[None]:
    """Around all updates from tensors or a group; does nothing where SGLang has no sessions.

    Opens on entry and always closes: after a failure too, whose exception stays the one that is raised; a second
    failure while closing becomes a note of it. selector: target, draft or all models of the engine.
    """
    if not api.update_session:
        yield
        return
    arguments = {"selector": selector} if api.update_session_selector else {}
    check_result("begin_weight_update", engine.begin_weight_update(**arguments))
    try:
        yield
    except BaseException as first:
        try:
            check_result("end_weight_update", engine.end_weight_update())
        except Exception as second:
            first.add_note(f"closing the weight update session failed too: {second}")
        raise
    check_result("end_weight_update", engine.end_weight_update())


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
    call = "update_weights_from_tensor"
    arguments = {"load_format": load_format, "flush_cache": flush_cache}
    known = {name: value for name, value in arguments.items() if name in api.tensor_update_parameters}
    check_result(call, engine.update_weights_from_tensor(named_tensors, **known))


def update_weights_from_disk(engine: Engine, path: str, load_format: str = "auto") -> None:
    """Load a checkpoint folder that every host of the engine can read; needs no session.

    load_format is given since SGLang's default is the engine's own, and an engine started on "dummy" would refuse.
    """
    check_result("update_weights_from_disk", engine.update_weights_from_disk(path, load_format))


def init_weights_update_group(
    engine: Engine, *, address: str, port: int, rank_offset: int, world_size: int, group_name: str, backend: str
) -> None:
    """Join the engine's schedulers to a process group; TP rank r becomes rank_offset + r, in every pipeline stage
    alike.

    Blocks until all ranks have joined, so rank 0, the sender, must be joining at the same time.
    """
    call = "init_weights_update_group"
    check_result(call, engine.init_weights_update_group(address, port, rank_offset, world_size, group_name, backend))


def update_weights_from_distributed(
    api: SGLangApi,
    engine: Engine,
    named_shapes: Sequence[tuple[str, str, Sequence[int]]],
    *,
    group_name: str,
    flush_cache: bool,
    load_format: str | None = None,
) -> None:
    """Receive tensors by broadcast from rank 0 of the group, in order; inside `update_session`.

    named_shapes: (checkpoint name, dtype such as "bfloat16", shape). Until 0.4.8.post1 each tensor is a call of its
    own, always flushes the cache, and there is one group whatever its name.
    """
    call = "update_weights_from_distributed"
    known = api.distributed_update_parameters
    if load_format is not None and "load_format" not in known:
        raise ValueError(f"load_format = {load_format}: sglang {api.version} has none for {call}; leave it out.")
    if "name" in known:
        for name, dtype, shape in named_shapes:
            check_result(f"{call}({name})", engine.update_weights_from_distributed(name, dtype, list(shape)))
        return
    arguments = {
        "names": [name for name, _, _ in named_shapes],
        "dtypes": [dtype for _, dtype, _ in named_shapes],
        "shapes": [list(shape) for _, _, shape in named_shapes],
        "group_name": group_name,
        "flush_cache": flush_cache,
        "load_format": load_format,
    }
    sent = {name: value for name, value in arguments.items() if name in known}
    check_result(call, engine.update_weights_from_distributed(**sent))


def destroy_weights_update_group(api: SGLangApi, engine: Engine, group_name: str) -> bool:
    """Leave the group. Returns False, having done nothing, where SGLang keeps it as long as the engine lives."""
    if api.destroys_update_group:
        check_result("destroy_weights_update_group", engine.destroy_weights_update_group(group_name))
    return api.destroys_update_group


def release_memory_occupation(api: SGLangApi, engine: Engine, tags: Sequence[str] | None = None) -> None:
    """Free the GPU memory of `tags`, or of all. The content of weights and cache is lost. The engine must be idle."""
    arguments = memory_arguments(api, tags)
    check_result("release_memory_occupation", engine.release_memory_occupation(**arguments))


def resume_memory_occupation(api: SGLangApi, engine: Engine, tags: Sequence[str] | None = None) -> None:
    """Take back the GPU memory of `tags`, or of all. A tag that is not released kills the scheduler from 0.5.1 on."""
    arguments = memory_arguments(api, tags)
    check_result("resume_memory_occupation", engine.resume_memory_occupation(**arguments))


def memory_arguments(api: SGLangApi, tags: Sequence[str] | None) -> dict[str, list[str]]:
    """Keywords for release and resume. Raises ValueError for an unknown tag, for tags where this SGLang takes none,
    and for an empty sequence, which some releases read as nothing and others as all."""
    if tags is None:
        return {}
    if api.memory_tags is None:
        raise ValueError(
            f"tags = {list(tags)}: sglang {api.version} releases and resumes all memory at once; use None."
        )
    unknown = [tag for tag in tags if tag not in api.memory_tags]
    if unknown or not tags:
        raise ValueError(
            f"tags = {list(tags)}: sglang {api.version} has {', '.join(api.memory_tags)}; or None for all."
        )
    return {"tags": list(tags)}


def flush_cache(api: SGLangApi, engine: Engine) -> None:
    """Forget the prefix cache. Raises EngineRefused when requests are running, ValueError where SGLang cannot."""
    if not api.engine_flushes_cache:
        raise ValueError(f"flush_cache: sglang {api.version} has none on its Engine; use 0.4.5.post3 or newer.")
    check_result("flush_cache", await_in_engine(engine, lambda manager: manager.flush_cache()))


def pause_generation(api: SGLangApi, engine: Engine, mode: str = "abort") -> None:
    """Stop generating; abort ends running requests, retract and in_place keep them (see PauseGenerationReqInput)."""
    if api.pause_modes is None:
        raise ValueError(f"pause_generation: sglang {api.version} has none; use 0.4.9 or newer.")
    modes = api.pause_modes or ("abort",)
    if mode not in modes:
        raise ValueError(f"pause mode = {mode}: sglang {api.version} has {', '.join(modes)}.")
    arguments = _pause_request(api, "PauseGenerationReqInput", {"mode": mode})
    await_in_engine(engine, lambda manager: manager.pause_generation(*arguments))


def continue_generation(api: SGLangApi, engine: Engine) -> None:
    """Go on after pause_generation. Raises ValueError where SGLang cannot pause."""
    if api.pause_modes is None:
        raise ValueError(f"continue_generation: sglang {api.version} has none; use 0.4.9 or newer.")
    arguments = _pause_request(api, "ContinueGenerationReqInput", {})
    await_in_engine(engine, lambda manager: manager.continue_generation(*arguments))


def check_weights(api: SGLangApi, engine: Engine, action: str) -> tuple[RankChecksum, ...]:
    """Ask the schedulers about their own weights. checksum returns entries by rank; other actions return none.

    snapshot copies all weights to host memory, compare raises EngineRefused naming what differs from the snapshot,
    reset_tensors fills them with random values. In CPU mode EngineRefused comes of compare, and before 0.5.23 of
    checksum: both want a GPU. Only pipeline stage 0 answers; in 0.5.12 only its TP rank 0.
    Raises ValueError for an action that this SGLang does not have.
    """
    if action not in api.weight_check_actions:
        has = ", ".join(api.weight_check_actions) or "none"
        raise ValueError(f"check_weights action = {action}: sglang {api.version} has {has}.")
    request = source.load(IO_STRUCT, "CheckWeightsReqInput")(action=action)
    result = await_in_engine(engine, lambda manager: manager.check_weights(request))
    check_result(f"check_weights({action})", result)
    ranks = result[2] if isinstance(result, tuple) and len(result) > 2 else None
    return tuple(_rank_checksum(rank) for rank in ranks or ())


def collective_rpc(engine: Engine, method: str, **arguments: Any) -> None:
    """Call `method` of the Scheduler on all TP ranks; it returns nothing but success. Raises EngineRefused."""
    try:
        check_result(f"collective_rpc({method})", engine.collective_rpc(method, **arguments))
    except AssertionError as error:  # how every release so far reports that the method raised
        raise EngineRefused(f"collective_rpc({method})", str(error)) from error


def unlink_shared_memory(engine: Engine) -> None:
    """Take its name from the file in /dev/shm in which the schedulers report their load, since 0.5.13.

    SGLang never removes it, and ends its processes by SIGKILL. All who use it hold it open once the engine serves; the
    reader opens it at its first look.
    """
    reader = getattr(engine.tokenizer_manager, "load_snapshot_reader", None)
    path = getattr(reader, "path", None)  # none where the reports travel by ZeroMQ (dp attention)
    if reader is not None and path is not None:
        reader.read_all()
        Path(path).unlink(missing_ok=True)


def shutdown(engine: Engine) -> None:
    """End the engine's processes, and every other child of this process with them."""
    engine.shutdown()


def close(engine: Engine) -> None:
    """Let the engine close what it holds in this process; the caller ends its processes.

    SGLang's shutdown kills every child of this process, multiprocessing's resource tracker too: at Python's exit that one is
    started again with a warning, and knows none of the names in /dev/shm that it is then to remove.
    """
    module, name = sys.modules[type(engine).__module__], "kill_process_tree"
    real = vars(module).get(name)
    if real is not None:
        setattr(module, name, lambda *_, **__: None)
    try:
        engine.shutdown()
    finally:
        if real is not None:
            setattr(module, name, real)


def cancel_shutdown_at_exit(engine: Engine) -> None:
    """Leave the end of the engine's processes to the caller, also where Python exits; see close."""
    atexit.unregister(engine.shutdown)


def _engine_class() -> Any:
    """The class itself: the Engine of `import sglang` is a proxy that imports its module, for 7 s, only when called."""
    return source.load(ENGINE if source.installed("sglang").has(ENGINE) else OLD_ENGINE, "Engine")


def _success_and_message(call: str, result: object) -> tuple[bool, str]:
    if result is None or isinstance(result, bool):
        return result is not False, ""
    if isinstance(result, tuple) and result and isinstance(result[0], bool):
        return result[0], str(result[1]) if len(result) > 1 else ""
    success = getattr(result, "success", None)
    if isinstance(success, bool):
        return success, str(getattr(result, "message", ""))
    raise TypeError(
        f"{call} returned {type(result).__name__} {result!r:.200}: not None, bool, (bool, message) or .success."
    )


def _token_ids(input_ids: Sequence[Sequence[int]]) -> list[list[int]]:
    if not input_ids or not all(len(ids) for ids in input_ids):
        raise ValueError(f"input_ids: {len(input_ids)} prompts, some of them empty: every prompt needs a token.")
    return [list(ids) for ids in input_ids]


def _pause_request(api: SGLangApi, name: str, fields: Mapping[str, Any]) -> tuple[Any, ...]:
    """The argument of pause and continue: a request object since 0.5.6, nothing before."""
    if not api.pause_modes:
        return ()
    return (source.load(IO_STRUCT, name)(**fields),)


def _rank_checksum(answer: Mapping[str, Any]) -> RankChecksum:
    where = answer["parallelism_info"]
    where = where[0] if isinstance(where, list) else where  # since 0.5.21 one entry for each of target and draft models
    total = answer.get("per_gpu_checksum")
    return RankChecksum(tp_rank=where["tp_rank"], pp_rank=where["pp_rank"], tensors=answer["checksums"], total=total)
