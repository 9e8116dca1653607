"""What the engine's ranks hold at the model's true size, and what their loaders do with every name.

Each rank is a process forked from one that has imported everything, because SGLang keeps one configuration for each
process. All ranks of a pipeline stage run the same code and differ in their number alone. So its first, its second and
its last rank are built, and of the others those whose part is not on the line through theirs (ranks_in_line.py). Each
that is built is given one layer of each kind, and the three share the other layers: every name is given to one of them.
Where a loader does with a layer what it does with the first of its kind, the other ranks' loaders do too; a layer that
is unlike it is given to all.
"""

import json
import os
import shutil
import tempfile
from collections import defaultdict
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, TypeVar

import torch

from harness.config.model_fields import WEIGHT_INDEX
from harness.rollout.served_models import DRAFT, TARGET
from harness.runtime.errors import UnsupportedEnvironment
from harness.tools.engine_class import meta_model
from harness.tools.engine_class.absent_hardware import AssumedGpu, is_for_hardware
from harness.tools.engine_class.forks import ForkEnded, Told, in_forks
from harness.tools.engine_class.meta_kv_cache import KvCache
from harness.tools.engine_class.meta_model import MetaRank
from harness.tools.engine_class.ranks_in_line import RanksInLine
from harness.weights.fusing import FusingGroup
from harness.weights.layer_names import NO_LAYER, Layers, by_layer, kind_of, layer_of, without_layer
from harness.weights.tensor_view import span
from harness.weights.traced.coverage import LoadCoverage, LoaderCopy
from harness.weights.traced.rank_trace import LoaderTrace
from harness.weights.traced.undo import storage

T = TypeVar("T")
ModelRank = tuple[str, int]
"""(role, rank of the engine): one model of one rank."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Part:
    """Which layers a rank is given."""

    kinds: Mapping[int, Any]
    """Layer -> what it has in common with others of its kind, as kind_of returns."""
    number: int = 0
    of: int = 0
    """It gets the number-th of so many equal shares of the layers that are like others; 0: none of them."""
    odd: frozenset[int] = frozenset()
    """Layers that another rank of its stage treats unlike the others of their kind. They stand for themselves."""
    every: bool = False
    """It gets all of them, and each stands for itself."""


class RankFailed(Told):
    """SGLang could not build a rank. The message has SGLang's own words."""


@dataclass(frozen=True, kw_only=True)
class EngineRank:
    """One rank of the engine: what it holds, and what its loader did."""

    rank: int
    nbytes: int
    """Bytes of the parameters."""
    held: dict[str, tuple[str, tuple[int, ...]]]
    """The parameters' dtypes and shapes by name."""
    derived_bytes: int
    """Bytes of what SGLang derives from them once they are loaded, and keeps beside them."""
    built: str
    """SGLang's class of the model."""
    asked_of_gpu: frozenset[str]
    """Functions of torch.cuda that SGLang called, and that were answered for an absent GPU."""
    groups: tuple[FusingGroup, ...]
    """What was given to its loader, of the layers below."""
    layers: frozenset[int]
    """The layers whose groups these are, and those that it holds and for which nothing is sent. Of layers that are
    alike only one is here."""
    alike: dict[int, tuple[int, ...]]
    """Layer -> the others that it holds which are like it, and told by it."""
    odd: frozenset[int]
    """Those of its layers that it treats unlike the first of their kind."""
    given: int
    """How many names its loader was given; 0 if it was not built, as it differs from its neighbours in its number
    alone."""
    held_layers: frozenset[int]
    """The decoder layers that it holds."""
    coverage: LoadCoverage
    """What the loader did with the groups above."""
    moe_ep_rank: int
    """Which part of the experts it holds, as SGLang counts; 0 without experts."""
    moe_tp_rank: int
    """Its place among the ranks that share these experts."""
    untouched_experts: dict[str, int]
    """The engine's parameter -> how many of its experts nothing at all is written of."""
    kv_caches: dict[str, KvCache] = field(default_factory=dict)
    """The KV cache of one token by kind of kv_cache_dtype, see meta_kv_cache; none of a draft model."""
    notes: tuple[str, ...] = ()
    """What SGLang decided by itself, and a reader should know."""
    unfit: str = ""
    """Why an engine of this class cannot serve, though it is built; "" if nothing is known."""


@dataclass(frozen=True, kw_only=True)
class EngineShape:
    """The engine's ranks, and how many of them are a pipeline stage."""

    folder: Path
    arguments: dict[str, Any]
    """SGLang's server arguments."""
    tp: int
    pp: int
    processes: int = field(default_factory=lambda: len(os.sched_getaffinity(0)))
    """How many ranks are built at the same time."""
    draft: bool = False
    """Build the draft model of speculative decoding, which only the last pipeline stage has."""
    on_gpu: bool = True
    """Build what a GPU would hold, and not what SGLang's CPU mode holds."""

    def stages(self) -> list[range]:
        """Return the ranks of each stage that has such a model."""
        found = [range(stage * self.tp, (stage + 1) * self.tp) for stage in range(self.pp)]
        return found[-1:] if self.draft else found


def examine(shape: EngineShape, groups: Iterable[FusingGroup], every_name: bool) -> list[EngineRank]:
    """Return all ranks of one engine. every_name: give every name to every rank. Raise RankFailed,
    UnsupportedEnvironment.
    """
    layers = by_layer(groups)
    kinds = {layer: kind_of(members) for layer, members in layers.items()}
    stages = shape.stages()
    chosen = {stage: sorted({*stage} if every_name else {*stage[:2], *stage[-1:]}) for stage in stages}
    parts = {
        rank: _part(kinds, number, min(len(chosen[stage]), shape.processes), every_name)
        for stage in stages
        for number, rank in enumerate(chosen[stage])
    }
    role = DRAFT if shape.draft else TARGET

    def ask(parts: Mapping[int, Part]) -> dict[int, EngineRank]:
        found = ask_ranks(shape, {(role, rank): part for rank, part in parts.items()}, layers, engine_rank)
        return {rank: each for (_, rank), each in found.items()}

    found = ask(parts)
    odd = {stage: frozenset().union(*(found[rank].odd for rank in chosen[stage])) for stage in stages}
    again = {stage: Part(kinds=kinds, odd=odd[stage]) for stage in stages}
    unlike = [stage for stage in stages if odd[stage] and not every_name]
    found |= ask({rank: again[stage] for stage in unlike for rank in chosen[stage]})
    for stage in stages:
        found |= {each.rank: each for each in _ranks_between([found[rank] for rank in chosen[stage]])}
    found |= ask({rank: again[stage] for stage in stages for rank in stage if rank not in found})
    return _with_layers_of_nobody([found[rank] for stage in stages for rank in stage], layers)


@contextmanager
def _with_index(shape: EngineShape, layers: Layers) -> Iterator[Path]:
    """Yield the model's folder, or one with an index of what is sent too, if SGLang's class reads one and there is
    none.

    Llama 4 has a vision tower only if the index beside config.json names one. The folder of the model stays as it is.
    """
    if (shape.folder / WEIGHT_INDEX).exists() or not meta_model.reads_index(shape.folder):
        yield shape.folder
        return
    with tempfile.TemporaryDirectory() as scratch:
        folder = Path(scratch)
        shutil.copyfile(shape.folder / "config.json", folder / "config.json")
        names = {
            view.name: "model.safetensors" for groups in layers.values() for group in groups for view in group.views
        }
        (folder / WEIGHT_INDEX).write_text(json.dumps({"metadata": {}, "weight_map": names}))
        yield folder


def _part(kinds: Mapping[int, Any], number: int, sharing: int, every_name: bool) -> Part:
    """Return the part of the number-th rank of a stage, of which the first ones, that run at the same time, share the
    layers.
    """
    return Part(kinds=kinds, number=number, of=sharing if number < sharing else 0, every=every_name)


def _ranks_between(chosen: Sequence[EngineRank]) -> Iterator[EngineRank]:
    """Yield the ranks of a stage that differ from its first, second and last rank in their number alone."""
    if len(chosen) != 3 or len({_but_for_its_number(each) for each in chosen}) > 1:
        return
    first = chosen[0]
    line = RanksInLine.of(first.groups, *map(_of_its_layers, chosen))
    for rank in range(first.rank + 2, chosen[-1].rank) if line else ():
        if line and (coverage := line.at(rank - first.rank)):
            yield replace(first, rank=rank, coverage=coverage, given=0)


def _of_its_layers(rank: EngineRank) -> LoadCoverage:
    """Return what a rank's loader did with the groups that it has, without what else it was given."""
    coverage = rank.coverage
    missing = {name: found for name, found in coverage.missing.items() if layer_of(name) in rank.layers}
    twice = {name: found for name, found in coverage.overwritten.items() if layer_of(name) in rank.layers}
    return replace(coverage, missing=missing, overwritten=twice)


def _but_for_its_number(rank: EngineRank) -> str:
    """Return all about a rank that is equal for ranks that hold other parts of the same."""
    keys = [_key(group) for group in rank.groups]
    return repr(
        (
            rank.held,
            rank.derived_bytes,
            rank.layers,
            sorted(rank.held_layers),
            rank.untouched_experts,
            rank.kv_caches,
            keys,
        )
    )


def _with_layers_of_nobody(ranks: list[EngineRank], layers: Layers) -> list[EngineRank]:
    """Add to the first rank, as ignored, the layers that no rank holds.

    One rank of each stage was given them, and ignored them.
    """
    held = frozenset().union(*(each.held_layers | each.layers for each in ranks))
    groups = [group for layer in sorted(layers.keys() - held - {NO_LAYER}) for group in layers[layer]]
    first, coverage = ranks[0], ranks[0].coverage
    ignored = replace(
        coverage,
        copies=[*coverage.copies, *([] for _ in groups)],
        unknown=[*coverage.unknown, *sorted(_names_of(groups))],
    )
    return [replace(first, groups=(*first.groups, *groups), coverage=ignored), *ranks[1:]]


def given_to_all(ranks: Sequence[EngineRank]) -> tuple[tuple[FusingGroup, ...], list[LoadCoverage]]:
    """Return the groups of all layers that stand for others or for themselves, and what each rank did with them.

    A rank of another stage, which lacks such a layer, ignores its names: one rank of its stage was given them, and
    would have returned the layer if it did anything else.
    """
    groups = {_key(group): group for each in ranks for group in each.groups}
    coverage = []
    for each in ranks:
        copies = dict(zip(map(_key, each.groups), each.coverage.copies, strict=True))
        padded = {_key(each.groups[number]): zeros for number, zeros in each.coverage.padded.items()}
        others = [view.name for key, group in groups.items() if key not in copies for view in group.views]
        coverage.append(
            replace(
                _of_its_layers(each), copies=[copies.get(key, []) for key in groups],
                unknown=[*each.coverage.unknown, *others],
                padded={number: padded[key] for number, key in enumerate(groups) if key in padded},
            )
        )  # fmt: skip
    return tuple(groups.values()), coverage


def _key(group: FusingGroup) -> tuple[str, str]:
    """Return what tells a group from the others, also if their names are the same."""
    return group.views[0].name, group.views[0].of


def layers_to_give(layers: Layers, held: Collection[int], part: Part) -> tuple[dict[int, int], list[int]]:
    """Return layer -> the layer that stands for it, for those whose names a rank is given; and those for which nothing
    is sent.

    held: the decoder layers of the rank. Layers are of one kind if the same names, dtypes and shapes are sent for them;
    the first one that the rank holds stands for them. Layers that it does not hold stand for themselves.
    """
    firsts: dict[Any, int] = {}
    stands: dict[int, int] = {}
    for layer in layers:
        alone = part.every or layer == NO_LAYER or layer not in held or layer in part.odd
        stands[layer] = layer if alone else firsts.setdefault(part.kinds[layer], layer)
    told = {NO_LAYER, *firsts.values(), *part.odd}
    shared = [layer for layer in layers if layer not in told]
    if not part.every:
        mine = {*told, *(shared[part.number :: part.of] if part.of else ())}
        stands = {layer: other for layer, other in stands.items() if layer in mine}
    return stands, sorted(set(held) - layers.keys())


@dataclass(frozen=True, kw_only=True)
class TracedRank:
    """One rank, in the process that built it, and its loader traced over its part of what is sent."""

    shape: EngineShape
    rank: int
    built: MetaRank
    gpu: AssumedGpu
    shared: dict[str, str]
    """"embedding" and "head" -> the parameter, if a target and its draft model share them."""
    parameters: dict[str, torch.Tensor]
    """Its own: a draft model is served the target's embedding and head."""
    trace: LoaderTrace
    coverage: LoadCoverage
    layers: Layers
    part: Part
    stands: dict[int, int]
    """Layer that it was given -> the one that stands for it."""
    nothing_sent: list[int]
    """Layers that it holds and for which nothing is sent."""

    @property
    def held_layers(self) -> frozenset[int]:
        """The decoder layers of its parameters."""
        return frozenset(layer_of(name) for name in self.parameters) - {NO_LAYER}

    def alike(self, kept: Collection[int]) -> dict[int, tuple[int, ...]]:
        """Return the first layer of each kind -> the layers of that kind that it stands for, as they are not in `kept`."""
        firsts: dict[Any, int] = {}
        found: dict[int, tuple[int, ...]] = {}
        for layer in sorted(self.held_layers & self.layers.keys() - self.part.odd):
            first = firsts.setdefault(self.part.kinds[layer], layer)
            if layer not in kept:
                found[first] = (*found.get(first, ()), layer)
        return found


def trace_rank(shape: EngineShape, rank: int, layers: Layers, part: Part) -> TracedRank:
    """Build one rank in this process, and give its part of these layers' names to its loader."""
    gpu = AssumedGpu()
    if shape.on_gpu:
        gpu.answer()
    built = meta_model.build_on_meta(shape.folder, shape.arguments, rank, shape.draft, enlarged=not shape.on_gpu)
    # Without a draft model nothing is shared, and a target's class raises in a stage that lacks one of the two.
    hands_out = shape.draft or (shape.pp == 1 and shape.arguments.get("speculative_algorithm"))
    shared = meta_model.embedding_and_head(built.model, shape.pp) if hands_out else {}
    not_its_own = {*shared.values()} if shape.draft else set()
    parameters = {name: each for name, each in built.model.named_parameters() if name not in not_its_own}
    held = frozenset(layer_of(name) for name in parameters) - {NO_LAYER}
    stands, nothing_sent = layers_to_give(layers, held, part)
    trace = LoaderTrace(built.model, tuple(group for layer in stands for group in layers[layer]))
    trace.run()
    return TracedRank(
        shape=shape, rank=rank, built=built, gpu=gpu, shared=shared, parameters=parameters, trace=trace,
        coverage=trace.coverage(), layers=layers, part=part, stands=stands, nothing_sent=nothing_sent,
    )  # fmt: skip


def engine_rank(traced: TracedRank) -> EngineRank:
    """Return what outlives the process of a rank."""
    groups, coverage, stands, part = traced.trace.groups, traced.coverage, traced.stands, traced.part
    parameters, held, modules = traced.parameters, traced.held_layers, list(traced.built.model.modules())
    digests = _digests(groups, coverage)
    unlike = {layer for layer, other in stands.items() if digests[layer] != digests[other]}
    # Another stage's layers are ignored; one of which anything is copied, or that is refused, stands for itself.
    ignored = set(coverage.unknown)
    foreign = stands.keys() - held - {NO_LAYER}
    odd = unlike | {layer for layer in foreign if not _names_of(traced.layers[layer]) <= ignored}
    told = {layer for layer, other in stands.items() if layer == other and (layer in held or part.every)}
    kept = frozenset(told | odd | part.odd & stands.keys() | set(traced.nothing_sent) | {NO_LAYER})
    numbers = [number for number, group in enumerate(groups) if layer_of(group.views[0].name) in kept]
    given = {*stands, *traced.nothing_sent}
    missing = {name: each for name, each in coverage.missing.items() if name in parameters and layer_of(name) in given}
    return EngineRank(
        rank=traced.rank,
        nbytes=sum(each.nbytes for each in parameters.values()),
        held={name: (str(each.dtype).removeprefix("torch."), tuple(each.shape)) for name, each in parameters.items()},
        derived_bytes=traced.trace.derived_bytes,
        built=type(traced.built.model).__name__,
        asked_of_gpu=frozenset(traced.gpu.asked),
        groups=tuple(groups[number] for number in numbers),
        layers=kept,
        alike=traced.alike(kept),
        odd=frozenset(odd),
        given=sum(len(group.views) for group in groups),
        held_layers=held,
        coverage=_of_groups(replace(coverage, missing=missing), groups, numbers),
        moe_ep_rank=max((getattr(module, "moe_ep_rank", 0) for module in modules), default=0),
        moe_tp_rank=max((getattr(module, "moe_tp_rank", 0) for module in modules), default=0),
        untouched_experts=dict(_untouched_experts(parameters, missing, traced.trace)),
        kv_caches=traced.built.kv_caches,
        notes=traced.built.notes,
        unfit=traced.built.unfit,
    )


def _of_groups(coverage: LoadCoverage, groups: Sequence[FusingGroup], numbers: Sequence[int]) -> LoadCoverage:
    """Return what the loader did with the groups of these numbers, and all that is missing."""
    names = _names_of(groups[number] for number in numbers)
    return replace(
        coverage,
        copies=[coverage.copies[number] for number in numbers],
        unknown=[name for name in coverage.unknown if name in names],
        padded={at: coverage.padded[number] for at, number in enumerate(numbers) if number in coverage.padded},
    )


def _names_of(groups: Iterable[FusingGroup]) -> set[str]:
    return {view.name for group in groups for view in group.views}


def _untouched_experts(
    parameters: Mapping[str, torch.Tensor], missing: Mapping[str, tuple[int, int]], trace: LoaderTrace
) -> Iterator[tuple[str, int]]:
    """Yield parameters of experts, and how many of their experts nothing is written of.

    Their first axis is the experts.
    """
    unfilled = {
        storage(parameters[name]): name for name, (count, _) in missing.items() if count and ".experts." in name
    }
    untouched = {name: set(range(parameters[name].shape[0])) for name in unfilled.values()}
    for traced in trace.without_refused:
        for part in (*(copy.target for copy in traced.copies), *traced.zeros, *traced.computed):
            if (name := unfilled.get(storage(part))) and part.numel():
                step, start = parameters[name].stride(0), int(part.storage_offset()) // parameters[name].stride(0)
                last = int(part.storage_offset()) + span(part.shape, part.stride()) - 1
                untouched[name] -= set(range(start, last // step + 1))
    for name, experts in untouched.items():
        # What a refused tensor would fill is not missing, so it may be fewer.
        if count := min(len(experts), missing[name][0] // parameters[name].stride(0)):
            yield name, count


def _digests(groups: Sequence[FusingGroup], coverage: LoadCoverage) -> dict[int, int]:
    """Return a number for each layer that was given: equal if the loader does the same with two layers."""
    seen: dict[int, list[Any]] = defaultdict(list)
    for group, copies in zip(groups, coverage.copies, strict=True):
        seen[layer_of(group.views[0].name)] += [_pattern(copy) for copy in copies]
    for name in (*coverage.unknown, *coverage.opaque, *(name for names in coverage.errors for name in names)):
        seen[layer_of(name)].append(without_layer(name))
    for name, missing in coverage.missing.items():
        seen[layer_of(name)].append((without_layer(name), missing))
    given = {layer_of(group.views[0].name) for group in groups} | {NO_LAYER}
    return {layer: hash(tuple(seen[layer])) for layer in given}


def _pattern(copy: LoaderCopy) -> tuple[Any, ...]:
    source = copy.source
    return (
        without_layer(source.name),
        source.shape,
        source.stride,
        source.offset,
        without_layer(copy.into),
        str(copy.held),
    )


def ask_ranks(
    shape: EngineShape, parts: Mapping[ModelRank, Part], layers: Layers, answer: Callable[[TracedRank], T]
) -> dict[ModelRank, T]:
    """Trace each of these models in a forked process, some at the same time, and return what is made of each.

    parts: what each is given of the layers. Raise RankFailed at the first that fails, UnsupportedEnvironment.
    """
    keys = list(parts)
    with _with_index(shape, layers) as folder:
        jobs = {
            at: (replace(shape, folder=folder, draft=role != TARGET), rank, layers, parts[role, rank], answer)
            for at, (role, rank) in enumerate(keys)
        }
        try:
            found = in_forks(_answer_in_fork, jobs, shape.processes, "ranks")
        except ForkEnded as error:
            ended = f"{_called(*jobs[error.number][:2])} ended with exit code {error.code} before it answered"
            raise RankFailed(ended) from None
    return {keys[at]: each for at, each in found.items()}


def _answer_in_fork(shape: EngineShape, rank: int, layers: Layers, part: Part, answer: Callable[[TracedRank], T]) -> T:
    """Raise RankFailed with what SGLang raised, or UnsupportedEnvironment."""
    torch.set_num_threads(1)  # threads that torch started before the fork are not here, and would be waited for
    try:
        return answer(trace_rank(shape, rank, layers, part))
    except UnsupportedEnvironment:
        raise
    except Exception as error:  # whatever SGLang raises while it builds a model: it is the answer
        said = f"{type(error).__name__}: {error}"
        if is_for_hardware(error):
            raise UnsupportedEnvironment(f"SGLang cannot build {_called(shape, rank)} here: {said}") from error
        raise RankFailed(f"{_called(shape, rank)}: {said}") from error


def _called(shape: EngineShape, rank: int) -> str:
    return f"engine rank {rank}" + (" (draft model)" if shape.draft else "")
