"""The default transport: two buffers, gathered and loaded side by side."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import torch

from harness.rollout.verl_engine import VerlEngine
from harness.rollout.weight_link import WeightLink
from harness.weights.gather import Bucket, gather_into


@dataclass(slots=True)
class Stream:
    """While the engine loads one bucket, the next is gathered into the other slot; see weight_link for who waits."""

    engine: VerlEngine
    live: Mapping[str, torch.Tensor]
    link: Callable[[], WeightLink]
    """Opens the link at its first call."""

    def push(self, buckets: Sequence[Bucket], gather: object = None) -> None:
        """One sync in one engine call; the prefix cache is flushed with it. A collective call of all ranks."""
        link = self.link()
        with self.engine.weight_update():
            link.load(lambda index, slot: gather_into(slot, buckets[index], self.live))

    def close(self) -> None:
        """The link is its owner's."""
