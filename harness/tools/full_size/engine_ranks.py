"""What the engine's ranks hold at the model's true size, and what their loaders do with every name.

Each rank is a process forked from one that has imported everything, because SGLang keeps one configuration for each process.
The first and the last rank of each pipeline stage are given every name. The ranks between them are given one layer of each
kind, and each layer that is unlike the others of its kind on the first or the last rank: see `layers_to_give`.
"""

import multiprocessing
import re
import time
import traceback
from collections import Counter, defaultdict
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any

import torch

from harness.rollout.sglang_api import meta_model
from harness.rollout.sglang_api.absent_hardware import AssumedGpu, tells_what_is_absent
from harness.runtime.errors import UnsupportedEnvironment
from harness.weights.fusing import FusingGroup
from harness.weights.worker.coverage import LoadCoverage, LoaderCopy, LoaderTrace
from harness.weights.worker.model_state import derived_tensors
from harness.weights.worker.undo import UndoneWrites, storage

NO_LAYER = -1
"""Stands for what is outside the decoder layers: the embedding, the last norm and the head."""
Layers = Mapping[int, Sequence[FusingGroup]]
Job = tuple["EngineShape", int, Layers, bool]
"""The arguments of examine_rank."""


class RankFailed(Exception):
    """SGLang could not build a rank. The message has SGLang's own words."""


@dataclass(frozen=True, kw_only=True)
class EngineRank:
    """One rank of the engine."""

    rank: int
    parameters: int
    """How many tensors are parameters."""
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
    """What was given to its loader."""
    layers: frozenset[int]
    """The layers whose groups these are, and for a rank that was given every name also those for which nothing is sent."""
    coverage: LoadCoverage
    """What the loader did with these groups."""
    digests: dict[int, int]
    """Layer that it holds -> a number that layers have in common of which the loader does the same."""
    seconds: float


@dataclass(frozen=True, kw_only=True)
class EngineShape:
    """The engine's ranks, and how many of them are a pipeline stage."""

    folder: Path
    arguments: dict[str, Any]
    """SGLang's server arguments."""
    tp: int
    pp: int
    processes: int
    """How many ranks are built at the same time."""
    draft: bool = False
    """Build the draft model of speculative decoding, which only the last pipeline stage has."""

    def stages(self) -> list[range]:
        """Return the ranks of each stage that has such a model."""
        found = [range(stage * self.tp, (stage + 1) * self.tp) for stage in range(self.pp)]
        return found[-1:] if self.draft else found


def examine(shape: EngineShape, groups: Iterable[FusingGroup], all_ranks: bool) -> list[EngineRank]:
    """Return all ranks of one engine. all_ranks: give every name to every rank. Raise RankFailed, UnsupportedEnvironment."""
    layers = by_layer(groups)
    every_rank = [rank for stage in shape.stages() for rank in stage]
    ends = sorted({rank for stage in shape.stages() for rank in (stage[0], stage[-1])})
    whole = every_rank if all_ranks else ends
    found = _in_processes({rank: (shape, rank, layers, True) for rank in whole}, shape.processes)
    wanted: set[int] = set()
    for stage in shape.stages():
        wanted |= layers_to_give(layers, [found[rank] for rank in stage if rank in found])
    given = {layer: layers.get(layer, []) for layer in sorted(wanted)}
    rest = {rank: (shape, rank, given, False) for rank in every_rank if rank not in found}
    found |= _in_processes(rest, shape.processes)
    return [found[rank] for rank in every_rank]


def given_to_all(ranks: Sequence[EngineRank]) -> tuple[tuple[FusingGroup, ...], list[LoadCoverage]]:
    """Return the groups that every rank's loader was given, and what each rank did with these."""
    layers = frozenset.intersection(*(each.layers for each in ranks))
    fewest = min(ranks, key=lambda each: len(each.layers)).groups
    coverage = []
    for each in ranks:
        numbers = [number for number, group in enumerate(each.groups) if layer_of(group.views[0].name) in layers]
        missing = {name: found for name, found in each.coverage.missing.items() if layer_of(name) in layers}
        copies = [each.coverage.copies[number] for number in numbers]
        coverage.append(replace(each.coverage, copies=copies, missing=missing, padded={}))
    return fewest, coverage


def filled_in_part(ranks: Sequence[EngineRank], target: Sequence[EngineRank] = ()) -> tuple[list[str], list[str]]:
    """Return sentences on parameters that some ranks' loaders fill whole, and others do not: problems, and what looks like padding.

    Where sizes do not divide, the last ranks hold padding, in every layer alike. Under expert parallelism each rank holds
    other experts, so one that is lost leaves a part of one rank unfilled. target: the same ranks of the target model, if these
    are of its draft model, whose one layer has to be compared with the target's.
    """
    problems: list[str] = []
    padding: list[str] = []
    key_of = last_names if target else without_layer
    filled = {name for each in ranks for name, (missing, _) in each.coverage.missing.items() if not missing}
    compared = {each.rank: each for each in target or ranks}
    for each in ranks:
        least: dict[str, int] = {}
        for name, (missing, _) in compared[each.rank].coverage.missing.items():
            least[key_of(name)] = min(missing, least.get(key_of(name), missing))
        for name, (missing, elements) in each.coverage.missing.items():
            if missing and name in filled:
                sentence = (
                    f"{name}: on engine rank {each.rank} nothing sent would fill {missing} of its {elements} elements"
                )
                (problems if missing > least.get(key_of(name), 0) else padding).append(sentence)
    return problems, padding


def by_layer(groups: Iterable[FusingGroup]) -> dict[int, list[FusingGroup]]:
    """Return the groups of each decoder layer, and of NO_LAYER."""
    layers: dict[int, list[FusingGroup]] = defaultdict(list)
    for group in groups:
        layers[layer_of(group.views[0].name)].append(group)
    return dict(sorted(layers.items()))


def layer_of(name: str) -> int:
    """Return the decoder layer of a tensor, by its name."""
    found = re.search(r"\blayers\.(\d+)\.", name)
    return int(found[1]) if found else NO_LAYER


def layers_to_give(layers: Layers, ends: Sequence[EngineRank]) -> set[int]:
    """Return the layers that show what the other ranks of a stage do with all of them.

    Layers are of one kind if the same names, dtypes and shapes are sent for them. Where the loaders of both ends of the stage
    do the same with two layers of a kind, those between them do too, since all ranks of a stage run the same code and differ
    in their number alone. So one layer stands for these, and each layer with another digest on one end for itself.
    """
    kinds: dict[Any, dict[int, tuple[int, ...]]] = defaultdict(dict)
    for layer in set().union(*(each.digests for each in ends)):
        kinds[kind_of(layers.get(layer, ()))][layer] = tuple(each.digests.get(layer, 0) for each in ends)
    wanted = {NO_LAYER}
    for digests in kinds.values():
        [(usual, _)] = Counter(digests.values()).most_common(1)
        wanted.add(next(layer for layer, digest in sorted(digests.items()) if digest == usual))
        wanted |= {layer for layer, digest in digests.items() if digest != usual}
    return wanted


def kind_of(groups: Iterable[FusingGroup]) -> tuple[Any, ...]:
    """Return what layers of one kind have in common: names, dtypes, shapes, and how they lie in the trainer's tensors."""
    views = [view for group in groups for view in group.views]
    return tuple((without_layer(view.name), str(view.dtype), view.shape, view.stride, view.offset) for view in views)


def without_layer(name: str) -> str:
    """Return a tensor's name without the number of its layer."""
    return re.sub(r"\blayers\.\d+\.", "layers.*.", name)


def last_names(name: str) -> str:
    """Return the last two parts of a parameter's name, which a layer of the target and of the draft model have in common."""
    return ".".join(name.split(".")[-2:])


def examine_rank(shape: EngineShape, rank: int, layers: Layers, whole: bool) -> EngineRank:
    """Build one rank in this process, and give these layers' names to its loader. whole: these are all that are sent."""
    started = time.monotonic()
    gpu = AssumedGpu()
    gpu.answer()
    model = meta_model.build_on_meta(shape.folder, shape.arguments, rank, shape.draft)
    shared = meta_model.shared_with_target(model, shape.pp) if shape.draft else frozenset()
    parameters = {name: each for name, each in model.named_parameters() if name not in shared}
    groups = tuple(group for each in layers.values() for group in each)
    trace = LoaderTrace(model, groups)
    trace.run()
    coverage = trace.coverage()
    held = {layer_of(name) for name in parameters} - {NO_LAYER}
    given = frozenset(layers) | (held if whole else set())
    missing = {name: found for name, found in coverage.missing.items() if layer_of(name) in given}
    missing = {name: found for name, found in missing.items() if name in parameters}
    coverage = replace(coverage, missing=missing)
    return EngineRank(
        rank=rank,
        parameters=len(parameters),
        nbytes=sum(each.nbytes for each in parameters.values()),
        held={name: (str(each.dtype).removeprefix("torch."), tuple(each.shape)) for name, each in parameters.items()},
        derived_bytes=_derived_bytes(trace),
        built=type(model).__name__,
        asked_of_gpu=frozenset(gpu.asked),
        groups=groups,
        layers=given,
        coverage=coverage,
        digests=dict(_digests(held, groups, coverage)),
        seconds=time.monotonic() - started,
    )


def _derived_bytes(trace: LoaderTrace) -> int:
    """Return the bytes of the tensors that the model's own post-load step makes, such as MLA's w_kc and w_vc."""
    if not trace.derives:
        return 0
    with torch.no_grad(), UndoneWrites(trace.model):
        trace.model.post_load_weights()
        held = {storage(each) for each in trace.model.parameters()}
        made = {storage(each): each.untyped_storage().nbytes() for each in derived_tensors(trace.model).values()}
    return sum(nbytes for place, nbytes in made.items() if place not in held)


def _digests(held: Collection[int], groups: Sequence[FusingGroup], coverage: LoadCoverage) -> Iterator[tuple[int, int]]:
    """Yield a number for each layer that the rank holds: equal if the loader does the same with two layers."""
    seen: dict[int, list[Any]] = {layer: [] for layer in sorted(held)}
    for group, copies in zip(groups, coverage.copies, strict=True):
        layer = layer_of(group.views[0].name)
        if layer in seen:
            seen[layer] += [_pattern(copy) for copy in copies]
    for name in (*coverage.unknown, *coverage.opaque, *coverage.errors):
        if layer_of(name) in seen:
            seen[layer_of(name)].append(without_layer(name))
    for name, missing in coverage.missing.items():
        if layer_of(name) in seen:
            seen[layer_of(name)].append((without_layer(name), missing))
    for layer, patterns in seen.items():
        yield layer, hash(tuple(patterns))


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


def _in_processes(jobs: Mapping[int, Job], processes: int) -> dict[int, EngineRank]:
    """Examine each rank in a forked process, so many at the same time. Raise RankFailed at the first that fails."""
    fork = multiprocessing.get_context("fork")
    waiting, found = sorted(jobs), dict[int, EngineRank]()
    running: dict[Any, tuple[int, Any]] = {}  # the reading end of its pipe -> the rank and its process
    try:
        while waiting or running:
            while waiting and len(running) < processes:
                rank = waiting.pop(0)
                reader, writer = fork.Pipe(duplex=False)
                child = fork.Process(target=_answer, args=(writer, *jobs[rank]), daemon=True)
                child.start()
                writer.close()
                running[reader] = rank, child
            for ready in wait(list(running)):
                rank, child = running.pop(ready)
                found[rank] = _answer_of(ready, rank, child)
    finally:
        for _, child in running.values():
            child.kill()
    return found


def _answer_of(reader: Any, rank: int, child: Any) -> EngineRank:
    try:
        answer = reader.recv()  # from our own fork, through a pipe that has no name
    except EOFError:
        child.join()
        raise RankFailed(f"engine rank {rank} ended with exit code {child.exitcode} before it answered") from None
    child.join()
    if isinstance(answer, UnsupportedEnvironment):
        raise answer
    if isinstance(answer, str):
        if tells_what_is_absent(answer):
            raise UnsupportedEnvironment(f"SGLang cannot build engine rank {rank} here: {answer}")
        raise RankFailed(f"engine rank {rank}: {answer}")
    assert isinstance(answer, EngineRank)
    return answer


def _answer(writer: Connection, *job: *Job) -> None:
    """Send what examine_rank returns, or the last line of what SGLang raised; its traceback goes to standard error."""
    try:
        writer.send(examine_rank(*job))
    except UnsupportedEnvironment as error:
        writer.send(error)
    except Exception as error:  # whatever SGLang raises while it builds a model: it is the answer
        traceback.print_exc()
        writer.send(f"{type(error).__name__}: {error}")
