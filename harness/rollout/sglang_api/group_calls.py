"""The trainer's side of an update group, made in the way SGLang makes the engine's, so that the two meet."""

from datetime import timedelta
from typing import TYPE_CHECKING, cast

from harness.rollout.sglang_api import source
from harness.rollout.sglang_api.probe import MODEL_RUNNER, SGLangApi

if TYPE_CHECKING:
    import torch.distributed as dist

UTILS = ("srt/utils/common.py", "srt/utils.py")


def update_group_ends_in_barrier(api: SGLangApi) -> bool:
    """Whether the engine's ranks end init_weights_update_group in a barrier on GPU number rank, until 0.4.6.post5.

    gloo refuses such a barrier, and on CUDA an engine sees no GPU of that number: no such group can be had.
    """
    return source.mentions(api.tree.find_function("init_weights_update_group", MODEL_RUNNER), "barrier")


def open_update_group(
    api: SGLangApi,
    *,
    address: str,
    port: int,
    world_size: int,
    group_name: str,
    backend: str,
    timeout_seconds: float,
) -> "dist.ProcessGroup":
    """Rank 0 of a process group outside the default one; the others meet it at address:port.

    Blocks until all ranks have joined; group_name must be new to this process. Raises what torch raises when they have
    not after timeout_seconds, which each collective may take too.
    """
    import torch.distributed as dist

    timeout = timedelta(seconds=timeout_seconds)
    # Not by init_method: under torchrun, torch would take this rank for a client of the agent's store, and nobody would
    # serve. multi_tenant: after a failure the last group's store may still be alive.
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
