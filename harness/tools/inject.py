"""The faults of run.inject: one rank fails on purpose when it begins a phase, as real ranks have failed.

Those that act on weights or gradients reach only into what the trainer and the sync have anyway.
"""

import os
import resource
import signal
import time
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch

from harness.cluster.world import Launch, all_gather
from harness.config.layers import ConfigError
from harness.config.schema import Config
from harness.runtime.errors import UnsupportedEnvironment
from harness.runtime.observer import Observer, RunContext
from harness.tools.fault_spec import Fault, parse_fault
from harness.trainer.offload import local

SLOW_SECONDS = 4.0  # how late the slow rank comes
BALLAST_BYTES = 256 << 20  # by which oom lets a rank grow on a CPU, and which it then takes
CHUNK_BYTES = 32 << 20
LARGEST_DISK = 1 << 30  # free bytes of a disk that may be filled on purpose


class InjectedFault(RuntimeError):
    """The exception of `exception@PHASE`."""


class Injector(Observer):
    """Cause the faults of run.inject that are meant for this rank, each once."""

    def __init__(self, announce: Callable[[str], None]) -> None:
        """announce: is called with each fault before it happens; returns once the other hosts know this rank's phase."""
        self.announce = announce
        self.pending: list[Fault] = []
        self.run: RunContext | None = None
        self.parts: dict[str, Any] = {}  # what the run has built: "sync", "actor", "critic"
        self._undo: list[Callable[[], None]] = []
        self._held: list[Any] = []

    def launched(self, config: Config, launch: Launch) -> None:
        self.pending = [fault for fault in map(parse_fault, config.run.inject) if fault.rank == launch.rank]

    def met(self, run: RunContext) -> None:
        """Raise UnsupportedEnvironment where a disk would have to be filled that others need."""
        self.run = run
        disk = os.statvfs(run.folder)
        free = disk.f_bavail * disk.f_frsize
        if free > LARGEST_DISK and any(fault.kind == "full-disk" for fault in self.pending):
            raise UnsupportedEnvironment(
                f"run.inject has full-disk, which fills at most {LARGEST_DISK >> 20} MiB: the disk of run.dir must be small"
                f" (mount -t tmpfs -o size=64m), got {run.folder} with {free >> 20} MiB free."
            )

    def built(self, name: str, part: Any) -> None:
        self.parts[name] = part

    def phase_begins(self, phase: str, step: int | None) -> None:
        for fault in self.due(phase, step):
            self.announce(str(fault))
            getattr(self, "_" + fault.kind.replace("-", "_"))(fault)

    def phase_ends(self, phase: str, step: int | None) -> None:
        while self._undo:
            self._undo.pop()()

    def passed(self) -> None:
        """Raise ConfigError on every rank where a fault that was asked for never happened. A collective call."""
        never = [str(fault) for pending in all_gather(self.pending) for fault in pending]
        if never:
            raise ConfigError(f"run.inject: {', '.join(never)} never happened, because this run has no such phase.")

    def due(self, phase: str, step: int | None, slow: bool = False) -> list[Fault]:
        """Return this rank's faults of the phase, each once: those that make it slow, or the others."""
        due = [each for each in self.pending if each.matches(phase, step) and (each.kind == "slow") == slow]
        self.pending = [fault for fault in self.pending if fault not in due]
        for fault in due:
            if self.run:
                self.run.events.fact("injected", fault=str(fault))
        return due

    def _exception(self, fault: Fault) -> None:
        raise InjectedFault(f"{fault} was asked for")

    def _kill(self, fault: Fault) -> None:
        os.kill(os.getpid(), signal.SIGKILL)

    def _stop(self, fault: Fault) -> None:
        os.kill(os.getpid(), signal.SIGSTOP)

    def _hang(self, fault: Fault) -> None:
        time.sleep(1 << 30)

    def _oom(self, fault: Fault) -> None:
        """Take all memory: on a GPU, what is free; on a CPU, what a limit leaves, so that the kernel kills no process."""
        if torch.cuda.is_initialized():
            free, _ = torch.cuda.mem_get_info()
            self._held.append(torch.empty(max(0, free - CHUNK_BYTES), dtype=torch.uint8, device="cuda"))
            return
        pages, before = int(Path("/proc/self/statm").read_text().split()[0]), resource.getrlimit(resource.RLIMIT_AS)
        ballast: list[bytearray] = []
        resource.setrlimit(resource.RLIMIT_AS, (pages * resource.getpagesize() + BALLAST_BYTES, before[1]))
        try:
            while True:
                ballast.append(bytearray(CHUNK_BYTES))
        except MemoryError as error:
            raise MemoryError(f"{len(ballast) * CHUNK_BYTES >> 20} MiB of ballast took all memory") from error
        finally:
            ballast.clear()
            resource.setrlimit(resource.RLIMIT_AS, before)

    def _full_disk(self, fault: Fault) -> None:
        """Fill the disk by a file without a name, whose bytes are free again once this process has ended."""
        assert self.run is not None
        file = os.open(self.run.folder, os.O_TMPFILE | os.O_WRONLY)
        self._held.append(file)
        for size in (1 << 20, 1 << 12, 1):
            try:
                while True:
                    os.write(file, bytes(size))
            except OSError:
                continue  # full, but for less than that
        raise OSError(28, "No space left on device", str(self.run.folder))

    def _nan_gradient(self, fault: Fault) -> None:
        learner = self.parts[fault.phase.removeprefix("update_")]

        def spoil() -> None:
            learner.after_backward.clear()
            parameter = next(
                each for each in learner.model.parameters() if each.grad is not None and local(each).numel()
            )
            local(parameter.grad).view(-1)[0] = float("nan")

        learner.after_backward.append(spoil)

    def _nan_weight(self, fault: Fault) -> None:
        _, tensor = self._first_sent()
        with torch.no_grad():
            local(tensor).view(-1)[0] = float("nan")

    def _wrong_shape(self, fault: Fault) -> None:
        name, tensor = self._first_sent()
        live, rows = self.parts["sync"].live, tensor.shape[0] + 1
        live[name] = torch.zeros(rows, *tensor.shape[1:], dtype=tensor.dtype, device=tensor.device)
        self._undo.append(lambda: live.__setitem__(name, tensor))

    def _dropped_bucket(self, fault: Fault) -> None:
        """Send zeros for this rank's rows of the last bucket, in every sync: a search for the cause finds it again."""
        sync = self.parts["sync"]
        real, live = sync.transport, sync.live

        def push(buckets: Any, gather: Any) -> None:
            lost = {piece.live_name: live[piece.live_name] for piece in buckets[-1].pieces}
            live.update({name: torch.zeros_like(tensor) for name, tensor in lost.items()})
            try:
                real.push(buckets, gather)
            finally:
                live.update(lost)

        sync.transport = SimpleNamespace(push=push, close=real.close)

    def _lost_message(self, fault: Fault) -> None:
        """Lose the next request to the scheduler beside this rank, which therefore never answers."""
        channel = self.parts["sync"].engine._channel
        channel._request = lambda *_: channel._connection.recv_bytes()

    def _first_sent(self) -> tuple[str, torch.Tensor]:
        """Return name and tensor of the first that a sync gathers, and of which this rank has a part."""
        live = self.parts["sync"].live
        return next((name, each) for name, each in live.items() if each.is_floating_point() and local(each).numel())


class LateRank(Observer):
    """Delay a rank at the start of a phase; comes before the watchdog, which must not know of the phase yet."""

    def __init__(self, injector: Injector) -> None:
        self.injector = injector

    def phase_begins(self, phase: str, step: int | None) -> None:
        if self.injector.due(phase, step, slow=True):
            time.sleep(SLOW_SECONDS)
