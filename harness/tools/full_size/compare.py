"""The same question to two releases of SGLang: which names arrive in one and not in the other, and what their engines
hold.

Both answers are compared in the form that --json writes. A difference that layers, experts or ranks share is reported
once.
"""

import json
import re
import subprocess
import sys
import tempfile
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, fields
from itertools import groupby
from pathlib import Path
from typing import Any

from harness.config.layers import ConfigError
from harness.runtime.errors import UnsupportedEnvironment
from harness.runtime.events import working
from harness.tools.bisection.candidates import Candidate, between, releases
from harness.tools.bisection.installation import Environment, Unavailable, provider_of, store_root
from harness.tools.bisection.question import Options as BisectOptions
from harness.tools.bisection.question import Pause, WrongQuestion
from harness.tools.bisection.question import Question as BisectQuestion
from harness.tools.environments import REPOSITORY, has_gpu
from harness.tools.full_size.model_and_options import Options, read_question

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
    there = environment_of(options.against)
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


def environment_of(release: str) -> Environment:
    """Return the environment of a release of SGLang, which is installed as a bisect does, and kept.

    Raise ConfigError if there is no such release, UnsupportedEnvironment if it cannot be installed here.
    """
    no_gpu = not has_gpu()
    folder = store_root() / f"against-{'cpu' if no_gpu else 'gpu'}"
    question = BisectQuestion(options=BisectOptions(package="sglang"), command=(SCRIPT,), folder=str(REPOSITORY))
    try:
        if (folder / "resolutions" / f"{release}.txt").exists():  # it was resolved before: no index is needed
            candidate = Candidate(name=release)
        else:
            [candidate] = between(releases("sglang"), release, release, "sglang")
        with working(f"installing sglang {release}"):
            return provider_of(question, folder, no_gpu).make(candidate)
    except WrongQuestion as error:
        raise ConfigError(str(error)) from error
    except (Unavailable, Pause) as error:
        raise UnsupportedEnvironment(f"sglang {release} cannot be installed: {error}") from error


def ask(environment: Environment, words: Sequence[str]) -> dict[str, Any]:
    """Return the table that launch/full_size.py writes in an environment, and print its verdict.

    Raise UnsupportedEnvironment with its own last words if it has none.
    """
    with tempfile.TemporaryDirectory() as scratch:
        file = Path(scratch) / "found.json"
        command = [environment.python, str(REPOSITORY / SCRIPT), *words, "--json", str(file)]
        variables = environment.variables(cpu_mode=True, imports_harness=True)
        ended = subprocess.run(command, env=variables, capture_output=True, text=True)
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
            more = f", of which {SHOWN} are shown" if len(lines) > SHOWN else ""
            yield f"what {title} differs in {len(lines)} way(s){more}:"
            yield from (f"  {line}" for line in lines[:SHOWN])


def compare(first: Table, second: Table) -> Comparison:
    """Return what differs between the answers of two releases to the same question."""
    names = name_of(first), name_of(second)
    return Comparison(
        names=names,
        sent=len(second["sent"]),
        arrives=(*_of_sent(first, second), *_of_fate(first, second)),
        holds=() if first["cannot_build"] or second["cannot_build"] else tuple(_of_parameters(first, second)),
    )


def name_of(table: Table) -> str:
    """Return the release that answered."""
    versions = table["versions"]
    return f"sglang {versions['sglang']} with transformers {versions['transformers']}"


def _of_sent(first: Table, second: Table) -> Iterator[str]:
    """Yield lines on names that only one trainer sends, or with another dtype or shape."""
    yield from in_groups(
        _changes(first["sent"], second["sent"], f"sent only to {name_of(first)}", f"sent only to {name_of(second)}")
    )


def _of_fate(first: Table, second: Table) -> Iterator[str]:
    """Yield lines on what is lost in one answer and not in the other."""
    for table, other in ((first, second), (second, first)):
        if table["cannot_build"]:
            if not other["cannot_build"]:
                yield f"{name_of(table)} cannot build the engine: {table['cannot_build']}"
            continue
        if other["cannot_build"]:
            continue
        known = {_subject(sentence) for sentence in other["problems"]}
        lost = [sentence for sentence in table["problems"] if _subject(sentence) not in known]
        yield from in_groups((_subject(each), f"with {name_of(table)} {_fate(each)}") for each in lost)
        untold = sorted(set(table["not_followed"]) - set(other["not_followed"]))
        yield from in_groups((name, f"cannot be followed with {name_of(table)}") for name in untold)


def _subject(sentence: str) -> str:
    """Return the tensor that a sentence begins with."""
    return sentence.partition(":")[0]


def _fate(sentence: str) -> str:
    """Return what a sentence says of its tensor, without the engine's rank: one line stands for all ranks."""
    said = sentence.partition(":")[2].strip()
    return re.sub(r"on engine rank \d+", "on some engine rank", re.sub(r"\b(layers|experts)\.\d+\.", r"\1.*.", said))


def _of_parameters(first: Table, second: Table) -> Iterator[str]:
    """Yield lines on parameters, each with the ranks that it holds for, and on bytes."""
    ranks_of: dict[str, list[int]] = defaultdict(list)
    older, newer = _held(first), _held(second)
    only = f"held only by {name_of(first)}", f"held only by {name_of(second)}"
    for rank in sorted(older.keys() & newer.keys()):
        for line in in_groups(_changes(older[rank], newer[rank], *only)):
            ranks_of[line].append(rank)
    for line, ranks in ranks_of.items():
        yield line if len(ranks) == len(newer) else f"{line}; on engine ranks {ranges(ranks)}"
    sizes: dict[str, list[int]] = defaultdict(list)
    before = {each["rank"]: each["bytes"] for each in first["ranks"]}
    for each in second["ranks"]:
        if before.get(each["rank"], each["bytes"]) != each["bytes"]:
            sizes[f"{before[each['rank']] / 1e9:.3f} GB -> {each['bytes'] / 1e9:.3f} GB"].append(each["rank"])
    yield from (f"bytes of parameters: {text}; on engine ranks {ranges(ranks)}" for text, ranks in sizes.items())


def _held(table: Table) -> dict[int, dict[str, list[Any]]]:
    return {rank: each["parameters"] for each in table["held"] for rank in each["ranks"]}


def _changes(
    first: Mapping[str, list[Any]], second: Mapping[str, list[Any]], only_first: str, only_second: str
) -> Iterator[tuple[str, str]]:
    """Yield each tensor that differs, and how. The values are dtype and shape."""
    for name in dict.fromkeys((*first, *second)):
        if name not in second:
            yield name, f"{only_first}, {_described(first[name])}"
        elif name not in first:
            yield name, f"{only_second}, {_described(second[name])}"
        elif list(first[name]) != list(second[name]):
            yield name, f"{_described(first[name])} -> {_described(second[name])}"


def _described(tensor: Sequence[Any]) -> str:
    dtype, shape = tensor
    return f"{dtype} {list(shape)}"


def in_groups(found: Iterable[tuple[str, str]]) -> Iterator[str]:
    """Yield one line for all tensors whose names differ in numbers alone and of which the same is said."""
    groups: dict[tuple[str, str], list[str]] = defaultdict(list)
    for name, text in found:
        groups[re.sub(r"(?<=\.)\d+(?=\.)", "*", name), text].append(name)
    for (pattern, text), names in groups.items():
        if len(names) == 1:
            yield f"{names[0]}: {text}"
            continue
        layers = sorted({int(each[1]) for name in names if (each := re.search(r"\blayers\.(\d+)\.", name))})
        yield f"{pattern}: {text} ({len(names):,} tensors{f', layers {ranges(layers)}' if layers else ''})"


def ranges(numbers: Sequence[int]) -> str:
    """Return ascending numbers as text, such as "0-2, 5"."""
    runs = groupby(enumerate(numbers), key=lambda each: each[1] - each[0])
    ends = [(members[0][1], members[-1][1]) for members in (list(run) for _, run in runs)]
    return ", ".join(str(low) if low == high else f"{low}-{high}" for low, high in ends)
