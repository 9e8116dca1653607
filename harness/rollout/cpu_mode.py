"""The environment that engines in SGLang's CPU mode need. Imports nothing heavy."""

import os
from collections.abc import Mapping, Sequence

from harness.runtime.standins.harness_cpu_mode import CPU_MODE


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


def without_cpu_mode(environment: Mapping[str, str]) -> dict[str, str]:
    """Return the environment without what a Python in CPU mode has set in it when it started."""
    is_set = environment.get("SGLANG_USE_CPU_ENGINE") == "1"
    return {name: value for name, value in environment.items() if not is_set or CPU_MODE.get(name) != value}


def cores_by_tp_rank(entries: Sequence[str], tp_ranks: Sequence[int], tp: int) -> list[str]:
    """Return SGLANG_CPU_OMP_THREADS_BIND's entries for a release before 0.5.19, which wants one for each TP rank.

    entries, tp_ranks: those of the engine ranks on this host. A TP rank with several stages here gets the cores of all
    of them. One without any gets the first entry, which nobody uses.
    """
    here = list(zip(tp_ranks, entries, strict=True))
    return [
        ",".join(dict.fromkeys(cores for rank, cores in here if rank == tp_rank)) or entries[0] for tp_rank in range(tp)
    ]
