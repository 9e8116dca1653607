"""What a bisect's verdicts answer: the sentences that are printed, and report.md.

The report has every verdict, the packages that changed at the edge, the failure's log, and commands that show both
sides again.
"""

import os
import platform
import re
from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from shlex import join, quote
from typing import Literal

from harness.runtime import redact
from harness.tools.bisection.candidates import git, labels
from harness.tools.bisection.confidence import CONFIDENCE, confidence, failure_rate, is_sure
from harness.tools.bisection.question import SCRIPT, command_of, is_of_this_repository
from harness.tools.bisection.search import Edge, Verdict, find_edges, next_candidate
from harness.tools.bisection.state import Record, State
from harness.tools.diagnose.log_lines import lines_of
from harness.tools.environments import has_gpu
from harness.tools.trial.environment import Environment, python_version, without_cpu_mode
from harness.tools.trial.failure import pattern_for, same_cause
from harness.tools.trial.trial import Outcome

Confirmation = Literal["not run", "confirmed", "flaky", "another cause", "another failure"]
"""Of the revert. flaky: the newer end ended differently when it was run again. another cause: the revert changes
nothing. another failure: without the commit the newer end fails in a way of its own, or cannot be run."""
AnswerKind = Literal["found", "probable", "set", "several"]
EXIT_CODES: dict[AnswerKind, int] = {"found": 0, "probable": 1, "set": 1, "several": 3}
NOT_SHOWN = ("PATH", "VIRTUAL_ENV")
"""Variables that are not printed with their whole value: a shell has its own PATH, and no Python reads VIRTUAL_ENV."""
_LOG_LINES, _LINES_AFTER = 30, 8
_UNPACKED = re.compile(r"/commit-[^/]+/files")
"""The folder into which a commit was unpacked."""


@dataclass(frozen=True, slots=True)
class SecondCause:
    """The bad end fails in another way than the candidate at the edge. The order is from the edge to the bad end."""

    seen: int
    """The candidate nearest to the edge that fails as the bad end does."""
    hidden: tuple[int, ...]
    """The bad candidates between the edge and `seen`. They fail in another way, which may hide the bad end's
    failure."""


@dataclass(frozen=True, kw_only=True)
class Answer:
    """The edges, where good turns to bad or bad to good, oldest first, and what they mean.

    found: one edge, between two neighbours. probable: the same, but by chance it may be wrong. set: the edge is
    somewhere among candidates that cannot be classified. several: more than one cause.
    """

    kind: AnswerKind
    edges: tuple[Edge, ...]
    second: SecondCause | None = None
    """Where the bad end's own failure shows, if the first bad candidate fails in another way."""


def answer_of(state: State) -> Answer:
    """Return what the verdicts answer once no further run can narrow it."""
    edges, cause = tuple(find_edges(state.verdicts)), second_cause(state)
    if len(edges) > 1 or cause:
        return Answer(kind="several", edges=edges, second=cause)
    if len(edges[0].answer) > 1:
        return Answer(kind="set", edges=edges)
    if confirmation_of(state) == "another cause":
        return Answer(kind="several", edges=edges)
    return Answer(kind="found" if _is_steady(state) else "probable", edges=edges)


def _is_steady(state: State) -> bool:
    """Return whether runs of the same candidate ended alike often enough."""
    return is_sure(state) and confirmation_of(state) != "flaky"


def edge_to_confirm(state: State) -> Edge | None:
    """Return the edge whose commit can be reverted on top of the newer end.

    None without --git, if no single commit was found, or if it is the newer end: without it that is the commit before.
    """
    if not state.question.options.git or answer_of(state).kind not in ("found", "probable"):
        return None
    edge = find_edges(state.verdicts)[0]
    return None if edge.after == len(state.candidates) - 1 else edge


def confirmation_of(state: State) -> Confirmation:
    """Return what the revert of the commit found says about it."""
    reverted, control = state.reverted, state.control
    if not reverted or not reverted.attempts:
        return "not run"
    older, newer = state.record(0), state.record(len(state.candidates) - 1)

    def ends_as(record: Record, end: Record) -> bool:
        is_plain = end.verdict == "good" or not state.question.takes_any  # --match and --hang know one failure
        return record.verdict == end.verdict and (is_plain or _fails_as(record, end))

    if ends_as(reverted, newer):
        return "another cause"
    if not ends_as(reverted, older):
        return "another failure"
    return "confirmed" if control and ends_as(control, newer) else "flaky"


def second_cause(state: State) -> SecondCause | None:
    """Return where the bad end's own failure shows first; None if the candidate at the edge fails in the same way.

    With --match and --hang there is only one failure to look for.
    """
    if not state.question.takes_any:
        return None
    edges, bad_end = find_edges(state.verdicts), state.bad_end
    at_edge, step = (edges[0].before, -1) if state.question.options.find_fix else (edges[-1].after, 1)
    ran = [index for index in range(at_edge, bad_end + step, step) if state.verdicts.get(index) == "bad"]
    own = [index for index in ran if _fails_as(state.record(index), state.record(bad_end))]
    if own[0] == at_edge:
        return None
    return SecondCause(own[0], tuple(ran[: ran.index(own[0])]))


def next_for_cause(state: State) -> int | None:
    """Return the candidate to run next to find where the bad end's own failure follows another one; None if it is
    known.
    """
    if not (cause := second_cause(state)):
        return None
    near, inner = cause.hidden[-1], range(*sorted((cause.hidden[-1], cause.seen)))
    known: dict[int, Verdict] = dict.fromkeys((index for index in state.verdicts if index in inner), "skip")
    return next_candidate({**known, near: "good", cause.seen: "bad"})


def _fails_as(record: Record, end: Record) -> bool:
    """Return whether the candidate fails as the bad end did in one of its runs."""
    assert record.decisive
    failure = record.decisive.failure
    return any(same_cause(failure, each.failure) for each in end.attempts if each.verdict == "bad")


def sentences(state: State, answer: Answer) -> list[str]:
    edges = answer.edges
    if len(edges) > 1:
        lines = [
            f"The verdict changes in {len(edges)} places: there are several causes, or a flaky one (try --repeat)."
        ]
    elif answer.second:
        lines = ["There are two causes or more: the bad end fails in another way than the first bad candidate."]
    else:
        lines = []
    lines += [_describe_edge(state, edge) for edge in edges]
    if answer.second:
        lines += _describe_second(state, answer.second)
    elif len(edges) == 1:
        lines += _masked(state, edges[0])
        lines += describe_confirmation(state, edges[0])
    sure, rate = confidence(state), failure_rate(state)
    if sure is not None and rate:
        lines.append(
            f"The answer is right with a probability of {min(sure, 0.999):.1%}, if every bad release fails as often as the bad"
            f" end, which failed in {rate.failed} of {rate.runs} runs after its first failure."
        )
        if not is_sure(state):
            lines.append(f"That is less than {CONFIDENCE:.0%}: give more --repeat or more --confirm.")
    unrun = len(state.candidates) - len(state.records)
    if unrun and answer.kind != "several":
        were = "candidate was" if unrun == 1 else "candidates were"
        lines.append(f"{unrun} {were} not run: a failure that came and went among them would not show.")
    return lines


def _describe_edge(state: State, edge: Edge) -> str:
    what = "commit" if state.question.options.git else "release"
    before, after = (state.candidates[i].label for i in (edge.before, edge.after))
    first, last = ("bad", "good") if state.verdicts[edge.before] == "good" else ("good", "bad")
    is_probably = "is" if _is_steady(state) else "is probably"
    if len(edge.answer) == 1:
        return f"The first {first} {what} {is_probably} {after}; the last {last} one is {before}."
    among = labels(state.candidates[i] for i in edge.answer)
    return (
        f"The first {first} {what} {is_probably} one of {len(edge.answer)}: {among}. The last one known to be {last} is"
        f" {before}; those in between could not be classified."
    )


def describe_confirmation(state: State, edge: Edge) -> list[str]:
    """Say what the commit's revert on top of the newer end shows, and what that means."""
    options, made, is_end = state.question.options, state.reverted, edge.after == len(state.candidates) - 1
    if not options.git or len(edge.answer) > 1 or (made is None and not is_end):
        return []
    commit, before, tip = (state.candidates[i].name[:12] for i in (edge.after, edge.before, -1))
    older, newer = ("passes" if state.record(i).verdict == "good" else "fails" for i in (0, len(state.candidates) - 1))
    which, broke = ("good", "repaired") if options.find_fix else ("bad", "broke")
    if made is None:
        return [f"{commit} is the {which} end itself: without it the files are those of {before}, which {older}."]
    end, reason = f"the {which} end {tip}", made.reason.rstrip(".")
    without = f"with {commit} reverted on top of {end}, it"
    remains = f"what remains is that {before} {older} and {commit} {newer}"
    if made.verdict == "bad" and made.decisive:
        reason = _with_place(made.decisive)
    return [
        {
            "not run": f"Not confirmed: {commit} cannot be reverted on top of {end}: {reason}; {remains}.",
            "confirmed": f"Confirmed: {without} {older}; {end} itself, run again right after, {newer} as before.",
            "flaky": f"Not confirmed: {without} {older}, but {end}, run again right after, did not end as before. The failure"
            " comes and goes; give --repeat.",
            "another cause": f"Not the only cause: {without} still {newer}: {made.reason.rstrip('.')}. So a later commit"
            f" {broke} it too, or repeats these changes: look for that one as well.",
            "another failure": f"Not confirmed: {without} ends in another way: {reason}. Either later commits need this one, or"
            f" one of them {broke} something too; {remains}.",
        }[confirmation_of(state)]
    ]


def _masked(state: State, edge: Edge) -> list[str]:
    hidden = [index for index in edge.answer if state.verdicts.get(index) == "other"]
    if not hidden:
        return []
    reasons = list(dict.fromkeys(state.record(i).reason for i in hidden))
    listed = labels(state.candidates[i] for i in hidden)
    return [f"Another failure masks it in {len(hidden)}: {listed}. There they fail with: {'; '.join(reasons[:3])}."]


def _describe_second(state: State, cause: SecondCause) -> list[str]:
    """Say how the edge fails, where the bad end's own failure shows first, and which candidates may hide it."""
    first, seen = cause.hidden[0], cause.seen
    seen_first, before = ("last", "after") if seen < first else ("first", "before")
    edge, own = (state.record(index).decisive for index in (first, seen))
    assert own and edge
    there, here = (_with_place(each) for each in (edge, own))
    hiding = labels(state.candidates[index] for index in sorted(cause.hidden))
    pattern = pattern_for(own.failure, edge.failure)
    return [
        f"{state.candidates[first].label} fails with: {there}.",
        f"The bad end's own failure is {seen_first} seen at {state.candidates[seen].label}: {here}. The candidates run"
        f" {before} it fail in the other way, which may hide it: {hiding}.",
        *([f"--match {quote(pattern)} looks for the bad end's failure alone."] if pattern else []),
    ]


def _with_place(made: Outcome) -> str:
    failure, reason = made.failure, made.reason.rstrip(".")
    is_bare = not failure.words  # for example an assert without a message
    code = f": {failure.source}" if is_bare and failure.source else ""
    return f"{reason} (in {failure.place}{code})" if failure.place else reason


# report.md.


def write_report(state: State, answer: Answer, folder: Path) -> str:
    """Write report.md without secrets, and each environment's pins. Return the answer in a few lines.

    Raises OSError.
    """
    for record in (each for each in state.records if each.attempts):
        file = _freeze_file(folder, record.name)
        file.parent.mkdir(exist_ok=True)
        file.write_text("".join(f"{package}=={version}\n" for package, version in record.environment.freeze.items()))
    text = redact.text("\n".join(_markdown(state, answer, folder)) + "\n")
    (folder / "report.md").write_text(text, encoding="utf-8")
    return redact.text("\n".join([*sentences(state, answer), _cost(state)]))


def _freeze_file(folder: Path, name: str) -> Path:
    return folder / "environments" / f"{name}.txt"


def _markdown(state: State, answer: Answer, folder: Path) -> Iterator[str]:
    yield f"# Bisect of {state.question.options.package}, {state.candidates[0].label} to {state.candidates[-1].label}"
    for sentence in sentences(state, answer):
        yield from ("", sentence)
    yield from ("", "```", join(["python3", SCRIPT, *state.question.words()]), "```", "")
    yield from ("## Verdicts", "", "| candidate | verdict | run | first failure, or why | imported | seconds | log |")
    yield "|---|---|---|---|---|---|---|"
    ran = sorted(enumerate(state.records, 1), key=lambda each: state.index(each[1].name))
    reverts = filter(None, (state.reverted, state.control))
    for number, record in (*ran, *enumerate(reverts, len(ran) + 1)):
        label = next((each.label for each in state.candidates if each.name == record.name), record.name)
        log = record.decisive.log if record.decisive else "-"
        cells = (label, record.verdict, number, record.reason, record.imported or "-", f"{record.seconds:.1f}", log)
        yield f"| {' | '.join(str(cell).replace('|', '/') for cell in cells)} |"
    yield ""
    for edge in answer.edges:
        yield from _edge(state, edge, folder)
    if answer.second is not None:
        yield from _first_failure(state.record(answer.second.seen), folder)
    if state.reverted and state.reverted.attempts:
        yield from ("## The commit reverted", "", "```", *_revert_commands(state, answer.edges[0], folder), "```", "")
    yield from ("## Cost", "", _cost(state), "", f"- {platform.platform()}, Python {platform.python_version()}")
    cpu_mode = ": SGLang ran in its CPU mode, with the stand-ins of harness/runtime/standins"
    yield "- an NVIDIA GPU" if has_gpu() else f"- no GPU{cpu_mode if state.question.runs_sglang else ''}"


def _cost(state: State) -> str:
    runs = sum(record.seconds for record in filter(None, [*state.records, state.reverted, state.control]))
    ran = f"{sum(bool(each.attempts) for each in state.records)} of {len(state.candidates)} candidates were run"
    return f"{ran}; your command took {runs:.0f} s in all."


def _edge(state: State, edge: Edge, folder: Path) -> Iterator[str]:
    sides = (edge.before, edge.after)
    before, after = (state.record(index) for index in sides)
    yield from (f"## What changed from {' to '.join(state.candidates[index].label for index in sides)}", "")
    old, new = before.environment.freeze, after.environment.freeze
    if changed := sorted(name for name in {*old, *new} if old.get(name) != new.get(name)) if old and new else []:
        yield from ("| package | before | after |", "|---|---|---|")
        yield from (f"| {name} | {old.get(name, '-')} | {new.get(name, '-')} |" for name in changed)
        yield ""
    modules = [Path(record.imported.rpartition(" is ")[2]).parent for record in (before, after)]
    if checkout := state.question.options.git:
        yield from (f"    git -C {quote(checkout)} log --oneline {before.name}..{after.name}", "")
    elif modules[0] != modules[1]:
        yield from (f"    {join(['diff', '-ru', *map(str, modules)])}", "")
    yield from _first_failure(after if after.verdict == "bad" else before, folder)
    yield from ("## Reproduce with", "", "```")
    for record in (before, after):
        if record.environment.python:
            yield f"# {record.verdict}: {state.candidates[state.index(record.name)].label}"
            yield from reproduce_commands(state, record, folder)
    yield from ("```", "")


def _first_failure(bad: Record, folder: Path) -> Iterator[str]:
    if not (made := bad.decisive):
        return
    log = folder / made.log
    yield from (f"## First failure of {bad.name[:24]}", "", bad.reason, "", f"All of its output: {made.log}", "")
    if made.failure.slug:
        yield from (f"It is known as {made.failure.slug}: see launch/diagnose.py.", "")
    kept: deque[str] = deque(maxlen=_LOG_LINES)  # the lines around the failure's own, or the last ones
    for line in lines_of(str(log)) if log.is_file() else ():
        kept.append(line.whole.encode("ascii", "replace").decode().replace("```", "'''"))
        if made.failure.line and line.number >= made.failure.line + _LINES_AFTER:
            break
    yield from ("```", *kept, "```", "") if any(kept) else ()


def reproduce_commands(state: State, record: Record, folder: Path, named: str = "") -> list[str]:
    """Return shell commands, one a line, that show a verdict again without this program.

    named: the commit to start from, if the record's name is none.
    """
    question, options, environment = state.question, state.question.options, record.environment
    place, made = f"/tmp/{options.package}-{record.name[:12] if not named else record.name}", []
    if options.git:
        made = [f"git -C {quote(options.git)} worktree add --detach {place} {named or record.name}"]
        inside = [_UNPACKED.split(each)[-1] for each in environment.paths]
        environment = replace(environment, paths=tuple(place + each for each in inside))
    elif not options.environments:
        version = ".".join(python_version(environment.python).split(".")[:2])
        environment = replace(environment, python=f"{place}/bin/python")
        install = ["pip", "install", "--no-deps", "--python", environment.python, *environment.sources]
        pins = str(_freeze_file(folder, record.name))
        made = [f"uv venv --python {version} {place}", join(["uv", *install, "-r", pins])]
    command = join(redact.words(command_of(question, environment.python, Path("/tmp"))))
    return [*made, " ".join([f"cd {quote(question.folder)} &&", *_assignments(state, record, environment), command])]


def _revert_commands(state: State, edge: Edge, folder: Path) -> list[str]:
    """Return shell commands that run the newer end without the commit found."""
    assert state.reverted
    commit, checkout = state.candidates[edge.after].name, Path(state.question.options.git)
    unpack, run = reproduce_commands(state, state.reverted, folder, state.candidates[-1].name)
    mainline = "--mainline 1 " if git(checkout, "rev-parse", "--verify", "--quiet", f"{commit}^2") else ""
    return [unpack, f"git -C {unpack.split()[-2]} revert --no-commit {mainline}{commit}", run]


def _assignments(state: State, record: Record, environment: Environment) -> list[str]:
    """Return the variables of a run that a user's shell lacks, as NAME=VALUE."""
    question = state.question
    is_ours = is_of_this_repository(question)
    variables = environment.variables(not has_gpu() and question.runs_sglang, is_ours) | {
        "BISECT_CANDIDATE": record.name
    }
    hidden = [*NOT_SHOWN, *([] if is_ours else ["HARNESS_VENV"])]
    # PYTHONPATH is never that of the user's shell, because launch/bisect_versions.py puts its checkout there for
    # itself.
    shell = without_cpu_mode(os.environ)
    changed = {n: v for n, v in variables.items() if n not in hidden and (v != shell.get(n) or n == "PYTHONPATH")}
    return [
        f'PATH={quote(str(Path(environment.python).parent))}:"$PATH"',
        *(f"{name}={quote(value)}" for name, value in changed.items()),
    ]
