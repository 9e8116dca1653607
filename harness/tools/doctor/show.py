"""The picture of a job, and its findings, as text and as JSON."""

import json
from collections.abc import Iterator, Sequence
from dataclasses import asdict

from harness.tools.doctor.checks_of_links import speeds
from harness.tools.doctor.examination import GIB, Examination, Finding, host_labels, named_ranks, runs
from harness.tools.doctor.facts import NOT_INSTALLED, RankFacts

RANK_LINES = 16
"""Up to so many ranks have a line each; beyond, hosts do."""


def as_text(view: Examination | None, findings: Sequence[Finding], seconds: float) -> str:
    """view: None where ranks are missing, so that there is no picture."""
    lines = [*picture(view), ""] if view else []
    lines += listed(view, findings)
    lines.append(verdict(findings, seconds))
    return "\n".join(lines)


def as_json(view: Examination | None, findings: Sequence[Finding], seconds: float) -> str:
    """One object: verdict ("OK" or "faults"), seconds, findings, mesh, hosts, and facts and links of every rank."""
    told: dict[str, object] = {
        "verdict": "faults" if any(each.fault for each in findings) else "OK",
        "seconds": round(seconds, 1),
        "findings": [asdict(each) for each in findings],
    }
    if view:
        told |= {
            "mesh": asdict(view.dims),
            "hosts": {label: view.hosts[host] for host, label in host_labels(view).items()},
            "ranks": [asdict(each) for each in view.facts],
            "links": [each and asdict(each) for each in view.links],
        }
    return json.dumps(told, indent=1)


def verdict(findings: Sequence[Finding], seconds: float) -> str:
    faults = sum(each.fault for each in findings)
    warnings = len(findings) - faults
    told = f"{faults} fault{'s' if faults > 1 else ''}" if faults else "OK"
    return f"{told}{f', {warnings} warning' + 's' * (warnings > 1) if warnings else ''} ({seconds:.1f} s)"


def listed(view: Examination | None, findings: Sequence[Finding]) -> Iterator[str]:
    """Numbered: what is wrong, where, what to do."""
    for number, each in enumerate(findings, 1):
        where = _where(view, each.ranks)
        yield f"{number}. {'FAULT' if each.fault else 'warning'} {each.check}{where}: {each.what}"
        yield f"   -> {each.remedy}"


def _where(view: Examination | None, ranks: Sequence[int]) -> str:
    """Whole hosts by name, single ranks with their host's."""
    if view is None or not ranks or len(ranks) == len(view.facts):
        return "" if view is None or not ranks else " on all ranks"
    labels, parts = host_labels(view), []
    for host, here in view.hosts.items():
        found = [rank for rank in here if rank in ranks]
        if found:
            parts.append(f"{labels[host]} ({named_ranks(found)})")
    return f" on {', '.join(parts)}"


def picture(view: Examination) -> Iterator[str]:
    """Hosts, ranks, GPUs, interface and address; then groups with their speeds."""
    dims = view.dims
    device = "GPU" if view.on_gpu else f"no GPU: {view.facts[0].gpu_reason}"
    yield (
        f"{len(view.facts)} ranks on {len(view.hosts)} host{'s' if len(view.hosts) > 1 else ''}, mesh dp={dims.dp} tp={dims.tp}"
        f" pp={dims.pp}, {dims.rank_order} ({device})"
    )
    yield _software(view)
    labels = host_labels(view)
    width = max(4, *(len(label) for label in labels.values()))
    yield ""
    yield f"{'host':<{width}}  {'ranks':<9} {'address (interface)':<28} {'clock':<14} {'shm free':>8} {'memory':>8} {'files':>7}  GPUs"
    for facts in view.first_on_host:
        yield f"{labels[facts.host]:<{width}}  {_host_line(view, facts)}"
    if len(view.facts) <= RANK_LINES:
        yield ""
        yield f"rank  {'host':<{width}}  dp tp pp  engine ports  GPU"
        for facts in view.facts:
            yield f"{facts.rank:>4}  {labels[facts.host]:<{width}}  {_rank_line(view, facts)}"
    measured = speeds(view)
    if measured:
        yield ""
    for (backend, kind), groups in measured.items():
        worst = min(groups, key=lambda each: each.bandwidth)
        latency = max(each.latency for each in groups)
        many = f"{len(groups)} groups of {len(worst.ranks)}, the slowest" if len(groups) > 1 else "1 group"
        yield (
            f"{backend} all-reduce, {kind:<6} {many} ({named_ranks(worst.ranks)}):"
            f" {worst.bandwidth / 1e9:.2f} GB/s, {latency * 1e6:.0f} us"
        )


def _software(view: Examination) -> str:
    """Of rank 0; differences are findings."""
    found = view.facts[0].versions
    names = ("python", "torch", "cuda", "nccl", "driver", "sglang", "torch_memory_saver", "transformers")
    return ", ".join(
        f"{name} {found[name]}" for name in names if found.get(name, "none") not in ("none", NOT_INSTALLED)
    )


def _host_line(view: Examination, facts: RankFacts) -> str:
    links = view.links[facts.rank]
    address = f"{links.address.address} ({links.address.interface})" if links and links.address else "none"
    clock = "unknown"
    if links and links.clock:
        clock = "reference" if facts.rank == 0 else f"{links.clock.offset:+.3f} s"
    files = facts.limits["nofile"][0]
    ranks = view.on_host(facts)
    return (
        f"{runs(ranks):<9} {address:<28} {clock:<14} {facts.shared_memory.free / GIB:>6.1f} G {facts.memory[1] / GIB:>6.1f} G"
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


def _rank_line(view: Examination, facts: RankFacts) -> str:
    at, links = view.dims.coordinates(facts.rank), view.links[facts.rank]
    ports = f"{links.ports} on" if links and links.ports is not None else "-"
    gpu = (
        "-"
        if facts.gpu is None
        else f"{facts.gpu.uuid} {facts.gpu.free / GIB:.1f} of {facts.gpu.total / GIB:.1f} GiB free"
    )
    return f"{at.dp:>2} {at.tp:>2} {at.pp:>2}  {ports:<12}  {gpu}"
