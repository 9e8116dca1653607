"""report.md and report.html: the answer, every verdict, what changed at the edge, and how to see it again."""

import os
import platform
import re
from collections import deque
from collections.abc import Iterator, Mapping
from dataclasses import fields
from difflib import unified_diff
from pathlib import Path
from shlex import join, quote
from typing import Any

from harness.runtime import redact
from harness.tools.bisection.answer import Answer, candidate_rows, sentences
from harness.tools.bisection.candidates import Candidate, github_page, subjects
from harness.tools.bisection.causes import module_of, normal_name, relative_file, trace_at
from harness.tools.bisection.installation import (
    Environment,
    package_root,
    package_sources,
    store_of,
    unmet_requirements,
)
from harness.tools.bisection.measurement import numbers_table
from harness.tools.bisection.question import SCRIPT, command_of, is_of_this_repository
from harness.tools.bisection.search import DECIDED, Edge, most_runs
from harness.tools.bisection.state import Record, State
from harness.tools.diagnose.log_lines import LogLine, raw_lines
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
"""Repositories whose tags are v and the version."""
SHOWN_VARIABLES = (
    "PYTHONPATH",
    "SGLANG_USE_CPU_ENGINE",
    "SGLANG_CPU_OMP_THREADS_BIND",
    "OMP_NUM_THREADS",
    "TORCHDYNAMO_DISABLE",
    "SGLANG_NCCL_SO_PATH",
)
"""Variables that a command to reproduce a run sets, if the run had other values than this process."""
MOST_SUBJECTS = 30
MOST_LINES, MOST_LINES_OF_A_FILE = 160, 60
_LOG_LINES, _LINES_AFTER = 30, 8
_FRAME = re.compile(r'File "[^"]*?/(?:site-packages|site|python)/(?P<module>\w+)[./]')
_EXCEPTION_LINE = re.compile(r"^[\w.]*(?:Error|Exception|Exit|Interrupt)\b", re.MULTILINE)
_SKIPPED_FIELDS = ("tree", "version", "engine_arguments")


def write_reports(state: State, answer: Answer, folder: Path) -> str:
    """Write both reports, without secrets, and each environment's freeze; return the answer in a few lines. Raises OSError."""
    for record in state.records:
        if record.freeze:
            file = _freeze_file(folder, record.name)
            file.parent.mkdir(exist_ok=True)
            file.write_text("".join(f"{package}=={version}\n" for package, version in record.freeze.items()))
    text = redact.text("\n".join(_markdown(state, answer, folder)) + "\n")
    (folder / "report.md").write_text(text, encoding="utf-8")
    (folder / "report.html").write_text(redact.text(bisect_page(text, state, folder)), encoding="utf-8")
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
    yield from _verdicts(state)
    yield from numbers_table(state)
    for edge in answer.edges if answer.kind != "open" else ():
        yield from _edge(state, edge, folder)
    if answer.second is not None:
        yield from _first_failure(state.record(answer.second.seen), folder)
    yield from ("## Cost", "", _cost(state), "")
    yield from ("## Where", "", f"- {platform.platform()}, Python {platform.python_version()}")
    if not options.environments:
        yield f"- {store_of(options).describe()}"
    cpu = "no GPU: SGLang in its CPU mode, with the stand-ins of harness/runtime/standins"
    yield from (f"- {'an NVIDIA GPU' if has_gpu() else cpu}", "")


def _verdicts(state: State) -> Iterator[str]:
    """Yield a table of what ran, in order, and a list of what could not."""
    yield from ("## Verdicts", "", "| run | candidate | verdict | first failure, or why | seconds | log |")
    yield "|---|---|---|---|---|---|"
    for number, record in enumerate(state.records, 1):
        label = state.candidates[state.index(record.name)].label.replace("|", "/")
        log = record.decisive.log if record.decisive else "-"
        reason = record.reason.replace("|", "/") + (" (replayed)" if record.replayed else "")
        yield f"| {number} | {label} | {record.verdict} | {reason} | {record.seconds:.1f} | {log} |"
    yield ""
    if state.closed:
        yield from ("## Not run", "", *(f"- {name[:24]}: {reason}" for name, reason in state.closed.items()), "")


def _cost(state: State) -> str:
    """Return what it took, and what the search itself added to the runs."""
    ran = [record for record in state.records if not record.replayed]
    runs, waited = sum(record.seconds for record in ran), sum(record.waited_seconds for record in ran)
    most = most_runs(len(state.candidates), sum(record.verdict not in DECIDED for record in state.records))
    search = state.wall_seconds - state.resolving_seconds
    share = f", {search / runs - 1:+.0%} of the runs" if runs else ""
    return (
        f"{len(ran)} candidates run of {len(state.candidates)} (at most {most} for one edge): runs {runs:.1f} s, the search"
        f" around them {search:.1f} s{share}, after {state.resolving_seconds:.1f} s of resolving. Waited for environments:"
        f" {waited:.1f} s, {ran[0].waited_seconds if ran else 0.0:.1f} s of it before the first run; their installs took"
        f" {sum(state.installs.values()):.1f} s."
    )


def _edge(state: State, edge: Edge, folder: Path) -> Iterator[str]:
    options, sides = state.question.options, (edge.before, edge.after)
    before, after = records = [state.record(index) for index in sides]
    candidates = [state.candidates[index] for index in sides]
    bad = after if after.verdict == "bad" else before
    yield from (f"## What changed from {candidates[0].label} to {candidates[1].label}", "")
    if address := _compare_page(state, before.name, after.name):
        yield from (f"- {address}", "")
    if options.git:
        merged = subjects(Path(options.git), before.name, after.name)
        yield from (f"- {subject}" for subject in merged[:MOST_SUBJECTS])
        if len(merged) > MOST_SUBJECTS:
            yield f"- and {len(merged) - MOST_SUBJECTS} more: git log --oneline {before.name[:12]}..{after.name[:12]}"
        yield ""
    yield from _packages(state, before, after, bad, folder)
    for record in records:
        yield from requirements_table(state, record)
    yield from _traceback_files(before, after, bad, options.package, folder)
    yield from changed_api(before, after)
    yield from _first_failure(bad, folder)
    lines: list[str] = []
    for record, candidate in zip(records, candidates, strict=True):
        if record.freeze:
            lines += [f"# {record.verdict}: {candidate.label}", *reproduce_commands(state, record, candidate, folder)]
    if lines:
        yield from ("## Reproduce with", "", "```", *lines, "```", "")


def requirements_table(state: State, record: Record) -> Iterator[str]:
    """Yield what a candidate wants of the packages that it is laid over, and what they have."""
    if lacks := unmet_requirements(record.paths, state.question.options.package, record.freeze):
        yield from (
            f"## Requirements that {record.name[:12]} did not get",
            "",
            "| package | wants | has |",
            "|---|---|---|",
        )
        yield from (f"| {u.package} | {u.wants.replace('|', '/')} | {u.has or 'not installed'} |" for u in lacks)
        yield ""


def _compare_page(state: State, before: str, after: str) -> str:
    """Return upstream's page of the commits between the two; "" if it is not known."""
    options = state.question.options
    if options.git:
        address = github_page(Path(options.git))
        return f"{address}/compare/{before}...{after}" if address else ""
    repository = UPSTREAM.get(normal_name(options.package), "")
    return f"https://github.com/{repository}/compare/v{before}...v{after}" if repository else ""


def _packages(state: State, before: Record, after: Record, bad: Record, folder: Path) -> Iterator[str]:
    """Yield the packages that differ, and which of them to suspect."""
    question, package = state.question, normal_name(state.question.options.package)
    if not before.freeze or not after.freeze:
        return
    old, new = before.freeze, after.freeze
    changed = {
        name: (old.get(name, ""), new.get(name, "")) for name in sorted({*old, *new}) if old.get(name) != new.get(name)
    }
    if not changed:
        yield from (f"No resolved package changed{' but the commit itself' if question.options.git else ''}.", "")
        return
    suspect = _suspect(_log(bad, folder), changed, package)
    yield from ("| package | before | after | |", "|---|---|---|---|")
    for name, (was, now) in changed.items():
        yield f"| {name} | {was or '-'} | {now or '-'} | {'likely suspect' if name == suspect else ''} |"
    yield ""
    if suspect and suspect != package:
        ends = ["--good", changed[suspect][0], "--bad", changed[suspect][1]]
        held = f"{question.options.package}=={old.get(package, before.name)}"
        command = ["python", SCRIPT, "--package", suspect, "--hold", held, *ends, "--", *question.command]
        yield f"The failure shows in {suspect}, which changed as well. To hold everything else and move it alone:"
        yield from ("", "```", join(command), "```", "")


def _suspect(log: str, changed: Mapping[str, tuple[str, str]], moved: str) -> str:
    """Return the changed package in whose code the first traceback of a log ends, else the moved one, else the only one."""
    by_module = {module_of(name): name for name in changed}
    exception = _EXCEPTION_LINE.search(log)
    frames = [match["module"] for match in _FRAME.finditer(log[: exception.start()] if exception else "")]
    if frames and frames[-1] in by_module:
        return by_module[frames[-1]]
    return moved if moved in changed else next(iter(changed)) if len(changed) == 1 else ""


def _log(record: Record, folder: Path) -> str:
    file = folder / record.decisive.log if record.decisive else None
    return file.read_text(errors="replace") if file and file.is_file() else ""


def _traceback_files(before: Record, after: Record, bad: Record, package: str, folder: Path) -> Iterator[str]:
    """Yield how the files that the failure's traceback names differ; nothing if it names none, or a side's files are gone."""
    old, new = (package_root(record.paths, record.python, package) for record in (before, after))
    if old is None or new is None or old == new or not (files := _named_files(bad, package, folder, (old, new))):
        return
    yield from ("## What changed in the files of the traceback", "")
    left, unchanged = MOST_LINES, []
    for file in files:
        was, now = (p.read_text(errors="replace").splitlines() if p.is_file() else [] for p in (old / file, new / file))
        lines = [_ascii(line) for line in unified_diff(was, now, f"before/{file}", f"after/{file}", lineterm="")]
        if not lines:
            unchanged.append(file)
        elif left > 0:
            shown = lines[: min(left, MOST_LINES_OF_A_FILE)]
            left -= len(shown)
            more = [f"... {len(lines) - len(shown)} lines more"] if len(shown) < len(lines) else []
            yield from ("```", *shown, *more, "```", "")
    if unchanged:
        yield from (f"Unchanged: {', '.join(unchanged)}.", "")


def _named_files(bad: Record, package: str, folder: Path, roots: tuple[Path, Path]) -> list[str]:
    """Return files below either root: the deepest frame's first, then those of modules that the message names."""
    made = bad.decisive
    if made is None:
        return []
    found = []
    if made.line and (folder / made.log).is_file():
        trace = trace_at(LogLine(str(folder / made.log), 0, made.line, "", "", "", None))
        found += [relative_file(frame.file, package) for frame in reversed(trace.inside(package))] if trace else []
    for name in re.findall(rf"\b{re.escape(module_of(package))}(?:\.\w+)*", made.failure):
        path = name.replace(".", "/")
        found += [f"{path}.py", f"{path}/__init__.py"]
    return [file for file in dict.fromkeys(found) if any((root / file).is_file() for root in roots)]


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
    yield from ("## Changed engine arguments and API", "")
    lines = []
    if gone := sorted(old.engine_arguments - new.engine_arguments):
        lines.append(f"- engine arguments gone: {', '.join(gone)}")
    if added := sorted(new.engine_arguments - old.engine_arguments):
        lines.append(f"- engine arguments new: {', '.join(added)}")
    for field in fields(old):
        was, now = getattr(old, field.name), getattr(new, field.name)
        if field.name not in _SKIPPED_FIELDS and was != now:
            lines.append(f"- {field.name}: {was!r} -> {now!r}")
    yield from [*(lines or ["None of those that this harness probes."]), ""]


def _first_failure(bad: Record, folder: Path) -> Iterator[str]:
    if not bad.decisive:
        return
    log = folder / bad.decisive.log
    yield from (f"## First failure of {bad.name[:24]}", "", bad.reason, "", f"All of its output: {log}", "")
    if bad.decisive.slug:
        yield from (f"It is known as {bad.decisive.slug}: see launch/diagnose.py.", "")
    kept: deque[str] = deque(maxlen=_LOG_LINES)  # the lines around the failure's own, or the last ones
    for position, raw in raw_lines(str(log)) if log.is_file() else ():
        kept.append(_ascii(raw.decode("utf-8", "replace").rstrip()))
        if bad.decisive.line and position >= bad.decisive.line + _LINES_AFTER:
            break
    if any(kept):
        yield from ("```", *kept, "```", "")


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
    shown = (n for n in SHOWN_VARIABLES if variables.get(n) and variables[n] != os.environ.get(n))
    assigned = [f"{name}={quote(variables[name])}" for name in shown]
    command = join(command_of(question, python, Path("/tmp")))
    return [*made, " ".join([f"cd {quote(question.folder)} &&", *assigned, command])]


def bisect_page(markdown: str, state: State, folder: Path) -> str:
    """Return the report as one page that needs no other file, with the candidates in order above it.

    Links lead to upstream and to files below the folder. Inline Markdown stays as it is: __init__ in a log is no emphasis.
    """
    import jinja2
    from markdown_it import MarkdownIt

    title, _, rest = markdown.partition("\n")
    parser = MarkdownIt("zero").enable(["fence", "heading", "list", "table"])
    parser.add_render_rule("text", lambda self, tokens, index, options, env: linked(tokens[index].content, folder))
    loader = jinja2.FileSystemLoader(Path(__file__).parent)
    environment = jinja2.Environment(loader=loader, autoescape=True, undefined=jinja2.StrictUndefined)
    template = environment.get_template("bisect_page.html.jinja")
    return template.render(title=title.removeprefix("# "), body=parser.render(rest), rows=candidate_rows(state))


def linked(text: str, folder: Path) -> Any:
    """Return the text as HTML in which addresses, and files below the folder, are links."""
    from markupsafe import Markup, escape

    parts = []
    for word in re.split(r"(\s+)", text):
        address = word if word.startswith("https://") else _relative(word, folder)
        parts.append(Markup('<a href="{}">{}</a>').format(address, word) if address else escape(word))
    return Markup("").join(parts)


def _relative(word: str, folder: Path) -> str:
    """Return the path from the folder of a file below it; "" if the word names none."""
    for file in (folder / word, Path(word)):
        if "/" in word and ".." not in file.parts and file.is_relative_to(folder) and os.path.isfile(file):
            return str(file.relative_to(folder))
    return ""
