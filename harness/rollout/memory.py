"""Sleep and wake in stages, so that trainer and engine can share a GPU: weights first, the KV cache when it is needed.

Woken all at once, the KV cache would claim its memory while the trainer's gathered copies still hold it.
"""

from dataclasses import dataclass, field

import torch
import torch.distributed as dist

from harness.rollout.verl_engine import VerlEngine

WEIGHTS, KV_CACHE = "weights", "kv_cache"


@dataclass(slots=True)
class MemoryStages:
    """What of one engine is asleep. Without the memory saver (on CPU, or turned off) every stage does nothing."""

    engine: VerlEngine
    asleep: set[str] = field(default_factory=set)

    def sleep(self) -> None:
        """Free KV cache and weights; their contents are lost."""
        if self.engine.has_memory_saver:
            self.engine.release_memory_occupation(self._tags(KV_CACHE, WEIGHTS))
            self.asleep = {WEIGHTS, KV_CACHE}
        self._meet()

    def wake_weights(self) -> None:
        """Take the weights' memory back; what it holds is garbage until the next sync."""
        if WEIGHTS in self.asleep:
            self._empty_trainer_cache()
            self.engine.resume_memory_occupation(self._tags(WEIGHTS))
            self.asleep -= {WEIGHTS} if self._has_tags else {WEIGHTS, KV_CACHE}
        self._meet()

    def wake_kv_cache(self) -> None:
        """Take the KV cache's memory back."""
        self._empty_trainer_cache()
        if KV_CACHE in self.asleep:
            self.engine.resume_memory_occupation(self._tags(KV_CACHE))
            self.asleep -= {KV_CACHE}
        self._meet()

    @property
    def _has_tags(self) -> bool:
        return self.engine.api.memory_tags is not None

    def _tags(self, *tags: str) -> tuple[str, ...] | None:
        """The tags, or None where this sglang frees and takes all memory at once (before 0.4.8)."""
        return tags if self._has_tags else None

    def _empty_trainer_cache(self) -> None:
        """Give the GPU what torch's allocator of this process only keeps for later."""
        if torch.cuda.is_initialized():
            torch.cuda.empty_cache()
        self._meet()

    def _meet(self) -> None:
        """No rank goes on before all GPUs of the engine are in the same state."""
        dist.barrier(group=self.engine.group.process_group)
