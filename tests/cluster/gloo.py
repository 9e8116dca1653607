"""Run a function on real gloo ranks, each a process, forked from a server that has imported torch and transformers."""

import multiprocessing
import os
import pickle
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch.distributed as dist


def forkserver() -> Any:
    """Return the multiprocessing context whose processes start with the imports that take seconds."""
    context = multiprocessing.get_context("forkserver")
    modules = [
        "torch.distributed.tensor",
        "harness.weights.transports",
        "harness.trainer.model",
        "harness.trainer.critic",
    ]
    context.set_forkserver_preload(modules)
    return context


def on_ranks(function: Callable[..., Any], ranks: int, folder: Path, *arguments: Any) -> list[Any]:
    """What function(rank, *arguments) returned on each rank. Fails if a rank does not return within three minutes."""
    context = forkserver()
    # The server keeps the environment of its own start.
    given = (str(folder), dict(os.environ), arguments)
    processes = [context.Process(target=_rank, args=(function, rank, ranks, *given)) for rank in range(ranks)]
    for process in processes:
        process.start()
    for process in processes:
        process.join(180)
    exits = [process.exitcode for process in processes]
    for process in processes:
        process.kill()
    assert exits == [0] * ranks
    return [pickle.loads((folder / f"rank{rank}.pickle").read_bytes()) for rank in range(ranks)]


def _rank(
    function: Callable[..., Any],
    rank: int,
    ranks: int,
    folder: str,
    environment: dict[str, str],
    arguments: tuple[Any, ...],
) -> None:
    os.environ.clear()
    os.environ.update(environment)
    dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=ranks)
    # Gloo's start fails on a rank whose peer has connected, done its part and left already.
    dist.barrier()
    try:
        answer = function(rank, *arguments)
    finally:
        dist.destroy_process_group()
    (Path(folder) / f"rank{rank}.pickle").write_bytes(pickle.dumps(answer))
    # Without Python's teardown: gloo's threads, where a caught error still refers to a group, may abort it ("terminate
    # called without an active exception"; seen once in hundreds of runs). What is tested has been written.
    os._exit(0)
