"""A report in Markdown as one HTML page that needs no other file. Imports no torch."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal


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


def page(markdown: str) -> str:
    """The whole page."""
    import jinja2

    environment = jinja2.Environment(autoescape=True, trim_blocks=True, undefined=jinja2.StrictUndefined)
    template = environment.from_string(Path(__file__).with_name("page.html.jinja").read_text(encoding="utf-8"))
    title = markdown.splitlines()[0].removeprefix("# ")
    return template.render(title=title, blocks=list(blocks_of(markdown)))


def _rows(lines: Sequence[str]) -> Block:
    """A list, or a table without its line of dashes."""
    if lines[0].startswith("-"):
        return Block(kind="list", rows=tuple(line[2:] for line in lines))
    cells = [tuple(cell.strip() for cell in line.strip("|").split("|")) for line in lines]
    return Block(kind="table", rows=tuple(row for row in cells if set("".join(row)) != {"-"}))
