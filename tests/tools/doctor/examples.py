"""A healthy job of two hosts, as facts; tests plant one fault in it."""

from collections.abc import Callable
from dataclasses import replace as replace_dataclass
from typing import Any

from msgspec.structs import replace

from harness.cluster.mesh import ParallelDims
from harness.cluster.network import HostAddress
from harness.cluster.placement import RankLocation
from harness.config.schema import Config, Parallel
from harness.runtime import GIB
from harness.tools.doctor.checks import Examination
from harness.tools.doctor.links import Collective, RankLinks, Reach
from harness.tools.doctor.rank_facts import Gpu, RankFacts

Change = Callable[[RankFacts], RankFacts]


def facts_of(rank: int, per_host: int, gpus: bool) -> RankFacts:
    """Of a rank of a job with so many ranks a host; nothing is wrong with it."""
    host, local = divmod(rank, per_host)
    uuids = [f"GPU-{host}{index}" for index in range(per_host)]
    return RankFacts(
        rank=rank,
        host=f"host{host}/boot{host}/net:[{host}]",
        config="0123456789abcdef",
        location=RankLocation(rank, f"host{host}/boot{host}/net:[{host}]", local, None, per_host if gpus else None),
        device="cuda" if gpus else "cpu",
        gpu_index=local if gpus else None,
        problem="",
        gpu=Gpu(
            uuid=uuids[local],
            name="NVIDIA H200",
            total=140 * GIB,
            free=139 * GIB,
        )
        if gpus
        else None,
        gpu_reason="" if gpus else "this torch is built without CUDA",
        gpu_devices=per_host if gpus else 0,
        route=f"10.0.0.{host + 1}",
        master="10.0.0.1",
        shared_memory=60 * GIB,
        folders={"TMPDIR = /tmp": 60 * GIB, "run.dir = /runs": 60 * GIB},
        open_files=65536,
        versions={"python": "3.11.9", "torch": "2.9.1", "sglang": "0.5.8", "transformers": "4.57.1",
                  "torch_memory_saver": "0.0.9", "nccl": "2.27.5"},
        environment={"NCCL_CUMEM_ENABLE": "0", "OMP_NUM_THREADS": "1"},
        preload="",
        absent=("task.source = openai/gsm8k",),
    )  # fmt: skip


def healthy(dp: int = 1, tp: int = 4, pp: int = 1, per_host: int = 2, gpus: bool = True) -> Examination:
    """A job of which there is nothing to say."""
    dims = ParallelDims(dp=dp, tp=tp, pp=pp)
    facts = tuple(facts_of(rank, per_host, gpus) for rank in range(dims.world_size))
    bare = Examination(
        config=Config(parallel=Parallel(dp=dp, tp=tp, pp=pp)), dims=dims, facts=facts, links=(None,) * len(facts)
    )
    links = []
    for each in facts:
        host = each.rank // per_host
        first = each.rank % per_host == 0
        others = [ranks[0] for ranks in bare.hosts.values() if each.rank not in ranks]
        backends = ("gloo", "nccl") if gpus else ("gloo",)
        links.append(
            RankLinks(
                rank=each.rank,
                address=HostAddress("eth0", f"10.0.0.{host + 1}", "it routes to MASTER_ADDR"),
                ports=30000 if first else None,
                reaches=tuple(
                    Reach(to=other, address=f"10.0.0.{other // per_host + 1}", port=30008) for other in others
                )
                if first
                else (),
                collectives=tuple(
                    Collective(backend=backend, bandwidth=2e10)  # type: ignore[arg-type]
                    for backend in backends
                ),
            )
        )
    return replace_dataclass(bare, links=tuple(links))


def with_facts(view: Examination, rank: int, **changes: Any) -> Examination:
    """One rank's facts changed."""
    facts = list(view.facts)
    facts[rank] = replace(facts[rank], **changes)
    return replace_dataclass(view, facts=tuple(facts))


def with_links(view: Examination, rank: int, **changes: Any) -> Examination:
    """One rank's measurements changed."""
    links = list(view.links)
    own = links[rank]
    assert own is not None
    links[rank] = replace(own, **changes)
    return replace_dataclass(view, links=tuple(links))


def with_variable(view: Examination, rank: int, name: str, value: str) -> Examination:
    return with_facts(view, rank, environment={**view.facts[rank].environment, name: value})


def with_gpu(view: Examination, rank: int, **changes: Any) -> Examination:
    gpu = view.facts[rank].gpu
    assert gpu is not None
    return with_facts(view, rank, gpu=replace(gpu, **changes))
