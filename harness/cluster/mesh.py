"""ParallelDims(dp, tp, pp): which coordinates a rank has, and the DeviceMesh over them."""

from dataclasses import dataclass
from typing import TYPE_CHECKING, Self

from harness.config.schema import Parallel

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh

RANK_ORDERS = ("dp,tp,pp", "dp,pp,tp")


@dataclass(frozen=True, slots=True)
class Coordinates:
    """Where a rank stands in the mesh, each axis counted from 0."""

    dp: int
    tp: int
    pp: int


@dataclass(frozen=True, kw_only=True, slots=True)
class ParallelDims:
    """Sizes of the mesh axes, and how ranks fill them, slowest axis first.

    "dp,tp,pp" is row-major, as init_device_mesh gives: rank = (dp * TP + tp) * PP + pp.
    "dp,pp,tp" is the order in which SGLang fills hosts: rank = (dp * PP + pp) * TP + tp.
    Raises ValueError for a size below 1 or an unknown order.
    """

    dp: int
    tp: int
    pp: int
    rank_order: str = "dp,tp,pp"

    def __post_init__(self) -> None:
        for axis, size in (("dp", self.dp), ("tp", self.tp), ("pp", self.pp)):
            if size < 1:
                raise ValueError(f"parallel.{axis} = {size} is no size of a mesh axis: it must be 1 or more")
        if self.rank_order not in RANK_ORDERS:
            raise ValueError(
                f'parallel.rank_order = "{self.rank_order}" is unknown: it must be "dp,tp,pp" or "dp,pp,tp"'
            )

    @classmethod
    def of(cls, parallel: Parallel) -> Self:
        """The mesh that a config asks for."""
        return cls(dp=parallel.dp, tp=parallel.tp, pp=parallel.pp, rank_order=parallel.rank_order)

    @property
    def world_size(self) -> int:
        return self.dp * self.tp * self.pp

    @property
    def engine_size(self) -> int:
        """Ranks of one engine."""
        return self.tp * self.pp

    def validate(self, world_size: int) -> None:
        """Raises ValueError unless the mesh has as many ranks as were started."""
        if self.world_size == world_size:
            return
        engines, rest = divmod(world_size, self.engine_size)
        alternative = f" or set parallel.dp = {engines}" if engines > 0 and rest == 0 else ""
        raise ValueError(
            f"parallel.dp * parallel.tp * parallel.pp = {self.dp} * {self.tp} * {self.pp} = {self.world_size}, but the "
            f"world size is {world_size}: start {self.world_size} ranks (--nnodes times --nproc-per-node){alternative}"
        )

    def coordinates(self, rank: int) -> Coordinates:
        """Coordinates of a world rank. Raises ValueError outside 0..world_size - 1."""
        if not 0 <= rank < self.world_size:
            raise ValueError(f"rank = {rank} is outside this mesh: it must be 0 to {self.world_size - 1}")
        dp, within = divmod(rank, self.engine_size)
        if self.rank_order == "dp,pp,tp":
            pp, tp = divmod(within, self.tp)
        else:
            tp, pp = divmod(within, self.pp)
        return Coordinates(dp, tp, pp)

    def rank_of(self, at: Coordinates) -> int:
        """World rank at these coordinates, the inverse of `coordinates`. Raises ValueError outside the mesh."""
        for axis, index, size in (("dp", at.dp, self.dp), ("tp", at.tp, self.tp), ("pp", at.pp, self.pp)):
            if not 0 <= index < size:
                raise ValueError(f"{axis} = {index} is outside this mesh: it must be 0 to {size - 1}")
        within = at.pp * self.tp + at.tp if self.rank_order == "dp,pp,tp" else at.tp * self.pp + at.pp
        return at.dp * self.engine_size + within

    def engine_ranks(self, dp_index: int) -> tuple[int, ...]:
        """World ranks of one engine in engine order: pp slowest, then tp, as SGLang's tp_size * pp_rank + tp_rank."""
        return tuple(self.rank_of(Coordinates(dp_index, tp, pp)) for pp in range(self.pp) for tp in range(self.tp))

    def engine_rank(self, rank: int) -> int:
        """Position of a world rank in its engine's `engine_ranks`."""
        at = self.coordinates(rank)
        return at.pp * self.tp + at.tp


def build_mesh(dims: ParallelDims, device_type: str) -> "DeviceMesh":
    """The mesh with axes ("dp", "tp", "pp") over the default process group, whatever the rank order.

    device_type is "cpu" (gloo) or "cuda". A collective call: every rank makes it. Flattened, its ("tp", "pp") axes are
    not in engine order where both are above 1; take `engine_ranks` for that.
    Raises ValueError where the world size is not dp * tp * pp.
    """
    import torch
    import torch.distributed as dist
    from torch.distributed.device_mesh import DeviceMesh

    dims.validate(dist.get_world_size())
    ranks = torch.tensor(
        [
            [[dims.rank_of(Coordinates(dp, tp, pp)) for pp in range(dims.pp)] for tp in range(dims.tp)]
            for dp in range(dims.dp)
        ],
        dtype=torch.int,
        device="cpu",
    )
    return DeviceMesh(device_type, ranks, mesh_dim_names=("dp", "tp", "pp"))
