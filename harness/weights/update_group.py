"""The process group through which an engine's head, rank 0, broadcasts weights to the engine's TP ranks, 1 + r.

Two calls run at once, each on its own thread: the engine's, which makes its ranks receive, and the broadcast.
"""

from collections.abc import Callable
from concurrent.futures import FIRST_EXCEPTION, Future, wait
from functools import partial
from itertools import count
from typing import Any, TypeVar

import torch
import torch.distributed as dist

from harness.rollout import sglang_api
from harness.rollout.verl_engine import NamedTensors, VerlEngine
from harness.runtime.background import in_background

T = TypeVar("T")

TIMEOUT_SECONDS = 600.0
"""For opening a group, and for each broadcast."""
GRACE_SECONDS = 10.0
"""How long one side may run on after the other has failed, before it is left behind."""
_NUMBERS = count()  # torch wants each group of a process to have a name of its own


class UpdateGroup:
    """The group of one engine: opened with the first broadcast, kept for the next, opened anew after a failure."""

    def __init__(self, engine: VerlEngine) -> None:
        """Raise ValueError for pipeline stages."""
        if engine.group.pp > 1:
            raise ValueError(
                f"parallel.pp must be 1 with an update group, got {engine.group.pp}: sglang gives every pipeline stage the"
                " same ranks of it; use another transport."
            )
        self._engine = engine
        self._group: dist.ProcessGroup | None = None  # of the head alone
        self._name = ""
        self._backend = "gloo" if engine.device_type == "cpu" else "nccl"

    def broadcast(self, named_tensors: NamedTensors, flush_cache: bool) -> None:
        """Send contiguous tensors under their checkpoint names; a collective call of the engine's ranks, in a session.

        Only the head's tensors are sent, in one call of the engine. Raise EngineRefused, or what the broadcast raised, on
        the head, and EngineFailed on the other ranks.
        """
        self._engine.on_head(lambda inner: self._exchange(inner, named_tensors, flush_cache))
        self._engine.disconnect()

    def close(self) -> None:
        """Close the group on both sides, where this sglang can; a collective call that may be repeated."""
        self._engine.on_head(self._close)

    def _exchange(self, inner: Any, named_tensors: NamedTensors, flush_cache: bool) -> None:
        if self._group is None:
            self._open(inner)
        names, tensors = [name for name, _ in named_tensors], [tensor for _, tensor in named_tensors]
        dtypes = [str(tensor.dtype).removeprefix("torch.") for tensor in tensors]
        receive = partial(sglang_api.call, inner, "update_weights_from_distributed", names, dtypes)
        theirs = partial(receive, [list(tensor.shape) for tensor in tensors], self._name, flush_cache)
        if self._backend == "nccl":
            torch.cuda.current_stream().synchronize()  # the broadcasting thread has another current stream
        # Only self keeps the group: gloo closes its connections, and so frees the engine, with the last reference.
        self._both(inner, theirs, lambda: _broadcast_all(self._group, tensors))

    def _open(self, inner: Any) -> None:
        """Let both sides join; the head waits where its engine's lease of ports says."""
        self._name = f"harness_update_{next(_NUMBERS)}"
        address, port = self._engine.update_group_address
        rest: dict[str, Any] = {
            "world_size": self._engine.group.tp + 1,
            "group_name": self._name,
            "backend": self._backend,
        }
        theirs = partial(sglang_api.call, inner, "init_weights_update_group", address, port, rank_offset=1, **rest)
        ours = partial(sglang_api.open_update_group, address, port, timeout_seconds=TIMEOUT_SECONDS, **rest)
        self._group = self._both(inner, theirs, ours)

    def _close(self, inner: Any) -> None:
        group, self._group = self._group, None
        if group is not None and inner is not None:
            destroys = self._engine.api.destroys_update_group  # else it lives as long as the engine
            theirs = partial(sglang_api.call, inner, "destroy_weights_update_group", self._name)
            self._both(inner, theirs if destroys else lambda: None, partial(dist.destroy_process_group, group))

    def _both(self, inner: Any, theirs: Callable[[], object], ours: Callable[[], T]) -> T:
        """Run the engine's call and ours at once; return what ours returned. After a failure the group is destroyed."""
        device = torch.cuda.current_device() if self._backend == "nccl" else None

        def on_device() -> T:
            if device is not None:
                torch.cuda.set_device(device)
            return ours()

        def give_up() -> None:
            group, self._group = self._group, None
            if group is not None:
                if self._backend == "nccl":
                    group.abort()  # ends a broadcast that waits
                dist.destroy_process_group(group)

        return side_by_side(sglang_api.in_its_loop(inner, theirs), on_device, TIMEOUT_SECONDS, give_up)


def _broadcast_all(group: dist.ProcessGroup | None, tensors: list[torch.Tensor]) -> None:
    """Send contiguous tensors from rank 0, in order; return when all have left."""
    works = []
    for tensor in tensors:  # no comprehension: the cell that it makes of `group` would outlive a failure
        works.append(dist.broadcast(tensor, src=0, group=group, async_op=True))
    for work in works:
        work.wait()
    if tensors and tensors[0].is_cuda:
        torch.cuda.current_stream().synchronize()  # NCCL's wait only orders the stream


def side_by_side(theirs: Callable[[], object], ours: Callable[[], T], seconds: float, give_up: Callable[[], None]) -> T:
    """Run both calls at once, each on a daemon thread; return what `ours` returned, when both have.

    Once one fails, or both have taken `seconds`, give_up() must free whichever still waits, and the first failure is
    raised, or TimeoutError; a thread that does not end in GRACE_SECONDS is left behind.
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
