"""A run as the text of an issue: what, expected, seen, where, and how to reproduce it."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from harness.config.layers import to_toml
from harness.runtime import redact
from harness.tools.diagnose.diagnose import CatalogueMatch, diagnose
from harness.tools.diagnose.log_lines import log_files
from harness.tools.export.subject import RankRecord, RunEnd, Subject


@dataclass(frozen=True, slots=True)
class Difference:
    """A variable or version that is not the same on all ranks."""

    name: str
    values: Mapping[str, Sequence[int]]
    """Ranks by value; "unset" where there is none."""


def outcome(subject: Subject) -> str:
    """Return PASSED, FAILED, or DID NOT END."""
    if subject.seen is None or subject.seen.code is None:
        return "DID NOT END"
    return "PASSED" if subject.seen.code == 0 else "FAILED"


def title(subject: Subject) -> str:
    """Return one line: the failure where there is one, and on what."""
    seen, parallel = subject.seen, subject.config.parallel
    run = f"{subject.config.model.name}, dp {parallel.dp} tp {parallel.tp} pp {parallel.pp}"
    job = "Weight sync" if subject.script.endswith("sync.py") else "PPO"
    if outcome(subject) == "PASSED" or seen is None:
        return f"{job} on sglang passed: {run}"
    if seen.code is None:
        return f"{job} on sglang did not end: {run}"
    what = seen.error.partition(":")[0] or "failed"
    if seen.kind == "deadline":
        what = f"a deadline passed, with rank {ranges(seen.ranks)} behind"
    elif seen.kind and seen.ranks:
        what = f"rank {ranges(seen.ranks)}: {what}"
    return f"{job} on sglang, {run}: {what}{f' in {at(subject)}' if seen.phase else ''}"


def at(subject: Subject) -> str:
    """Return the phase of the first failure, with its step."""
    seen = subject.seen
    assert seen is not None
    return seen.phase if seen.step is None else f"{seen.phase} of step {seen.step}"


def known_failure(subject: Subject) -> CatalogueMatch | None:
    """Return the catalogue's entry of what failed, if it has one."""
    if outcome(subject) == "PASSED":
        return None
    try:
        files = log_files([subject.words[0]])
    except ValueError:  # a run that was killed before it wrote a line
        return None
    return diagnose(files).finding


def issue(subject: Subject, finding: CatalogueMatch | None, sections: Sequence[str] = ()) -> str:
    """Return Markdown. sections: lines that come before the environment."""
    config, seen = subject.config, subject.seen
    hosts = len({each.host for each in subject.ranks})
    lines = [f"# {title(subject)}", "", "## What", ""]
    lines += [
        f"{config.run.steps} steps of `{subject.script}`: {config.model.name} in {config.model.dtype}, {len(subject.ranks)}"
        f" rank(s) on {hosts} host(s), weights by {config.weights.transport}, verified at level {config.weights.verify}.",
        "",
    ]
    lines += ["## Expected", "", 'Exit code 0 and a last line that begins with "PASSED".', "", "## Seen", ""]
    lines += seen_lines(subject)
    if finding:
        entry = finding.entry
        lines += [f"Known as **{entry.slug}** (confidence: {finding.confidence}): {entry.title}.", ""]
        lines += [f"- cause: {_one_line(entry.cause)}", f"- fix: {_one_line(entry.fix)}"]
        lines += [f"- {link}" for link in entry.links]
        lines.append("")
    elif outcome(subject) == "FAILED":
        lines += ["No known failure: the catalogue has nothing that explains it.", ""]
    if seen and seen.traceback:
        lines += ["```", *seen.traceback[-20:], "```", ""]
    lines += sections
    if drawn := picture(subject):
        lines += ["## Where it ran", "", "```", *drawn, "```", ""]
    if engine := engine_lines(subject):
        lines += ["## Engine", "", "```", *engine, "```", ""]
    lines += ["## Environment", "", *environment(subject.ranks), ""]
    lines += [
        "## Reproduce with",
        "",
        "With this harness, and config.toml as below:",
        "",
        "```",
        reproduce(subject),
        "```",
        "",
    ]
    lines += ["Without it, as one file: `python launch/export.py RUN_DIR > repro.py`.", ""]
    lines += [
        "<details><summary>config.toml</summary>",
        "",
        "```toml",
        to_toml(config).rstrip(),
        "```",
        "",
        "</details>",
    ]
    return redact.text("\n".join(lines) + "\n")


def seen_lines(subject: Subject) -> list[str]:
    """Return how it ended, in Markdown."""
    seen = subject.seen
    if seen is None:
        return ["Nothing: it was not run.", ""]
    code = "No exit code: it did not end." if seen.code is None else f"Exit code {seen.code}."
    return [code, "", "```", *seen_once(seen), "```", ""]


def seen_once(seen: RunEnd) -> list[str]:
    """Return the verdict without the lines of the traceback that is shown below it."""
    shown = {line.strip() for line in seen.traceback[-20:]}
    return [line for line in seen.verdict if line.strip().removeprefix("|").strip() not in shown or not line.strip()]


def engine_lines(subject: Subject) -> list[str]:
    """Return what the run became: device, transport, and the arguments that reached the engine; none before it started."""
    found = next((each for each in subject.events if each["event"] == "engine"), None)
    if found is None:
        return []
    arguments = [f"{name} = {value!r}" for name, value in found["arguments"].items()]
    return [f"sglang {found['version']} on {found['device']}, its defaults: {found['defaults']}", *arguments]


def picture(subject: Subject) -> list[str]:
    """Return hosts, ranks and engines as the run drew them; nothing where it failed before."""
    return next((list(each["picture"]) for each in subject.events if each["event"] == "placement"), [])


def reproduce(subject: Subject) -> str:
    """Return the command line."""
    return f"{subject.torchrun} {subject.script} config.toml --run.dir runs/again"


def environment(ranks: Sequence[RankRecord]) -> list[str]:
    """Return a table of hosts, their variables, and what differs between ranks, in Markdown."""
    if not ranks:
        return ["Unknown: the run ended before its ranks met."]
    lines = ["| host | ranks | device | platform |", "|---|---|---|---|"]
    for host, some in hosts_of(ranks).items():
        first = some[0]
        lines.append(f"| {host} | {ranges([each.rank for each in some])} | {first.device} | {first.platform} |")
    versions = ", ".join(f"{name} {version}" for name, version in ranks[0].versions.items())
    lines += ["", f"Versions (rank {ranks[0].rank}): {versions}.", ""]
    if variables := shown_variables(ranks[0]):
        lines += ["```", *variables, "```", ""]
    different = differences(ranks)
    if not different:
        return [*lines, "Versions and variables are the same on all ranks."]
    lines += ["| differs | value | ranks |", "|---|---|---|"]
    for each in different:
        lines += [f"| {each.name} | {value} | {ranges(some)} |" for value, some in each.values.items()]
    return lines


def shown_variables(facts: RankRecord) -> list[str]:
    """Return NAME=value, secrets redacted."""
    return [f"{name}={value}" for name, value in redact.variables(facts.environment).items()]


def hosts_of(ranks: Sequence[RankRecord]) -> dict[str, list[RankRecord]]:
    """Return ranks by host."""
    found: dict[str, list[RankRecord]] = {}
    for each in ranks:
        found.setdefault(each.host, []).append(each)
    return found


def differences(ranks: Sequence[RankRecord]) -> list[Difference]:
    """Return the versions, variables, devices and platforms that are not the same everywhere."""
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
            found.append(Difference(name, values))
    return found


def ranges(ranks: Sequence[int]) -> str:
    """Return ranks as in 0-3, 8, 10-11."""
    parts: list[list[int]] = []
    for rank in sorted(ranks):
        if parts and rank == parts[-1][-1] + 1:
            parts[-1].append(rank)
        else:
            parts.append([rank])
    return ", ".join(str(part[0]) if len(part) == 1 else f"{part[0]}-{part[-1]}" for part in parts)


def _one_line(text: str) -> str:
    return " ".join(text.split())
