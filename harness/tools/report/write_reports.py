"""Write report.md, the text of an issue, report.html, a page that opens offline, and trace.json, from a run directory's files.

python -m harness.tools.report.write_reports RUN_DIR
"""

import json
import sys
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import jinja2

from harness.config.layers import to_toml
from harness.runtime import redact
from harness.runtime.phases import phase_of_step
from harness.runtime.units import GIB
from harness.tools.diagnose.diagnose import CatalogueMatch, diagnose
from harness.tools.diagnose.log_lines import log_files
from harness.tools.export.subject import RankRecord, RunEnd, Subject, read_subject
from harness.tools.picture import runs
from harness.tools.report import svg
from harness.tools.report.run_history import Reading, Span, readings, spans
from harness.tools.report.trace import write_trace

LAST_STEPS = 4
"""Drawn apart in the timeline: beside a start of a minute steps are slivers."""
MOST_READINGS, MOST_IN_CARD = 120, 60
"""Columns of the large memory plot, and of a small one: the last ones."""
METRICS = (
    "reward_mean", "log_prob_difference_mean", "actor/loss", "actor/grad_norm", "actor/entropy", "reference_kl", "critic/loss",
    "critic/explained_variance", "seconds",
)  # fmt: skip
LINKED = ("failure*.json", "stacks*.txt", "flight-record-*", "engines", "events", "config.toml")
"""What a reader of a failure opens next; of one kind at most MOST_LINKS."""
MOST_LINKS = 8

Metrics = Mapping[str, Any]


def write_reports(folder: Path) -> list[Path]:
    """Return the paths of all. Raise ConfigError where the folder is no run directory, OSError where it is not writable."""
    templates = jinja2.Environment(
        loader=jinja2.FileSystemLoader(Path(__file__).parent),
        autoescape=lambda name: name == "report.html.jinja",
        trim_blocks=True,
        lstrip_blocks=True,
        keep_trailing_newline=True,
        undefined=jinja2.StrictUndefined,
    )
    subject = read_subject([str(folder)])
    values = _values(subject, folder)
    names = ("report.md", "report.html")
    texts = [redact.text(templates.get_template(f"{name}.jinja").render(values)) for name in names]
    for name, text in zip(names, texts, strict=True):
        part = folder / f".{name}.part"
        part.write_text(text, encoding="utf-8")
        part.replace(folder / name)
    trace = write_trace(folder, subject.events, subject.seen.time if subject.seen else 0.0)
    return [*(folder / name for name in names), trace]


def _values(subject: Subject, folder: Path) -> dict[str, Any]:
    """Return what the templates show."""
    metrics = _read_metrics(folder / "metrics.jsonl")
    steps = [each for each in metrics if "step" in each]
    ranks, seen = subject.ranks, subject.seen
    assert seen  # a run directory has an end
    history = spans(subject.events, seen.time)
    facts = {each["event"]: each for each in reversed(subject.events)}
    engine = facts.get("engine")
    traceback = seen.traceback[-20:]
    quoted = {line.strip() for line in traceback}
    outcome = "DID NOT END" if seen.code is None else "FAILED" if seen.code else "PASSED"
    return {
        "subject": subject,
        "config": subject.config,
        "config_file": to_toml(subject.config).rstrip(),
        "seen": seen,
        "outcome": outcome,
        "title": title_of(subject, seen),
        "finding": None if outcome == "PASSED" else known_failure(folder),
        # Without the lines of the traceback, which is shown below it.
        "verdict": [
            line for line in seen.verdict if not line.strip() or line.strip().removeprefix("|").strip() not in quoted
        ],
        "traceback": traceback,
        "hosts": [
            (
                host,
                runs([each.rank for each in ranks if each.host == host]),
                next(each for each in ranks if each.host == host),
            )
            for host in dict.fromkeys(each.host for each in ranks)
        ],
        "versions": ranks[0].versions,
        "variables": redact.variables(ranks[0].environment),
        "differences": differences(ranks),
        "engine": engine and f"sglang {engine['version']} on {engine['device']}, its defaults: {engine['defaults']}",
        "arguments": engine["arguments"] if engine else {},
        "picture": facts.get("placement", {}).get("picture", ()),
        "reproduce": f"{subject.torchrun} {subject.script} config.toml --run.dir runs/again",
        "table": step_table(steps),
        "final": next((each for each in metrics if each.get("kind") == "final_check"), None),
        "verification": facts.get("verification", {}).get("lines", ()),
        "startup": {
            name[8:]: value for each in steps[:1] for name, value in each.items() if name.startswith("startup/")
        },
        "files": [str(each.relative_to(folder)) for kind in LINKED for each in sorted(folder.glob(kind))[:MOST_LINKS]],
        "seconds": max((each.end for each in history), default=0.0),
        "timelines": timelines(subject, history, seen.ranks),
        "legend": {name: shade for name, (shade, _) in svg.GROUPS.items()} | {"failed": svg.FAILED},
        "memory": memory_drawings(readings(subject.events)),
        "curves": [
            svg.lines({name: [each[name] for each in steps]}, name)
            for name in METRICS
            if steps and all(name in each for each in steps)
        ],
        "log_probs": log_probs(subject),
        "validation": (validated := validation_table(metrics)),
        "validation_curve": validation_curve(validated),
    }


def title_of(subject: Subject, seen: RunEnd) -> str:
    """Return one line: the failure where there is one, and on what."""
    parallel = subject.config.parallel
    run = f"{subject.config.model.name}, dp {parallel.dp} tp {parallel.tp} pp {parallel.pp}"
    job = f"{'Weight sync' if subject.script.endswith('sync.py') else 'PPO'} on sglang"
    if not seen.code:
        return f"{job} {'did not end' if seen.code is None else 'passed'}: {run}"
    what = seen.error.partition(":")[0] or "failed"
    if seen.kind == "deadline":
        what = f"a deadline passed, with rank {runs(sorted(seen.ranks))} behind"
    elif seen.kind and seen.ranks:
        what = f"rank {runs(sorted(seen.ranks))}: {what}"
    return f"{job}, {run}: {what}{f' in {phase_of_step(seen.phase, seen.step)}' if seen.phase else ''}"


def known_failure(folder: Path) -> CatalogueMatch | None:
    """Return the catalogue's entry of what failed, if it has one."""
    with suppress(ValueError):  # a run that was killed before it wrote a line
        return diagnose(log_files([str(folder)])).finding
    return None


def differences(ranks: Sequence[RankRecord]) -> list[tuple[str, dict[str, str]]]:
    """Return the versions, variables, devices and platforms that are not the same everywhere: ranks by value."""
    facts = [
        {"device": each.device, "platform": each.platform} | dict(each.versions) | redact.variables(each.environment)
        for each in ranks
    ]
    found = []
    for name in dict.fromkeys(name for each in facts for name in each):
        values: dict[str, list[int]] = {}
        for each, own in zip(ranks, facts, strict=True):
            values.setdefault(own.get(name, "unset"), []).append(each.rank)
        if len(values) > 1:
            found.append((name, {value: runs(some) for value, some in values.items()}))
    return found


def step_table(steps: Sequence[Metrics]) -> list[list[str]]:
    """Return the names of the metrics, and a row for each step."""
    names = [name for name in METRICS if steps and name in steps[0]]
    rows = [[f"{each['step']:.0f}", *(f"{each[name]:.4g}" for name in names)] for each in steps]
    return [["step", *names], *rows] if rows else []


def validation_table(metrics: Sequence[Metrics]) -> list[list[str]]:
    """Return a heading, the updates before it and what it measured, and a row for each validation; [] for none."""
    rows = [each for each in metrics if each.get("kind") == "validation"]
    names = [
        name for name in (rows[-1] if rows else ()) if name.startswith("validation/") and name != "validation/step"
    ]
    shown = [[f"{each['validation/step']}", *(f"{each[name]:.4g}" for name in names)] for each in rows]
    return [["updates", *(name.partition("/")[2] for name in names)], *shown] if rows else []


def validation_curve(table: Sequence[Sequence[str]]) -> str:
    """Draw the accuracies of a validation_table over updates; "" for none."""
    if not table:
        return ""
    columns = dict(zip(table[0], zip(*table[1:], strict=True), strict=True))
    series = {
        name: [float(value) for value in values] for name, values in columns.items() if name.startswith("accuracy")
    }
    return svg.lines(
        series, "accuracy on the validation set", 720, 170, unit="update", steps=[*map(int, columns["updates"])]
    )


def timelines(subject: Subject, history: Sequence[Span], culprits: Sequence[int]) -> dict[str, str]:
    """Draw the whole run, and its last steps."""
    if not history:
        return {}
    ranks = sorted({each.rank for each in history} | {each.rank for each in subject.ranks})
    end = max(each.end for each in history)
    drawn = {"The whole run": svg.timeline(history, ranks, 0.0, end, culprits)}
    shown = sorted({each.step for each in history if each.step is not None})[-LAST_STEPS:]
    if shown:
        start = min(each.start for each in history if each.step in shown)
        last = max(shown[0], min(shown[-1], subject.config.run.steps - 1))  # the last sync has the number after it
        name = f"Steps {shown[0]} to {last}, and what followed"
        drawn[name] = svg.timeline(history, ranks, start, end, culprits)
    return drawn


def memory_drawings(by_rank: Mapping[int, Sequence[Reading]]) -> dict[str, Any]:
    """Draw one large plot of the rank that had most taken, and a small one of each rank, all on one scale of bytes."""
    if not by_rank:
        return {}
    stacks = {rank: [svg.stack(each.figures) for each in some] for rank, some in by_rank.items()}
    full = max(sum(column.values()) for columns in stacks.values() for column in columns) or 1
    most = {rank: max(sum(c.values()) - c.get("free", 0) for c in columns) / GIB for rank, columns in stacks.items()}
    worst = max(most, key=lambda rank: most[rank])
    layers = stacks[worst][0]
    what = "host memory of the process" if "rss" in layers else "GPU"
    heading = f"rank {worst}, which had most: {what}, GiB at the end of each phase; {most[worst]:.2f} taken at most"
    return {
        "large": svg.memory(by_rank[worst][-MOST_READINGS:], heading, svg.WIDTH, 220, full, names=True),
        "cards": [
            svg.memory(some[-MOST_IN_CARD:], f"rank {rank}: {most[rank]:.2f} GiB", 204, 62, full, names=False)
            for rank, some in sorted(by_rank.items())
        ],
        "layers": {name: svg.LAYERS[name] for name in layers},
    }


def log_probs(subject: Subject) -> str:
    """Draw |engine's log-prob - trainer's| over the syncs, as the first rank has it, beside what is allowed."""
    first = min((each["rank"] for each in subject.events), default=0)
    own = [each for each in subject.events if each["rank"] == first]
    found = [each for each in own if each["event"] == "log_prob_difference"]
    if not found:
        return ""
    series = {
        "mean": [float(each["log_prob_difference_mean"]) for each in found],
        "largest": [float(each["log_prob_difference_max"]) for each in found],
    }
    allowed = [float(each["allowed"]) for each in own if each["event"] == "log_prob_baseline"]
    limits = {"allowed for the mean": allowed[-1]} if allowed else {}
    heading = "|engine's log-prob - trainer's|, nats, after each sync"
    return svg.lines(series, heading, 720, 170, log=True, limits=limits, unit="sync")


def _read_metrics(file: Path) -> list[Metrics]:
    """Return the lines of metrics.jsonl; none where there is no file. One that was cut off is left out."""
    lines = file.read_text(encoding="utf-8").splitlines() if file.is_file() else []
    return [json.loads(line) for line in lines if line.endswith("}")]


if __name__ == "__main__":
    write_reports(Path(sys.argv[1]))
