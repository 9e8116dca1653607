"""What a bisect's verdicts answer: the sentences that are printed, and report.md.

The report has every verdict, what changed at the edge, and commands that show it again.
"""

import os
import platform
import re
from collections import deque
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, fields, replace
from difflib import unified_diff
from pathlib import Path
from shlex import join, quote
from typing import Literal

from packaging.utils import canonicalize_name

from harness.runtime import redact
from harness.tools.bisection.candidates import Candidate, git, git_lines, labels
from harness.tools.bisection.confidence import CONFIDENCE, confidence, failure_rate, is_sure
from harness.tools.bisection.failure_causes import (
    cause_of,
    frames_of,
    pattern_for,
    relative_file,
    same_cause,
    traceback_at,
)
from harness.tools.bisection.installation import (
    Environment,
    module_of,
    package_root,
    package_sources,
    torch_backend,
    unmet_requirements,
    uv_binary,
    without_cpu_mode,
)
from harness.tools.bisection.question import SCRIPT, WrongQuestion, command_of, is_of_this_repository
from harness.tools.bisection.search import Edge, Verdict, find_edges, next_candidate
from harness.tools.bisection.state import Attempt, Record, State
from harness.tools.diagnose.log_lines import lines_of
from harness.tools.diagnose.tracebacks import Traceback
from harness.tools.environments import has_gpu, uv_environment

Outcome = Literal["not run", "confirmed", "flaky", "another cause", "another failure"]
"""Of the revert. flaky: the newer end ended differently when it was run again. another cause: the revert changes
nothing. another failure: without the commit the newer end fails in a way of its own, or cannot be run."""
AnswerKind = Literal["found", "probable", "set", "several"]
EXIT_CODES: dict[AnswerKind, int] = {"found": 0, "probable": 1, "set": 1, "several": 3}
UPSTREAM = {
    "sglang": "sgl-project/sglang",
    "torch": "pytorch/pytorch",
    "transformers": "huggingface/transformers",
    "flashinfer-python": "flashinfer-ai/flashinfer",
    "torch-memory-saver": "fzyzcjy/torch_memory_saver",
}
"""Repositories whose tags are v and the version."""
NOT_SHOWN = ("PATH", "VIRTUAL_ENV")
"""Variables that are not printed with their whole value: a shell has its own PATH, and no Python reads VIRTUAL_ENV."""
MOST_SUBJECTS, MOST_LINES_OF_A_FILE = 30, 60
_LOG_LINES, _LINES_AFTER = 30, 8
_UNPACKED = re.compile(r"/commit-[^/]+/files")
"""The folder into which a commit was unpacked."""
_GITHUB = re.compile(r"(?:https://|(?:ssh://)?git@)github\.com[:/](.+?)(?:\.git)?/?")


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
    if outcome_of(state) == "another cause":
        return Answer(kind="several", edges=edges)
    return Answer(kind="found" if _is_steady(state) else "probable", edges=edges)


def _is_steady(state: State) -> bool:
    """Return whether runs of the same candidate ended alike often enough."""
    return is_sure(state) and outcome_of(state) != "flaky"


def edge_to_confirm(state: State) -> Edge | None:
    """Return the edge whose commit can be reverted on top of the newer end.

    None without --git, if no single commit was found, or if it is the newer end: without it that is the commit before.
    """
    if not state.question.options.git or answer_of(state).kind not in ("found", "probable"):
        return None
    edge = find_edges(state.verdicts)[0]
    return None if edge.after == len(state.candidates) - 1 else edge


def outcome_of(state: State) -> Outcome:
    """Return what the revert of the commit found says about it."""
    if not (made := state.confirmation) or not (reverted := made.reverted):
        return "not run"
    older, newer = state.record(0), state.record(len(state.candidates) - 1)

    def ends_as(record: Record, end: Record) -> bool:
        is_plain = end.verdict == "good" or state.question.kind != "failure"  # --match and --hang know one failure
        return record.verdict == end.verdict and (is_plain or _fails_as(record, end))

    if ends_as(reverted, newer):
        return "another cause"
    if not ends_as(reverted, older):
        return "another failure"
    return "confirmed" if made.control and ends_as(made.control, newer) else "flaky"


def second_cause(state: State) -> SecondCause | None:
    """Return where the bad end's own failure shows first; None if the candidate at the edge fails in the same way.

    With --match and --hang there is only one failure to look for.
    """
    if state.question.kind != "failure":
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
    causes = [cause_of(each) for each in end.attempts if each.verdict == "bad"]
    return any(same_cause(cause_of(record.decisive), each) for each in causes)


def sentences(state: State, answer: Answer) -> list[str]:
    edges, options = answer.edges, state.question.options
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
    if options.only_package:
        sides = dict.fromkeys(index for edge in edges for index in (edge.before, edge.after))
        lines += filter(None, (describe_unmet(state.record(index), options.package) for index in sides))
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
    options, made, outcome = state.question.options, state.confirmation, outcome_of(state)
    if not options.git or len(edge.answer) > 1:
        return []
    is_end = edge.after == len(state.candidates) - 1
    if made is None and not is_end:
        return []
    commit, before, tip = (state.candidates[i].name[:12] for i in (edge.after, edge.before, -1))
    passes = {"good": "passes", "bad": "fails"}
    older, newer = (passes[str(state.record(i).verdict)] for i in (0, len(state.candidates) - 1))
    end = f"the {'good' if options.find_fix else 'bad'} end {tip}"
    fixed = "repaired" if options.find_fix else "broke"
    if made is None:
        return [f"{commit} is {end.replace(tip, 'itself')}: without it the files are those of {before}, which {older}."]
    neighbours = f"what remains is that {before} {older} and {commit} {newer}"
    if not made.reverted:
        return [f"Not confirmed: {commit} cannot be reverted on top of {end}: {made.problem}; {neighbours}."]
    without = f"with {commit} reverted on top of {end}, it"
    reason = made.reverted.reason.rstrip(".")
    match outcome:
        case "confirmed":
            return [f"Confirmed: {without} {older}; {end} itself, run again right after, {newer} as before."]
        case "flaky":
            return [
                f"Not confirmed: {without} {older}, but {end}, run again right after, did not end as before. The failure"
                " comes and goes; give --repeat."
            ]
        case "another cause":
            still = f"{without} still {newer}{'' if newer == 'passes' else f': {reason}'}"
            return [
                f"Not the only cause: {still}. So a later commit {fixed} it too, or repeats these changes: look for that one as well."
            ]
        case _:
            if made.reverted.verdict == "bad" and made.reverted.decisive:
                reason = _with_place(made.reverted.decisive)
            return [
                f"Not confirmed: {without} ends in another way: {reason}. Either later commits need this one, or one of them"
                f" {fixed} something too; {neighbours}."
            ]


def describe_unmet(record: Record, package: str) -> str:
    """Return a sentence if a candidate ran over other packages than it asks for; "" if it had what it needs."""
    lacks = unmet_requirements(record.environment, package)
    parts = [f"with {name} {has} (it asks for {wants})" for name, (wants, has) in lacks.items() if has]
    absent = sum(not has for _, has in lacks.values())
    parts += [f"without {absent} of its dependencies"] if absent else []
    remedy = "leave out --only-package to install what it asks for"
    return f"{record.name} was tested {', '.join(parts)}; {remedy}." if parts else ""


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


def _with_place(made: Attempt) -> str:
    failure, reason = made.failure, made.reason.rstrip(".")
    is_bare = not cause_of(made).words  # for example an assert without a message
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
    options = state.question.options
    yield from (f"# Bisect of {options.package}, {state.candidates[0].label} to {state.candidates[-1].label}", "")
    for sentence in sentences(state, answer):
        yield from (sentence, "")
    yield from ("```", join(["python3", SCRIPT, *state.question.words()]), "```", "")
    yield from ("## Verdicts", "", "| candidate | verdict | run | first failure, or why | imported | seconds | log |")
    yield "|---|---|---|---|---|---|---|"
    for number, record in sorted(enumerate(state.records, 1), key=lambda each: state.index(each[1].name)):
        label = state.candidates[state.index(record.name)].label.replace("|", "/")
        log = record.decisive.log if record.decisive else "-"
        why, imported = record.reason.replace("|", "/"), record.imported or "-"
        yield f"| {label} | {record.verdict} | {number} | {why} | {imported} | {record.seconds:.1f} | {log} |"
    yield ""
    for edge in answer.edges:
        yield from _edge(state, edge, folder)
    if answer.second is not None:
        yield from _first_failure(state.record(answer.second.seen), folder)
    yield from _confirmation(state, answer, folder)
    yield from ("## Cost", "", _cost(state), "", f"- {platform.platform()}, Python {platform.python_version()}")
    cpu_mode = ": SGLang ran in its CPU mode, with the stand-ins of harness/runtime/standins"
    yield "- an NVIDIA GPU" if has_gpu() else f"- no GPU{cpu_mode if state.question.runs_sglang else ''}"


def _confirmation(state: State, answer: Answer, folder: Path) -> Iterator[str]:
    """Yield the runs without the commit found, and how to repeat them."""
    made, options = state.confirmation, state.question.options
    if not made or not made.reverted:
        return
    edge, tip = answer.edges[0], state.candidates[-1]
    commit = state.candidates[edge.after].name
    yield from ("## The commit reverted", "")
    yield from ("| candidate | verdict | first failure, or why | seconds | log |", "|---|---|---|---|---|")
    for record in made.records:
        log = record.attempts[-1].log if record.attempts else "-"
        yield f"| {record.name} | {record.verdict} | {record.reason.replace('|', '/')} | {record.seconds:.1f} | {log} |"
    place, plain = (f"/tmp/{options.package}-{name}" for name in (made.reverted.name, tip.name[:12]))
    unpack, run = (
        line.replace(plain, place)
        for line in reproduce_commands(state, made.reverted, Candidate(name=tip.name), folder)
    )
    mainline = "--mainline 1 " if git(Path(options.git), "rev-parse", "--verify", "--quiet", f"{commit}^2") else ""
    yield from ("", "```", unpack, f"git -C {place} revert --no-commit {mainline}{commit}", run, "```", "")


def _cost(state: State) -> str:
    confirming = state.confirmation.records if state.confirmation else []
    runs = sum(record.seconds for record in [*state.records, *confirming])
    ran = f"{sum(bool(each.attempts) for each in state.records)} of {len(state.candidates)} candidates were run"
    return f"{ran}, in {state.wall_seconds:.0f} s in all, of which {runs:.0f} s were your command."


def _edge(state: State, edge: Edge, folder: Path) -> Iterator[str]:
    options, sides = state.question.options, (edge.before, edge.after)
    before, after = records = [state.record(index) for index in sides]
    candidates = [state.candidates[index] for index in sides]
    bad = after if after.verdict == "bad" else before
    yield from (f"## What changed from {candidates[0].label} to {candidates[1].label}", "")
    yield from _upstream(state, before, after)
    made = bad.decisive
    log = folder / made.log if made and made.failure.line else None
    trace = traceback_at(log, made.failure.line) if made and log and log.is_file() else None
    yield from _packages(before.environment.freeze, after.environment.freeze, trace, options.package)
    yield from _traceback_files(before, after, trace, options.package)
    yield from changed_api(before, after)
    yield from _first_failure(bad, folder)
    lines: list[str] = []
    for record, candidate in zip(records, candidates, strict=True):
        if record.environment.python:
            lines += [f"# {record.verdict}: {candidate.label}", *reproduce_commands(state, record, candidate, folder)]
    yield from ("## Reproduce with", "", "```", *lines, "```", "") if lines else ()


def _upstream(state: State, before: Record, after: Record) -> Iterator[str]:
    """Yield the address that compares both sides, and the commits between them if they are commits."""
    options = state.question.options
    repository, tags = UPSTREAM.get(canonicalize_name(options.package), ""), f"v{before.name}...v{after.name}"
    if options.git:
        origin = _GITHUB.fullmatch(git(Path(options.git), "remote", "get-url", "origin"))
        repository, tags = origin[1] if origin else "", f"{before.name}...{after.name}"
    yield from (f"- https://github.com/{repository}/compare/{tags}", "") if repository else ()
    if options.git:
        merged = git_lines(Path(options.git), "log", "--format=- %h %s", f"{before.name}..{after.name}")
        more = [f"- and {len(merged) - MOST_SUBJECTS} more"] if len(merged) > MOST_SUBJECTS else []
        yield from (*merged[:MOST_SUBJECTS], *more, "")


def _packages(old: Mapping[str, str], new: Mapping[str, str], trace: Traceback | None, package: str) -> Iterator[str]:
    """Yield the packages that differ.

    The suspect is the one in whose code the traceback ends, else the candidate's own.
    """
    changed = sorted(name for name in {*old, *new} if old.get(name) != new.get(name))
    if not old or not new or not changed:
        return
    deepest = trace.frames[-1].file if trace and trace.frames else ""
    moved = [canonicalize_name(package)] if len(changed) > 1 else changed
    suspect = max([*moved, *changed], key=lambda name: deepest.rfind(f"/{module_of(name)}/"))
    yield from ("| package | before | after | |", "|---|---|---|---|")
    for name in changed:
        mark = "likely suspect" if name == suspect else ""
        yield f"| {name} | {old.get(name, '-')} | {new.get(name, '-')} | {mark} |"
    yield ""


def _traceback_files(before: Record, after: Record, trace: Traceback | None, package: str) -> Iterator[str]:
    """Yield how the files that the failure's traceback names differ, the deepest frame's first."""
    old, new = (package_root(record.environment, package) for record in (before, after))
    if old is None or new is None or old == new or trace is None:
        return
    files = dict.fromkeys(relative_file(frame.file, package) for frame in frames_of(trace, package))
    for number, file in enumerate(files):
        was, now = (p.read_text(errors="replace").splitlines() if p.is_file() else [] for p in (old / file, new / file))
        lines = [_ascii(line) for line in unified_diff(was, now, f"before/{file}", f"after/{file}", lineterm="")]
        more = [f"... {len(lines) - MOST_LINES_OF_A_FILE} lines more"] if len(lines) > MOST_LINES_OF_A_FILE else []
        yield from ("## What changed in the files of the traceback", "") if not number else ()
        yield from ("```", *(lines or [f"{file} is unchanged"])[:MOST_LINES_OF_A_FILE], *more, "```", "")


def changed_api(before: Record, after: Record) -> Iterator[str]:
    """Yield the engine arguments and other facts of the two SGLangs that differ."""
    roots = [package_root(record.environment, "sglang") for record in (before, after)]
    if None in roots or roots[0] == roots[1]:
        return
    from harness.rollout.sglang_api.probe import SourceTree, probe

    try:
        old, new = (probe(SourceTree(root / "sglang")) for root in roots if root)
    except ValueError:
        return  # another package of this name, or a tree that the probe does not know
    gone, added = old.engine_arguments - new.engine_arguments, new.engine_arguments - old.engine_arguments
    yield from ("## Changed engine arguments and API", "")
    yield f"- engine arguments gone: {', '.join(sorted(gone)) or 'none'}"
    yield f"- engine arguments new: {', '.join(sorted(added)) or 'none'}"
    for name in [field.name for field in fields(old) if field.name not in ("tree", "version", "engine_arguments")]:
        if getattr(old, name) != getattr(new, name):
            yield f"- {name}: {getattr(old, name)!r} -> {getattr(new, name)!r}"
    yield ""


def _first_failure(bad: Record, folder: Path) -> Iterator[str]:
    if not (made := bad.decisive):
        return
    log = folder / made.log
    yield from (f"## First failure of {bad.name[:24]}", "", bad.reason, "", f"All of its output: {made.log}", "")
    if made.failure.slug:
        yield from (f"It is known as {made.failure.slug}: see launch/diagnose.py.", "")
    kept: deque[str] = deque(maxlen=_LOG_LINES)  # the lines around the failure's own, or the last ones
    for line in lines_of(str(log)) if log.is_file() else ():
        kept.append(_ascii(line.whole))
        if made.failure.line and line.number >= made.failure.line + _LINES_AFTER:
            break
    yield from ("```", *kept, "```", "") if any(kept) else ()


def _ascii(line: str) -> str:
    return line.encode("ascii", "replace").decode().replace("```", "'''")


def reproduce_commands(state: State, record: Record, candidate: Candidate, folder: Path) -> list[str]:
    """Return shell commands, one a line, that show a verdict again without this program."""
    question, options = state.question, state.question.options
    place = f"/tmp/{options.package}-{candidate.name[:12]}"
    environment, made, uv = record.environment, [], _uv_command()
    if options.git:
        made = [f"git -C {quote(options.git)} worktree add --detach {place} {candidate.name}"]
        paths = tuple(place + _UNPACKED.split(each)[-1] for each in environment.paths)
        environment = replace(environment, paths=paths)
    elif options.only_package:
        words = ["pip", "install", "--no-deps", "--target", place, "--python", environment.python]
        made = [f"{uv} {join([*words, *package_sources(options), f'{options.package}=={candidate.name}'])}"]
        environment = replace(environment, paths=(place,))
    elif not options.environments:
        version = ".".join(Path(environment.python).resolve().name.removeprefix("python").split(".")[:2]) or "3"
        environment = replace(environment, python=f"{place}/bin/python")
        sources = package_sources(options)
        torch = torch_backend(environment.freeze, sources)
        install = ["pip", "install", "--no-deps", *torch, "--python", environment.python, *sources]
        pins = str(_freeze_file(folder, candidate.name))
        made = [f"{uv} venv --python {version} {place}", f"{uv} {join([*install, '-r', pins])}"]
    command = join(redact.words(command_of(question, environment.python, Path("/tmp"))))
    return [*made, " ".join([f"cd {quote(question.folder)} &&", *_assignments(state, record, environment), command])]


def _uv_command() -> str:
    """Return uv with the certificates that this program gives it, for a shell. A finished bisect needs no uv itself."""
    certificates = uv_environment().get("SSL_CERT_FILE", "")
    differ = certificates != os.environ.get("SSL_CERT_FILE", "")
    try:
        uv = uv_binary()
    except WrongQuestion:
        uv = "uv"
    return join([*(["env", f"SSL_CERT_FILE={certificates}"] if differ else []), uv])


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
