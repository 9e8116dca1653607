"""Ranks that wait for each other in a collective, or cannot finish one."""

import datetime
import os
import signal
import time

from harness.tools.repro.case import Case
from harness.tools.repro.local_ranks import free_port, join_group, run_ranks

SHORT = datetime.timedelta(seconds=2)


@Case(
    broken="the engine is called between two gathers",
    healthy="all is gathered, then the engine is called",
    signature=(r"[Tt]imed out waiting \d+ms for (send|recv) operation to complete",),
)
def interleaved_full_tensor_deadlock(broken: bool) -> None:
    """An engine call between two full_tensor() gathers, on one rank only, blocks both."""

    def work(rank: int) -> None:
        import torch
        import torch.distributed as dist
        from torch.distributed.device_mesh import init_device_mesh
        from torch.distributed.tensor import Shard, distribute_tensor

        join_group(seconds=4)
        engine = dist.new_group([0, 1], timeout=2 * SHORT)  # the engine's ranks; its call returns when both have it
        mesh = init_device_mesh("cpu", (2,))
        for _ in range(3):
            distribute_tensor(torch.ones(8, 4), mesh, [Shard(0)]).full_tensor()
            if broken and rank == 0:
                dist.barrier(engine)
        dist.barrier(engine)
        print(f"rank {rank}: all tensors are with the engine", flush=True)

    run_ranks(work)


@Case(
    needs="several_gpus",
    broken="NCCL_CUMEM_ENABLE=0 on rank 0, as the engine's start leaves it, and 1 on rank 1",
    healthy="NCCL_CUMEM_ENABLE=0 on both ranks",
    signature=(r"ncclUnhandledCudaError|[Cc]uda failure.*invalid argument|ncclInternalError|ncclSystemError",),
)
def nccl_cumem_skew(broken: bool) -> None:
    """Ranks that differ in NCCL_CUMEM_ENABLE cannot gather."""

    def work(rank: int) -> None:
        import torch
        import torch.distributed as dist

        os.environ["NCCL_NVLS_ENABLE"] = "0"  # multicast memory outlives a process that is killed on some machines
        torch.cuda.set_device(rank)
        dist.init_process_group("cpu:gloo,cuda:nccl", timeout=15 * SHORT)
        os.environ["NCCL_CUMEM_ENABLE"] = str(int(broken and rank == 1))
        dist.barrier(dist.new_group([0, 1], backend="gloo"))
        gathered = torch.empty(2 << 20, device="cuda")
        dist.all_gather_into_tensor(gathered, torch.full((1 << 20,), float(rank), device="cuda"))
        torch.cuda.synchronize()
        print(f"rank {rank}: gathered {gathered.mean().item()}", flush=True)
        dist.destroy_process_group()

    run_ranks(work)


@Case(
    broken="rank 1 brings eight elements",
    healthy="both ranks bring one element",
    signature=(r"op\.preamble\.length <= op\.nbytes|Received data size doesn't match expected size",),
)
def gloo_collective_mismatch(broken: bool) -> None:
    """A rank aborts when another one calls the same collective with another number of elements."""

    def work(rank: int) -> None:
        import torch
        import torch.distributed as dist

        join_group(seconds=4)
        total = torch.ones(8 if broken and rank == 1 else 1)
        dist.all_reduce(total)
        print(f"rank {rank}: {total[0].item()}", flush=True)

    run_ranks(work)


@Case(
    broken="rank 0 is killed by SIGKILL before it takes part",
    healthy="it takes part",
    signature=(r"Connection closed by peer|Connection reset by peer",),
)
def peer_vanished(broken: bool) -> None:
    """The other ranks see only a closed connection when a rank is killed, whatever killed it."""

    def work(rank: int) -> None:
        import torch.distributed as dist

        join_group()
        if broken and rank == 0:
            time.sleep(0.5)  # rank 1 is waiting for it by then
            os.kill(os.getpid(), signal.SIGKILL)
        gathered: list[object] | None = [None, None] if rank == 0 else None
        dist.gather_object(b"x" * 1_000_000, gathered, dst=0)
        dist.barrier()
        print(f"rank {rank}: gathered", flush=True)

    run_ranks(work)


@Case(
    broken="generating takes 5 s, the timeout is 2 s",
    healthy="generating takes 0.5 s",
    signature=(r"[Tt]imed out waiting 2000ms for recv operation to complete",),
)
def rollout_timeout(broken: bool) -> None:
    """Generating takes longer than the timeout of the group in which the other ranks wait for TP rank 0's answer."""

    def work(rank: int) -> None:
        import torch.distributed as dist

        join_group()
        answers = dist.new_group([0, 1], timeout=SHORT)  # 30 minutes by default
        if rank == 0:
            time.sleep(5 if broken else 0.5)
        dist.broadcast_object_list([None], src=0, group=answers)
        print(f"rank {rank}: has the answers", flush=True)

    run_ranks(work)


@Case(
    broken="the trainer joins after the engine has answered",
    healthy="the trainer joins, and then asks for the answer",
    signature=(r"wait timeout after \d+ ?ms, keys: /(default_pg/)?answer",),
    failure="update-group-hang",
)
def update_group_order(broken: bool) -> None:
    """The trainer waits for the engine to join the update group before it joins the group itself."""
    port = free_port()

    def work(rank: int) -> None:  # rank 1 stands for the engine, which answers when all have joined
        import torch.distributed as dist

        calls = dist.TCPStore("127.0.0.1", port, 2, is_master=rank == 0)  # what trainer and engine talk over
        if rank == 0 and broken:
            calls.wait(["answer"], SHORT)
        dist.init_process_group("gloo", timeout=3 * SHORT)
        calls.set("answer", "joined") if rank == 1 else calls.wait(["answer"], SHORT)
        dist.barrier()
        print(f"rank {rank}: the update group is up", flush=True)

    run_ranks(work)
