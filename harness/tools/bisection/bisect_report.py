"""report.md: the answer, every verdict, what changed at the edge, and commands that show it again."""

import os
import platform
import re
from collections import deque
from collections.abc import Iterator, Mapping
from dataclasses import fields, replace
from difflib import unified_diff
from pathlib import Path
from shlex import join, quote

from packaging.utils import canonicalize_name

from harness.runtime import redact
from harness.runtime.tracebacks import Traceback
from harness.tools.bisection.answer import Answer, describe_confirmation, sentences
from harness.tools.bisection.candidates import Candidate, git, git_lines
from harness.tools.bisection.failures import frames_of, relative_file, traceback_at
from harness.tools.bisection.installation import (
    Environment,
    module_of,
    package_root,
    package_sources,
    torch_backend,
    uv_binary,
)
from harness.tools.bisection.question import SCRIPT, WrongQuestion, command_of, is_of_this_repository
from harness.tools.bisection.search import Edge
from harness.tools.bisection.state import Record, State
from harness.tools.diagnose.log_lines import lines_of
from harness.tools.environments import has_gpu, uv_environment

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


def write_report(state: State, answer: Answer, folder: Path) -> str:
    """Write report.md without secrets, and each environment's pins. Return the answer in a few lines. Raises OSError."""
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
    yield from ("## Verdicts", "", "| candidate | verdict | run | first failure, or why | seconds | log |")
    yield "|---|---|---|---|---|---|"
    for number, record in sorted(enumerate(state.records, 1), key=lambda each: state.index(each[1].name)):
        label = state.candidates[state.index(record.name)].label.replace("|", "/")
        log = record.decisive.log if record.decisive else "-"
        yield f"| {label} | {record.verdict} | {number} | {record.reason.replace('|', '/')} | {record.seconds:.1f} | {log} |"
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
    yield from ("## The commit reverted", "", *describe_confirmation(state, edge), "")
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
    """Yield the packages that differ. The suspect is the one in whose code the traceback ends, else the candidate's own."""
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
    from harness.rollout.sglang_api.probe import probe
    from harness.rollout.sglang_api.source import SourceTree

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
    command = join(command_of(question, environment.python, Path("/tmp")))
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
    # PYTHONPATH is never that of the user's shell, because launch/bisect_versions.py puts its checkout there for itself.
    changed = {n: v for n, v in variables.items() if n not in hidden and (v != os.environ.get(n) or n == "PYTHONPATH")}
    return [
        f'PATH={quote(str(Path(environment.python).parent))}:"$PATH"',
        *(f"{name}={quote(value)}" for name, value in changed.items()),
    ]
