"""One HTML page about an answer: the verdict, heat maps of ranks and layers, and of a whole run its memory and its
syncs.

It needs no network and no script. Every name comes from a file or a program of somebody else, so the template escapes
all text.
"""

import re
from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from math import prod
from pathlib import Path

from harness.runtime import GIB
from harness.tools.full_size.compare import ranges
from harness.tools.full_size.findings import KV_CACHE_SCALES
from harness.tools.full_size.heat_map import (
    FAULT,
    TOLD,
    UNKNOWN,
    Cell,
    HeatMap,
    Scale,
    alike,
    in_bins,
    label_of,
    summed,
)
from harness.tools.full_size.model_verdict import SHOWN, Answer, total_gb
from harness.tools.full_size.ranks_at_true_size import NO_LAYER, EngineRank, layer_of
from harness.tools.full_size.sync_plan import SyncPlan
from harness.tools.full_size.whole_run import WholeRun
from harness.tools.page_template import page_template

MOST_RANKS = 128
"""Columns of a map of trainer ranks; where there are more, their hosts are shown."""
MOST_ROWS = 64
"""Rows and columns of a map between hosts, and rows of one of engine ranks; beyond it, neighbours share one."""
MOST_LINES = 500
"""Problems, and names that cannot be followed, on the page; the JSON has all."""
LONGEST_LABEL = 30
"""Characters of the numbers of hosts that share a row."""
PARTS = 10
"""Colours of a bar's parts: the classes p0 to p9 of the page's style."""
BAR = 760
"""Pixels of the longest bar."""
ON_RANK = re.compile(r"on engine rank (\d+) nothing sent would fill")
"""Matches the problems of a single rank (`ranks_at_true_size.filled_in_part`)."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Bar:
    """What the fullest GPU holds in one stage."""

    stage: str
    parts: list[tuple[str, float, float, str]]
    """Class, place and width in pixels, and title of each part."""
    total: str
    is_over: bool


@dataclass(frozen=True, kw_only=True, slots=True)
class MemoryChart:
    """The bars of all stages, with the limit of a GPU."""

    bars: list[Bar]
    legend: list[tuple[str, str]]
    limit: float
    """Its place in pixels."""
    limit_text: str
    rows: list[list[str]]
    """The same as a table."""


@dataclass(frozen=True, kw_only=True)
class RunPart:
    """The part of the page about a whole run."""

    memory: MemoryChart
    alike: str
    """A sentence on how many kinds of GPUs there are."""
    gpus: list[HeatMap]
    sync: list[tuple[str, ...]]
    between: list[HeatMap]
    note: str


@dataclass(kw_only=True)
class Faults:
    """The parameters and layers that the problems of one model name."""

    problems: Sequence[str]
    on_ranks: dict[str, set[int]] = field(default_factory=lambda: defaultdict(set))
    """Parameter -> the ranks on which a part of it is not filled, if it is filled on others."""
    anywhere: set[str] = field(default_factory=set)
    """Subjects of the other problems."""
    in_layer: dict[int, int] = field(default_factory=lambda: defaultdict(int))
    """Layer -> how many problems it has."""

    def __post_init__(self) -> None:
        for sentence in self.problems:
            subject = sentence.partition(":")[0]
            self.in_layer[layer_of(subject)] += 1
            if found := ON_RANK.search(sentence):
                self.on_ranks[subject].add(int(found[1]))
            else:
                self.anywhere.add(subject)

    def has(self, parameter: str, rank: int) -> bool:
        """Return whether what a rank lacks of a parameter is a problem, and no padding."""
        return parameter in self.anywhere or rank in self.on_ranks.get(parameter, ())


def page_of(answer: Answer) -> str:
    """Return the page."""
    return page_template(Path(__file__).parent).render(
        answer=answer,
        facts=list(facts_of(answer)),
        lines=list(answer.engine_lines()) if answer.ranks else [],
        exported=list(answer.exported.as_lines()) if answer.exported else [],
        notes=list(answer.notes()),
        shown=SHOWN,
        most=MOST_LINES,
        models=list(_models_of(answer)),
        run=run_part(answer.whole, answer) if answer.whole else None,
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
    if whole := answer.whole:
        dims, shape = whole.shape.dims, whole.shape
        yield (
            "run",
            f"{dims.world_size} ranks on {shape.hosts} hosts of {shape.nproc_per_node}, dp {dims.dp}, GPUs of"
            f" {answer.options.gpu_memory_gib:g} GiB, weights.transport = {whole.transport}",
        )


def _models_of(answer: Answer) -> Iterator[tuple[str, list[HeatMap]]]:
    """Yield the maps of the engine's model, and of its draft model."""
    tp = answer.question.tp
    if answer.ranks and answer.findings:
        yield "Engine", maps_of_engine(answer.ranks, Faults(problems=answer.findings.problems), tp)
    if answer.draft:
        faults = Faults(problems=answer.draft.findings.problems)
        yield "Draft model", maps_of_engine(answer.draft.ranks, faults, tp)


def maps_of_engine(ranks: Sequence[EngineRank], faults: Faults, tp: int) -> list[HeatMap]:
    """Return the maps of one model's ranks: bytes, what does not arrive, and the same layer by layer."""
    return [_bytes_by_rank(ranks, tp), _unfilled_by_rank(ranks, faults, tp), _filled_by_layer(ranks, faults)]


def _by_stage(ranks: Sequence[EngineRank], cells: Sequence[Cell], tp: int) -> tuple[list[str], list[list[Cell]]]:
    """Return cells of ranks in rows of pipeline stages, with their labels."""
    rows = [list(cells[start : start + tp]) for start in range(0, len(cells), tp)]
    return [f"stage {ranks[start].rank // tp}" for start in range(0, len(cells), tp)], rows


def _bytes_by_rank(ranks: Sequence[EngineRank], tp: int) -> HeatMap:
    scale = Scale.of((each.nbytes for each in ranks), gb)
    cells = [
        Cell(
            scale.shade(each.nbytes),
            f"rank {each.rank}: {each.parameters:,} parameters, {each.nbytes:,} bytes; {each.derived_bytes:,} bytes more that"
            " SGLang derives from them",
            gb(each.nbytes),
        )
        for each in ranks
    ]
    labels, rows = _by_stage(ranks, cells, tp)
    return HeatMap(
        title="Bytes of parameters, rank by rank", row_axis="pipeline stage", column_axis="tensor-parallel rank",
        rows=labels, columns=[str(each) for each in range(tp)], cells=rows, legend=scale.legend(), marks={},
    )  # fmt: skip


def _unfilled_by_rank(ranks: Sequence[EngineRank], faults: Faults, tp: int) -> HeatMap:
    cells = []
    for each in ranks:
        lost = sum(
            missing for name, (missing, _) in each.coverage.missing.items() if missing and faults.has(name, each.rank)
        )
        refused = len(each.coverage.errors)
        title = f"rank {each.rank}: {lost:,} elements that nothing sent fills, {refused} names that the loader refuses"
        cells.append(Cell(FAULT if lost or refused else "whole", title, "refused" if refused else short(lost)))
    labels, rows = _by_stage(ranks, cells, tp)
    return HeatMap(
        title="Elements that do not arrive, rank by rank",
        row_axis="pipeline stage",
        column_axis="tensor-parallel rank",
        rows=labels,
        columns=[str(each) for each in range(tp)],
        cells=rows,
        legend=[("whole", "every element of its parameters is filled"), (FAULT, "some are not, or names are refused")],
        marks={},
        note="Names that every rank ignores, or that come in another dtype, are in the list of problems.",
    )


def _filled_by_layer(ranks: Sequence[EngineRank], faults: Faults) -> HeatMap:
    held = [_elements_by_layer(each) for each in ranks]
    lacking = [_lacking_by_layer(each) for each in ranks]
    layers = sorted({layer for each in held for layer in each} | faults.in_layer.keys())
    layers = [*(layer for layer in layers if layer != NO_LAYER), *(layer for layer in layers if layer == NO_LAYER)]
    outside = "all parameters" if layers == [NO_LAYER] else "outside layers"
    cells = [
        [
            _layer_cell(rank, layer, outside, every, lack, faults)
            for rank, every, lack in zip(ranks, held, lacking, strict=True)
        ]
        for layer in layers
    ]
    marks = {
        row: f"{count} problem{'s' if count > 1 else ''}"
        for row, layer in enumerate(layers)
        if (count := faults.in_layer.get(layer, 0))
    }
    legend = [
        ("whole", "every element is filled"),
        (TOLD, "not given to this rank: another one of its stage treats the layer as others of its kind"),
        ("padded", "unfilled in every layer alike, as padding is"),
        (FAULT, "elements are not filled, or names are refused"),
        (UNKNOWN, "cannot be told, as the rank's loader refuses a name"),
    ]
    used = {cell.shade for row in cells for cell in row if cell}
    return HeatMap(
        title="Share of elements that are filled, by layer and rank", row_axis="layer", column_axis="engine rank",
        rows=[outside if layer == NO_LAYER else str(layer) for layer in layers],
        columns=[str(each.rank) for each in ranks], cells=cells,
        legend=[each for each in legend if each[0] in used], marks=marks,
        note="Empty: the rank does not hold the layer. Behind a row: the problems that name a tensor of this layer.",
    )  # fmt: skip


def _elements_by_layer(rank: EngineRank) -> dict[int, int]:
    found: dict[int, int] = defaultdict(int)
    for name, (_, dims) in rank.held.items():
        found[layer_of(name)] += prod(dims)
    return found


def _lacking_by_layer(rank: EngineRank) -> dict[int, dict[str, int]]:
    """Return for each layer that the rank was given: its parameters of which elements are not filled -> how many."""
    found: dict[int, dict[str, int]] = defaultdict(dict)
    for name, (missing, _) in rank.coverage.missing.items():
        lacks = found[layer_of(name)]
        if missing and not name.endswith(KV_CACHE_SCALES):  # their own note is on the page
            lacks[name] = missing
    return found


def _layer_cell(
    rank: EngineRank, layer: int, outside: str, held: dict[int, int], lacking: dict[int, dict[str, int]], faults: Faults
) -> Cell | None:
    """Return the field of one layer on one rank; None if the rank does not hold it. outside: what NO_LAYER is
    called.
    """
    if layer not in held:
        return None
    every = held[layer]
    place = f"{outside if layer == NO_LAYER else f'layer {layer}'}, rank {rank.rank}:"
    refused = [name for name in rank.coverage.errors if layer_of(name) == layer]
    if refused:
        return Cell(FAULT, f"{place} the loader refuses {len(refused)} names, such as {refused[0]}", "refused")
    if rank.coverage.errors:  # then it tells of no parameter what is missing
        return Cell(UNKNOWN, f"{place} {every:,} elements; how many are filled cannot be told")
    if layer not in lacking:
        return Cell(TOLD, f"{place} {every:,} elements; another rank of the stage was given its names")
    lacks = lacking[layer]
    missing = sum(lacks.values())
    share = share_of(every - missing, every)
    title = f"{place} {share} filled, {missing:,} of {every:,} elements are not"
    wrong = [name for name in lacks if faults.has(name, rank.rank)]
    if wrong:
        return Cell(FAULT, f"{title}; {', '.join(wrong)}", share)
    return Cell("padded" if missing else "whole", title, share)


def run_part(whole: WholeRun, answer: Answer) -> RunPart:
    """Return what the page shows of a whole run."""
    groups, ranks = whole.alike_gpus(), whole.shape.dims.world_size
    if len(groups) == 1:
        sentence = f"All {ranks} GPUs hold the same in every stage."
    else:
        sentence = (
            f"The {ranks} GPUs are of {len(groups)} kinds: engine ranks hold other layers or experts, or trainer ranks fewer"
            " rows, and so less of AdamW's states."
        )
    known = "" if answer.rates.network else ", where their rates are known"
    return RunPart(
        memory=memory_chart(whole, answer.options.gpu_memory_gib),
        alike=sentence,
        gpus=[_gpu_map(whole, stage) for stage in whole.memory.stages] if len(groups) > 1 else [],
        sync=whole.sync_rows(answer.rates),
        between=list(_sync_maps(whole)),
        note=(
            "* this run's. own GPU, NVLink, staging: of the rank with most; network in: of the host with most; least: what any"
            f" transport must bring to that host; seconds: of the links alone{known}."
        ),
    )


def memory_chart(whole: WholeRun, gpu_gib: float) -> MemoryChart:
    """Return the bars of the fullest GPU."""
    stages, limit = whole.memory.stages, whole.memory.gpu_bytes
    names = list(dict.fromkeys(name for parts in stages.values() for name in parts))
    longest = max(limit, *(sum(parts.values()) for parts in stages.values()))
    bars = []
    for stage, parts in stages.items():
        at, placed = 0, []
        for name in names:
            if nbytes := parts.get(name, 0):
                title = f"{stage}, {name}: {nbytes / GIB:,.2f} GiB"
                placed.append(
                    (_part(names, name), round(BAR * at / longest, 1), round(BAR * nbytes / longest, 1), title)
                )
                at += nbytes
        bars.append(Bar(stage=stage, parts=placed, total=f"{at / GIB:,.1f}", is_over=at > limit))
    rows = [["GiB", *stages]]
    rows += [[name, *(f"{parts[name] / GIB:,.1f}" if name in parts else "-" for parts in stages.values())] for name in names]  # fmt: skip
    rows.append(["total", *(f"{sum(parts.values()) / GIB:,.1f}" for parts in stages.values())])
    return MemoryChart(
        bars=bars, legend=[(_part(names, name), name) for name in names], limit=round(BAR * limit / longest, 1),
        limit_text=f"{gpu_gib:g} GiB of one GPU", rows=rows,
    )  # fmt: skip


def _part(names: Sequence[str], name: str) -> str:
    return f"p{names.index(name) % PARTS}"


def _gpu_map(whole: WholeRun, stage: str) -> HeatMap:
    """Return the GPUs of all hosts in one stage; hosts that are alike share a row."""
    limit, shape = whole.memory.gpu_bytes, whole.shape
    ranks = range(shape.dims.world_size)
    held = [whole.gpu_stages(rank)[stage] for rank in ranks]
    scale = Scale.of((sum(parts.values()) for parts in held), gib)
    cells = []
    for rank, parts in zip(ranks, held, strict=True):
        total = sum(parts.values())
        described = ", ".join(f"{name} {gib(nbytes)}" for name, nbytes in parts.items())
        text = f"rank {rank}, engine rank {shape.dims.engine_rank(rank)}: {gib(total)}: {described}"
        cells.append(Cell(FAULT if total > limit else scale.shade(total), text, f"{total / GIB:.2f}"))
    hosts = [[cells[rank] for rank in shape.ranks_of(host)] for host in range(shape.hosts)]
    rows = alike(hosts)
    over = [(FAULT, f"more than the {gib(limit)} of a GPU")] if any(cell.shade == FAULT for cell in cells) else []
    return HeatMap(
        title=f"{stage}: GiB of each GPU",
        row_axis="host",
        column_axis="rank of the host",
        rows=list(map(_hosts_label, rows)),
        columns=[str(each) for each in range(shape.nproc_per_node)],
        cells=[hosts[members[0]] for members in rows],
        legend=[*scale.legend(), *over],
        marks={},
        note="Hosts that are alike share a row; under the pointer: the first of them."
        if len(rows) < len(hosts)
        else "",
    )


def _hosts_label(hosts: Sequence[int]) -> str:
    """Return the hosts of a row as text of a length that a label can have."""
    text = ranges(hosts)
    if len(text) > LONGEST_LABEL:
        text = f"{text[:LONGEST_LABEL].rpartition(',')[0]} ... ({len(hosts)})"
    return f"host{'s' if len(hosts) > 1 else ''} {text}"


def _sync_maps(whole: WholeRun) -> Iterator[HeatMap]:
    """Yield who sends how much to whom: between hosts by the run's transport and by pull, and by pair of ranks."""
    for name in dict.fromkeys((whole.transport, "pull")):
        plan = whole.plans[name]
        if any(plan.network_in):
            yield _between_hosts(plan)
    yield _by_pair(whole)


def _between_hosts(plan: SyncPlan) -> HeatMap:
    bins = in_bins(len(plan.network_in), MOST_ROWS)
    note = f"{len(bins[0])} hosts share a row and a column." if len(bins[0]) > 1 else ""
    return _matrix_map(
        f"{plan.transport}: bytes between hosts", "receiving host", "sending host",
        summed(plan.between_hosts, bins, bins), list(map(label_of, bins)), list(map(label_of, bins)), note,
    )  # fmt: skip


def _by_pair(whole: WholeRun) -> HeatMap:
    """Return what each rank of one engine reads of each trainer rank, or of each host where there are many."""
    shape, pairs = whole.shape, whole.pairs
    world = shape.dims.world_size
    matrix = [[each.get(rank, 0) for rank in range(world)] for each in pairs]
    owners, axis = [range(rank, rank + 1) for rank in range(world)], "trainer rank that holds it"
    names = list(map(label_of, owners))
    if world > MOST_RANKS:
        hosts = in_bins(shape.hosts, MOST_ROWS)
        owners = [range(shape.ranks_of(some[0]).start, shape.ranks_of(some[-1]).stop) for some in hosts]
        names, axis = list(map(label_of, hosts)), "host whose trainers hold it"
    readers = in_bins(len(pairs), MOST_ROWS)
    return _matrix_map(
        "pull: bytes that a rank of an engine reads", "engine rank", axis, summed(matrix, readers, owners),
        list(map(label_of, readers)), names, "In the dtype in which they are sent. All engines read the same.",
    )  # fmt: skip


def _matrix_map(
    title: str, row_axis: str, column_axis: str, matrix: Sequence[Sequence[int]], rows: Sequence[str],
    columns: Sequence[str], note: str,
) -> HeatMap:  # fmt: skip
    """Return a map of bytes. Nothing is a colour apart."""
    scale = Scale.of([nbytes for row in matrix for nbytes in row if nbytes] or [0], gb)
    cells = [
        [
            Cell(
                scale.shade(nbytes) if nbytes else "none",
                f"{row_axis} {row}, {column_axis} {column}: {gb(nbytes)}",
                gb(nbytes).removesuffix(" GB") if nbytes else "",
            )
            for nbytes, column in zip(numbers, columns, strict=True)
        ]
        for numbers, row in zip(matrix, rows, strict=True)
    ]
    return HeatMap(
        title=title, row_axis=row_axis, column_axis=column_axis, rows=rows, columns=columns, cells=cells,
        legend=[("none", "nothing"), *scale.legend()], marks={}, note=note,
    )  # fmt: skip


def share_of(part: int, whole: int) -> str:
    """Return a share in percent, which is 100% of the whole alone."""
    if part == whole:
        return "100%"
    return f"{min(part / whole * 100, 99.99):.2f}%"


def short(number: int) -> str:
    """Return a number in a few characters."""
    for unit, size in (("G", 10**9), ("M", 10**6), ("k", 10**3)):
        if number >= size:
            return f"{number / size:.1f} {unit}"
    return str(number)


def gb(nbytes: float) -> str:
    """Format bytes in GB, with as many digits as a small number needs."""
    number = nbytes / 1e9
    return f"{number:,.{1 if number >= 100 else 2 if number >= 1 else 4}f} GB"


def gib(nbytes: float) -> str:
    """Format bytes in GiB."""
    return f"{nbytes / GIB:,.2f} GiB"
