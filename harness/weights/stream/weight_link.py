"""The trainer's end of the weight stream: every rank of an engine beside its own scheduler, one engine call for all.

The head's call runs on a thread of its own while each rank, the head too, feeds its scheduler.
"""

import json
import uuid
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, TypeVar

import torch
import torch.distributed as dist

from harness.cluster.world import all_gather
from harness.rollout import scratch
from harness.rollout.errors import EngineFailed, SchedulerFailed
from harness.rollout.schedulers import call_schedulers
from harness.rollout.verl_engine import VerlEngine
from harness.weights.stream.clock import SegmentTimer
from harness.weights.stream.slots import SLOTS, Layout, Link, StreamListener, slot_bytes, stamp
from harness.weights.worker import reader as stream
from harness.weights.worker.reader import LoadCoverage

T = TypeVar("T")


@dataclass(slots=True)
class WeightLink:
    """Two slots beside each scheduler of one engine, and what its loader makes of a layout of buckets."""

    engine: VerlEngine
    device: torch.device
    layout: Layout
    link: Link
    coverage: tuple[LoadCoverage, ...]
    """Of all the engine's schedulers, in engine order."""
    stamped: int = 1
    """The next bucket's stamp: no two have the same, and none is 0, as a fresh slot is."""
    broken: bool = False
    """A call failed, and may have left words in the connection that the next one would take for its own."""
    seconds: dict[str, float] = field(default_factory=dict)
    """What the parts of the last load took: fill and wait on this rank, feed both together; scheduler_load and
    scheduler_wait in its scheduler, and gpu_ of these where the GPU's own time is known."""

    @classmethod
    def open(cls, engine: VerlEngine, layout: Layout, payload_bytes: int) -> "WeightLink":
        """Make the slots and let the schedulers open them; changes no weight. A collective call of the engine's ranks.

        payload_bytes: of the largest bucket. Raises EngineFailed where a scheduler does not come, MemoryError when
        two buckets are more than the GPU has free.
        """
        nbytes, device = slot_bytes(payload_bytes), engine.device
        _check_room(engine, device, SLOTS * nbytes)
        name = [f"harness-{uuid.uuid4().hex[:12]}"]
        dist.broadcast_object_list(name, engine.group.head, engine.group.process_group)
        folder = scratch.shared() / name[0]  # each host's own
        rank = engine.group.ranks.index(engine.group.rank)
        door = StreamListener.open(folder, rank)
        dist.barrier(group=engine.group.process_group)
        message = json.dumps({"do": stream.OPEN, "folder": name[0]})

        def offer(ended: Callable[[], bool]) -> tuple[Link, LoadCoverage]:
            link = door.offer(nbytes, device, layout, ended)
            return link, _answer(link, "arrival", ended)

        try:
            link, arrival = call_schedulers(engine, stream.STREAM, message, offer)
        finally:
            door.close()
        by_rank = dict(zip(sorted(engine.group.ranks), all_gather(arrival, engine.group.process_group), strict=True))
        return cls(engine, device, layout, link, tuple(by_rank[rank] for rank in engine.group.ranks))

    def load(self, fill: Callable[[int, torch.Tensor], None]) -> None:
        """fill(bucket, slot) for each bucket, in order, while the schedulers load the ones before; returns when all
        are loaded. Every rank fills its slot with the same bytes. The prefix cache is flushed.

        A slot is handed to `fill` only when its reader is done with it: on CUDA the current stream waits for the
        reader's event. A collective call; raises EngineFailed.
        """

        first, self.stamped = self.stamped, self.stamped + len(self.layout)

        def feed(ended: Callable[[], bool]) -> dict[str, float]:
            clock = SegmentTimer(self.device)
            with clock.measure("feed"):
                for index in range(len(self.layout)):
                    with clock.measure("wait"):
                        if index >= SLOTS:
                            self._await_read(index - SLOTS, ended)
                    with clock.measure("fill"):
                        slot = self.link.slots[index % SLOTS]
                        stamp(slot).fill_(first + index)
                        fill(index, slot)
                    self._say_filled(index)
                for index in range(max(0, len(self.layout) - SLOTS), len(self.layout)):
                    self._await_read(index, ended)
            there = _answer(self.link, "done", ended)
            return clock.read() | {f"scheduler_{name}": seconds for name, seconds in there.items()}

        self.seconds = self._call(stream.LOAD, feed, flush_cache=True, first=first)

    def read_back(self, compare: Callable[[int, torch.Tensor], None]) -> list[str]:
        """compare(bucket, slot) with what this rank's scheduler holds, each in the place that it had when it was sent.

        Bytes of a bucket that this scheduler does not hold are 0. Returns the engine's own names of tensors derived
        from weights (DeepSeek's absorbed projections) that were stale; those are then made anew. A collective call.
        """

        def take(ended: Callable[[], bool]) -> list[str]:
            for index in range(len(self.layout)):
                self.link.slots[1].zero_()
                if self.device.type == "cuda":
                    torch.cuda.synchronize(self.device)
                self.link.send(index)
                assert self._receive(ended) == index
                compare(index, self.link.slots[1])
            return _answer(self.link, "done", ended)

        return self._call(stream.READ_BACK, take)

    def close(self) -> None:
        """Give the slots back. A collective call of the engine's ranks."""
        self._call(stream.CLOSE, lambda ended: None)
        self.link.close()

    def _call(
        self, what: str, meanwhile: Callable[[Callable[[], bool]], T], flush_cache: bool = False, **details: int
    ) -> T:
        message = json.dumps({"do": what} | details)
        try:
            return call_schedulers(self.engine, stream.STREAM, message, meanwhile, flush_cache)
        except Exception:
            self.broken = True
            raise

    def _receive(self, ended: Callable[[], bool]) -> Any:
        message = self.link.receive(ended)
        if isinstance(message, tuple) and message[0] == "failed":
            raise EngineFailed(f"the scheduler beside rank {self.engine.group.rank}: {message[1]}")
        return message

    def _await_read(self, index: int, ended: Callable[[], bool]) -> None:
        received = self._receive(ended)
        assert received == index, f"the scheduler answered {received!r} where bucket {index} was due"
        if self.link.read:
            self.link.read[index % SLOTS].wait(torch.cuda.current_stream(self.device))

    def _say_filled(self, index: int) -> None:
        if self.link.filled:
            self.link.filled[index % SLOTS].record(torch.cuda.current_stream(self.device))
        self.link.send(index)


def _answer(link: Link, kind: str, ended: Callable[[], bool]) -> Any:
    message = link.receive(ended)
    if message[0] != kind:
        raise SchedulerFailed(f"its scheduler answered {message[0]}: {message[1]}")
    return message[1]


def _check_room(engine: VerlEngine, device: torch.device, nbytes: int) -> None:
    """Raises MemoryError on every rank when one of the engine's GPUs has not nbytes free."""
    free = None
    if device.type == "cuda":
        torch.cuda.empty_cache()
        free = torch.cuda.mem_get_info(device)[0]
    for rank, each in zip(sorted(engine.group.ranks), all_gather(free, engine.group.process_group), strict=True):
        if each is not None and each < nbytes:
            raise MemoryError(
                f"weights.bucket_size_mib: two buckets take {nbytes >> 20} MiB, but rank {rank}'s GPU has"
                f" {each >> 20} MiB free; make it smaller, or leave the engine less (engine.args.mem_fraction_static)."
            )
