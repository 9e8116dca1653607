"""The environment that engines in SGLang's CPU mode need. Imports nothing heavy."""

import os
from collections.abc import Sequence

CPU_MODE = {
    "SGLANG_USE_CPU_ENGINE": "1",
    # With two threads MKL's first vector call (cos of the rotary table) races over the choice of kernels: half of the
    # table may come out with 13 bits, for the life of the engine. Seen with torch 2.13: log-probs off by 5e-5.
    "OMP_NUM_THREADS": "1",
    # With tp > 1 SGLang compiles a few integer operations (masking of token ids) with torch.compile, which on the CPU
    # runs a C++ compiler: 5 to 30 s at the first token on a fresh machine.
    "TORCHDYNAMO_DISABLE": "1",
    # With a CUDA build of torch, which brings NCCL, SGLang would open NCCL communicators on the CPU and die. The name
    # of a library that does not exist turns that off.
    "SGLANG_NCCL_SO_PATH": "absent-in-cpu-mode",
}
"""The variables that are the same for every engine in SGLang's CPU mode. SGLang reads some of them when it is
imported."""


def cpu_environment(ranks_on_host: int) -> dict[str, str]:
    """Return the variables of SGLang's CPU mode for this number of engine ranks on this host.

    The cores that this process may use are split evenly and in order, with one entry per rank ("0,1|2,3"). If there are
    more ranks than cores, ranks share cores.
    """
    cores = sorted(os.sched_getaffinity(0))
    share = len(cores) // ranks_on_host
    entries = [
        ",".join(map(str, cores[rank * share : (rank + 1) * share])) if share else str(cores[rank % len(cores)])
        for rank in range(ranks_on_host)
    ]
    return CPU_MODE | {"SGLANG_CPU_OMP_THREADS_BIND": "|".join(entries)}


def cores_by_tp_rank(entries: Sequence[str], tp_ranks: Sequence[int], tp: int) -> list[str]:
    """Return SGLANG_CPU_OMP_THREADS_BIND's entries for a release before 0.5.19, which wants one for each TP rank.

    entries, tp_ranks: those of the engine ranks on this host. A TP rank with several stages here gets the cores of all
    of them. One without any gets the first entry, which nobody uses.
    """
    here = list(zip(tp_ranks, entries, strict=True))
    return [
        ",".join(dict.fromkeys(cores for rank, cores in here if rank == tp_rank)) or entries[0] for tp_rank in range(tp)
    ]
