"""The trainer's end of the slots: every rank of an engine feeds its own scheduler, during one engine call for all."""

import json
import shutil
import uuid
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, TypeVar

import torch
import torch.distributed as dist

from harness.rollout.engine_errors import EngineFailed, SchedulerFailed
from harness.rollout.schedulers import call_schedulers
from harness.rollout.verl_engine import VerlEngine
from harness.runtime import scratch
from harness.weights.stream.slots import SLOTS, Layout, SegmentTimer, SlotConnection, StreamListener, slot_bytes, stamp
from harness.weights.worker import reader
from harness.weights.worker.reader import LoadCoverage

T = TypeVar("T")
Ended = Callable[[], bool]


@dataclass(slots=True)
class WeightLink:
    """Two slots beside each scheduler of one engine, and what its loader makes of a layout of buckets."""

    engine: VerlEngine
    device: torch.device
    layout: Layout
    link: SlotConnection
    coverage: tuple[LoadCoverage, ...]
    """Of all schedulers of the engine, in engine order."""
    stamped: int = 1
    """The stamp of the next bucket: no two are the same, and none is 0, as in a fresh slot."""
    broken: bool = False
    """A call failed: the connection may still hold messages of that call."""
    seconds: dict[str, float] = field(default_factory=dict)
    """Parts of the last load: fill and wait on this rank, feed both together; scheduler_load, scheduler_wait in its."""

    @classmethod
    def open(cls, engine: VerlEngine, layout: Layout, payload_bytes: int) -> "WeightLink":
        """Make the slots and let the schedulers open them; changes no weight. A collective call of the engine's ranks.

        payload_bytes: of the largest bucket. Raise EngineFailed where a scheduler does not come, MemoryError when the
        GPU has no room for two buckets.
        """
        nbytes, device, group = slot_bytes(payload_bytes), engine.device, engine.group
        _check_room(engine, device, SLOTS * nbytes)
        name = [f"harness-{uuid.uuid4().hex[:12]}"]
        dist.broadcast_object_list(name, group.head, group.process_group)
        listener = StreamListener(scratch.shared() / name[0], group.ranks.index(group.rank))  # on each host
        dist.barrier(group=group.process_group)

        def offer(ended: Ended) -> tuple[SlotConnection, LoadCoverage]:
            link = listener.offer(nbytes, device, layout, ended)
            return link, _answer(link, "coverage", ended)

        try:
            message = json.dumps({"do": reader.OPEN, "folder": name[0]})
            link, coverage = call_schedulers(engine, reader.STREAM, message, offer)
        finally:
            listener.close()
        by_rank = group.all_gather(coverage)
        return cls(engine, device, layout, link, tuple(by_rank[rank] for rank in group.ranks))

    def load(self, fill: Callable[[int, torch.Tensor], None]) -> None:
        """Call fill(bucket, slot) for each bucket in order, while the schedulers load the ones before. Collective.

        Every rank fills its slot with the same bytes, once its reader is done with the slot: on CUDA the current stream
        waits for the reader's event. The prefix cache is flushed. Raise EngineFailed.
        """
        there, here = self._feed(reader.LOAD, fill, flush_cache=True)
        self.seconds = here | {f"scheduler_{name}": seconds for name, seconds in there.items()}

    def compare(self, fill: Callable[[int, torch.Tensor], None]) -> tuple[dict[str, tuple[int, int]], list[str]]:
        """Call `fill` as load does; return what the scheduler of this rank holds otherwise (SlotReader.compare)."""
        found, _ = self._feed(reader.COMPARE, fill)
        return found

    def _feed(self, what: str, fill: Callable[[int, torch.Tensor], None], flush_cache: bool = False) -> Any:
        """Return what the scheduler answers, and the seconds of the parts here."""
        first, self.stamped = self.stamped, self.stamped + len(self.layout)
        timer = SegmentTimer(self.device)

        def feed(ended: Ended) -> Any:
            with timer.measure("feed"):
                for index in range(len(self.layout) + SLOTS):
                    with timer.measure("wait"):
                        if index >= SLOTS:
                            self._await_read(index - SLOTS, ended)
                    if index < len(self.layout):
                        with timer.measure("fill"):
                            slot = self.link.slots[index % SLOTS]
                            stamp(slot).fill_(first + index)
                            fill(index, slot)
                        self._say_filled(index)
            return _answer(self.link, "done", ended)

        answer = self._call(what, feed, flush_cache, first=first)
        return answer, timer.read()

    def close(self) -> None:
        """Give the slots back. A collective call of the engine's ranks."""
        self._call(reader.CLOSE, lambda ended: None)
        self.link.close()

    def _call(self, what: str, meanwhile: Callable[[Ended], T], flush_cache: bool = False, **details: int) -> T:
        message = json.dumps({"do": what} | details)
        try:
            return call_schedulers(self.engine, reader.STREAM, message, meanwhile, flush_cache)
        except Exception:
            self.broken = True
            raise

    def _await_read(self, index: int, ended: Ended) -> None:
        message = self.link.receive(ended)
        if isinstance(message, tuple) and message[0] == "failed":
            # Not SchedulerFailed: the other ranks need this one in the gathers of the buckets to come.
            raise EngineFailed(f"the scheduler beside rank {self.engine.group.rank}: {message[1]}")
        assert message == index, f"the scheduler answered {message!r} where bucket {index} was due"
        if self.link.read:
            self.link.read[index % SLOTS].wait(torch.cuda.current_stream(self.device))

    def _say_filled(self, index: int) -> None:
        if self.link.filled:
            self.link.filled[index % SLOTS].record(torch.cuda.current_stream(self.device))
        self.link.send(index)


def _answer(link: SlotConnection, kind: str, ended: Ended) -> Any:
    message = link.receive(ended)
    if message[0] != kind:
        raise SchedulerFailed(f"its scheduler answered {message[0]}: {message[1]}")
    return message[1]


def _check_room(engine: VerlEngine, device: torch.device, nbytes: int) -> None:
    """Raise MemoryError on every rank when one has not nbytes free, on its GPU or in the shared memory of its host."""
    if device.type == "cuda":
        torch.cuda.empty_cache()
        place, free = "GPU", torch.cuda.mem_get_info(device)[0]
    else:
        place, free = "share of /dev/shm", shutil.disk_usage("/dev/shm").free // len(engine.node.ranks)
    for rank, each in engine.group.all_gather(free).items():
        if each < nbytes:
            raise MemoryError(
                f"weights.bucket_size_mib: two buckets take {nbytes >> 20} MiB, but rank {rank}'s {place} has"
                f" {each >> 20} MiB free; make it smaller, or leave the engine less (engine.args.mem_fraction_static)."
            )
