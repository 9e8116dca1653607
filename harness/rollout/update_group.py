"""The process group through which a trainer rank broadcasts weights to an engine's TP ranks.

The trainer's end is the engine's head. It is rank 0 of the group, and TP rank r is rank 1 + r. A broadcast needs two
calls at once, each on its own thread: one makes the engine's ranks receive, the other sends.
"""

from collections.abc import Callable
from concurrent.futures import FIRST_EXCEPTION, Future, wait
from functools import partial
from itertools import count
from typing import Any, TypeVar

import torch
import torch.distributed as dist

from harness.rollout import sglang_api
from harness.rollout.engine import NamedTensors
from harness.runtime.processes import in_background

T = TypeVar("T")

TIMEOUT_SECONDS = 600.0
"""For opening a group, and for each broadcast."""
GRACE_SECONDS = 10.0
"""How long one side may run on after the other has failed. After that it is left behind."""
_NUMBERS = count()  # torch wants a new name for each group of a process


class UpdateGroup:
    """The head's end of the group: opened by the first broadcast, kept for the next ones, opened again after a
    failure.
    """

    def __init__(self, call: Callable[..., None], address: tuple[str, int], tp: int, backend: str) -> None:
        """Open nothing yet.

        call: call("update_weights_from_distributed", names=..., ...) makes that call of the engine, with SGLang's
        names. address: a host and free port of this rank that the engine's ranks reach. backend: "nccl" or "gloo".
        """
        self._call = call
        self._address = address
        self._tp = tp
        self._backend = backend
        self._group: dist.ProcessGroup | None = None
        self._name = ""

    def broadcast(self, named_tensors: NamedTensors, flush_cache: bool) -> None:
        """Send contiguous tensors under their checkpoint names in one call.

        Raise what the first failing side raised.
        """
        if self._group is None:
            self._open()
        tensors, how = [tensor for _, tensor in named_tensors], {}
        if any(tensor.is_floating_point() and tensor.itemsize == 1 for tensor in tensors):  # gloo knows no 8-bit floats
            named_tensors = sorted(named_tensors, key=lambda named: -named[1].itemsize)  # as flattened_bucket does
            tensors = [sglang_api.flattened_bucket(named_tensors)["flattened_tensor"]]
            how = {"load_format": "flattened_bucket"}
        receive = partial(
            self._call,
            "update_weights_from_distributed",
            names=[name for name, _ in named_tensors],
            dtypes=[str(tensor.dtype).removeprefix("torch.") for _, tensor in named_tensors],
            shapes=[list(tensor.shape) for _, tensor in named_tensors],
            group_name=self._name,
            flush_cache=flush_cache,
            **how,
        )
        if self._backend == "nccl":
            torch.cuda.current_stream().synchronize()  # the sending thread has another current stream
        # Only self keeps a reference to the group: gloo closes its connections, which frees the engine, with the last
        # one.
        self._both(receive, lambda: _broadcast_all(self._group, tensors))

    def close(self) -> None:
        """Close the group at both ends. A second call does nothing."""
        group, self._group = self._group, None
        if group is not None:
            theirs = partial(self._call, "destroy_weights_update_group", group_name=self._name)
            self._both(theirs, partial(dist.destroy_process_group, group))

    def _open(self) -> None:
        self._name = f"harness_update_{next(_NUMBERS)}"
        host, port = self._address
        rest: dict[str, Any] = {"world_size": self._tp + 1, "group_name": self._name, "backend": self._backend}
        theirs = partial(
            self._call, "init_weights_update_group", master_address=host, master_port=port, rank_offset=1, **rest
        )
        self._group = self._both(
            theirs, partial(sglang_api.open_update_group, host, port, timeout_seconds=TIMEOUT_SECONDS, **rest)
        )

    def _both(self, theirs: Callable[[], object], ours: Callable[[], T]) -> T:
        """Run the engine's call and ours at once; return what ours returned. After a failure the group is destroyed."""
        device = torch.cuda.current_device() if self._backend == "nccl" else None

        def on_device() -> T:
            if device is not None:
                torch.cuda.set_device(device)  # the current device is per thread
            return ours()

        def give_up() -> None:
            group, self._group = self._group, None
            if group is not None:
                if self._backend == "nccl":
                    group.abort()  # ends a broadcast that is waiting
                dist.destroy_process_group(group)

        return side_by_side(theirs, on_device, TIMEOUT_SECONDS, give_up)


def _broadcast_all(group: dist.ProcessGroup | None, tensors: list[torch.Tensor]) -> None:
    """Send contiguous tensors from rank 0, in order; return when all have left."""
    works = []
    for tensor in tensors:  # not a comprehension: it would keep a reference to the group after a failure
        works.append(dist.broadcast(tensor, src=0, group=group, async_op=True))
    for work in works:
        work.wait()
    if tensors and tensors[0].is_cuda:
        torch.cuda.current_stream().synchronize()  # with NCCL, wait() only orders the stream


def side_by_side(theirs: Callable[[], object], ours: Callable[[], T], seconds: float, give_up: Callable[[], None]) -> T:
    """Run both calls at once, each on a daemon thread. Return what `ours` returned when both are done.

    If one fails, or both together take more than `seconds`, call give_up(), which must free the side that still waits,
    and raise the first failure, or TimeoutError. A thread that has not ended after GRACE_SECONDS is left behind.
    """
    engine, trainer = in_background(theirs, "update-group-engine"), in_background(ours, "update-group-trainer")
    sides: dict[str, Future[Any]] = {"the engine's call": engine, "the trainer's side": trainer}
    wait(sides.values(), seconds, FIRST_EXCEPTION)
    errors = [error for side in sides.values() if side.done() and (error := side.exception())]
    late = [name for name, side in sides.items() if not side.done()]
    if not errors and not late:
        return trainer.result()
    give_up()
    wait(sides.values(), GRACE_SECONDS)
    raise (
        errors[0]
        if errors
        else TimeoutError(f"{' and '.join(late)} took more than {seconds:.0f} s in the update group")
    )
