"""report.md: a run as the text of an issue. A failed run begins with its first failure.

Every function returns the lines of one section; an empty list leaves the section out.
"""

import re
import shlex
from collections.abc import Mapping, Sequence
from typing import Any

from harness.config.layers import to_toml
from harness.config.schema import Config
from harness.runtime.events import phase_of_step, quoted
from harness.runtime.installed import as_typed
from harness.runtime.ranks import ranks_by, runs
from harness.tools.diagnose.entries import catalogue
from harness.tools.export.subject import RankRecord, RunEnd, Subject
from harness.tools.report.timeline import where_ranks_stood

METRICS = (
    "reward_mean", "log_prob_difference_mean", "actor/loss", "actor/grad_norm", "actor/entropy", "reference_kl", "critic/loss",
    "critic/explained_variance", "seconds",
)  # fmt: skip
"""Columns of the table of steps."""
MOST_ROWS = 100
"""Rows of a table. An issue on GitHub has at most 65,536 characters; metrics.jsonl has all rows."""

JOBS = {"launch/sync.py": "Weight sync", "launch/step_bench.py": "Timed PPO", "launch/mismatch.py": "Mismatch search"}
"""What a script runs, in a title; the others run PPO."""
WITHOUT_STEPS = ("launch/sync.py", "launch/mismatch.py")
"""Scripts that do not read run.steps, and choose transports and checks themselves."""

Metrics = Mapping[str, Any]
Event = Mapping[str, Any]


def opening(subject: Subject, files: Sequence[str]) -> list[str]:
    """Return the title, how the run ended, and of a run that did not pass where its ranks stood.

    files: what to read next, relative to the run directory.
    """
    return [f"# {title_of(subject)}", *failure_or_result(subject, files), *stood(subject)]


def details(subject: Subject, metrics: Sequence[Metrics]) -> list[str]:
    """Return what follows, the whole config apart. metrics: the rows of metrics.jsonl."""
    facts = {each["event"]: each for each in reversed(subject.events)}
    return [
        *what_ran(subject),
        *steps(metrics),
        *validations(metrics),
        *samples(subject.events),
        *section("Verification", facts.get("verification", {}).get("lines", ())),
        *start_up(metrics),
        *placed(facts.get("placement", {}).get("picture", ())),
        *engine(facts.get("engine")),
        *environment(subject.ranks),
        *reproduce(subject),
    ]


def folded_config(config: Config) -> list[str]:
    """Return the whole config in an element that GitHub folds."""
    whole = fenced(to_toml(config).rstrip().splitlines(), "toml")
    return ["", "<details><summary>config.toml with the defaults</summary>", "", *whole, "", "</details>"]


def outcome_of(seen: RunEnd | None) -> str:
    """Return PASSED, FAILED or DID NOT END."""
    if seen is None or seen.code is None:
        return "DID NOT END"
    return "FAILED" if seen.code else "PASSED"


def title_of(subject: Subject) -> str:
    """Return one line: the outcome, the failure if there is one, and what ran."""
    seen, parallel = subject.seen, subject.config.parallel
    run = f"{JOBS.get(subject.script, 'PPO')} on sglang, {subject.config.model.name}, dp {parallel.dp} tp {parallel.tp} pp {parallel.pp}"
    if seen is None or not seen.code:
        return f"{outcome_of(seen)}: {run}"
    what = seen.error.partition(":")[0] or "failed"
    if seen.kind == "deadline":
        what = f"a deadline passed, with rank {runs(sorted(seen.ranks))} behind"
    elif seen.kind and seen.ranks:
        what = f"rank {runs(sorted(seen.ranks))}: {what}"
    return f"FAILED: {run}: {what}{f' in {phase_of_step(seen.phase, seen.step)}' if seen.phase else ''}"


def failure_or_result(subject: Subject, files: Sequence[str]) -> list[str]:
    """Return the verdict, and for a failure its known cause, its traceback and what to read next."""
    seen = subject.seen
    assert seen  # a run directory has an end
    if seen.code == 0:
        return section("Result", fenced(seen.verdict))
    traceback = seen.traceback[-20:]
    # The watchdog's verdict quotes the traceback, which is shown in full below.
    quoted = {line.strip() for line in traceback}
    verdict = [
        line for line in seen.verdict if line.strip().removeprefix("|").strip() not in quoted or not line.strip()
    ]
    lines = fenced(verdict)
    if seen.code is not None:
        lines += ["", f"Exit code {seen.code}{', a deadline passed' if seen.code == 124 else ''}."]
        lines += ["", *known(seen.slug)]
    if traceback:
        lines += ["", f"Traceback of rank {seen.ranks[0]}:", "", *fenced(traceback)]
    if files:
        lines += ["", f"Read next, in the run directory: {', '.join(f'`{name}`' for name in files)}."]
    return section("First failure" if seen.code else "Result", lines)


def known(slug: str) -> list[str]:
    """Return what the catalogue says about the failure."""
    if (entry := catalogue().get(slug)) is None:
        return ["The catalogue has no failure that it is for sure."]
    return [
        f"Known as `{entry.slug}`: {entry.title}.",
        "",
        f"- cause: {' '.join(entry.cause.split())}",
        f"- fix: {' '.join(entry.fix.split())}",
        *(f"- {link}" for link in entry.links),
    ]


def what_ran(subject: Subject) -> list[str]:
    """Return the run in one sentence, and the keys of its config that this version does not know."""
    config, ranks = subject.config, subject.ranks
    hosts = len({each.host for each in ranks})
    size = f"{config.model.name} in {config.model.dtype}, {len(ranks)} rank(s) on {hosts} host(s)"
    how = f"{config.run.steps} steps, weights sent by {config.weights.transport}, verified: {config.weights.verify}"
    parts = [size] if subject.script in WITHOUT_STEPS else [size, how]
    lines = [f"`{shlex.join([subject.script, *subject.options])}`: {', '.join(parts)}."]
    if subject.unknown_keys:
        named = ", ".join(f"`{key}`" for key in subject.unknown_keys)
        lines += ["", f"Its config.toml has keys that this version of the harness does not know: {named}."]
    return section("What ran", lines)


def steps(metrics: Sequence[Metrics]) -> list[str]:
    """Return the main metrics of each step, and the check after the last update."""
    rows = [each for each in metrics if "step" in each]
    names = [name for name in METRICS if any(name in row for row in rows)]
    lines = table(
        ["step", *names], [[f"{each['step']:.0f}", *(number(each.get(name)) for name in names)] for each in rows]
    )
    final = next((each for each in metrics if each.get("kind") == "final_check"), None)
    if final:
        difference = number(final.get("final/log_prob_difference_mean"))
        lines += ["", f"After the last update the weights were sent once more: mean log-prob difference {difference}."]
    return section("Steps", lines)


def validations(metrics: Sequence[Metrics]) -> list[str]:
    """Return the mean reward on the validation set, after so many updates."""
    rows = [each for each in metrics if each.get("kind") == "validation"]
    keys = [key for key in (rows[-1] if rows else ()) if key.startswith("validation/") and key != "validation/step"]
    heading = ["updates", *(key.partition("/")[2] for key in keys)]
    return section(
        "Validation",
        table(heading, [[f"{each['validation/step']}", *(number(each.get(key)) for key in keys)] for each in rows]),
    )


def samples(events: Sequence[Event]) -> list[str]:
    """Return a prompt, its response and its reward for each of the last steps: rank 0's first. A model may write
    anything, and at any length: events/rank0.jsonl has all of it.
    """
    found = [each for each in events if each["event"] == "sample" and each["rank"] == 0][-MOST_ROWS // 5 :]
    lines = [
        line
        for each in found
        for line in (
            f"step {each['step']}, reward {number(each['reward'])}",
            f"  prompt   {quoted(each['prompt'], 400)}",
            f"  response {quoted(each['response'], 400)}",
        )
    ]
    return section("Samples", fenced(lines) if lines else [])


def start_up(metrics: Sequence[Metrics]) -> list[str]:
    """Return the seconds of each part of the start."""
    first = next((each for each in metrics if "step" in each), {})
    parts = {key.partition("/")[2]: value for key, value in first.items() if key.startswith("startup/")}
    return section("Start-up", [f"- {name}: {seconds:.1f} s" for name, seconds in parts.items()])


def placed(picture: Sequence[str]) -> list[str]:
    """Return which rank and engine is on which GPU."""
    return section("Where it ran", fenced(picture) if picture else [])


def engine(event: Event | None) -> list[str]:
    """Return the engine's version and arguments."""
    if event is None:
        return []
    first = f"sglang {event['version']} on {event['device']}, preset: {event['preset']}"
    return section("Engine", fenced([first, *(f"{name} = {value!r}" for name, value in event["arguments"].items())]))


def environment(ranks: Sequence[RankRecord]) -> list[str]:
    """Return hosts, versions and variables of rank 0, and everything that differs between ranks."""
    hosts = []
    for host in dict.fromkeys(each.host for each in ranks):
        there = [each for each in ranks if each.host == host]
        hosts.append([host, runs([each.rank for each in there]), there[0].device, there[0].platform])
    versions = ", ".join(f"{name} {version}" for name, version in ranks[0].versions.items())
    variables = [f"{name}={value}" for name, value in ranks[0].environment.items()]
    lines = [*table(["host", "ranks", "device", "platform"], hosts), "", f"Versions (rank 0): {versions}.", ""]
    if variables:
        lines += [*fenced(variables), ""]
    different = differences(ranks)
    if different:
        rows = [[name, value, some] for name, values in different.items() for value, some in values.items()]
        lines += ["These differ between ranks:", "", *table(["name", "value", "ranks"], rows)]
    else:
        lines.append("Versions, devices and variables are the same on all ranks.")
    return section("Environment", lines)


def differences(ranks: Sequence[RankRecord]) -> dict[str, dict[str, str]]:
    """Return each version, variable, device or platform that is not the same everywhere: its values, and their
    ranks.
    """
    facts = {
        each.rank: {"device": each.device, "platform": each.platform, **each.versions, **each.environment}
        for each in ranks
    }
    names = dict.fromkeys(name for own in facts.values() for name in own)
    values = {name: ranks_by({rank: own.get(name, "unset") for rank, own in facts.items()}) for name in names}
    return {name: {value: runs(some) for value, some in seen.items()} for name, seen in values.items() if len(seen) > 1}


def stood(subject: Subject) -> list[str]:
    """Return where each rank of a run that did not pass was when it ended."""
    if outcome_of(subject.seen) == "PASSED":
        return []
    places = ranks_by(where_ranks_stood(subject.events, subject.seen))
    rows = [[runs(ranks), place] for place, ranks in places.items()]
    return section("Where the ranks stood", table(["ranks", "when the run ended"], rows))


def reproduce(subject: Subject) -> list[str]:
    """Return a section with the command to run it again, and the config keys that differ from their defaults."""
    words = [subject.script, "config.toml", *subject.options]
    changed = to_toml(subject.config, without=Config()).rstrip().splitlines()
    return section(
        "Reproduce with",
        [
            "With this harness, and config.toml as below:",
            "",
            *fenced([as_typed(f"{subject.torchrun} {shlex.join(words)} --run.dir runs/again")]),
            "",
            as_typed(
                "As one file that needs torch, transformers and sglang alone: `python3 launch/export.py RUN_DIR > repro.py`."
            ),
            "",
            "config.toml, without what has the default value:",
            "",
            *fenced(changed, "toml"),
        ],
    )


def section(heading: str, lines: Sequence[str]) -> list[str]:
    """Return a heading and its lines; [] for no lines."""
    return ["", f"## {heading}", "", *lines] if lines else []


def table(heading: Sequence[str], rows: Sequence[Sequence[str]]) -> list[str]:
    """Return a Markdown table of the last MOST_ROWS rows; [] for no rows."""
    if not rows:
        return []
    shown = [heading, ["---"] * len(heading), *rows[-MOST_ROWS:]]
    lines = [f"| {' | '.join(cell.replace('|', chr(92) + '|') for cell in row)} |" for row in shown]
    left_out = len(rows) - MOST_ROWS
    return [f"The first {left_out} rows are left out; metrics.jsonl has them.", "", *lines] if left_out > 0 else lines


def fenced(lines: Sequence[str], language: str = "") -> list[str]:
    """Return a block of code, with a fence longer than any in its lines: a log may quote Markdown."""
    longest = max((len(run) for line in lines for run in re.findall("`+", line)), default=0)
    fence = "`" * max(3, longest + 1)
    return [fence + language, *lines, fence]


def number(value: Any) -> str:
    """Return a metric in four digits; "" for one that a row lacks."""
    return f"{value:.4g}" if isinstance(value, int | float) else ""
