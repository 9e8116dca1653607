"""Faults between ranks: hosts that do not reach one another, and groups whose all-reduce fails or is slow."""

from collections.abc import Iterator
from statistics import median

from harness.tools.doctor.examination import Examination, Finding, host_labels, named_ranks
from harness.tools.doctor.links import Collective, Reach

SLOW_LATENCY = 0.02
SLOW_BANDWIDTH = {"gloo": 10e6, "nccl": 100e6}
"""Bytes a second of a group's all-reduce, below which a run is not worth starting."""
SLOW_SHARE = 0.4
"""A group with less than this share of its kind's median bandwidth has a link that is worse than the others'."""


def silent(view: Examination) -> Iterator[Finding]:
    """Every rank that came also told what it measured."""
    ranks = tuple(rank for rank, links in enumerate(view.links) if links is None)
    if ranks:
        yield Finding(
            check="silent",
            fault=True,
            ranks=ranks,
            what="nothing came back from the measurements between ranks",
            remedy="look at what this rank printed; it died, hangs in the driver, or its host was cut off meanwhile",
        )


def reached(view: Examination) -> Iterator[Finding]:
    """Hosts reach one another's leased ports over TCP: no firewall, no wrong address."""
    labels = host_labels(view)
    failed: dict[tuple[str, str, str], list[tuple[int, Reach]]] = {}
    for rank, links in enumerate(view.links):
        for reach in links.reaches if links else ():
            if reach.error:
                hosts = labels[view.facts[rank].host], labels[view.facts[reach.to].host]
                failed.setdefault((*hosts, reach.error), []).append((rank, reach))
    for (here, there, error), reaches in failed.items():
        ports = ", ".join(str(port) for port in sorted({reach.port for _, reach in reaches}))
        yield Finding(
            check="reached",
            fault=True,
            ranks=tuple(sorted({rank for rank, _ in reaches})),
            what=f"{here} does not reach {there} at {reaches[0][1].address} port {ports}: {error}",
            remedy=f"let {here} and {there} talk on all ports (engines, gloo and NCCL choose theirs), and see that the address is"
            f" {there}'s on the network between them",
        )


def all_reduced(view: Examination) -> Iterator[Finding]:
    """Every group's all-reduce ended, with the right sum."""
    for (backend, kind, ranks), errors in _errors(view).items():
        tried = [error for error in errors.values() if not error.startswith("not tried")]
        error = tried[0] if tried else next(iter(errors.values()))
        yield Finding(
            check="all_reduced",
            fault=True,
            ranks=tuple(errors),
            what=f"{backend} all-reduce of {kind} ({named_ranks(ranks)}): {error}",
            remedy=_remedy(backend),
        )


def _errors(view: Examination) -> dict[tuple[str, str, tuple[int, ...]], dict[int, str]]:
    found: dict[tuple[str, str, tuple[int, ...]], dict[int, str]] = {}
    for rank, links in enumerate(view.links):
        for each in links.collectives if links else ():
            if each.error:
                found.setdefault((each.backend, each.group, each.ranks), {})[rank] = each.error
    return found


def _remedy(backend: str) -> str:
    if backend == "gloo":
        return "see that these hosts reach one another on all ports, over the interface of GLOO_SOCKET_IFNAME"
    return (
        "run it again with NCCL_DEBUG=INFO; then with NCCL_P2P_DISABLE=1, NCCL_SHM_DISABLE=1 or NCCL_IB_DISABLE=1 on every"
        " host to see which transport fails"
    )


def speeds(view: Examination) -> dict[tuple[str, str], list[Collective]]:
    """(backend, kind) -> one measurement a group, its slowest rank's; failed ones left out."""
    found: dict[tuple[str, str, tuple[int, ...]], Collective] = {}
    for links in view.links:
        for each in links.collectives if links else ():
            if not each.error:
                key = each.backend, each.group, each.ranks
                found[key] = min(found.get(key, each), each, key=lambda one: one.bandwidth)
    by_kind: dict[tuple[str, str], list[Collective]] = {}
    for (backend, kind, _), each in found.items():
        by_kind.setdefault((backend, kind), []).append(each)
    return by_kind


def slow(view: Examination) -> Iterator[Finding]:
    """No group is slow by itself, or next to others of its kind."""
    for (backend, kind), groups in speeds(view).items():
        usual = median(each.bandwidth for each in groups)
        for each in groups:
            if each.latency > SLOW_LATENCY or each.bandwidth < SLOW_BANDWIDTH[backend]:
                told = f"{each.latency * 1000:.1f} ms for 8 bytes, {each.bandwidth / 1e6:.1f} MB/s"
            elif each.bandwidth < SLOW_SHARE * usual:
                told = f"{each.bandwidth / 1e9:.2f} GB/s, where {usual / 1e9:.2f} is usual for {kind} groups"
            else:
                continue
            yield Finding(
                check="slow",
                fault=False,
                ranks=each.ranks,
                what=f"{backend} all-reduce of {kind} is slow: {told}",
                remedy="see that the fastest interface between these hosts is the one in use, and that nothing else uses it",
            )
