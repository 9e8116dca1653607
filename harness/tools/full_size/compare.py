"""The same question to two releases of SGLang: which names arrive in one and not in the other, and what their engines
hold.

Both answers are compared in the form that --json writes. A difference that layers, experts or ranks share is reported
once.
"""

import json
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any

from harness.config.layers import ConfigError
from harness.runtime.errors import UnsupportedEnvironment
from harness.runtime.events import working
from harness.runtime.ranks import runs
from harness.tools.environments import REPOSITORY
from harness.tools.full_size.model_and_options import Options, read_question
from harness.tools.trial.environment import Environment, of_release, run_script
from harness.weights.findings import Finding, grouped, shown

SCRIPT = "launch/full_size.py"
NOT_PASSED_ON = ("against", "json")
SHOWN = 12
"""How many lines of each kind are printed; the JSON has all."""
Table = Mapping[str, Any]
"""What --json writes."""


@dataclass(frozen=True, kw_only=True)
class Comparison:
    """What differs between two answers."""

    names: tuple[str, str]
    """The two releases, such as "sglang 0.5.17 with transformers 5.12.1"."""
    sent: int
    """How many names the trainer sends to the second."""
    arrives: tuple[str, ...]
    """What is sent or arrives in one alone."""
    holds: tuple[str, ...]
    """Parameters of the engine that one alone has, or that have another shape or dtype."""

    def verdict(self) -> str:
        first, second = self.names
        if self.arrives:
            return f"VERDICT: what arrives differs between {first} and {second}; first: {self.arrives[0]}"
        same = f"VERDICT: the same {self.sent:,} names are sent to {first} and {second}, and no more of them are lost"
        if self.holds:
            return f"{same}; their engines hold other parameters; first: {self.holds[0]}"
        return f"{same}; their engines hold equal parameters"


def against(name: str, options: Options, words: Sequence[str]) -> int:
    """Ask the release of --against, and the installed one; print what differs and return the exit code.

    0 if the same names are sent and arrive, 1 if not. Raise ConfigError, UnsupportedEnvironment.
    """
    with tempfile.TemporaryDirectory() as scratch:
        if read_question(name, options, words, Path(scratch)).run:
            raise ConfigError(
                "--against compares one engine; leave out --nnodes, and give a MODEL that is no config of a run."
            )
    asked = [str(Path(name).absolute()) if Path(name).exists() else name, *_words_of(options)]
    there = of_release(options.against)
    here = Environment(python=sys.executable)
    with working(f"asking sglang {options.against} and the installed one"):
        tables = [ask(there, asked), ask(here, asked)]
    found = compare(*tables)
    for line in lines_of(found):
        print(line)
    if options.json:
        table = {"answers": tables, "arrives": found.arrives, "holds": found.holds}
        Path(options.json).write_text(json.dumps(table, indent=1))
    print(found.verdict())
    return 1 if found.arrives else 0


def _words_of(options: Options) -> list[str]:
    """Return the options that are not the default ones, as on a command line."""
    words = []
    for each in fields(options):
        value = getattr(options, each.name)
        if each.name not in NOT_PASSED_ON and value != each.default:
            flag = f"--{each.name.replace('_', '-')}"
            words += [flag] if value is True else [flag, str(value)]
    return words


def ask(environment: Environment, words: Sequence[str]) -> dict[str, Any]:
    """Return the table that launch/full_size.py writes in an environment, and print its verdict.

    Raise UnsupportedEnvironment with its own last words if it has none.
    """
    with tempfile.TemporaryDirectory() as scratch:
        file = Path(scratch) / "found.json"
        ended = run_script(environment, [str(REPOSITORY / SCRIPT), *words, "--json", str(file)], capture_output=True)
        if not file.exists():
            last = ended.stderr.strip().rpartition("\n")[2].removeprefix("error: ") or "no output"
            raise UnsupportedEnvironment(f"{environment.python} gave no answer (exit code {ended.returncode}): {last}")
        table: dict[str, Any] = json.loads(file.read_text())
    print(f"{name_of(table)}: {ended.stdout.strip().rpartition(chr(10))[2]}", flush=True)
    return table


def lines_of(found: Comparison) -> Iterator[str]:
    """Yield the lines to print above the verdict."""
    for title, lines in (("arrives", found.arrives), ("is held by the engine", found.holds)):
        if lines:
            yield f"what {title} differs in {len(lines)} way(s):"
            yield from (f"  {line}" for line in shown(lines, SHOWN))


def compare(first: Table, second: Table) -> Comparison:
    """Return what differs between the answers of two releases to the same question."""
    cannot_build = first["cannot_build"] or second["cannot_build"]
    only = f"sent only to {name_of(first)}", f"sent only to {name_of(second)}"
    sent = grouped(_changes(first["sent"], second["sent"], *only))
    return Comparison(
        names=(name_of(first), name_of(second)),
        sent=len(second["sent"]),
        arrives=(*map(str, sent), *_of_fate(first, second), *_of_fate(second, first)),
        holds=() if cannot_build else tuple(map(str, grouped(_of_parameters(first, second)))),
    )


def name_of(table: Table) -> str:
    """Return the release that answered."""
    versions = table["versions"]
    return f"sglang {versions['sglang']} with transformers {versions['transformers']}"


def _of_fate(table: Table, other: Table) -> Iterator[str]:
    """Yield lines on what is lost in one answer and not in the other."""
    if table["cannot_build"] and not other["cannot_build"]:
        yield f"{name_of(table)} cannot build the engine: {table['cannot_build']}"
    if table["cannot_build"] or other["cannot_build"]:
        return
    known = {each["tensor"] for each in other["findings"]}
    lost: dict[tuple[str, str], Finding] = {}
    for each in map(Finding.of_table, table["findings"]):
        if each.tensor not in known:  # one line for all ranks that lack it
            before = lost.setdefault((each.kind, each.tensor), each)
            lost[each.kind, each.tensor] = replace(before, ranks=tuple(sorted({*before.ranks, *each.ranks})))
    yield from (f"with {name_of(table)}: {line}" for line in grouped(lost.values()))
    untold = sorted(set(table["not_followed"]) - set(other["not_followed"]))
    where = {"where": name_of(table)}
    yield from map(str, grouped(Finding(kind="not followed", tensor=name, counts=where) for name in untold))


def _of_parameters(first: Table, second: Table) -> Iterator[Finding]:
    """Yield how parameters differ, each with the ranks that it holds for."""
    older, newer = _held(first), _held(second)
    only = f"held only by {name_of(first)}", f"held only by {name_of(second)}"
    found: dict[str, tuple[Finding, list[int]]] = {}
    for rank in sorted(older.keys() & newer.keys()):
        for each in _changes(older[rank], newer[rank], *only):
            found.setdefault(str(each), (each, []))[1].append(rank)
    for each, ranks in found.values():
        on = "" if len(ranks) == len(newer) else f"; on engine ranks {runs(ranks)}"
        yield replace(each, counts={**each.counts, "on": on})


def _held(table: Table) -> dict[int, dict[str, list[Any]]]:
    return {rank: each["parameters"] for each in table["held"] for rank in each["ranks"]}


def _changes(
    first: Mapping[str, list[Any]], second: Mapping[str, list[Any]], only_first: str, only_second: str
) -> Iterator[Finding]:
    """Yield each tensor that differs, and how. The values are dtype and shape."""
    for name in dict.fromkeys((*first, *second)):
        before, after = (_described(table[name]) if name in table else "" for table in (first, second))
        if before and after and before != after:
            yield Finding(kind="changed", tensor=name, counts={"before": before, "form": after, "on": ""})
        elif before != after:
            counts = {"where": only_second if after else only_first, "form": before or after, "on": ""}
            yield Finding(kind="only", tensor=name, counts=counts)


def _described(tensor: Sequence[Any]) -> str:
    dtype, shape = tensor
    return f"{dtype} {list(shape)}"
