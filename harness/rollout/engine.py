"""RolloutEngine: all that a PPO step and a weight sync need of an inference engine, and how it fails.

Light: the watchdog imports the errors without torch. VerlEngine drives an sglang.Engine in the trainer's own processes. Another implementation needs no change in the
trainer, in PPO or in the sync: tests/rollout/http_engine.py reaches a server over HTTP.
"""

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Protocol, TypeVar

if TYPE_CHECKING:
    import torch

    from harness.rollout.engine_ranks import Group

T = TypeVar("T")

NamedTensors = Sequence[tuple[str, "torch.Tensor"]]


class EngineFailed(RuntimeError):
    """The engine did not start, died, or failed a call. The message names the rank and the first error in its log."""


class SchedulerFailed(EngineFailed):
    """A scheduler is alive, and answered that its part of a call failed."""


class PeerGone(ConnectionError):
    """The scheduler at the other end of a connection has died, or has given up."""


def in_one_line(error: BaseException) -> str:
    """Return an exception in one line, for the other ranks."""
    return str(error) if isinstance(error, EngineFailed) else f"{type(error).__name__}: {error}"


@dataclass(slots=True)
class Starts:
    """How the processes of an engine were started on one host."""

    forked: int = 0
    """By a server of rollout/early_start.py."""
    spawned: int = 0
    why_spawned: str = ""
    """Why a server could not fork one; "" if there was none, or if all were forked by the first."""


@dataclass(frozen=True, kw_only=True, slots=True)
class EngineRecord:
    """How an engine was started."""

    arguments: Mapping[str, Any]
    """All that its software was given."""
    dropped_defaults: Sequence[str] = ()
    """Defaults of the harness that this release does not have."""
    starts: Starts = field(default_factory=Starts)


class RolloutEngine(Protocol):
    """One inference engine, used by the trainer ranks of one group.

    Every rank of the group makes the same calls in the same order, so each method is a collective call: it returns the
    same value, or raises, on every rank. A failure of the engine raises EngineFailed.
    """

    @property
    def group(self) -> "Group":
        """The trainer ranks that use this engine."""

    @property
    def nnodes(self) -> int:
        """The number of hosts that the engine runs on."""

    @property
    def version(self) -> str:
        """The version of the engine's software, for messages."""

    @property
    def has_memory_saver(self) -> bool:
        """Whether release and resume move memory; if not, they do nothing."""

    @property
    def holds_graphs(self) -> bool:
        """Whether the tag "cuda_graph" is among what release and resume move."""

    @property
    def can_ask(self) -> bool:
        """Whether `ask` works. Without it weights cannot be read back, and only log-probs show whether they arrived."""

    def record(self) -> EngineRecord:
        """Return how the engine was started, for the run's events."""

    def generate(
        self,
        *,
        input_ids: Sequence[Sequence[int]],
        sampling_params: Mapping[str, Any],
        return_logprob: bool = False,
        return_routed_experts: bool = False,
    ) -> list[dict[str, Any]]:
        """Return one answer for each prompt, in SGLang's form: output_ids, and meta_info with the log-prob of each of
        them.

        return_routed_experts: meta_info also says which experts each token took; the engine needs the argument
        enable_return_routed_experts.
        """

    def seed(self, number: int) -> None:
        """Make the responses from here on depend on this number alone. Does nothing if the engine cannot be seeded."""

    def weight_update(self) -> AbstractContextManager[None]:
        """Group the updates made in this block into one update session of the engine (no-op when nested)."""

    def update_weights_from_tensor(
        self, named_tensors: NamedTensors, load_format: str | None = None, flush_cache: bool = True
    ) -> None:
        """Load full tensors under their checkpoint names. Every rank passes the same names and its own copy.

        load_format: None for one handle each, "flattened_bucket" for all tensors in one buffer.
        """

    def update_weights_from_disk(self, path: str) -> None:
        """Load a checkpoint folder that every host of the engine can read. It may be deleted when this returns."""

    def update_weights_from_distributed(self, named_tensors: NamedTensors, flush_cache: bool = True) -> None:
        """Broadcast contiguous tensors from the group's first rank to the engine, which may be on other GPUs and
        hosts.
        """

    def set_weight_version(self, version: str) -> None:
        """Name the weights that the engine holds from here on: meta_info of an answer has the name in weight_version.

        Does nothing if the engine knows no versions.
        """

    def flush_cache(self) -> None:
        """Forget cached prefixes: their keys and values were computed with the old weights."""

    def release_memory_occupation(self, tags: Sequence[str]) -> None:
        """Free the GPU memory of some of "kv_cache", "weights" and "cuda_graph". What the first two held is lost."""

    def resume_memory_occupation(self, tags: Sequence[str]) -> None:
        """Take the memory back. Update the weights before the engine generates again."""

    def ask(self, function: Callable[[Any, Any], T], argument: object = None) -> T:
        """Run function(model, argument) in the scheduler next to each rank, and return its answer. Needs can_ask."""

    def shutdown(self) -> None:
        """End the engine. Return on every rank when its processes are gone; a second call does nothing."""


class PullableEngine(RolloutEngine, Protocol):
    """An engine whose schedulers share hosts with the trainer ranks: what transport "pull" needs in addition."""

    @property
    def host(self) -> str:
        """The host of this rank, as the run numbers its hosts."""

    @property
    def trainer_gpu(self) -> str | None:
        """The GPU of this rank's trainer, written as in visible_gpus; None on CPU."""

    @property
    def visible_gpus(self) -> tuple[str, ...] | None:
        """The GPUs of this host whose CUDA IPC handles the schedulers here can open; None on CPU."""
