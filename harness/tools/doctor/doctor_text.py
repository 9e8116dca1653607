"""The picture of a job, and its problems, as text and as JSON."""

import json
from collections.abc import Iterator, Sequence

from msgspec import to_builtins

from harness.runtime.units import GIB
from harness.tools.doctor.checks import Examination, Problem, host_labels, rank_spans, ranks_in_words, slowest
from harness.tools.doctor.facts import NOT_INSTALLED

RANK_LINES = 16
"""Up to so many ranks have a line each; beyond, only hosts do."""
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


def _where(view: Examination | None, problem: Problem) -> str:
    """Return hosts by name, with their ranks."""
    if view is None or not problem.ranks:
        return ""
    if len(problem.ranks) == len(view.facts):
        return " on all ranks"
    labels = host_labels(view)
    found = {labels[host]: [rank for rank in ranks if rank in problem.ranks] for host, ranks in view.hosts.items()}
    return " on " + ", ".join(f"{label} ({ranks_in_words(ranks)})" for label, ranks in found.items() if ranks)


def _picture(view: Examination) -> Iterator[str]:
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
    yield f"\n{'host':<{width}}  {'ranks':<9} {'address (interface)':<28} {'clock':<10} {'shm free':>8} {'files':>7} {'ports':>7}  GPUs"
    for facts, links, ranks in view.by_host:
        address = f"{links.address.address} ({links.address.interface})" if links.address else "none"
        clock = "reference" if facts.rank == 0 else f"{links.clock.offset:+.3f} s" if links.clock else "unknown"
        files = "no end" if facts.limits["nofile"] < 0 else facts.limits["nofile"]
        yield (
            f"{labels[facts.host]:<{width}}  {rank_spans(ranks):<9} {address:<28} {clock:<10} {facts.shared_memory / GIB:>6.1f} G"
            f" {files:>7} {links.ports or 'none':>7}  {_gpus(view, ranks)}"
        )
    if len(view.facts) <= RANK_LINES:
        yield f"\nrank  {'host':<{width}}  dp tp pp  GPU"
        for facts in view.facts:
            at, gpu = dims.coordinates(facts.rank), facts.gpu
            memory = f"{gpu.uuid} {gpu.free / GIB:.1f} of {gpu.total / GIB:.1f} GiB free" if gpu else "-"
            yield f"{facts.rank:>4}  {labels[facts.host]:<{width}}  {at.dp:>2} {at.tp:>2} {at.pp:>2}  {memory}"
    yield ""
    for worst, groups in slowest(view):
        many = f"{groups} groups of {len(worst.ranks)}, the slowest" if groups > 1 else "1 group"
        yield (
            f"{worst.backend} all-reduce, {worst.group:<6} {many} ({ranks_in_words(worst.ranks)}):"
            f" {worst.bandwidth / 1e9:.2f} GB/s, {worst.latency * 1e6:.0f} us"
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
