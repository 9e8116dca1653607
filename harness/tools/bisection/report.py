"""report.md and report.html: the answer, every verdict, what changed at the edge, and how to see it again."""

import platform
import re
from collections import deque
from collections.abc import Iterator, Mapping
from pathlib import Path
from shlex import join

from harness.runtime import redact
from harness.tools.bisection import changes, commits, differences, measured, reproduce, requirements, search, setting
from harness.tools.bisection.answer import Answer
from harness.tools.bisection.page import page
from harness.tools.bisection.search import Edge
from harness.tools.bisection.state import Record, State
from harness.tools.bisection.story import sentences
from harness.tools.diagnose.log_lines import raw_lines
from harness.tools.environments import has_gpu

UPSTREAM = {
    "sglang": "sgl-project/sglang",
    "torch": "pytorch/pytorch",
    "transformers": "huggingface/transformers",
    "flashinfer-python": "flashinfer-ai/flashinfer",
    "torch-memory-saver": "fzyzcjy/torch_memory_saver",
    "accelerate": "huggingface/accelerate",
    "xgrammar": "mlc-ai/xgrammar",
    "torchao": "pytorch/ao",
}
"""Whose tags are v and the version."""
_LOG_LINES, _LINES_AFTER = 30, 8
_MOST_SUBJECTS = 30


def write(state: State, answer: Answer, folder: Path) -> str:
    """Write both reports, without secrets, and each environment's freeze; returns the answer in a few lines. Raises OSError."""
    for record in state.records:
        if record.freeze:
            reproduce.write_freeze(folder, record)
    text = redact.text("\n".join(markdown(state, answer, folder)) + "\n")
    (folder / "report.md").write_text(text, encoding="utf-8")
    (folder / "report.html").write_text(redact.text(page(text, state, folder)), encoding="utf-8")
    return redact.text("\n".join([*sentences(state, answer), cost(state)]))


def markdown(state: State, answer: Answer, folder: Path) -> Iterator[str]:
    """Lines. Only what page.py knows of Markdown is used."""
    question = state.question
    yield f"# Bisect of {question.options.package}, {state.candidates[0].shown} to {state.candidates[-1].shown}"
    yield ""
    for sentence in sentences(state, answer):
        yield from (sentence, "")
    yield from ("```", join(["python", "launch/bisect_versions.py", *question.words()]), "```", "")
    yield from verdicts(state)
    yield from measured.table(state)
    for edge in answer.edges if answer.kind != "open" else ():
        yield from _edge(state, edge, folder)
    if answer.second is not None:
        yield from _first_failure(state.record(answer.second.seen), folder)
    yield from ("## Cost", "", cost(state), "")
    yield from ("## Where", "", f"- {platform.platform()}, Python {platform.python_version()}")
    if not question.options.environments:
        yield f"- {setting.store_of(question.options).shown()}"
    yield from (
        f"- {'an NVIDIA GPU' if has_gpu() else 'no GPU: SGLang in its CPU mode, with the stand-ins of harness/rollout/cpu'}",
        "",
    )


def verdicts(state: State) -> Iterator[str]:
    """A table of what ran, in order, and a list of what could not."""
    yield from (
        "## Verdicts",
        "",
        "| run | candidate | verdict | first failure, or why | seconds | log |",
        "|---|---|---|---|---|---|",
    )
    for number, record in enumerate(state.records, 1):
        candidate = state.candidates[state.index(record.name)]
        log = record.decisive.log if record.decisive else "-"
        told = record.reason.replace("|", "/") + (" (replayed)" if record.replayed else "")
        yield f"| {number} | {candidate.shown.replace('|', '/')} | {record.verdict} | {told} | {record.seconds:.1f} | {log} |"
    yield ""
    if state.closed:
        yield from ("## Not run", "")
        yield from (f"- {name[:24]}: {sentence}" for name, sentence in state.closed.items())
        yield ""


def cost(state: State) -> str:
    """What it took, and what the search itself added to the runs."""
    ran = [record for record in state.records if not record.replayed]
    seconds = sum(record.seconds for record in ran)
    waited = sum(record.waited_seconds for record in ran)
    skips = sum(record.verdict not in search.DECIDED for record in state.records)
    most = search.most_runs(len(state.candidates), skips)
    search_seconds = state.wall_seconds - state.resolving_seconds
    share = f", {search_seconds / seconds - 1:+.0%} of the runs" if seconds else ""
    first = ran[0].waited_seconds if ran else 0.0
    return (
        f"{len(ran)} candidates run of {len(state.candidates)} (at most {most} for one edge): runs {seconds:.1f} s, the search"
        f" around them {search_seconds:.1f} s{share}, after {state.resolving_seconds:.1f} s of resolving. Waited for environments:"
        f" {waited:.1f} s, {first:.1f} s of it before the first run; their installs took {sum(state.installs.values()):.1f} s."
    )


def _edge(state: State, edge: Edge, folder: Path) -> Iterator[str]:
    """What changed from one side to the other."""
    before, after = (state.record(index) for index in (edge.before, edge.after))
    names = [state.candidates[index].shown for index in (edge.before, edge.after)]
    bad = after if after.verdict == "bad" else before
    yield from (f"## What changed from {names[0]} to {names[1]}", "")
    if address := compare_address(state, edge):
        yield from (f"- {address}", "")
    if state.question.options.git:
        yield from _subjects(Path(state.question.options.git), before.name, after.name)
    yield from _packages(state, before, after, bad, folder)
    for record in (before, after):
        yield from requirements.table(state, record)
    yield from differences.section(before, after, bad, state.question.options.package, folder)
    yield from changes.api(before, after)
    yield from _first_failure(bad, folder)
    lines: list[str] = []
    for index, record in ((edge.before, before), (edge.after, after)):
        if record.freeze:
            lines.append(f"# {record.verdict}: {state.candidates[index].shown}")
            lines += reproduce.commands(state, record, state.candidates[index], folder, no_gpu=not has_gpu())
    if lines:
        yield from ("## Reproduce with", "", "```", *lines, "```", "")


def _subjects(checkout: Path, before: str, after: str) -> Iterator[str]:
    """The commits of the newer one that the older one lacks, those that were merged too."""
    found = commits.subjects(checkout, before, after)
    yield from (f"- {each}" for each in found[:_MOST_SUBJECTS])
    if len(found) > _MOST_SUBJECTS:
        yield f"- and {len(found) - _MOST_SUBJECTS} more: git log --oneline {before[:12]}..{after[:12]}"
    yield ""


def _packages(state: State, before: Record, after: Record, bad: Record, folder: Path) -> Iterator[str]:
    changed = changes.packages(before.freeze, after.freeze)
    if not before.freeze or not after.freeze:
        return
    if not changed:
        yield from (
            "No resolved package changed but the commit itself."
            if state.question.options.git
            else "No resolved package changed.",
            "",
        )
        return
    suspect = changes.suspect(_log(bad, folder), changed, state.question.options.package)
    yield from ("| package | before | after | |", "|---|---|---|---|")
    for name, (old, new) in changed.items():
        yield f"| {name} | {old or '-'} | {new or '-'} | {'likely suspect' if name == suspect else ''} |"
    yield ""
    if suspect and suspect != changes.normal(state.question.options.package):
        old, new = changed[suspect]
        yield f"The failure shows in {suspect}, which changed as well. To hold everything else and move it alone:"
        yield from ("", "```", _follow_up(state, before, suspect, old, new), "```", "")


def _follow_up(state: State, before: Record, suspect: str, old: str, new: str) -> str:
    package = state.question.options.package
    held = f"{package}=={before.freeze.get(changes.normal(package), before.name)}"
    words = ["python", "launch/bisect_versions.py", "--package", suspect, "--hold", held, "--good", old, "--bad", new]
    return join([*words, "--", *state.question.command])


def _log(record: Record, folder: Path) -> str:
    decisive = record.decisive
    file = folder / decisive.log if decisive else None
    return file.read_text(errors="replace") if file and file.is_file() else ""


def _first_failure(bad: Record, folder: Path) -> Iterator[str]:
    if not bad.decisive:
        return
    log = folder / bad.decisive.log
    yield from (f"## First failure of {bad.name[:24]}", "", bad.reason, "", f"All of its output: {log}", "")
    if bad.decisive.slug:
        yield from (f"It is known as {bad.decisive.slug}: launch/diagnose.py says more.", "")
    if shown := _around(log, bad.decisive.line):
        yield from ("```", *shown, "```", "")


def _around(log: Path, number: int) -> list[str]:
    """The lines before and after the failure's own, or the last ones where it is not of the log."""
    if not log.is_file():
        return []
    kept: deque[str] = deque(maxlen=_LOG_LINES)
    for position, raw in raw_lines(str(log)):
        kept.append(raw.decode("ascii", "replace").rstrip().replace("\ufffd", "?").replace("```", "'''"))
        if number and position >= number + _LINES_AFTER:
            break
    return list(kept) if any(kept) else []


def compare_address(state: State, edge: Edge) -> str:
    """Upstream's page of the commits between the two; "" where it is not known."""
    before, after = (state.candidates[index].name for index in (edge.before, edge.after))
    if state.question.options.git:
        page = commits.remote(Path(state.question.options.git))
        return f"{page}/compare/{before}...{after}" if page else ""
    upstream: Mapping[str, str] = UPSTREAM
    repository = upstream.get(re.sub(r"[-_.]+", "-", state.question.options.package).lower())
    return f"https://github.com/{repository}/compare/v{before}...v{after}" if repository else ""
