"""What is exported: a config that nobody has run yet, or a run directory with what was seen in it."""

import json
from collections import Counter
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from harness.cluster.placement import host_name
from harness.config.command import parse
from harness.config.layers import ConfigError
from harness.config.schema import Config
from harness.tools.watchdog.failure import phase_of_step

PASSED = "PASSED: "
MISTAKES = {"ConfigError": 2, "UnsupportedEnvironment": 125}
"""Exit codes of the errors by which a run ends before it begins."""
UNTOLD = ("run",)
"""Phases that hold the others, and fail with them."""


@dataclass(frozen=True, kw_only=True, slots=True)
class RankFacts:
    """One rank of environment.json."""

    rank: int
    host: str
    """For people."""
    device: str
    platform: str
    versions: Mapping[str, str]
    environment: Mapping[str, str]
    """Variables that change how torch, NCCL, CUDA or SGLang behave."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Seen:
    """How a run ended."""

    code: int | None
    """Exit code of the rank that failed first; None where the run did not come to an end."""
    verdict: tuple[str, ...]
    """Its last words: PASSED, or the first failure and what followed."""
    kind: str = ""
    """Of the first failure, as harness/tools/watchdog/failure.py names them; empty where there is none."""
    ranks: tuple[int, ...] = ()
    """That failed first; of a deadline, those that the others waited for."""
    phase: str = ""
    """In which they were."""
    step: int | None = None
    error: str = ""
    """Type and message of the first failure, or how its process ended."""
    traceback: tuple[str, ...] = ()
    """Lines, of the rank that failed first."""
    time: float = 0.0
    """UNIX seconds of the first failure, where a watchdog noticed one."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Subject:
    """One run, done or to be done."""

    words: tuple[str, ...]
    """What the command line named: TOML files and overrides, or the run directory."""
    config: Config
    nnodes: int
    nproc_per_node: int
    ranks: tuple[RankFacts, ...] = ()
    """Empty where nothing was run."""
    seen: Seen | None = None
    script: str = "launch/ppo.py"

    events: tuple[Mapping[str, Any], ...] = ()

    @property
    def torchrun(self) -> str:
        """The command up to the script."""
        if self.nnodes == 1:
            return f"torchrun --standalone --nproc-per-node={self.nproc_per_node}"
        meeting = "--rdzv-backend=c10d --rdzv-endpoint=HOST0:29400"
        return f"torchrun --nnodes={self.nnodes} --nproc-per-node={self.nproc_per_node} {meeting}"


def read_subject(words: Sequence[str]) -> Subject:
    """words: `CONFIG.toml ... [--section.key VALUE]`, or a run directory and overrides.

    Raises ConfigError for a folder that is no run directory, and for what launch/ppo.py would refuse.
    """
    folder = Path(words[0]) if words and not words[0].startswith("--") and not words[0].endswith(".toml") else None
    if folder is not None:
        missing = [name for name in ("config.toml", "environment.json") if not (folder / name).is_file()]
        if missing:
            raise ConfigError(
                f"{folder} is no run directory: it has no {missing[0]}; give the run.dir of a run, or a TOML file."
            )
    command = parse(words if folder is None else [str(folder / "config.toml"), *words[1:]])
    options = command.options
    if options.dry_run or options.check or options.json or options.cuda_visible_devices:
        raise ConfigError("--dry-run, --check and what belongs to them are options of launch/ppo.py; leave them out.")
    parallel = command.config.parallel
    world_size = parallel.dp * parallel.tp * parallel.pp
    if folder is not None:
        ranks = read_ranks(folder)
        per_host = Counter(each.host for each in ranks).values()
        return Subject(
            words=tuple(words),
            config=command.config,
            nnodes=len(per_host),
            nproc_per_node=max(per_host),
            ranks=ranks,
            seen=read_seen(folder),
            script=script_of(folder),
            events=tuple(read_events(folder)),
        )
    nproc_per_node = options.nproc_per_node or world_size // options.nnodes
    if options.nnodes * nproc_per_node != world_size:
        raise ConfigError(
            f"--nnodes {options.nnodes} times --nproc-per-node {nproc_per_node} must be the mesh's {world_size} ranks."
        )
    return Subject(words=tuple(words), config=command.config, nnodes=options.nnodes, nproc_per_node=nproc_per_node)


def read_ranks(folder: Path) -> tuple[RankFacts, ...]:
    """environment.json of a run directory. Raises ConfigError where it is not one."""
    file = folder / "environment.json"
    try:
        facts = json.loads(file.read_text(encoding="utf-8"))
        names = ("rank", "device", "platform", "versions", "environment")
        ranks = [RankFacts(host=host_name(each["host"]), **{name: each[name] for name in names}) for each in facts]
    except (ValueError, KeyError, TypeError) as error:
        raise ConfigError(f"{file} is not what a run writes: {type(error).__name__}: {error}.") from error
    if not ranks:
        raise ConfigError(f"{file} is not what a run writes: it has no rank.")
    return tuple(ranks)


def read_seen(folder: Path) -> Seen:
    """What the watchdogs wrote, else what the ranks' own events say."""
    events = read_events(folder)
    told = [_read_verdict(file) for file in sorted(folder.glob("failure-*.json"))]
    told = [each for each in told if each["first"]["kind"] != "mistake"]  # which its rank says better
    if told:
        return _seen_by_watchdog(min(told, key=lambda each: each["first"]["time"]), events)
    failed = [each for each in events if each["event"] == "phase_failed" and each["phase"] not in UNTOLD]
    if failed:
        first = failed[0]
        at = phase_of_step(first["phase"], first["step"])
        return Seen(
            code=MISTAKES.get(first["error"].partition(":")[0], 1),
            verdict=(f"rank {first['rank']} on {host_name(first['host'])} failed in {at}: {first['error']}",),
            kind="exception",
            ranks=(first["rank"],),
            phase=first["phase"],
            step=first["step"],
            error=first["error"],
            traceback=_told(events, [first["rank"]], "traceback"),
        )
    said = [each["text"] for each in events if each["event"] == "say" and each["text"].startswith(PASSED)]
    if said:
        return Seen(code=0, verdict=(said[-1].partition("; report ")[0],))
    began = [each for each in events if each["event"] == "phase_start"]
    where = phase_of_step(began[-1]["phase"], began[-1]["step"]) if began else "nothing"
    return Seen(code=None, verdict=(f"The run did not come to an end; the last phase that began was {where}.",))


def _read_verdict(file: Path) -> Mapping[str, Any]:
    """Raises ConfigError where it is not what a watchdog writes."""
    try:
        verdict: Mapping[str, Any] = json.loads(file.read_text(encoding="utf-8"))
        missing = {"code", "said", "first"} - set(verdict) or (
            {"kind", "time", "ranks", "place", "detail"} - set(verdict["first"])
            or {"phase", "step"} - set(verdict["first"]["place"])
        )
    except (ValueError, TypeError, RecursionError) as error:
        raise ConfigError(f"{file} is not what a watchdog writes: {type(error).__name__}: {error}.") from error
    if missing:
        raise ConfigError(f"{file} is not what a watchdog writes: it has no {', '.join(sorted(missing))}.")
    return verdict


def _seen_by_watchdog(verdict: Mapping[str, Any], events: Sequence[Mapping[str, Any]]) -> Seen:
    first = verdict["first"]
    ranks, phase, step = tuple(first["ranks"]), first["place"]["phase"], first["place"]["step"]
    if first["kind"] == "deadline":  # noticed by those that wait
        ranks, (phase, step) = behind([each for each in events if each["time"] <= first["time"]]) or (
            ranks,
            (phase, step),
        )
    whole = _told(events, ranks, "error")  # the watchdog's is cut
    return Seen(
        code=verdict["code"],
        verdict=tuple(verdict["said"]),
        kind=first["kind"],
        ranks=ranks,
        phase=phase,
        step=step,
        error=" ".join(whole) if whole and first["kind"] == "exception" else first["detail"],
        traceback=_told(events, ranks, "traceback"),
        time=first["time"],
    )


def behind(events: Sequence[Mapping[str, Any]]) -> tuple[tuple[int, ...], tuple[str, int | None]] | None:
    """The ranks that began and ended fewest phases, and the phase that they are in, or ended last; None without events."""
    progress: Counter[int] = Counter()
    inside: dict[int, list[tuple[str, int | None]]] = {}
    last: dict[int, tuple[str, int | None]] = {}
    for each in events:
        if each["event"] in ("phase_start", "phase_end", "phase_failed"):
            rank, place = each["rank"], (each["phase"], each["step"])
            progress[rank] += 1
            opened = inside.setdefault(rank, [])
            if each["event"] == "phase_start":
                opened.append(place)
            elif place in opened:
                opened.remove(place)
                last[rank] = place
    if not progress:
        return None
    least = min(progress.values())
    ranks = tuple(sorted(rank for rank, count in progress.items() if count == least))
    told = [place for place in inside[ranks[0]] if place[0] not in UNTOLD]
    return ranks, told[-1] if told else last.get(ranks[0], ("", None))


def read_events(folder: Path) -> list[dict[str, Any]]:
    """The events of all ranks, by time. A line that a killed rank did not finish is left out."""
    events = []
    for file in sorted((folder / "events").glob("rank*.jsonl")):
        for line in file.read_text(encoding="utf-8").splitlines():
            with suppress(ValueError):
                events.append(json.loads(line))
    return sorted(events, key=lambda each: each["time"])


def script_of(folder: Path) -> str:
    """Which job the run was: only a sync job has these phases outside of a step of PPO."""
    phases = {each["phase"] for each in read_events(folder) if each["event"] == "phase_start"}
    return "launch/sync.py" if phases & {"readback", "bench"} else "launch/ppo.py"


def _told(events: Sequence[Mapping[str, Any]], ranks: Sequence[int], what: str) -> tuple[str, ...]:
    """Lines of what the first of these ranks said as it failed; empty where it had no time to."""
    for each in events:
        if each["event"] == "failed" and each["rank"] in ranks and what in each:
            return tuple(each[what].rstrip().splitlines())
    return ()
