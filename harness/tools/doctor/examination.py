"""All that was learned of a job, as the checks read it, and what they answer."""

from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass

from harness.cluster.mesh import ParallelDims
from harness.cluster.placement import EnginePlacement, RankLocation, host_name, place
from harness.config.schema import Config
from harness.tools.doctor.facts import RankFacts
from harness.tools.doctor.links import RankLinks

GIB = 1 << 30
MIB = 1 << 20


@dataclass(frozen=True, kw_only=True, slots=True)
class Finding:
    """Something that will or may make a run fail."""

    check: str
    """Name of the check."""
    fault: bool
    """False: a warning."""
    ranks: tuple[int, ...]
    """Where; empty: everywhere."""
    what: str
    remedy: str


@dataclass(frozen=True, kw_only=True, slots=True)
class Examination:
    """Facts and measurements of all ranks, by rank; links are None for a rank whose measurements did not come."""

    config: Config
    dims: ParallelDims
    facts: tuple[RankFacts, ...]
    links: tuple[RankLinks | None, ...]

    @property
    def hosts(self) -> dict[str, tuple[int, ...]]:
        """Host identity -> its ranks, in the order of first ranks."""
        found: dict[str, list[int]] = {}
        for each in self.facts:
            found.setdefault(each.host, []).append(each.rank)
        return {host: tuple(ranks) for host, ranks in found.items()}

    @property
    def first_on_host(self) -> tuple[RankFacts, ...]:
        """One rank a host speaks for what all of its ranks see."""
        return tuple(self.facts[ranks[0]] for ranks in self.hosts.values())

    @property
    def apart(self) -> bool:
        """Whether some of the hosts have no kernel or no network in common, as emulated hosts may."""
        return len({each.machine for each in self.facts}) > 1

    @property
    def on_gpu(self) -> bool:
        return any(each.device == "cuda" for each in self.facts)

    def address(self, rank: int) -> str | None:
        """How the other hosts reach this rank's."""
        links = self.links[rank]
        return links.address.address if links and links.address else None

    def on_host(self, facts: RankFacts) -> tuple[int, ...]:
        """Ranks of this rank's host."""
        return self.hosts[facts.host]


Check = Callable[[Examination], Iterable[Finding]]


def placements(
    dims: ParallelDims, locations: Sequence[RankLocation | None], on_gpu: bool
) -> tuple[tuple[EnginePlacement, ...], str]:
    """Where engines go, or none and why."""
    known = [location for location in locations if location is not None]
    if len(known) < len(locations):
        return (), "a rank has no GPU that it can use"
    try:
        return place(dims, known, "cuda" if on_gpu else "cpu"), ""
    except ValueError as error:
        return (), str(error)


def groups_of(dims: ParallelDims, hosts: Iterable[Sequence[int]]) -> dict[str, tuple[tuple[int, ...], ...]]:
    """The groups whose links a run uses, by kind; hosts: the ranks of each host.

    engine (tp x pp), tp and pp where both are more than one rank, hosts (the first rank of each), world. A kind whose
    groups are those of an earlier one, or of one rank each, is left out.
    """
    engines = tuple(dims.engine_ranks(dp) for dp in range(dims.dp))
    stages = range(dims.pp)
    kinds = {
        "engine": engines,
        "tp": tuple(engine[stage * dims.tp : (stage + 1) * dims.tp] for engine in engines for stage in stages),
        "pp": tuple(engine[index :: dims.tp] for engine in engines for index in range(dims.tp)),
        "hosts": (tuple(ranks[0] for ranks in hosts),),
        "world": (tuple(range(dims.world_size)),),
    }
    chosen: dict[str, tuple[tuple[int, ...], ...]] = {}
    for kind, groups in kinds.items():
        same = [{frozenset(group) for group in other} for other in chosen.values()]
        if len(groups[0]) > 1 and {frozenset(group) for group in groups} not in same:
            chosen[kind] = groups
    return chosen


def merged(findings: Iterable[Finding]) -> list[Finding]:
    """Equal ones of several ranks as one; faults first, else in their order."""
    found: dict[tuple[str, bool, str, str], list[int]] = {}
    for each in findings:
        found.setdefault((each.check, each.fault, each.what, each.remedy), []).extend(each.ranks)
    merged = [
        Finding(check=check, fault=fault, ranks=tuple(sorted(set(ranks))), what=what, remedy=remedy)
        for (check, fault, what, remedy), ranks in found.items()
    ]
    return sorted(merged, key=lambda each: not each.fault)


def runs(ranks: Iterable[int]) -> str:
    """0, 1, 2, 3, 8 -> "0-3, 8"."""
    spans: list[list[int]] = []
    for rank in sorted(ranks):
        if spans and rank == spans[-1][1] + 1:
            spans[-1][1] = rank
        else:
            spans.append([rank, rank])
    return ", ".join(
        str(first) if first == last else f"{first}-{last}" if last > first + 1 else f"{first}, {last}"
        for first, last in spans
    )


def named_ranks(ranks: Sequence[int]) -> str:
    return f"rank{'s' if len(ranks) > 1 else ''} {runs(ranks)}"


def host_labels(view: Examination) -> dict[str, str]:
    """Host identity -> hostname, numbered where several hosts share one."""
    names = {host: host_name(host) for host in view.hosts}
    count = Counter(names.values())
    taken: Counter[str] = Counter()
    labels = {}
    for host, name in names.items():
        labels[host] = f"{name}#{taken[name]}" if count[name] > 1 else name
        taken[name] += 1
    return labels


def differences(values: Mapping[int, object]) -> tuple[str, tuple[int, ...]] | None:
    """Values by rank in words, and the ranks that differ from most (at a tie, from the first); None where all agree."""
    groups: dict[object, list[int]] = {}
    for rank, value in values.items():
        groups.setdefault(value, []).append(rank)
    if len(groups) < 2:
        return None
    most = max(groups.values(), key=len)
    told = "; ".join(f"{shown(value)} on {named_ranks(ranks)}" for value, ranks in groups.items())
    return told, tuple(rank for ranks in groups.values() if ranks is not most for rank in ranks)


def shown(value: object) -> str:
    return "unset" if value is None else '""' if value == "" else str(value)
