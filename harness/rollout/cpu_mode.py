"""SGLang's CPU mode: the environment that its engines need. Imports nothing heavy."""

import os
from collections.abc import Sequence


def cpu_environment(ranks_on_host: int) -> dict[str, str]:
    """Return what SGLang's CPU mode reads from the environment, for `ranks_on_host` engine ranks on this host.

    The cores this process may use are split evenly and in order, one entry a rank ("0-3|4-7"); with more ranks than
    cores the ranks go round the cores, one core each. Engines of several stages or hosts: see cores_by_tp_rank.
    """
    cores = sorted(os.sched_getaffinity(0))
    share = len(cores) // ranks_on_host
    entries = [
        ",".join(map(str, cores[rank * share : (rank + 1) * share])) if share else str(cores[rank % len(cores)])
        for rank in range(ranks_on_host)
    ]
    return {
        "SGLANG_USE_CPU_ENGINE": "1",
        "SGLANG_CPU_OMP_THREADS_BIND": "|".join(entries),
        # With two threads MKL's first vector call, the rotary table's cos, races over which kernels suit the CPU: one
        # half may come out with 13 bits, for the life of the engine. Seen with torch 2.13: log-probs off by 5e-5.
        "OMP_NUM_THREADS": "1",
        # With tp > 1 SGLang compiles the masking of token ids by torch.compile, on the CPU with a C++ compiler: 5 to
        # 30 s at the first token of a fresh machine, for a few integer operations.
        "TORCHDYNAMO_DISABLE": "1",
        # Beside a torch that brings NCCL (its CUDA build) SGLang would open NCCL communicators on the CPU, and die. A
        # library that is not there turns that off, as it does beside a CPU build.
        "SGLANG_NCCL_SO_PATH": "absent-in-cpu-mode",
    }


def cores_by_tp_rank(entries: Sequence[str], tp_ranks: Sequence[int], tp: int) -> list[str]:
    """Return the entries for a SGLang that wants one for each TP rank of the engine: the cores of its stages here, or any.

    entries, tp_ranks: of each engine rank here.
    """
    here = list(zip(tp_ranks, entries, strict=True))
    return [
        ",".join(dict.fromkeys(cores for rank, cores in here if rank == tp_rank)) or entries[0] for tp_rank in range(tp)
    ]
