"""Each fault planted in a healthy job gives its finding, and nothing else; the healthy job gives none."""

from collections.abc import Callable
from dataclasses import replace as replace_dataclass

import pytest
from msgspec.structs import replace

from harness.cluster.network import HostAddress
from harness.runtime import GIB, MIB
from harness.tools.doctor.checks import Examination, missing, problems_of
from harness.tools.doctor.links import Reach
from tests.tools.doctor.examples import healthy, with_facts, with_gpu, with_links, with_variable

Plant = Callable[[Examination], Examination]


@pytest.mark.parametrize(
    "job",
    [
        {},
        {"gpus": False},
        {"dp": 2, "tp": 2},
        {"dp": 4, "tp": 1, "per_host": 4},
        {"dp": 8, "tp": 16, "per_host": 8},
        {"tp": 2, "pp": 2, "per_host": 4},
    ],
)
def test_of_a_healthy_job_there_is_nothing_to_say(job: dict[str, int]) -> None:
    assert problems_of(healthy(**job)) == []


def lo(view: Examination, rank: int) -> Examination:
    return with_links(view, rank, address=HostAddress("lo", "127.0.1.1", "MASTER_ADDR is a loopback address"))


FAULTS: list[tuple[str, Plant, tuple[int, ...], str]] = [
    ("configs", lambda v: with_facts(v, 1, config="f" * 16), (1,), "the resolved config differs: 01234567 on ranks 0, 2, 3; ffffffff on rank 1"),
    ("routes", lambda v: lo(v, 2), (2, 3), "its address for 1 other hosts is 127.0.1.1"),
    ("routes", lambda v: with_facts(v, 2, route=None, master="Name or service not known"), (2, 3), "no route to MASTER_ADDR: Name or"),
    ("routes", lambda v: with_links(v, 2, address=None, address_error="network.interface = ib0 is neither"), (2, 3), "ib0 is neither"),
    ("needed_packages", lambda v: every(v, versions={**v.facts[0].versions, "torch_memory_saver": "not installed"}), (0, 1, 2, 3), "torch_memory_saver is not installed"),
    ("versions", lambda v: with_facts(v, 3, versions={**v.facts[3].versions, "torch": "2.8.0"}), (3,), "torch differs: 2.9.1 on ranks 0-2; 2.8.0 on rank 3"),
    ("environment", lambda v: with_variable(v, 1, "NCCL_CUMEM_ENABLE", "1"), (1,), "NCCL_CUMEM_ENABLE differs: 0 on ranks 0, 2, 3; 1 on rank 1"),
    ("environment", lambda v: with_variable(v, 1, "SGLANG_X", ""), (1,), 'SGLANG_X differs: unset on ranks 0, 2, 3; "" on rank 1'),
    ("environment", lambda v: with_variable(v, 1, "NCCL_IB_HCA", "mlx5_0"), (1,), "NCCL_IB_HCA differs: unset on rank 0; mlx5_0 on rank 1"),
    ("expandable_segments", lambda v: every_variable(v, "PYTORCH_CUDA_ALLOC_CONF", "expandable_segments:True"), (0, 1, 2, 3), "expandable_segments:True"),
    ("expandable_segments", lambda v: every_variable(v, "PYTORCH_ALLOC_CONF", "max_split_size_mb:64, expandable_segments: True"), (0, 1, 2, 3), "PYTORCH_ALLOC_CONF"),
    ("preload", lambda v: every(v, preload="/x/torch_memory_saver_cpp.abi3.so"), (0, 1, 2, 3), "in the engine alone"),
    ("own_gpus", lambda v: with_gpu(v, 3, uuid="GPU-10"), (2, 3), "ranks 2, 3 are all on GPU GPU-10"),
    ("locations", lambda v: with_facts(v, 3, location=None, problem="rank 3 has local rank 1 but sees 1 GPUs; give"), (3,), "rank 3 has local rank 1 but sees 1 GPUs"),
    ("occupied", lambda v: with_gpu(v, 1, free=130 * GIB), (1,), "10.0 GiB of this rank's GPU are in use"),
    ("balance", lambda v: with_gpu(v, 2, total=121 * GIB, free=120 * GIB), (2,), "engine 0: from 120.0 to 139.0 GiB are free"),
    ("limits", lambda v: with_facts(v, 0, open_files=256), (0,), "256 open files are allowed (ulimit -n); 4 ranks need 288"),
    ("shared_memory", lambda v: with_facts(v, 2, shared_memory=64 * MIB), (2, 3), "64 MiB can be written to /dev/shm; 2 ranks need 320"),
    ("folders", lambda v: with_facts(v, 3, folders={"TMPDIR = /tmp": 0}), (3,), "TMPDIR = /tmp: 0 MiB can be written there"),
    ("ports", lambda v: with_links(v, 2, ports=None, ports_error="no block of 32 free ports"), (2,), "no block of 32 free ports"),
    ("inputs", lambda v: with_facts(v, 2, absent=(*v.facts[2].absent, "model.name = /models/DeepSeek-V3")), (2,), "model.name = /models/DeepSeek-V3 is not there"),
    ("inputs", lambda v: with_facts(v, 2, absent=()), (0, 1, 3), "task.source = openai/gsm8k is not there"),
    ("reached", lambda v: with_links(v, 2, reaches=(Reach(to=0, address="10.0.0.1", port=30008, error="no answer within 3 s"),)), (2,), "host1 does not reach host0 at 10.0.0.1 port 30008: no answer"),
    ("silent", lambda v: replace_dataclass(v, links=(*v.links[:3], None)), (3,), "nothing came back"),
    ("all_reduced", lambda v: changed(v, "nccl", error="unhandled cuda error"), (0, 1, 2, 3), "nccl all-reduce: unhandled cuda error"),
    ("routes", lambda v: with_links(v, 2, address=HostAddress("eth0", "10.0.0.1", "")), (0, 1, 2), "several hosts have the same address 10.0.0.1"),
    ("devices", lambda v: unusable(), (0, 1, 2, 3), "the host has 2 GPUs, but this torch is built without CUDA"),
    ("locations", lambda v: healthy(tp=2, pp=2), (), 'set parallel.rank_order = "dp,pp,tp"'),
    ("limits", lambda v: every(healthy(dp=8, tp=16, per_host=8), open_files=1024), tuple(range(128)), "128 ranks need 1280"),
]  # fmt: skip


def every(view: Examination, **changes: object) -> Examination:
    for rank in range(len(view.facts)):
        view = with_facts(view, rank, **changes)
    return view


def every_variable(view: Examination, name: str, value: str) -> Examination:
    for rank in range(len(view.facts)):
        view = with_variable(view, rank, name, value)
    return view


def changed(view: Examination, backend: str, **changes: object) -> Examination:
    """The all-reduce of one backend changed on all ranks."""
    for rank, links in enumerate(view.links):
        assert links is not None
        new = tuple(
            replace(each, **changes) if each.backend == backend else each  # type: ignore[arg-type]
            for each in links.collectives
        )
        view = with_links(view, rank, collectives=new)
    return view


@pytest.mark.parametrize(("check", "plant", "ranks", "what"), FAULTS)
def test_a_planted_fault_is_found_and_nothing_else(check: str, plant: Plant, ranks: tuple[int, ...], what: str) -> None:
    (found,) = problems_of(plant(healthy()))
    assert (found.check, found.fault, found.ranks) == (check, True, ranks)
    assert what in found.what and found.remedy


def slower(rank: int) -> Examination:
    links = healthy().links[rank]
    assert links
    slow = tuple(replace(each, bandwidth=2e6) for each in links.collectives if each.backend == "nccl")
    return with_links(healthy(), rank, collectives=slow)


@pytest.mark.parametrize(
    ("view", "what"),
    [
        (changed(healthy(), "gloo", bandwidth=1e6), "gloo all-reduce is slow: 1.0 MB/s"),
        (slower(2), "nccl all-reduce is slow: 2.0 MB/s"),  # the slowest rank counts
    ],
)
def test_what_may_be_meant_is_a_warning(view: Examination, what: str) -> None:
    (found,) = problems_of(view)
    assert (found.check, found.fault, found.ranks) == ("slow", False, ())
    assert what in found.what and found.remedy


def on_loopback(view: Examination) -> Examination:
    """Hosts emulated on one machine, which share its loopback address rightly."""
    view = lo(lo(view, 0), 2)
    for rank in range(4):
        view = with_facts(view, rank, host=f"host{rank // 2}/boot/net:[1]")
    return view


def only_gpus_mind(_: Examination) -> Examination:
    view = every_variable(healthy(gpus=False), "PYTORCH_CUDA_ALLOC_CONF", "expandable_segments:True")
    view = every(view, versions={**view.facts[0].versions, "torch_memory_saver": "not installed"})
    return every(view, preload="/x/torch_memory_saver_cpp.abi3.so")


def unusable(device: str = "auto") -> Examination:
    """A host whose GPUs this torch cannot use."""
    view = every(healthy(gpus=False), gpu_devices=2)
    view.config.engine.device = device  # type: ignore[assignment]
    return view


HARMLESS: list[Plant] = [
    lambda v: with_variable(v, 2, "CUDA_VISIBLE_DEVICES", "2,3"),
    lambda v: with_variable(v, 2, "OMP_NUM_THREADS", "4"),
    lambda v: with_variable(with_variable(v, 2, "NCCL_SOCKET_IFNAME", "=eth0"), 3, "NCCL_SOCKET_IFNAME", "=eth0"),
    lambda v: with_gpu(v, 2, total=127 * GIB, free=126 * GIB),
    lambda v: with_variable(v, 1, "NCCL_DEBUG", "INFO"),
    lambda v: every_variable(v, "PYTORCH_CUDA_ALLOC_CONF", "expandable_segments:False"),
    on_loopback,
    only_gpus_mind,
    lambda v: every_variable(unusable(), "CUDA_VISIBLE_DEVICES", ""),
    lambda v: unusable(device="cpu"),
]


@pytest.mark.parametrize("plant", HARMLESS)
def test_what_differs_by_design_is_no_finding(plant: Plant) -> None:
    assert problems_of(plant(healthy())) == []


def test_ranks_on_cpu_and_gpu_together_are_a_fault() -> None:
    found = problems_of(with_facts(healthy(), 3, device="cpu", gpu=None))
    assert found[0].check == "devices" and "cuda on ranks 0-2; cpu on rank 3" in found[0].what


def test_ranks_that_never_came() -> None:
    assert missing((3,), 4, 11.0).what == "rank 3 of 4 never came (waited 11 s)"
    assert missing(tuple(range(8, 24)), 24, 11.0).what.startswith("ranks 8-23 of 24")
