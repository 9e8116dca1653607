"""One gloo all-reduce over all ranks; `--fail RANK CODE` makes that rank end with the code instead."""

import json
import os
import socket
import sys

import torch
import torch.distributed as dist

if __name__ == "__main__":
    rank = int(os.environ["RANK"])
    if sys.argv[1:2] == ["--fail"] and rank == int(sys.argv[2]):
        sys.exit(int(sys.argv[3]))
    dist.init_process_group("gloo")
    total = torch.full((1000,), float(rank + 1))
    dist.all_reduce(total)
    found = {"rank": rank, "host": socket.gethostname(), "sum": total.unique().tolist()}
    dist.barrier()
    os.write(1, (json.dumps(found) + "\n").encode())  # in one call, or two ranks of a host may share a line
    os._exit(0)
