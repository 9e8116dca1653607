"""report.md and report.html: the answer, every verdict, what changed at the edge, and how to see it again."""

import os
import platform
import re
from collections import deque
from collections.abc import Iterator, Mapping
from dataclasses import fields
from difflib import unified_diff
from html import escape
from pathlib import Path
from shlex import join, quote
from typing import Any

from packaging.utils import canonicalize_name

from harness.runtime import redact
from harness.tools.bisection.answer import Answer, candidate_rows, sentences
from harness.tools.bisection.candidates import Candidate, git
from harness.tools.bisection.causes import LogTrace, module_of, relative_file, trace_at
from harness.tools.bisection.installation import Environment, package_root, package_sources, store_of
from harness.tools.bisection.question import SCRIPT, command_of, is_of_this_repository
from harness.tools.bisection.search import Edge
from harness.tools.bisection.state import Record, State
from harness.tools.diagnose.log_lines import raw_lines
from harness.tools.environments import has_gpu

UPSTREAM = {
    "sglang": "sgl-project/sglang",
    "torch": "pytorch/pytorch",
    "transformers": "huggingface/transformers",
    "flashinfer-python": "flashinfer-ai/flashinfer",
    "torch-memory-saver": "fzyzcjy/torch_memory_saver",
}
"""Repositories whose tags are v and the version."""
NOT_SHOWN = ("PATH", "VIRTUAL_ENV", "PYTHONNOUSERSITE", "HARNESS_VENV")
"""Variables that a run has otherwise than this process, and that a command to reproduce it does without."""
MOST_SUBJECTS, MOST_LINES_OF_A_FILE = 30, 60
_LOG_LINES, _LINES_AFTER = 30, 8
_GITHUB = re.compile(r"(?:https://|(?:ssh://)?git@)github\.com[:/](.+?)(?:\.git)?/?")
_LINK = re.compile(r"https://[^\s|]+|\bruns/[\w.+-]+/\d+/log\.txt")


def write_reports(state: State, answer: Answer, folder: Path) -> str:
    """Write both reports, without secrets, and each environment's freeze; return the answer in a few lines. Raises OSError."""
    for record in state.records:
        file = _freeze_file(folder, record.name)
        file.parent.mkdir(exist_ok=True)
        file.write_text("".join(f"{package}=={version}\n" for package, version in record.freeze.items()))
    text = redact.text("\n".join(_markdown(state, answer, folder)) + "\n")
    (folder / "report.md").write_text(text, encoding="utf-8")
    (folder / "report.html").write_text(redact.text(bisect_page(text, state)), encoding="utf-8")
    return redact.text("\n".join([*sentences(state, answer), _cost(state)]))


def _freeze_file(folder: Path, name: str) -> Path:
    return folder / "environments" / f"{name}.txt"


def _markdown(state: State, answer: Answer, folder: Path) -> Iterator[str]:
    """Yield lines. Only blocks of Markdown are used, because bisect_page() shows all else as it stands."""
    options = state.question.options
    yield from (f"# Bisect of {options.package}, {state.candidates[0].label} to {state.candidates[-1].label}", "")
    for sentence in sentences(state, answer):
        yield from (sentence, "")
    yield from ("```", join(["python", SCRIPT, *state.question.words()]), "```", "")
    yield from ("## Verdicts", "", "| candidate | verdict | run | first failure, or why | seconds | log |")
    yield "|---|---|---|---|---|---|"
    for number, record in sorted(enumerate(state.records, 1), key=lambda each: state.index(each[1].name)):
        label = state.candidates[state.index(record.name)].label.replace("|", "/")
        reason = record.reason.replace("|", "/")
        run = "replayed" if record.replayed else str(number)
        log = record.decisive.log if record.decisive else "-"
        yield f"| {label} | {record.verdict} | {run} | {reason} | {record.seconds:.1f} | {log} |"
    yield from ("", *(f"- {name[:24]}: {reason}" for name, reason in state.closed.items()), "")
    for edge in answer.edges:
        yield from _edge(state, edge, folder)
    if answer.second is not None:
        yield from _first_failure(state.record(answer.second.seen), folder)
    yield from ("## Cost", "", _cost(state), "", f"- {platform.platform()}, Python {platform.python_version()}")
    yield f"- {store_of(options).describe()}"
    cpu = "no GPU: SGLang in its CPU mode, with the stand-ins of harness/runtime/standins"
    yield f"- {'an NVIDIA GPU' if has_gpu() else cpu}"


def _cost(state: State) -> str:
    ran = [record for record in state.records if not record.replayed]
    runs, waited = sum(record.seconds for record in ran), sum(record.waited_seconds for record in ran)
    search = state.wall_seconds - state.resolving_seconds
    share = f", {search / runs - 1:+.0%} of the runs" if runs else ""
    return (
        f"{len(ran)} candidates run of {len(state.candidates)}: runs {runs:.1f} s, the search around them {search:.1f} s{share},"
        f" after {state.resolving_seconds:.1f} s of resolving. Waited for environments: {waited:.1f} s."
    )


def _edge(state: State, edge: Edge, folder: Path) -> Iterator[str]:
    options, sides = state.question.options, (edge.before, edge.after)
    before, after = records = [state.record(index) for index in sides]
    candidates = [state.candidates[index] for index in sides]
    bad = after if after.verdict == "bad" else before
    yield from (f"## What changed from {candidates[0].label} to {candidates[1].label}", "")
    repository, tags = UPSTREAM.get(canonicalize_name(options.package), ""), f"v{before.name}...v{after.name}"
    if options.git:
        origin = _GITHUB.fullmatch(git(Path(options.git), "remote", "get-url", "origin"))
        repository, tags = origin[1] if origin else "", f"{before.name}...{after.name}"
    yield from (f"- https://github.com/{repository}/compare/{tags}", "") if repository else ()
    if options.git:
        merged = git(Path(options.git), "log", "--format=- %h %s", f"{before.name}..{after.name}").splitlines()
        more = [f"- and {len(merged) - MOST_SUBJECTS} more"] if len(merged) > MOST_SUBJECTS else []
        yield from (*merged[:MOST_SUBJECTS], *more, "")
    made = bad.decisive
    log = folder / made.log if made and made.line else None
    trace = trace_at(str(log), made.line) if made and log and log.is_file() else None
    yield from _packages(before.freeze, after.freeze, trace, options.package)
    yield from _traceback_files(before, after, trace, options.package)
    yield from changed_api(before, after)
    yield from _first_failure(bad, folder)
    lines: list[str] = []
    for record, candidate in zip(records, candidates, strict=True):
        if record.freeze:
            lines += [f"# {record.verdict}: {candidate.label}", *reproduce_commands(state, record, candidate, folder)]
    yield from ("## Reproduce with", "", "```", *lines, "```", "") if lines else ()


def _packages(old: Mapping[str, str], new: Mapping[str, str], trace: LogTrace | None, package: str) -> Iterator[str]:
    """Yield the packages that differ; suspected is the one in whose code the traceback ends, else the one that moved."""
    changed = sorted(name for name in {*old, *new} if old.get(name) != new.get(name))
    if not old or not new or not changed:
        return
    deepest = trace.frames[-1][0] if trace and trace.frames else ""
    moved = [canonicalize_name(package)] if len(changed) > 1 else changed
    suspect = max([*moved, *changed], key=lambda name: deepest.rfind(f"/{module_of(name)}/"))
    yield from ("| package | before | after | |", "|---|---|---|---|")
    for name in changed:
        mark = "likely suspect" if name == suspect else ""
        yield f"| {name} | {old.get(name, '-')} | {new.get(name, '-')} | {mark} |"
    yield ""


def _traceback_files(before: Record, after: Record, trace: LogTrace | None, package: str) -> Iterator[str]:
    """Yield how the files that the failure's traceback names differ, the deepest frame's first."""
    old, new = (package_root(record.paths, record.python, package) for record in (before, after))
    if old is None or new is None or old == new or trace is None:
        return
    files = dict.fromkeys(relative_file(file, package) for file, _ in trace.inside(package))
    for number, file in enumerate(files):
        was, now = (p.read_text(errors="replace").splitlines() if p.is_file() else [] for p in (old / file, new / file))
        lines = [_ascii(line) for line in unified_diff(was, now, f"before/{file}", f"after/{file}", lineterm="")]
        more = [f"... {len(lines) - MOST_LINES_OF_A_FILE} lines more"] if len(lines) > MOST_LINES_OF_A_FILE else []
        yield from ("## What changed in the files of the traceback", "") if not number else ()
        yield from ("```", *(lines or [f"{file} is unchanged"])[:MOST_LINES_OF_A_FILE], *more, "```", "")


def changed_api(before: Record, after: Record) -> Iterator[str]:
    """Yield the engine arguments and other facts of the two SGLangs that differ."""
    roots = [package_root(record.paths, record.python, "sglang") for record in (before, after)]
    if None in roots or roots[0] == roots[1]:
        return
    from harness.rollout.sglang_api.probe import probe
    from harness.rollout.sglang_api.source import SourceTree

    try:
        old, new = (probe(SourceTree(root / "sglang")) for root in roots if root)
    except ValueError:
        return  # a package of this name that is not SGLang, or a tree of another age
    gone, added = old.engine_arguments - new.engine_arguments, new.engine_arguments - old.engine_arguments
    yield from ("## Changed engine arguments and API", "")
    yield f"- engine arguments gone: {', '.join(sorted(gone)) or 'none'}"
    yield f"- engine arguments new: {', '.join(sorted(added)) or 'none'}"
    for name in [field.name for field in fields(old) if field.name not in ("tree", "version", "engine_arguments")]:
        if getattr(old, name) != getattr(new, name):
            yield f"- {name}: {getattr(old, name)!r} -> {getattr(new, name)!r}"
    yield ""


def _first_failure(bad: Record, folder: Path) -> Iterator[str]:
    if not bad.decisive:
        return
    log = folder / bad.decisive.log
    yield from (f"## First failure of {bad.name[:24]}", "", bad.reason, "")
    yield from (f"All of its output: {bad.decisive.log}", "")
    if bad.decisive.slug:
        yield from (f"It is known as {bad.decisive.slug}: see launch/diagnose.py.", "")
    kept: deque[str] = deque(maxlen=_LOG_LINES)  # the lines around the failure's own, or the last ones
    for position, raw in raw_lines(str(log)) if log.is_file() else ():
        kept.append(_ascii(raw.decode("utf-8", "replace").rstrip()))
        if bad.decisive.line and position >= bad.decisive.line + _LINES_AFTER:
            break
    yield from ("```", *kept, "```", "") if any(kept) else ()


def _ascii(line: str) -> str:
    return line.encode("ascii", "replace").decode().replace("```", "'''")


def reproduce_commands(state: State, record: Record, candidate: Candidate, folder: Path) -> list[str]:
    """Return a line each, for a shell, that show a verdict again, without this program if that is possible."""
    question, options = state.question, state.question.options
    place = f"/tmp/{options.package}-{candidate.name[:12]}"
    python, paths, made = record.python, record.paths, []
    if options.git:
        made = [f"git -C {quote(options.git)} worktree add --detach {place} {candidate.name}"]
        paths = tuple(each.replace(each.partition("/files")[0] + "/files", place) for each in paths)
    elif options.only_package:
        words = ["uv", "pip", "install", "--no-deps", "--target", place, "--python", python, *package_sources(options)]
        made, paths = [join([*words, f"{options.package}=={candidate.name}"])], (place,)
    elif not options.environments:
        own = ".".join(Path(python).resolve().name.removeprefix("python").split(".")[:2]) or "3"
        python = f"{place}/bin/python"
        install = ["uv", "pip", "install", "--no-deps", "--python", python, *package_sources(options)]
        made = [f"uv venv --python {own} {place}", join([*install, "-r", str(_freeze_file(folder, candidate.name))])]
    environment = Environment(python=python, paths=paths, freeze=record.freeze)
    variables = environment.variables(not has_gpu(), is_of_this_repository(question))
    changed = {n: value for n, value in variables.items() if value != os.environ.get(n) and n not in NOT_SHOWN}
    assigned = [f"{name}={quote(value)}" for name, value in changed.items() if value]
    command = join(command_of(question, python, Path("/tmp")))
    return [*made, " ".join([f"cd {quote(question.folder)} &&", *assigned, command])]


def bisect_page(markdown: str, state: State) -> str:
    """Return the report as one page that needs no other file, with the candidates in order above it.

    Links lead to upstream and to the runs' logs. Inline Markdown stays as it is: __init__ in a log is no emphasis.
    """
    import jinja2
    from markdown_it import MarkdownIt

    def linked(renderer: object, tokens: Any, index: int, options: object, env: object) -> str:
        return _LINK.sub(lambda found: f'<a href="{found[0]}">{found[0]}</a>', escape(tokens[index].content))

    title, _, rest = markdown.partition("\n")
    parser = MarkdownIt("zero").enable(["fence", "heading", "list", "table"])
    parser.add_render_rule("text", linked)
    loader = jinja2.FileSystemLoader(Path(__file__).parent)
    environment = jinja2.Environment(loader=loader, autoescape=True, undefined=jinja2.StrictUndefined)
    template = environment.get_template("bisect_page.html.jinja")
    return template.render(title=title.removeprefix("# "), body=parser.render(rest), rows=candidate_rows(state))
