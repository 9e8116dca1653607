"""What is exported or reported: a config that was not run, or a run directory with what happened in it."""

import json
import math
import shlex
from collections import Counter
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any

import msgspec

from harness.cluster.placement import host_name
from harness.config.layers import ConfigError, Layer, key_types, of_older_version, read_layer, redacted
from harness.config.schema import Config
from harness.runtime import redact
from harness.runtime.events import phase_of_step
from harness.runtime.failure import Failure
from harness.runtime.files import is_regular
from harness.runtime.installed import as_files
from harness.tools.command_line import parse
from harness.tools.diagnose.diagnose import diagnose
from harness.tools.diagnose.log_lines import log_files

PASSED = "PASSED: "
MISTAKES = {"ConfigError": 2, "UnsupportedEnvironment": 125}
"""Exit codes of the errors that end a run before it starts."""
PPO = "launch/ppo.py"
OUTER_PHASES = ("run",)
"""Phases that contain the others, and fail with them."""
Event = Mapping[str, Any]

# What is read of a line of events/: these fields for each event, and no line that has others.
_EVERY = [("time", float), ("rank", int), ("host", str), ("event", str)]
_IN_PHASE = [*_EVERY, ("phase", str), ("step", int | None)]
_MEMORY = ("memory", dict[str, float] | None, None)
_EVENTS = {
    "phase_start": msgspec.defstruct("PhaseStart", _IN_PHASE),
    "phase_end": msgspec.defstruct("PhaseEnd", [*_IN_PHASE, _MEMORY]),
    "phase_failed": msgspec.defstruct("PhaseFailed", [*_IN_PHASE, ("error", str)]),
    "failed": msgspec.defstruct("Failed", [*_EVERY, ("error", str), ("traceback", str, "")]),
    "say": msgspec.defstruct("Say", [*_EVERY, ("text", str)]),
    "engine_call": msgspec.defstruct("EngineCall", [*_EVERY, ("call", str), ("seconds", float), ("ok", bool)]),
    "verification": msgspec.defstruct("VerificationLines", [*_EVERY, ("lines", tuple[str, ...])]),
    "placement": msgspec.defstruct("Picture", [*_EVERY, ("picture", tuple[str, ...])]),
    "engine": msgspec.defstruct(
        "EngineFacts",
        [*_EVERY, ("version", str), ("device", str), ("preset", str), ("arguments", dict[str, Any])],
    ),
    "log_prob_baseline": msgspec.defstruct(
        "Baseline", [*_EVERY, ("log_prob_difference_mean", float), ("allowed", float)]
    ),
    "trainer_rounding": msgspec.defstruct("Rounding", [*_EVERY, ("allowed", float)]),
    "sample": msgspec.defstruct(
        "Sample", [*_EVERY, ("step", int), ("prompt", str), ("response", str), ("reward", float)]
    ),
    "span": msgspec.defstruct("Span", [*_EVERY, ("part", str), ("began", float), ("ended", float)]),
}
_OTHER = msgspec.defstruct("OtherEvent", _EVERY)

_KEPT = msgspec.defstruct("KeptVerdict", [("said", tuple[str, ...]), ("first", Failure)])
"""What is read of failure-*.json."""


@dataclass(frozen=True, kw_only=True, slots=True)
class RankRecord:
    """One rank of environment.json. environment: variables that change how torch, NCCL, CUDA or SGLang behave."""

    rank: int
    host: str
    device: str
    platform: str
    versions: Mapping[str, str]
    environment: Mapping[str, str]
    command: str = ""  # the shell command that started it; older runs did not note it


@dataclass(frozen=True, kw_only=True, slots=True)
class RunEnd(Failure):
    """How a run ended. All but code and verdict is its first failure: for a timeout, of those that the others waited for."""

    verdict: tuple[str, ...]
    """Its last lines: PASSED, or the first failure and what followed."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Subject:
    """One run, past or planned."""

    words: tuple[str, ...]  # of the command line: TOML files and overrides, or the run directory
    config: Config
    nnodes: int
    nproc_per_node: int
    ranks: tuple[RankRecord, ...] = ()  # none where nothing was run
    seen: RunEnd | None = None
    script: str = PPO
    options: tuple[str, ...] = ()  # the script's own, which are not in its config
    events: tuple[Event, ...] = ()
    unknown_keys: tuple[str, ...] = ()  # of its config.toml: another version of the harness wrote them

    @property
    def torchrun(self) -> str:
        """Return the command up to the script."""
        if self.nnodes == 1:
            return f"torchrun --standalone --nproc-per-node={self.nproc_per_node}"
        meeting = "--rdzv-backend=c10d --rdzv-endpoint=HOST0:29400"
        return f"torchrun --nnodes={self.nnodes} --nproc-per-node={self.nproc_per_node} {meeting}"


def read_subject(words: Sequence[str]) -> Subject:
    """Read `CONFIG.toml ... [--section.key VALUE]`, or a run directory and overrides; raise ConfigError for others."""
    folder = Path(words[0]) if words and not words[0].startswith("--") and not words[0].endswith(".toml") else None
    if folder and not folder.is_dir():
        raise ConfigError(f"{folder} is not a folder here; give a run.dir that exists, or a TOML file.")
    if folder and (lacks := [name for name in ("config.toml", "environment.json") if not (folder / name).is_file()]):
        raise ConfigError(f"{folder} is not a run directory: it has no {lacks[0]}; give a run.dir or a TOML file.")
    known, unknown_keys = known_part(read_layer(str(folder / "config.toml"))) if folder else (None, ())
    command = parse(words[1:], base=[known]) if known else parse(words)
    options, parallel = command.options, command.config.parallel
    if options.dry_run or options.check or options.cuda_visible_devices:
        raise ConfigError("--dry-run, --check and what belongs to them are options of launch/ppo.py; leave them out.")
    if folder:
        file, events = folder / "environment.json", redact.values(read_events(folder))
        ranks = [replace(each, host=host_name(each.host)) for each in _decode(file, list[RankRecord], "a run")]
        if not ranks:
            raise ConfigError(f"{file} is not what a run writes: it has no rank.")
        per_host = Counter(each.host for each in ranks).values()
        script, of_script = what_was_started(ranks[0].command)
        return Subject(
            words=tuple(words),
            config=redacted(command.config),
            nnodes=len(per_host),
            nproc_per_node=max(per_host),
            ranks=tuple(ranks),
            seen=read_end(folder, events),
            script=script,
            options=of_script,
            events=tuple(events),
            unknown_keys=unknown_keys,
        )
    world_size = parallel.dp * parallel.tp * parallel.pp
    nproc_per_node = options.nproc_per_node or world_size // options.nnodes
    if options.nnodes * nproc_per_node != world_size:
        got = f"{options.nnodes} * {nproc_per_node}"
        raise ConfigError(f"--nnodes times --nproc-per-node must be the mesh's {world_size} ranks, got {got}.")
    return Subject(
        words=tuple(words),
        config=redacted(command.config),
        nnodes=options.nnodes,
        nproc_per_node=nproc_per_node,
    )


def what_was_started(command: str) -> tuple[str, tuple[str, ...]]:
    """Return the script that a shell command starts, and its options that are not in the config of its run.

    launch/ppo.py where the command does not say it.
    """
    try:
        words = shlex.split(as_files(command))
    except ValueError:  # somebody has edited it
        words = []
    at = next((at for at, word in enumerate(words) if word.endswith(".py") and Path(word).name != "torchrun.py"), None)
    if at is None:
        return PPO, ()
    script, options, is_own = Path(words[at]), list[str](), True
    for word in words[at + 1 :]:
        if word.startswith("--"):
            is_own = "." not in word.partition("=")[0]
        if is_own and (word.startswith("--") or not word.endswith(".toml")):
            options.append(word)
    return (f"launch/{script.name}" if script.parent.name == "launch" else str(script)), tuple(options)


def known_part(layer: Layer) -> tuple[Layer, tuple[str, ...]]:
    """Return the layer without the keys that this version does not know, and those keys."""
    kinds = key_types()
    sections = {key.partition(".")[0] for key in kinds}
    table: dict[str, Any] = {}
    unknown = []
    for section, values in layer.table.items():
        if section not in sections or not isinstance(values, dict):
            unknown.append(section)
            continue
        table[section] = {name: value for name, value in values.items() if f"{section}.{name}" in kinds}
        unknown += [f"{section}.{name}" for name in values if f"{section}.{name}" not in kinds]
    return Layer(layer.source, of_older_version(table)), tuple(unknown)


def _decode(file: Path, kind: Any, writer: str) -> Any:
    """Read JSON of that type, without secrets; raise ConfigError where it is another program's."""
    try:
        return msgspec.convert(redact.values(json.loads(file.read_bytes())), kind)
    except (ValueError, RecursionError) as error:  # msgspec's errors are such
        raise ConfigError(f"{file} is not what {writer} writes: {error}.") from error


def read_end(folder: Path, events: Sequence[Event]) -> RunEnd:
    """Return what the watchdogs wrote, else what the ranks' own events say."""
    verdicts: list[Any] = []
    for file in filter(is_regular, sorted(folder.glob("failure-*.json"))):
        # A full disk leaves it empty; other hosts have written theirs.
        with suppress(ConfigError):
            verdicts.append(_decode(file, _KEPT, "a watchdog"))
    verdicts = [each for each in verdicts if each.first.kind != "mistake"]  # its rank's event has more
    if verdicts:
        return _end_by_watchdog(min(verdicts, key=lambda each: each.first.time), events)
    if failed := [each for each in events if each["event"] == "phase_failed" and each["phase"] not in OUTER_PHASES]:
        first = failed[0]
        own = (each for each in events if each["event"] == "failed" and each["rank"] == first["rank"])
        at = phase_of_step(first["phase"], first["step"])
        return RunEnd(
            code=MISTAKES.get(first["error"].partition(":")[0], 1),
            verdict=(f"rank {first['rank']} on {host_name(first['host'])} failed in {at}: {first['error']}",),
            kind="exception",
            ranks=(first["rank"],),
            phase=first["phase"],
            step=first["step"],
            error=first["error"],
            traceback=next((tuple(each.get("traceback", "").splitlines()) for each in own), ()),
            slug=_known_as(folder),
        )
    if said := [each["text"] for each in events if each["event"] == "say" and each["text"].startswith(PASSED)]:
        return RunEnd(code=0, verdict=(said[-1].partition("; report ")[0],))
    began = [each for each in events if each["event"] == "phase_start"]
    where = phase_of_step(began[-1]["phase"], began[-1]["step"]) if began else "nothing"
    return RunEnd(code=None, verdict=(f"The run did not come to an end; the last phase that began was {where}.",))


def _end_by_watchdog(verdict: Any, events: Sequence[Event]) -> RunEnd:
    first = verdict.first
    end = RunEnd(verdict=verdict.said, **{each.name: getattr(first, each.name) for each in fields(Failure)})
    if first.kind != "deadline":
        return end
    # It is noticed by those that wait.
    ranks, (phase, step) = behind([each for each in events if each["time"] <= first.time]) or (
        first.ranks,
        (first.phase, first.step),
    )
    return replace(end, ranks=ranks, phase=phase, step=step)


def _known_as(folder: Path) -> str:
    """Return the catalogue's entry of a failure that no watchdog has named."""
    with suppress(ValueError):  # the run was killed before it wrote a line
        found = diagnose(log_files([str(folder)]))
        return found.finding.entry.slug if found.finding and found.finding.is_known else ""
    return ""


def behind(events: Sequence[Event]) -> tuple[tuple[int, ...], tuple[str, int | None]] | None:
    """Return the ranks that began and ended fewest phases, and the phase that they began or ended last."""
    phases = [each for each in events if each["event"] in ("phase_start", "phase_end", "phase_failed")]
    progress = Counter(each["rank"] for each in phases)
    ranks = tuple(sorted(rank for rank, count in progress.items() if count == min(progress.values())))
    places = [(each["phase"], each["step"]) for each in phases if each["rank"] in ranks[:1]]
    return (ranks, [("", None), *(place for place in places if place[0] not in OUTER_PHASES)][-1]) if ranks else None


def read_events(folder: Path) -> list[dict[str, Any]]:
    """Return the events of all ranks, by time, without lines that are no events: a killed rank does not finish its
    last.
    """
    events = []
    for file in filter(is_regular, sorted((folder / "events").glob("rank*.jsonl"))):
        with file.open("rb") as lines:
            for line in lines:
                with suppress(ValueError, RecursionError):  # msgspec's errors are such
                    event = msgspec.convert(json.loads(line), dict[str, Any])
                    msgspec.convert(event, _EVENTS.get(str(event.get("event")), _OTHER))
                    if all(math.isfinite(event.get(name, 0.0)) for name in ("time", "began", "ended")):
                        events.append(event)
    return sorted(events, key=lambda each: float(each["time"]))
