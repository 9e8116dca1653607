"""Sync by pull on real ranks; torchrun starts it, with the command line of ppo.py.

Each rank writes pull-RANK.json into the run directory: the seconds of a pull, the bytes that it read, what the engine
holds, and how fast the pull's kernel reads from its own GPU and from the next one.
"""

import json
import sys
import time
from collections.abc import Callable
from pathlib import Path
from statistics import median
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[3]))

import torch
import torch.distributed as dist

from harness.cluster.world import World, all_gather
from harness.trainer.model import named_tensors
from harness.trainer.offload import local
from harness.weights.pull.copies import copies_of
from harness.weights.pull.shards import OpenShards, export_shards
from harness.weights.pull.tiles import Move
from harness.weights.regions import Region

REPEATS = 10
LINK_BYTES = {"cuda": 4 << 30, "cpu": 64 << 20}
COLUMNS = 4096


def timed(call: Callable[[], object]) -> float:
    """Return the median seconds of a call, with all ranks at it at once."""
    found = []
    finish = torch.cuda.synchronize if torch.cuda.is_available() else lambda: None
    for _ in range(REPEATS):
        finish()
        dist.barrier()
        started = time.perf_counter()
        call()
        finish()
        found.append(time.perf_counter() - started)
    return median(found)


def link_rates(world: World, dtype: torch.dtype, sent: torch.dtype) -> dict[str, float]:
    """Return bytes in a second that the kernel of a pull reads, in large pieces, within this GPU and from the next
    rank's.

    dtype: of the trainer's shards. sent: in which the engine takes them. A collective call of all ranks.
    """
    rows, columns = LINK_BYTES[world.device_type] // dtype.itemsize // COLUMNS, COLUMNS
    region = Region(0, 0, 0, ((rows, columns, columns), (columns, 1, 1)))
    source = torch.ones(rows, columns, dtype=dtype, device=world.device)
    target = torch.empty(rows, columns, dtype=sent, device=world.device)
    exported = all_gather(export_shards({"source": source}, world.rank, world.host, None, world.world_size))
    peer = (world.rank + 1) % world.world_size
    opened = OpenShards([exported[peer]])
    places = {"same_gpu": source.data_ptr(), "nvlink": opened.find(peer, "source")[0]}
    found = {}
    for link, place in places.items():
        copies = copies_of([Move(region, place, target.data_ptr(), dtype, sent, sent)], world.device)
        found[link] = source.nbytes / timed(copies.run)
    dist.barrier()
    opened.close()
    return found


def pull(run: Any) -> str:
    from harness.build import build_sync
    from harness.tools.sync.job import make_engine_and_model

    engine, model, folder = make_engine_and_model(run)
    sync = build_sync(run, engine, model, folder)
    sync.update_engine()
    sync.loader.trace_once()
    coverage = sync.loader.coverage[run.dims.engine_rank(run.world.rank)]
    own = {name for name, each in named_tensors(model) if sync.weights.tensors.get(name) is each}
    found = {
        "seconds": timed(sync.update_engine),
        "sent_bytes": sync.weights.nbytes,
        "bytes_read": sync.transport.bytes_read(),
        "held": {name: elements for name, (_, elements) in coverage.missing.items()},
        "dtypes": {copy.into: str(copy.held).removeprefix("torch.") for group in coverage.copies for copy in group},
        "copy_bytes": sum(local(each).nbytes for name, each in sync.weights.tensors.items() if name not in own),
        "rank": run.world.rank,
    }
    print(f"rank {run.world.rank}: {found['seconds']:.4f} s a pull, {found['bytes_read']} bytes read", flush=True)
    sync.close()
    engine.shutdown()
    del model, sync
    torch.cuda.empty_cache()
    config = run.config.model
    found["rates"] = link_rates(run.world, getattr(torch, config.master_dtype), getattr(torch, config.dtype))
    (run.folder / f"pull-{run.world.rank}.json").write_text(json.dumps(found))
    return f"PASSED: a pull takes {found['seconds']:.4f} s"


if __name__ == "__main__":
    from harness.run import run
    from harness.tools.command_line import parse

    sys.exit(run(parse(sys.argv[1:]).config, (), pull))
