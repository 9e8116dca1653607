"""The picture of a job, and its problems, as text and as JSON."""

import json
from collections.abc import Iterator, Sequence

from msgspec import to_builtins

from harness.runtime.units import GIB
from harness.tools.doctor.checks import Examination, Problem, host_labels, rank_spans, ranks_in_words, speeds
from harness.tools.doctor.facts import NOT_INSTALLED, RankFacts
from harness.tools.doctor.links import RankLinks

RANK_LINES = 16
"""Up to so many ranks have a line each; beyond, only hosts do."""
SOFTWARE = ("python", "torch", "cuda", "nccl", "driver", "sglang", "torch_memory_saver", "transformers")


def as_text(view: Examination | None, problems: Sequence[Problem], seconds: float) -> str:
    """Return picture, problems and verdict. view: None if ranks are missing, so that there is no picture."""
    lines = [*picture(view), ""] if view else []
    for number, each in enumerate(problems, 1):
        lines.append(f"{number}. {'FAULT' if each.fault else 'warning'} {each.check}{_where(view, each)}: {each.what}")
        lines.append(f"   -> {each.remedy}")
    return "\n".join([*lines, verdict(problems, seconds)])


def as_json(view: Examination | None, problems: Sequence[Problem], seconds: float) -> str:
    """Return one object: verdict ("OK" or "faults"), seconds, findings, mesh, hosts, facts and links of every rank."""
    result: dict[str, object] = {
        "verdict": "faults" if any(each.fault for each in problems) else "OK",
        "seconds": round(seconds, 1),
        "findings": problems,
    }
    if view:
        result |= {
            "mesh": view.dims,
            "hosts": {label: view.hosts[host] for host, label in host_labels(view).items()},
            "ranks": view.facts,
            "links": view.links,
        }
    return json.dumps(to_builtins(result), indent=1)


def verdict(problems: Sequence[Problem], seconds: float) -> str:
    """Return "OK", "1 fault, 2 warnings" or the like, with the seconds."""
    faults = sum(each.fault for each in problems)
    counts = [(faults, "fault"), (len(problems) - faults, "warning")]
    words = ["OK"] * (not faults) + [f"{count} {name}{'s' * (count > 1)}" for count, name in counts if count]
    return f"{', '.join(words)} ({seconds:.1f} s)"


def _where(view: Examination | None, problem: Problem) -> str:
    """Return hosts by name, with their ranks."""
    if view is None or not problem.ranks:
        return ""
    if len(problem.ranks) == len(view.facts):
        return " on all ranks"
    labels = host_labels(view)
    found = {labels[host]: [rank for rank in ranks if rank in problem.ranks] for host, ranks in view.hosts.items()}
    return " on " + ", ".join(f"{label} ({ranks_in_words(ranks)})" for label, ranks in found.items() if ranks)


def picture(view: Examination) -> Iterator[str]:
    """Yield lines: hosts, ranks, GPUs, interface and address; then groups with their speeds."""
    dims, labels = view.dims, host_labels(view)
    width = max(4, *map(len, labels.values()))
    yield (
        f"{len(view.facts)} ranks on {len(view.hosts)} host{'s' if len(view.hosts) > 1 else ''}, mesh dp={dims.dp} tp={dims.tp}"
        f" pp={dims.pp}, {dims.rank_order} ({'GPU' if view.on_gpu else f'no GPU: {view.facts[0].gpu_reason}'})"
    )
    found = view.facts[0].versions  # where another rank's differ, that is a fault
    yield ", ".join(
        f"{name} {found[name]}" for name in SOFTWARE if found.get(name, "none") not in ("none", NOT_INSTALLED)
    )
    yield ""
    yield f"{'host':<{width}}  {'ranks':<9} {'address (interface)':<28} {'clock':<14} {'shm free':>8} {'memory':>8} {'files':>7}  GPUs"
    for facts, links, ranks in view.by_host:
        yield f"{labels[facts.host]:<{width}}  {_host_line(view, facts, links, ranks)}"
    if len(view.facts) <= RANK_LINES:
        yield ""
        yield f"rank  {'host':<{width}}  dp tp pp  engine ports  GPU"
        for facts, links in view.by_rank:
            yield f"{facts.rank:>4}  {labels[facts.host]:<{width}}  {_rank_line(view, facts, links)}"
    measured = speeds(view)
    if measured:
        yield ""
    for (backend, kind), groups in measured.items():
        worst = min(groups, key=lambda each: each.bandwidth)
        latency = max(each.latency for each in groups)
        many = f"{len(groups)} groups of {len(worst.ranks)}, the slowest" if len(groups) > 1 else "1 group"
        yield (
            f"{backend} all-reduce, {kind:<6} {many} ({ranks_in_words(worst.ranks)}):"
            f" {worst.bandwidth / 1e9:.2f} GB/s, {latency * 1e6:.0f} us"
        )


def _host_line(view: Examination, facts: RankFacts, links: RankLinks, ranks: Sequence[int]) -> str:
    address = f"{links.address.address} ({links.address.interface})" if links.address else "none"
    clock = "reference" if facts.rank == 0 else f"{links.clock.offset:+.3f} s" if links.clock else "unknown"
    files = facts.limits["nofile"][0]
    return (
        f"{rank_spans(ranks):<9} {address:<28} {clock:<14} {facts.shared_memory.free / GIB:>6.1f} G {facts.memory[1] / GIB:>6.1f} G"
        f" {'no end' if files < 0 else files:>7}  {_gpus(view, ranks)}"
    )


def _gpus(view: Examination, ranks: Sequence[int]) -> str:
    gpus = [gpu for rank in ranks if (gpu := view.facts[rank].gpu)]
    if not gpus:
        return "none"
    here = {gpu.uuid for gpu in gpus}
    pairs = [linked for gpu in gpus for uuid, linked in (gpu.nvlink or {}).items() if uuid in here]
    unknown = any(gpu.nvlink is None for gpu in gpus)
    nvlink = "NVLink unknown" if unknown else "NVLink" if pairs and all(pairs) else "no NVLink" if pairs else "one GPU"
    return f"{len(here)} x {gpus[0].name}, {nvlink}"


def _rank_line(view: Examination, facts: RankFacts, links: RankLinks) -> str:
    at, gpu = view.dims.coordinates(facts.rank), facts.gpu
    ports = "-" if links.ports is None else f"{links.ports} on"
    memory = f"{gpu.uuid} {gpu.free / GIB:.1f} of {gpu.total / GIB:.1f} GiB free" if gpu else "-"
    return f"{at.dp:>2} {at.tp:>2} {at.pp:>2}  {ports:<12}  {memory}"
