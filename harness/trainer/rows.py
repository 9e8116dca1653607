"""FSDP2's row rule: which rows of a tensor each rank holds.

FSDP2 cuts the first axis as torch.chunk does. Every rank holds ceil(rows / ranks) consecutive rows; the last ranks hold
fewer, or none. Ten rows on four ranks:

    rank 0   rows 0 1 2
    rank 1   rows 3 4 5
    rank 2   rows 6 7 8
    rank 3   row  9
"""

from dataclasses import dataclass

import torch
from torch.distributed.tensor import DTensor, Shard


@dataclass(frozen=True, slots=True)
class RowShards:
    """How the rows of one tensor are divided over the ranks of its mesh. A tensor that is not sharded has one rank."""

    rows: int
    """Rows of the whole tensor."""
    row_elements: int
    """Elements of one row."""
    ranks: int

    @classmethod
    def of(cls, tensor: torch.Tensor) -> "RowShards":
        """Raise ValueError for a DTensor that is not sharded by rows over a one-dimensional mesh."""
        rows = tensor.shape[0] if tensor.ndim else 1
        row_elements = tensor.numel() // max(rows, 1)
        if not isinstance(tensor, DTensor):
            return cls(rows, row_elements, ranks=1)
        if tuple(tensor.placements) != (Shard(0),):
            raise ValueError(f"placements must be (Shard(0),), that is rows over ranks, got {tensor.placements}")
        return cls(rows, row_elements, tensor.device_mesh.size())

    @property
    def chunk(self) -> int:
        """Rows of every rank but the last ones, which may hold fewer."""
        return -(-self.rows // self.ranks)

    def rows_of(self, rank: int) -> range:
        """Return the rows that a rank of the mesh holds."""
        return range(min(rank * self.chunk, self.rows), min((rank + 1) * self.chunk, self.rows))


def own_rows(tensor: torch.Tensor) -> range:
    """Return the rows of the whole tensor that this process holds: all of them if it is not sharded."""
    rank = tensor.device_mesh.get_local_rank() if isinstance(tensor, DTensor) else 0
    return RowShards.of(tensor).rows_of(rank)
