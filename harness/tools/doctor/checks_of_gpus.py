"""Faults of GPUs: one for each rank, free alike, nobody else on them, NVLink between them, and handles that an engine can open."""

from collections.abc import Iterator

from harness.tools.doctor.examination import GIB, Examination, Finding, differences, named_ranks

BALANCE = 0.9
"""SGLang refuses an engine whose fullest GPU has less than this share of the emptiest one's free memory."""
OCCUPIED_BYTES = GIB
UNSEEN_BYTES = 2 * GIB
"""Used without a process that is told: more than a driver takes. Inside a container others' processes are often not told."""


def devices(view: Examination) -> Iterator[Finding]:
    """All ranks run on GPUs, or all on the CPU because there is no GPU."""
    if different := differences({each.rank: each.device for each in view.facts if not each.problem}):
        yield Finding(
            check="devices",
            fault=True,
            ranks=different[1],
            what=f"the ranks' devices differ: {different[0]}",
            remedy="give every host GPUs that torch can use, or set engine.device",
        )
    for facts in view.facts:
        hidden = facts.environment.get("CUDA_VISIBLE_DEVICES", "unset") in ("", "-1")
        wanted = view.config.engine.device == "auto" and not facts.problem and not hidden
        if facts.device == "cpu" and facts.gpu_devices and wanted:
            yield Finding(
                check="devices",
                fault=True,
                ranks=(facts.rank,),
                what=f"the host has {facts.gpu_devices} GPUs, but {facts.gpu_reason}",
                remedy="install the torch that fits the driver (configs/environments), or set engine.device = cpu",
            )


def own_gpus(view: Examination) -> Iterator[Finding]:
    """No two ranks on one GPU, by UUID, however CUDA_VISIBLE_DEVICES numbers them."""
    users: dict[str, list[int]] = {}
    for facts in view.facts:
        if facts.gpu:
            users.setdefault(facts.gpu.uuid, []).append(facts.rank)
    for uuid, ranks in users.items():
        if len(ranks) > 1:
            yield Finding(
                check="own_gpus",
                fault=True,
                ranks=tuple(ranks),
                what=f"{named_ranks(ranks)} are all on GPU {uuid}",
                remedy="make CUDA_VISIBLE_DEVICES list distinct GPUs for the ranks and torchruns of a host",
            )


def occupied(view: Examination) -> Iterator[Finding]:
    """Nobody else holds memory of a GPU that the run will use."""
    own = {(each.host, each.pid) for each in view.facts}
    for facts in view.facts:
        others = [each for each in facts.gpu.processes if (facts.host, each.pid) not in own] if facts.gpu else []
        for each in others:
            if each.used >= OCCUPIED_BYTES or each.name.startswith("sglang::"):
                yield Finding(
                    check="occupied",
                    fault=True,
                    ranks=(facts.rank,),
                    what=f"process {each.pid} ({each.name}) holds {each.used / GIB:.1f} GiB of this rank's GPU",
                    remedy="end it by its pid where it is a leftover, or leave this GPU out of CUDA_VISIBLE_DEVICES",
                )
        unseen = facts.gpu.total - facts.gpu.free - sum(each.used for each in facts.gpu.processes) if facts.gpu else 0
        if unseen > UNSEEN_BYTES:
            yield Finding(
                check="occupied",
                fault=True,
                ranks=(facts.rank,),
                what=f"{unseen / GIB:.1f} GiB of this rank's GPU are used by processes that cannot be seen from here",
                remedy="look with nvidia-smi outside the container, and end what is left over there",
            )


def balance(view: Examination) -> Iterator[Finding]:
    """The GPUs of an engine have alike memory free: SGLang refuses more than a tenth of difference."""
    for dp in range(view.dims.dp):
        ranks = view.dims.engine_ranks(dp)
        free = {rank: gpu.free for rank in ranks if (gpu := view.facts[rank].gpu)}
        if free and min(free.values()) < BALANCE * max(free.values()):
            full = tuple(rank for rank in free if free[rank] < BALANCE * max(free.values()))
            yield Finding(
                check="balance",
                fault=True,
                ranks=full,
                what=f"engine {dp}: from {min(free.values()) / GIB:.1f} to {max(free.values()) / GIB:.1f} GiB are free on its GPUs"
                " (SGLang: The memory capacity is unbalanced)",
                remedy="free the fuller ones; nvidia-smi says who holds their memory",
            )


def models(view: Examination) -> Iterator[Finding]:
    """One kind of GPU: the slowest or smallest decides for all."""
    if different := differences({each.rank: each.gpu.name for each in view.facts if each.gpu}):
        yield Finding(
            check="models",
            fault=False,
            ranks=different[1],
            what=f"the GPUs are of several kinds: {different[0]}",
            remedy="use hosts of one kind, or size mem_fraction_static for the smallest",
        )


def nvlink(view: Examination) -> Iterator[Finding]:
    """Tensor parallelism inside a host wants NVLink between its GPUs."""
    uuids = {facts.gpu.uuid: facts.rank for facts in view.facts if facts.gpu}
    for facts in view.facts:
        if facts.gpu is None:
            continue
        if facts.gpu.nvlink is None:
            yield Finding(
                check="nvlink",
                fault=False,
                ranks=(facts.rank,),
                what=f"whether NVLink connects this GPU is not known: the GPU was told by {facts.gpu.told_by}",
                remedy="install nvidia-ml-py, which SGLang depends on",
            )
            continue
        engine = view.dims.engine_ranks(view.dims.coordinates(facts.rank).dp)
        apart = [uuids[uuid] for uuid, linked in facts.gpu.nvlink.items() if not linked and uuids.get(uuid) in engine]
        if apart:
            yield Finding(
                check="nvlink",
                fault=False,
                ranks=(facts.rank, *apart),
                what="there is no NVLink between GPUs of one engine on one host: its all-reduces take PCIe",
                remedy="choose GPUs that NVLink connects (nvidia-smi topo -m), or expect slow collectives",
            )


def ipc(view: Examination) -> Iterator[Finding]:
    """What the trainer hands over, the engine's process on the same GPU can open, and finds itself on that GPU."""
    for facts in view.facts:
        links = view.links[facts.rank]
        if links is None or links.ipc is None or facts.gpu is None:
            continue
        if links.ipc.error:
            yield Finding(
                check="ipc",
                fault=True,
                ranks=(facts.rank,),
                what=f"a child with CUDA_VISIBLE_DEVICES={links.ipc.visible} cannot open this rank's memory: {links.ipc.error}",
                remedy="in a container, allow it (--ipc=host, --cap-add=SYS_PTRACE); no expandable segments; or use"
                " weights.transport = disk",
            )
        elif links.ipc.uuid != facts.gpu.uuid:
            yield Finding(
                check="ipc",
                fault=True,
                ranks=(facts.rank,),
                what=f"the engine's process would be on GPU {links.ipc.uuid}, its trainer on {facts.gpu.uuid}"
                f" (CUDA_VISIBLE_DEVICES={links.ipc.visible})",
                remedy="write CUDA_VISIBLE_DEVICES with UUIDs, the same way for all ranks of the host",
            )
