"""The ranks of one engine: who calls it, and in which order its schedulers know them."""

from dataclasses import dataclass
from typing import TypeVar

import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

T = TypeVar("T")


@dataclass(frozen=True, kw_only=True, slots=True)
class Group:
    """The ranks of one engine."""

    process_group: dist.ProcessGroup
    ranks: tuple[int, ...]
    """World ranks in engine order: pp major, then tp."""
    rank: int
    """This process's world rank."""
    tp: int
    pp: int

    @property
    def head(self) -> int:
        """The rank that calls the engine."""
        return self.ranks[0]

    @classmethod
    def of(cls, mesh: DeviceMesh) -> "Group":
        """mesh: 1-D over tp, or 2-D over (tp, pp). Raises ValueError for another number of axes."""
        if mesh.ndim not in (1, 2):
            raise ValueError(
                f"device_mesh_cpu has axes {mesh.mesh_dim_names}; give the tp axis, or the tp and pp axes."
            )
        table = mesh.mesh.view(mesh.size(0), -1)
        ranks = tuple(table.T.flatten().tolist())
        return cls(
            # A group of its own, even where the mesh is the whole world: trainer threads use the default group while
            # the engine starts, and two threads must not share one.
            process_group=dist.new_group(sorted(ranks), backend="gloo", use_local_synchronization=True),
            ranks=ranks,
            rank=dist.get_rank(),
            tp=table.shape[0],
            pp=table.shape[1],
        )

    def gather(self, payload: T) -> list[T]:
        """Every rank's payload in engine order on the head; an empty list elsewhere."""
        received: list[T | None] | None = [None] * len(self.ranks) if self.rank == self.head else None
        dist.gather_object(payload, received, self.head, self.process_group)
        if received is None:
            return []
        by_rank = dict(zip(sorted(self.ranks), received, strict=True))
        return [by_rank[rank] for rank in self.ranks]  # type: ignore[misc]
