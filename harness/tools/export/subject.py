"""What is exported or reported: a config that has not run, or a run directory with what was seen in it."""

import json
from collections import Counter
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from harness.cluster.placement import host_name
from harness.config.cli import parse
from harness.config.layers import ConfigError
from harness.config.schema import Config
from harness.runtime.phases import phase_of_step

PASSED = "PASSED: "
MISTAKES = {"ConfigError": 2, "UnsupportedEnvironment": 125}
"""Exit codes of the errors by which a run ends before it begins."""
OUTER_PHASES = ("run",)
"""Phases that hold the others, and fail with them."""
Event = Mapping[str, Any]


@dataclass(frozen=True, kw_only=True, slots=True)
class RankRecord:
    """One rank of environment.json. environment: variables that change how torch, NCCL, CUDA or SGLang behave."""

    rank: int
    host: str
    device: str
    platform: str
    versions: Mapping[str, str]
    environment: Mapping[str, str]


@dataclass(frozen=True, kw_only=True, slots=True)
class RunEnd:
    """How a run ended. All but code and verdict are of its first failure."""

    code: int | None
    """Exit code of the rank that failed first; None where the run did not come to an end."""
    verdict: tuple[str, ...]
    """Its last lines: PASSED, or the first failure and what followed."""
    kind: str = ""
    """As harness/tools/watchdog/failures.py names it; empty where there is none."""
    ranks: tuple[int, ...] = ()
    """That failed first; for a timeout, those that the others waited for."""
    phase: str = ""
    step: int | None = None
    error: str = ""
    """Type and message, or how the process ended."""
    traceback: tuple[str, ...] = ()
    time: float = 0.0
    """UNIX seconds, where a watchdog noticed it."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Subject:
    """One run, done or to be done."""

    words: tuple[str, ...]
    """What the command line named: TOML files and overrides, or the run directory."""
    config: Config
    nnodes: int
    nproc_per_node: int
    ranks: tuple[RankRecord, ...] = ()
    """Empty where nothing was run."""
    seen: RunEnd | None = None
    script: str = "launch/ppo.py"
    events: tuple[Event, ...] = ()

    @property
    def torchrun(self) -> str:
        """Return the command up to the script."""
        if self.nnodes == 1:
            return f"torchrun --standalone --nproc-per-node={self.nproc_per_node}"
        meeting = "--rdzv-backend=c10d --rdzv-endpoint=HOST0:29400"
        return f"torchrun --nnodes={self.nnodes} --nproc-per-node={self.nproc_per_node} {meeting}"


def read_subject(words: Sequence[str]) -> Subject:
    """Read `CONFIG.toml ... [--section.key VALUE]`, or a run directory and overrides.

    Raises ConfigError for a folder that is no run directory, and for what launch/ppo.py would refuse.
    """
    folder = Path(words[0]) if words and not words[0].startswith("--") and not words[0].endswith(".toml") else None
    for name in ("config.toml", "environment.json") if folder else ():
        if not (folder / name).is_file():  # type: ignore[operator]
            raise ConfigError(
                f"{folder} is no run directory: it has no {name}; give the run.dir of a run, or a TOML file."
            )
    command = parse(words if folder is None else [str(folder / "config.toml"), *words[1:]])
    options, parallel = command.options, command.config.parallel
    if options.dry_run or options.check or options.json or options.cuda_visible_devices:
        raise ConfigError("--dry-run, --check and what belongs to them are options of launch/ppo.py; leave them out.")
    if folder is not None:
        ranks, events = read_ranks(folder), read_events(folder)
        per_host = Counter(each.host for each in ranks).values()
        # Only a sync job has these phases.
        is_sync = {"readback", "bench"} & {each["phase"] for each in events if each["event"] == "phase_start"}
        return Subject(
            words=tuple(words),
            config=command.config,
            nnodes=len(per_host),
            nproc_per_node=max(per_host),
            ranks=ranks,
            seen=read_end(folder, events),
            script="launch/sync.py" if is_sync else "launch/ppo.py",
            events=tuple(events),
        )
    world_size = parallel.dp * parallel.tp * parallel.pp
    nproc_per_node = options.nproc_per_node or world_size // options.nnodes
    if options.nnodes * nproc_per_node != world_size:
        raise ConfigError(
            f"--nnodes times --nproc-per-node must be the mesh's {world_size} ranks, got {options.nnodes} * {nproc_per_node}."
        )
    return Subject(words=tuple(words), config=command.config, nnodes=options.nnodes, nproc_per_node=nproc_per_node)


def read_ranks(folder: Path) -> tuple[RankRecord, ...]:
    """Read environment.json; raise ConfigError where it is not what a run writes."""
    file = folder / "environment.json"
    try:
        facts = json.loads(file.read_text(encoding="utf-8"))
        names = ("rank", "device", "platform", "versions", "environment")
        ranks = [RankRecord(host=host_name(each["host"]), **{name: each[name] for name in names}) for each in facts]
    except (ValueError, KeyError, TypeError) as error:
        raise ConfigError(f"{file} is not what a run writes: {type(error).__name__}: {error}.") from error
    if not ranks:
        raise ConfigError(f"{file} is not what a run writes: it has no rank.")
    return tuple(ranks)


def read_end(folder: Path, events: Sequence[Event]) -> RunEnd:
    """Return what the watchdogs wrote, else what the ranks' own events say."""
    verdicts = [_read_verdict(file) for file in sorted(folder.glob("failure-*.json"))]
    verdicts = [each for each in verdicts if each["first"]["kind"] != "mistake"]  # its rank's event has more
    if verdicts:
        return _end_by_watchdog(min(verdicts, key=lambda each: float(each["first"]["time"])), events)
    if failed := [each for each in events if each["event"] == "phase_failed" and each["phase"] not in OUTER_PHASES]:
        first = failed[0]
        at = phase_of_step(first["phase"], first["step"])
        return RunEnd(
            code=MISTAKES.get(first["error"].partition(":")[0], 1),
            verdict=(f"rank {first['rank']} on {host_name(first['host'])} failed in {at}: {first['error']}",),
            kind="exception",
            ranks=(first["rank"],),
            phase=first["phase"],
            step=first["step"],
            error=first["error"],
            traceback=_of_failed_rank(events, [first["rank"]], "traceback"),
        )
    if said := [each["text"] for each in events if each["event"] == "say" and each["text"].startswith(PASSED)]:
        return RunEnd(code=0, verdict=(said[-1].partition("; report ")[0],))
    began = [each for each in events if each["event"] == "phase_start"]
    where = phase_of_step(began[-1]["phase"], began[-1]["step"]) if began else "nothing"
    return RunEnd(code=None, verdict=(f"The run did not come to an end; the last phase that began was {where}.",))


def _read_verdict(file: Path) -> Event:
    """Raise ConfigError where it is not what a watchdog writes."""
    try:
        verdict: Event = json.loads(file.read_text(encoding="utf-8"))
        missing = {"code", "said", "first"} - set(verdict) or (
            {"kind", "time", "ranks", "place", "detail"} - set(verdict["first"])
            or {"phase", "step"} - set(verdict["first"]["place"])
        )
    except (ValueError, TypeError, RecursionError) as error:
        raise ConfigError(f"{file} is not what a watchdog writes: {type(error).__name__}: {error}.") from error
    if missing:
        raise ConfigError(f"{file} is not what a watchdog writes: it has no {', '.join(sorted(missing))}.")
    return verdict


def _end_by_watchdog(verdict: Event, events: Sequence[Event]) -> RunEnd:
    first = verdict["first"]
    ranks, place = tuple(first["ranks"]), (first["place"]["phase"], first["place"]["step"])
    if first["kind"] == "deadline":  # noticed by those that wait
        ranks, place = behind([each for each in events if each["time"] <= first["time"]]) or (ranks, place)
    whole = _of_failed_rank(events, ranks, "error")  # the watchdog's is cut
    return RunEnd(
        code=verdict["code"],
        verdict=tuple(verdict["said"]),
        kind=first["kind"],
        ranks=ranks,
        phase=place[0],
        step=place[1],
        error=" ".join(whole) if whole and first["kind"] == "exception" else first["detail"],
        traceback=_of_failed_rank(events, ranks, "traceback"),
        time=first["time"],
    )


def behind(events: Sequence[Event]) -> tuple[tuple[int, ...], tuple[str, int | None]] | None:
    """Return the ranks that began and ended fewest phases, and the phase that they are in, or ended last."""
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
    open_places = [place for place in inside[ranks[0]] if place[0] not in OUTER_PHASES]
    return ranks, open_places[-1] if open_places else last.get(ranks[0], ("", None))


def read_events(folder: Path) -> list[dict[str, Any]]:
    """Return the events of all ranks, by time, without a line that a killed rank did not finish."""
    events = []
    for file in sorted((folder / "events").glob("rank*.jsonl")):
        for line in file.read_text(encoding="utf-8").splitlines():
            with suppress(ValueError):
                events.append(json.loads(line))
    return sorted(events, key=lambda each: float(each["time"]))


def _of_failed_rank(events: Sequence[Event], ranks: Sequence[int], what: str) -> tuple[str, ...]:
    """Return lines of the failure event of the first of these ranks; empty if it had no time to write one."""
    failed = (each for each in events if each["event"] == "failed" and each["rank"] in ranks and what in each)
    return next((tuple(each[what].rstrip().splitlines()) for each in failed), ())
