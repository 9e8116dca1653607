"""Where the ranks of one engine sit: which of them share a host, and which of those builds the engine there."""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, Literal, Self, cast

import torch

from harness.cluster.mesh import ParallelDims
from harness.cluster.placement import EngineNode, RankLocation, place
from harness.cluster.world import all_gather, own_location
from harness.rollout.group import Group


@dataclass(frozen=True, slots=True)
class EngineRanks:
    """The group's locations, and this rank's node."""

    locations: dict[int, RankLocation]
    """By world rank."""
    node: EngineNode
    """In world ranks."""
    nnodes: int

    @classmethod
    def of(cls, group: Group, device: Literal["cpu", "cuda"], colocate: bool, nnodes: int | None) -> Self:
        """nnodes: what the caller expects, None for any. A collective call of the group.

        Raises ValueError for a placement that cannot work, and for another number of hosts than expected.
        """
        own = own_location(device == "cpu", colocate)
        locations: dict[int, RankLocation] = {
            location.rank: location for location in all_gather(own, group.process_group)
        }
        # Numbered as a mesh of one engine numbers them: tp major, then pp.
        order = [group.ranks[stage * group.tp + index] for index in range(group.tp) for stage in range(group.pp)]
        numbered = tuple(replace(locations[rank], rank=position) for position, rank in enumerate(order))
        placement = place(ParallelDims(dp=1, tp=group.tp, pp=group.pp), numbered, device)[0]
        if nnodes is not None and nnodes != placement.nnodes:
            raise ValueError(
                f"nnodes = {nnodes}, but the {len(group.ranks)} ranks of this engine are on {placement.nnodes} hosts;"
                f" pass nnodes = {placement.nnodes}, or leave it out."
            )
        nodes = [
            EngineNode(node.node_rank, node.host, tuple(order[rank] for rank in node.ranks), node.visible_devices)
            for node in placement.nodes
        ]
        return cls(locations, next(node for node in nodes if group.rank in node.ranks), placement.nnodes)

    def engine_device(self, device: Literal["cpu", "cuda"], rank: int) -> torch.device:
        """Where this process, of world rank `rank`, finds the GPU that its engine rank runs on."""
        if device == "cpu":
            return torch.device("cpu")
        return torch.device("cuda", torch.cuda.current_device() + self.locations[rank].engine_offset)

    def local_rank(self, rank: int) -> int:
        """torchrun's local rank of a world rank of this group."""
        return self.locations[rank].local_rank


def engine_device(engine_args: Mapping[str, Any]) -> Literal["cpu", "cuda"]:
    """The device argument, or CUDA where there is a GPU. Raises ValueError for another one."""
    device = engine_args.get("device") or ("cuda" if torch.cuda.is_available() else "cpu")
    if device not in ("cpu", "cuda"):
        raise ValueError(f"device = {device!r} is not served; it must be cpu or cuda.")
    return cast(Literal["cpu", "cuda"], device)
