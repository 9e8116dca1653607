"""A report in Markdown as one HTML page that needs no other file; its links are to logs and upstream. Imports no torch."""

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import groupby
from os.path import isfile
from pathlib import Path
from typing import Any, Literal

from harness.tools.bisection.measured import number_of
from harness.tools.bisection.state import State

MOST_UNRUN = 6
"""Neighbours that were not run and have a cell each."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Block:
    """One piece of a report."""

    kind: Literal["heading", "text", "code", "list", "table"]
    text: str = ""
    rows: tuple[Any, ...] = ()


def blocks_of(markdown: str) -> Iterator[Block]:
    """The pieces of a report in Markdown, of which only what report.md uses is known; its title is left out."""
    lines = markdown.splitlines()
    position = 0
    while position < len(lines):
        line = lines[position]
        end = position + 1
        if line.startswith("```"):
            while not lines[end].startswith("```"):
                end += 1
            yield Block(kind="code", text="\n".join(lines[position + 1 : end]))
            end += 1
        elif line.startswith(("- ", "|")):
            while end < len(lines) and lines[end].startswith(line[:1]):
                end += 1
            yield _rows(lines[position:end])
        elif line.startswith("## "):
            yield Block(kind="heading", text=line[3:])
        elif line and not line.startswith("# "):
            yield Block(kind="text", text=line)
        position = end


@dataclass(frozen=True, kw_only=True, slots=True)
class Cell:
    """A candidate, or a stretch of them that were not run."""

    shown: str
    kind: str
    """A verdict, or "unrun"."""
    told: str = ""
    """The verdict, and the number where one was measured."""
    why: str = ""
    """One sentence."""
    log: str = ""
    """Relative to the bisect's folder."""


def page(markdown: str, state: State, folder: Path) -> str:
    """The whole page, with the candidates in order above the report. folder: what links are relative to."""
    import jinja2

    sheets = Path(__file__).parents[2] / "reporting"
    environment = jinja2.Environment(
        loader=jinja2.FileSystemLoader([Path(__file__).parent, sheets]),
        autoescape=True,
        trim_blocks=True,
        lstrip_blocks=True,
        undefined=jinja2.StrictUndefined,
    )
    environment.filters["linked"] = lambda text: linked(text, folder)
    title = markdown.splitlines()[0].removeprefix("# ")
    template = environment.get_template("page.html.jinja")
    return template.render(title=title, blocks=list(blocks_of(markdown)), strip=list(strip(state)))


def strip(state: State) -> Iterator[Cell]:
    """Cells of all candidates, oldest first; many neighbours that were not run are one cell."""
    for kind, some in groupby(range(len(state.candidates)), key=lambda index: _kind(state, index)):
        stretch = list(some)
        if kind == "ran":
            yield from (_ran(state, index) for index in stretch)
        elif len(stretch) > MOST_UNRUN:
            ends = f"{_name(state, stretch[0])} to {_name(state, stretch[-1])}"
            yield Cell(shown=f"{len(stretch)} {kind}", kind="unrun", why=ends)
        else:
            for index in stretch:
                why = state.closed.get(state.candidates[index].name, "")
                yield Cell(shown=_name(state, index), kind="unrun", told=kind, why=_why(state, index, why))


def _kind(state: State, index: int) -> Literal["ran", "cannot run", "not run"]:
    if index in state.verdicts:
        return "ran"
    return "cannot run" if index in state.closed_indices else "not run"


def linked(text: str, folder: Path) -> Any:
    """Return the text as HTML in which addresses, and files below the folder, are links."""
    from markupsafe import Markup, escape

    parts = []
    for word in re.split(r"(\s+)", text):
        address = word if word.startswith("https://") else _relative(word, folder)
        parts.append(Markup('<a href="{}">{}</a>').format(address, word) if address else escape(word))
    return Markup("").join(parts)


def _relative(word: str, folder: Path) -> str:
    """Where a word names a file below the folder, its path from there; else ""."""
    for file in (folder / word, Path(word)):
        if "/" in word and ".." not in file.parts and file.is_relative_to(folder) and isfile(file):
            return str(file.relative_to(folder))
    return ""


def _ran(state: State, index: int) -> Cell:
    record = state.record(index)
    number = number_of(record)
    measured = "" if number is None else f" {number:.6g}"
    log = record.decisive.log if record.decisive else ""
    return Cell(
        shown=_name(state, index),
        kind=record.verdict,
        told=record.verdict + measured,
        why=_why(state, index, record.reason),
        log=log,
    )


def _why(state: State, index: int, reason: str) -> str:
    """With a commit's subject."""
    return ": ".join(filter(None, (state.candidates[index].title, reason)))


def _name(state: State, index: int) -> str:
    """A version, or the first twelve digits of a hash."""
    candidate = state.candidates[index]
    return candidate.name[:12] if candidate.title else candidate.name


def _rows(lines: Sequence[str]) -> Block:
    """A list, or a table without its line of dashes."""
    if lines[0].startswith("-"):
        return Block(kind="list", rows=tuple(line[2:] for line in lines))
    cells = [tuple(cell.strip() for cell in line.strip("|").split("|")) for line in lines]
    return Block(kind="table", rows=tuple(row for row in cells if set("".join(row)) != {"-"}))
