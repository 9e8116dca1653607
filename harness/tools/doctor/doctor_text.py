"""The table of a job's hosts, and its problems, as text."""

from collections.abc import Iterator, Sequence

from harness.cluster.placement import host_name
from harness.runtime import GIB
from harness.runtime.ranks import ranks_in_words, runs
from harness.tools.doctor.checks import Examination, Problem, bandwidths
from harness.tools.environment_file import NOT_INSTALLED

SOFTWARE = ("python", "torch", "cuda", "nccl", "driver", "sglang", "torch_memory_saver", "transformers")


def as_text(view: Examination | None, problems: Sequence[Problem], seconds: float) -> str:
    """Return picture, problems and verdict. view: None if ranks are missing, so that there is no picture."""
    lines = [*_picture(view), ""] if view else []
    for number, each in enumerate(problems, 1):
        lines.append(f"{number}. {'FAULT' if each.fault else 'warning'} {each.check}{_where(view, each)}: {each.what}")
        lines.append(f"   -> {each.remedy}")
    faults = sum(each.fault for each in problems)
    counts = [(faults, "fault"), (len(problems) - faults, "warning")]
    verdict = ["OK"] * (not faults) + [f"{count} {name}{'s' * (count > 1)}" for count, name in counts if count]
    return "\n".join([*lines, f"{', '.join(verdict)} ({seconds:.1f} s)"])


def _where(view: Examination | None, problem: Problem) -> str:
    """Return hosts by name, with their ranks."""
    if view is None or not problem.ranks:
        return ""
    if len(problem.ranks) == len(view.facts):
        return " on all ranks"
    found = {host: [rank for rank in ranks if rank in problem.ranks] for host, ranks in view.hosts.items()}
    return " on " + ", ".join(f"{host_name(host)} ({ranks_in_words(ranks)})" for host, ranks in found.items() if ranks)


def _picture(view: Examination) -> Iterator[str]:
    """Yield a table of the hosts, with their ranks, GPUs and addresses, and then a line for each all-reduce."""
    dims = view.dims
    width = max(4, *(len(host_name(host)) for host in view.hosts))
    yield (
        f"{len(view.facts)} ranks on {len(view.hosts)} host{'s' if len(view.hosts) > 1 else ''}, mesh dp={dims.dp} tp={dims.tp}"
        f" pp={dims.pp}, {dims.rank_order} ({'GPU' if view.on_gpu else f'no GPU: {view.facts[0].gpu_reason}'})"
    )
    found = view.facts[0].versions  # where another rank's differ, that is a fault
    yield ", ".join(
        f"{name} {found[name]}" for name in SOFTWARE if found.get(name, "none") not in ("none", NOT_INSTALLED)
    )
    yield f"\n{'host':<{width}}  {'ranks':<9} {'address (interface)':<28} {'shm free':>8} {'files':>8} {'ports':>7}  GPUs"
    for facts, links, ranks in view.by_host:
        address = f"{links.address.address} ({links.address.interface})" if links.address else "none"
        files = "no limit" if facts.open_files < 0 else facts.open_files
        yield (
            f"{host_name(facts.host):<{width}}  {runs(ranks):<9} {address:<28} {facts.shared_memory / GIB:>6.1f} G"
            f" {files:>8} {links.ports or 'none':>7}  {_gpus(view, ranks)}"
        )
    yield ""
    for backend, bandwidth in bandwidths(view).items():
        yield f"{backend} all-reduce of all ranks: {bandwidth / 1e9:.2f} GB/s"


def _gpus(view: Examination, ranks: Sequence[int]) -> str:
    gpus = [gpu for rank in ranks if (gpu := view.facts[rank].gpu)]
    if not gpus:
        return "none"
    return f"{len({gpu.uuid for gpu in gpus})} x {gpus[0].name}, {min(gpu.free for gpu in gpus) / GIB:.1f} GiB free"
