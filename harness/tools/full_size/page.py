"""One HTML page about an answer: the verdict, a table of layers and ranks, and of a whole run its memory.

It needs no network and no script. Every name comes from a file or a program of somebody else, so the template escapes
all text.
"""

from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from math import prod
from pathlib import Path

from harness.runtime import GIB
from harness.tools.engine_class.engine_answer import KV_CACHE_SCALES, EngineAnswer
from harness.tools.engine_class.traced_ranks import EngineRank
from harness.tools.full_size.gpu_stages import GpuMemory
from harness.tools.full_size.model_verdict import Answer, total_gb
from harness.tools.page_template import page_template
from harness.weights.findings import Finding, grouped
from harness.weights.layer_names import NO_LAYER, layer_of

MOST_LINES = 500
"""Lines of problems, and names that cannot be followed, on the page; the JSON has all."""
MOST_WITH_TEXT = 16
"""Ranks of a table whose fields have room for text."""
MEANINGS = {
    "whole": "every element is filled",
    "told": "not given to this rank: another one of its stage treats the layer as others of its kind",
    "padded": "unfilled in every layer alike, as padding is",
    "fault": "elements are not filled, or names are refused",
    "unknown": "cannot be told, as the rank's loader refuses a name",
}
"""What a field's class says."""


@dataclass(frozen=True, slots=True)
class Cell:
    """One field: a layer on a rank."""

    shade: str
    """A key of MEANINGS; "" if the rank does not hold the layer."""
    title: str = ""
    """What is shown under the pointer."""
    text: str = ""


def page_of(answer: Answer) -> str:
    """Return the page."""
    models = {"Engine": answer.engine, "Draft model": answer.draft and answer.draft.answer}
    return page_template(Path(__file__).parent).render(
        answer=answer,
        facts=list(facts_of(answer)),
        lines=list(answer.engine_lines()) if answer.ranks else [],
        exported=list(answer.exported.as_lines()) if answer.exported else [],
        problems=list(map(str, grouped(answer.findings))),
        notes=list(answer.notes()),
        most=MOST_LINES,
        most_with_text=MOST_WITH_TEXT,
        meanings=MEANINGS,
        models=[(title, each.ranks, list(rows_of(each))) for title, each in models.items() if each],
        memory=memory_rows(answer.memory) if answer.memory else None,
    )


def facts_of(answer: Answer) -> Iterator[tuple[str, str]]:
    """Yield what was asked."""
    versions, question = answer.versions, answer.question
    yield "model", answer.name
    if answer.ranks:
        yield "SGLang's class", answer.ranks[0].built
    yield "releases", ", ".join(f"{package} {version}" for package, version in versions.items())
    yield "sent", f"{len(answer.layout):,} names, {total_gb(answer.layout):,.1f} GB"
    yield "engine", f"{question.tp * question.pp} ranks: tp {question.tp}, pp {question.pp}"
    yield "SGLang's arguments", ", ".join(f"{name} = {value}" for name, value in question.arguments.items())


def rows_of(answer: EngineAnswer) -> Iterator[tuple[str, list[Cell], str]]:
    """Yield (label, one cell for each rank, number of problems) for each layer; last for what is outside of the layers."""
    in_layer: dict[int, list[Finding]] = defaultdict(list)
    for each in answer.findings:
        in_layer[layer_of(each.tensor)].append(each)
    held = [_elements_by_layer(each) for each in answer.ranks]
    layers = {layer for each in held for layer in each} | in_layer.keys()
    for layer in sorted(layers, key=lambda layer: (layer == NO_LAYER, layer)):
        label, found = "outside layers" if layer == NO_LAYER else f"layer {layer}", in_layer[layer]
        cells = [
            _cell(rank, layer, f"{label}, rank {rank.rank}:", every[layer], found) if layer in every else Cell("")
            for rank, every in zip(answer.ranks, held, strict=True)
        ]
        yield label, cells, f"{len(found)} problem{'s' * (len(found) > 1)}" if found else ""


def _elements_by_layer(rank: EngineRank) -> dict[int, int]:
    found: dict[int, int] = defaultdict(int)
    for name, (_, dims) in rank.held.items():
        found[layer_of(name)] += prod(dims)
    return dict(found)


def _cell(rank: EngineRank, layer: int, place: str, every: int, findings: Sequence[Finding]) -> Cell:
    """Return the field of one layer on one rank that holds it. findings: about this layer."""
    refused = [name for names in rank.coverage.errors for name in names]
    if own := [name for name in refused if layer_of(name) == layer]:
        return Cell("fault", f"{place} the loader refuses {len(own)} names, such as {own[0]}", "refused")
    if refused:  # then it tells of no parameter what is missing
        return Cell("unknown", f"{place} {every:,} elements; how many are filled cannot be told")
    missing = {name: count for name, (count, _) in rank.coverage.missing.items() if layer_of(name) == layer}
    if not missing:
        return Cell("told", f"{place} {every:,} elements; another rank of the stage was given its names")
    lacks = {name: count for name, count in missing.items() if count and not name.endswith(KV_CACHE_SCALES)}
    lost = sum(lacks.values())
    share = share_of(every - lost, every)
    title = f"{place} {share} filled, {lost:,} of {every:,} elements are not"
    wrong = {each.tensor for each in findings if not each.ranks or rank.rank in each.ranks} & lacks.keys()
    if wrong:
        return Cell("fault", f"{title}; {', '.join(sorted(wrong))}", share)
    return Cell("padded" if lost else "whole", title, share)


def share_of(part: int, whole: int) -> str:
    """Return a share in percent, which is 100% of the whole alone."""
    if part == whole:
        return "100%"
    return f"{min(part / whole * 100, 99.99):.2f}%"


def memory_rows(memory: GpuMemory) -> list[list[str]]:
    """Return the fullest GPU's parts by stage in GiB, below a row of titles."""
    names = dict.fromkeys(name for parts in memory.stages.values() for name in parts)
    rows = [["GiB", *memory.stages]]
    rows += [
        [name, *(f"{parts[name] / GIB:,.1f}" if name in parts else "-" for parts in memory.stages.values())]
        for name in names
    ]
    return [*rows, ["total", *(f"{sum(parts.values()) / GIB:,.1f}" for parts in memory.stages.values())]]
