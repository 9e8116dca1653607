"""A run as one page that opens offline: verdict, first failure, timeline, memory, metrics, log-probs, environment."""

import json
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from harness.config.layers import to_toml
from harness.runtime import redact
from harness.runtime.units import GIB
from harness.tools.diagnose.diagnose import CatalogueMatch
from harness.tools.export.subject import Subject
from harness.tools.report import svg
from harness.tools.report.issue_text import (
    differences,
    engine_lines,
    hosts_of,
    outcome,
    picture,
    ranges,
    reproduce,
    seen_once,
    shown_variables,
    title,
)
from harness.tools.report.run_history import Reading, Span, began, readings, spans

LAST_STEPS = 4
"""Drawn apart in the timeline: beside a start of a minute steps are slivers."""
MOST_READINGS, MOST_IN_CARD = 120, 60
"""Columns of the large memory plot, and of a small one: the last ones."""
CURVES = (
    "reward_mean", "actor/loss", "actor/grad_norm", "actor/entropy", "reference_kl", "critic/loss",
    "critic/explained_variance", "seconds",
)  # fmt: skip
MOST_ROWS = 12
MOST_LINKS = 8
"""Of one kind of file: those of the ranks that failed come first."""
MEMORY_CARD = (204, 62)


def page(subject: Subject, finding: CatalogueMatch | None, metrics: Sequence[Mapping[str, Any]]) -> str:
    """Return HTML. metrics: the lines of metrics.jsonl."""
    import jinja2

    history = spans(subject.events, subject.seen.time if subject.seen else 0.0)
    by_rank = readings(subject.events, began(subject.events))
    environment = jinja2.Environment(
        loader=jinja2.FileSystemLoader(Path(__file__).parent),
        autoescape=True,
        trim_blocks=True,
        lstrip_blocks=True,
        undefined=jinja2.StrictUndefined,
    )
    steps = [each for each in metrics if "step" in each]
    versions = subject.ranks[0].versions if subject.ranks else {}
    rendered = environment.get_template("run_page.html.jinja").render(
        title=title(subject),
        outcome=outcome(subject),
        seen=subject.seen,
        finding=finding,
        versions={name: version for name, version in versions.items() if version != "not installed"},
        config=subject.config,
        ranks=len(subject.ranks),
        seconds=max((each.end for each in history), default=0.0),
        timelines=timelines(subject, history),
        legend={name: shade for name, (shade, _) in svg.GROUPS.items()} | {"failed": svg.FAILED},
        memory_legend=svg.LAYERS,
        **memory_drawings(by_rank),
        table=table(steps),
        curves=curves(steps),
        log_probs=log_probs(subject.events),
        hosts=[
            (host, ranges([each.rank for each in some]), some[0].device, some[0].platform)
            for host, some in hosts_of(subject.ranks).items()
        ],
        variables=shown_variables(subject.ranks[0]) if subject.ranks else [],
        differences=[
            (each.name, [(value, ranges(some)) for value, some in each.values.items()])
            for each in differences(subject.ranks)
        ],
        reproduce=reproduce(subject),
        config_file=to_toml(subject.config),
        engines=engine_lines(subject),
        verdict=seen_once(subject.seen) if subject.seen else [],
        folder=subject.words[0],
        files=linked_files(Path(subject.words[0]), subject.seen.ranks if subject.seen else ()),
        picture=picture(subject),
    )
    return redact.text(rendered)


def read_metrics(folder: Path) -> list[dict[str, Any]]:
    """Return the lines of metrics.jsonl; none where there is no file. One that was cut off is left out."""
    file = folder / "metrics.jsonl"
    found = []
    for line in file.read_text(encoding="utf-8").splitlines() if file.is_file() else ():
        if line.endswith("}"):
            found.append(json.loads(line))
    return found


def linked_files(folder: Path, ranks: Sequence[int]) -> list[str]:
    """Return the files of the run that a reader of a failure opens next, relative to its directory.

    Of many of a kind, some and their folder.
    """
    kinds = ("engines/*.log", "stacks*.txt", "failure*.json", "flight-record-*", "events/*.jsonl", "config.toml")
    found = []
    for kind in kinds:
        files = sorted(folder.glob(kind), key=lambda file: (_rank_of(file) not in ranks, file.name))
        found += [str(file.relative_to(folder)) for file in files[:MOST_LINKS]]
        if len(files) > MOST_LINKS:
            found.append(f"{files[0].parent.relative_to(folder)}/")
    return found


def _rank_of(file: Path) -> int:
    """Return the rank that a file's name tells, -1 where it tells none."""
    match = re.search(r"rank(\d+)", file.name)
    return int(match[1]) if match else -1


def timelines(subject: Subject, history: Sequence[Span]) -> list[tuple[str, str]]:
    """Draw the whole run, and its last steps."""
    if not history:
        return []
    ranks = sorted({each.rank for each in history} | {each.rank for each in subject.ranks})
    culprits = subject.seen.ranks if subject.seen else ()
    end = max(each.end for each in history)
    drawn = [("The whole run", svg.timeline(history, ranks, 0.0, end, culprits))]
    steps = sorted({each.step for each in history if each.step is not None})
    shown = steps[-LAST_STEPS:]
    inside = [each for each in history if each.step in shown]
    if inside:
        start = min(each.start for each in inside)
        last = max(shown[0], min(shown[-1], subject.config.run.steps - 1))  # the last sync has the number after it
        name = f"Step {last}" if shown[0] == last else f"Steps {shown[0]} to {last}"
        drawn.append((f"{name}, and what followed", svg.timeline(history, ranks, start, end, culprits)))
    return drawn


def memory_drawings(by_rank: Mapping[int, Sequence[Reading]]) -> dict[str, Any]:
    """Draw one large plot of the rank that had most taken, and a small one of each rank, all on one scale of bytes."""
    if not by_rank:
        return {"memory_large": "", "memory_cards": [], "memory_layers": []}
    layers = list(svg.stack(next(iter(by_rank.values()))[0].figures))
    full = max(sum(svg.stack(each.figures).values()) for some in by_rank.values() for each in some) or 1
    worst = max(by_rank, key=lambda rank: _most(by_rank[rank]))
    what = "host memory of the process" if layers == ["rss"] else "GPU"
    most = _most(by_rank[worst])
    heading = f"rank {worst}, which had most: {what}, GiB at the end of each phase; {most:.2f} taken at most"
    wide, tall = MEMORY_CARD
    return {
        "memory_large": svg.memory(by_rank[worst][-MOST_READINGS:], heading, svg.WIDTH, 220, full, names=True),
        "memory_cards": [
            svg.memory(some[-MOST_IN_CARD:], f"rank {rank}: {_most(some):.2f} GiB", wide, tall, full, False)
            for rank, some in sorted(by_rank.items())
        ],
        "memory_layers": layers,
    }


def _taken(reading: Reading) -> int:
    return svg.taken(svg.stack(reading.figures))


def _most(some: Sequence[Reading]) -> float:
    return max(map(_taken, some)) / GIB


def table(steps: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Return a row for each step, of a long run the first and the last."""
    names = [name for name in ("log_prob_difference_mean", *CURVES) if steps and name in steps[0]]
    half = MOST_ROWS // 2
    shown = list(steps) if len(steps) <= MOST_ROWS else [*steps[:half], {}, *steps[-half:]]
    rows = [[f"{each['step']:.0f}", *(f"{each[name]:.4g}" for name in names)] if each else ["..."] for each in shown]
    return {"names": ["step", *names], "rows": rows}


def curves(steps: Sequence[Mapping[str, Any]]) -> list[str]:
    """Draw each metric that all steps have."""
    if len(steps) < 2:
        return []
    return [
        svg.lines({name: [float(each[name]) for each in steps]}, name)
        for name in CURVES
        if all(name in each for each in steps)
    ]


def log_probs(events: Sequence[Mapping[str, Any]]) -> str:
    """Draw |engine's log-prob - trainer's| over the syncs, as rank 0 has it, beside the baseline."""
    rank = min((each["rank"] for each in events), default=0)
    found = [each for each in events if each["event"] == "log_prob_difference" and each["rank"] == rank]
    if not found:
        return ""
    series = {
        "mean": [float(each["log_prob_difference_mean"]) for each in found],
        "largest": [float(each["log_prob_difference_max"]) for each in found],
    }
    limits, guides = {}, {}
    for each in events:
        if each["event"] == "log_prob_baseline" and each["rank"] == rank:
            guides["mean of the baseline"] = float(each["log_prob_difference_mean"])
            if "allowed" in each:
                limits["allowed for the mean"] = float(each["allowed"])
    heading = "|engine's log-prob - trainer's|, nats, after each sync"
    return svg.lines(series, heading, 720, 170, log=True, limits=limits, guides=guides, unit="sync")
