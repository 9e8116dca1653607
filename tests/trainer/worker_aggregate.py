"""Three ranks with unequal token counts: gradients of every aggregation. Argument: file for the gradients."""

import json
import sys
from pathlib import Path
from typing import get_args

import torch
import torch.distributed as dist

from harness.config.schema import LossAggregation
from harness.trainer.losses import Counts, aggregate, local_counts

ROWS = 6
HORIZON = 8


def losses(weight: torch.Tensor, rows: slice) -> torch.Tensor:
    """A [B, T] loss of those rows, nonlinear in the weight."""
    inputs = torch.randn((ROWS, HORIZON, 5), generator=torch.Generator().manual_seed(2), dtype=torch.float64)
    return (inputs[rows] @ weight).tanh().square()


def main() -> None:
    dist.init_process_group("gloo")
    world_size, rank = dist.get_world_size(), dist.get_rank()
    lengths = torch.tensor([1, 3, 8, 2, 0, 5])
    mask = (torch.arange(HORIZON) < lengths[:, None]).to(torch.int64)
    share = ROWS // world_size
    totals = local_counts(mask[rank * share : (rank + 1) * share])
    dist.all_reduce(totals)
    counts = Counts(*totals.tolist())
    results = {}
    for mode in get_args(LossAggregation):
        weight = torch.linspace(-1, 1, 5, dtype=torch.float64, requires_grad=True)
        for row in range(rank * share, (rank + 1) * share):
            rows = slice(row, row + 1)
            loss = aggregate(losses(weight, rows), mask[rows], mode, counts, HORIZON)
            (loss * world_size).backward()
        gradient = weight.grad
        assert gradient is not None
        dist.all_reduce(gradient)
        results[mode] = (gradient / world_size).tolist()  # the mean over ranks, as FSDP takes it
    if rank == 0:
        Path(sys.argv[1]).write_text(json.dumps({"counts": [counts.tokens, counts.sequences], "gradients": results}))
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
    from harness.runtime.exits import hard_exit

    hard_exit(0)
