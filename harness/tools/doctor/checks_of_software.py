"""Faults of what is installed and of the environment: versions, variables that differ, and variables that are traps."""

import hashlib
from collections.abc import Iterator

from harness.cluster.world import BEHAVIOUR_PREFIXES
from harness.tools.doctor.examination import Examination, Finding, differences
from harness.tools.doctor.facts import NOT_INSTALLED

PER_RANK = ("CUDA_VISIBLE_DEVICES", "OMP_NUM_THREADS")
"""Placement handles the first; torchrun sets the second, and an engine never inherits it."""
PER_HOST = (
    "GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME", "TP_SOCKET_IFNAME", "NCCL_HOSTID", "NCCL_IB_HCA", "NCCL_IB_GID_INDEX",
    "NCCL_TOPO_FILE", "UCX_NET_DEVICES", "NVIDIA_VISIBLE_DEVICES",
)  # fmt: skip
"""What may differ between hosts, but not between ranks of one."""
ONLY_LOGS = ("NCCL_DEBUG", "NCCL_DEBUG_SUBSYS", "NCCL_DEBUG_FILE", "TORCH_CPP_LOG_LEVEL", "TORCH_LOGS")
LONGEST = 120
"""Characters of a value that are shown."""
OLD_BALANCE = ("SGL_DISABLE_TP_MEMORY_INBALANCE_CHECK", "SGLANG_DISABLE_TP_MEMORY_INBALANCE_CHECK")


def versions(view: Examination) -> Iterator[Finding]:
    """Every rank runs the same versions; handles and collectives do not cross them."""
    for name in sorted({name for each in view.facts for name in each.versions}):
        if different := differences({each.rank: each.versions.get(name) for each in view.facts}):
            yield Finding(
                check="versions",
                fault=True,
                ranks=different[1],
                what=f"{name} differs: {different[0]}",
                remedy="install one environment on all hosts (configs/environments), and start torchrun from it",
            )


def needed_packages(view: Examination) -> Iterator[Finding]:
    """SGLang and transformers are there; on a GPU torch_memory_saver too, without which sleep frees nothing."""
    for facts in view.facts:
        needed = ["sglang", "transformers"] + (["torch_memory_saver"] if facts.device == "cuda" else [])
        for name in needed:
            if facts.versions.get(name) == NOT_INSTALLED:
                yield Finding(
                    check="needed_packages",
                    fault=True,
                    ranks=(facts.rank,),
                    what=f"{name} is not installed in this rank's Python",
                    remedy="install the environment of configs/environments that fits this CUDA, on every host",
                )


def environment(view: Examination) -> Iterator[Finding]:
    """A variable that changes behaviour has one value on all ranks; one that only a host decides, one on each host."""
    names = sorted({name for each in view.facts for name in each.environment} - set(PER_RANK))
    for name in names:
        groups = view.hosts.values() if name in PER_HOST else [tuple(range(len(view.facts)))]
        for ranks in groups:
            different = differences({rank: _value(view, rank, name) for rank in ranks})
            if different:
                yield Finding(
                    check="environment",
                    fault=name.startswith(BEHAVIOUR_PREFIXES) and name not in ONLY_LOGS,
                    ranks=different[1],
                    what=f"{name} differs: {different[0]}",
                    remedy="export one value on every host before torchrun, or unset it everywhere",
                )


def _value(view: Examination, rank: int, name: str) -> str | None:
    value = view.facts[rank].environment.get(name)
    if value is None or len(value) <= LONGEST:
        return value
    return f"{value[:LONGEST]}... (sha256 {hashlib.sha256(value.encode()).hexdigest()[:8]})"


def expandable_segments(view: Examination) -> Iterator[Finding]:
    """With them torch_memory_saver turns itself off, and handles of memory need rights that containers lack."""
    for facts in view.facts:
        for name in ("PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_ALLOC_CONF"):
            value = facts.environment.get(name, "")
            if facts.device == "cuda" and "expandable_segments:true" in value.lower().replace(" ", ""):
                yield Finding(
                    check="expandable_segments",
                    fault=True,
                    ranks=(facts.rank,),
                    what=f"{name}={value}: the memory saver does not work with expandable segments, nor does CUDA IPC everywhere",
                    remedy=f"take expandable_segments out of {name}",
                )


def preload(view: Examination) -> Iterator[Finding]:
    """torch_memory_saver puts itself into LD_PRELOAD of the engine, and fails beside what it does not expect."""
    for facts in view.facts:
        value = facts.environment.get("LD_PRELOAD")
        if facts.device == "cuda" and value:
            saver = "torch_memory_saver" in value
            yield Finding(
                check="preload",
                fault=saver,
                ranks=(facts.rank,),
                what=f"LD_PRELOAD={value}: " + ("the trainer would run under the memory saver too" if saver else
                "torch_memory_saver wants that variable for itself (TorchMemorySaver observes invalid LD_PRELOAD)"),
                remedy="unset LD_PRELOAD before torchrun",
            )  # fmt: skip


def renamed_variables(view: Examination) -> Iterator[Finding]:
    """0.5.7 to 0.5.17 read the old name of the switch of the memory balance check the wrong way round."""
    for facts in view.facts:
        for name in OLD_BALANCE:
            if name in facts.environment:
                yield Finding(
                    check="renamed_variables",
                    fault=False,
                    ranks=(facts.rank,),
                    what=f"{name} is set, which sglang 0.5.7 to 0.5.17 take for the opposite",
                    remedy="unset it: the harness sets what the sglang that is installed reads",
                )
