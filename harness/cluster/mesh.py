"""The coordinates of each rank, and the DeviceMeshes of a run."""

from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple, Self

from harness.config.schema import Parallel

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh


class Coordinates(NamedTuple):
    """The coordinates of a rank in the mesh, counted from 0."""

    dp: int
    tp: int
    pp: int


@dataclass(frozen=True, kw_only=True, slots=True)
class ParallelDims:
    """The sizes of the mesh axes, and the order in which ranks fill them, slowest axis first.

    "dp,tp,pp" is the row-major order of init_device_mesh: rank = (dp * TP + tp) * PP + pp.
    "dp,pp,tp" is the order in which SGLang fills hosts: rank = (dp * PP + pp) * TP + tp.
    """

    dp: int
    tp: int
    pp: int
    rank_order: str = "dp,tp,pp"

    @classmethod
    def of(cls, parallel: Parallel) -> Self:
        return cls(dp=parallel.dp, tp=parallel.tp, pp=parallel.pp, rank_order=parallel.rank_order)

    @property
    def world_size(self) -> int:
        return self.dp * self.tp * self.pp

    @property
    def engine_size(self) -> int:
        """Ranks of one engine."""
        return self.tp * self.pp

    def validate(self, world_size: int) -> None:
        """Raise ValueError unless the mesh has as many ranks as were started."""
        if self.world_size == world_size:
            return
        engines, rest = divmod(world_size, self.engine_size)
        alternative = f" or set parallel.dp = {engines}" if engines > 0 and rest == 0 else ""
        raise ValueError(
            f"parallel.dp * parallel.tp * parallel.pp = {self.dp} * {self.tp} * {self.pp} = {self.world_size}, but the "
            f"world size is {world_size}: start {self.world_size} ranks (--nnodes times --nproc-per-node){alternative}"
        )

    def coordinates(self, rank: int) -> Coordinates:
        dp, within = divmod(rank, self.engine_size)
        if self.rank_order == "dp,pp,tp":
            pp, tp = divmod(within, self.tp)
        else:
            tp, pp = divmod(within, self.pp)
        return Coordinates(dp, tp, pp)

    def engine_ranks(self, dp_index: int) -> tuple[int, ...]:
        """Return one engine's world ranks in SGLang's order: tp_size * pp_rank + tp_rank."""
        first = dp_index * self.engine_size
        return tuple(sorted(range(first, first + self.engine_size), key=self.engine_rank))

    def engine_rank(self, rank: int) -> int:
        """Return the position of a world rank in its engine's `engine_ranks`."""
        at = self.coordinates(rank)
        return at.pp * self.tp + at.tp


@dataclass(frozen=True, slots=True)
class Meshes:
    """Every DeviceMesh of a run."""

    engines: "DeviceMesh"
    """Axes ("dp", "tp", "pp") over gloo, whatever the rank order: one engine for each dp index. If tp and pp are both
    above 1, flattening ("tp", "pp") does not give the engine order; use `ParallelDims.engine_ranks` for that."""
    fsdp: "DeviceMesh"
    """One axis, "fsdp", over all ranks: the trainer's models are sharded over it."""


def build_meshes(dims: ParallelDims, device_type: str) -> Meshes:
    """Build the meshes over the default process group. A collective call of all ranks.

    device_type: the trainer's, "cpu" or "cuda". Raise ValueError if the world size is not dp * tp * pp.
    """
    import torch
    import torch.distributed as dist
    from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

    dims.validate(dist.get_world_size())
    ranks = torch.tensor([dims.engine_ranks(dp) for dp in range(dims.dp)], dtype=torch.int, device="cpu")
    ranks = ranks.view(dims.dp, dims.pp, dims.tp).transpose(1, 2).contiguous()
    return Meshes(
        engines=DeviceMesh("cpu", ranks, mesh_dim_names=Coordinates._fields),
        fsdp=init_device_mesh(device_type, (dims.world_size,), mesh_dim_names=("fsdp",)),
    )
