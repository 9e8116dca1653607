"""The faults of run.inject: one rank fails on purpose at the start of a phase, as real ranks have failed.

Faults in weights or gradients change the tensors of the trainer and the sync; they add none.
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
from harness.observer import Observer, RunContext
from harness.runtime.errors import UnsupportedEnvironment
from harness.tools.fault_spec import Fault, parse_fault
from harness.trainer.offload import local

SLOW_SECONDS = 4.0  # how late the slow rank comes
BALLAST_BYTES = 256 << 20  # how much more memory oom allows a rank on a CPU, before it takes it all
CHUNK_BYTES = 32 << 20
LARGEST_DISK = 1 << 30  # free bytes of a disk that may be filled on purpose


class InjectedFault(RuntimeError):
    """What `exception@PHASE` raises."""


class Injector(Observer):
    """Cause the faults of run.inject that are meant for this rank, each once."""

    def __init__(self, announce: Callable[[], None]) -> None:
        """announce: called before each fault happens; it returns once the other hosts know this rank's phase."""
        self.announce = announce
        self.pending: list[Fault] = []
        self.run: RunContext | None = None
        self.parts: dict[str, Any] = {}  # what the run has built: "sync", "actor", "critic"
        self._undo: list[Callable[[], None]] = []
        self._held: list[Any] = []

    def launched(self, config: Config, launch: Launch) -> None:
        self.pending = [fault for fault in map(parse_fault, config.run.inject) if fault.rank == launch.rank]

    def met(self, run: RunContext) -> None:
        """Raise UnsupportedEnvironment if full-disk would fill a disk that others may need."""
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
            self.announce()
            getattr(self, "_" + fault.kind.replace("-", "_"))(fault)

    def phase_ends(self, phase: str, step: int | None) -> None:
        while self._undo:
            self._undo.pop()()

    def passed(self) -> None:
        """Raise ConfigError on every rank if a fault of the config never happened. A collective call of all ranks."""
        never = [str(fault) for pending in all_gather(self.pending) for fault in pending]
        if never:
            raise ConfigError(f"run.inject: {', '.join(never)} never happened, because this run has no such phase.")

    def due(self, phase: str, step: int | None, slow: bool = False) -> list[Fault]:
        """Return this rank's faults at the phase, each only once: those that make it slow, or all others."""
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
        """Take all memory: on a GPU what is free; on a CPU up to a limit for this process, so that the kernel kills no
        other.
        """
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
        """Fill the disk with a file without a name, whose bytes become free again when this process ends."""
        assert self.run is not None
        file = os.open(self.run.folder, os.O_TMPFILE | os.O_WRONLY)
        self._held.append(file)
        for size in (1 << 20, 1 << 12, 1):
            try:
                while True:
                    os.write(file, bytes(size))
            except OSError:
                continue  # no room for this size: try a smaller one
        raise OSError(28, "No space left on device", str(self.run.folder))

    def _nan_gradient(self, fault: Fault) -> None:
        learner = self.parts[fault.phase.removeprefix("update_")]

        def spoil() -> None:
            if learner.loss_scale <= 1:  # else the backward is run again, as after an overflow of float16
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
        sent, rows = self.parts["sync"].weights.tensors, tensor.shape[0] + 1
        sent[name] = torch.zeros(rows, *tensor.shape[1:], dtype=tensor.dtype, device=tensor.device)
        self._undo.append(lambda: sent.__setitem__(name, tensor))

    def _dropped_bucket(self, fault: Fault) -> None:
        """Send zeros for this rank's rows of the last bucket, in every sync, so that a search for the cause finds it
        again.
        """
        sync = self.parts["sync"]
        real = sync.transport

        def send(weights: Any) -> None:
            lost = {piece.of: weights.tensors[piece.of] for piece in weights.buckets[-1].pieces}
            weights.tensors.update({name: torch.zeros_like(tensor) for name, tensor in lost.items()})
            try:
                real.send(weights)
            finally:
                weights.tensors.update(lost)

        sync.transport = SimpleNamespace(send=send, close=real.close)

    def _lost_message(self, fault: Fault) -> None:
        """Lose the next request to this rank's scheduler, so that it never answers."""
        channel = self.parts["sync"].engine._channel
        channel._request = lambda *_: channel._connection.recv_bytes()

    def _first_sent(self) -> tuple[str, torch.Tensor]:
        """Return the first tensor that a sync gathers and that this rank holds a part of, with its name."""
        sent = self.parts["sync"].weights.tensors
        return next((name, each) for name, each in sent.items() if each.is_floating_point() and local(each).numel())


class LateRank(Observer):
    """Delays a rank at the start of a phase.

    Runs before the watchdog observes, which must not know of the phase yet.
    """

    def __init__(self, injector: Injector) -> None:
        self.injector = injector

    def phase_begins(self, phase: str, step: int | None) -> None:
        if self.injector.due(phase, step, slow=True):
            time.sleep(SLOW_SECONDS)
