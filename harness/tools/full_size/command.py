"""What launch/full_size.py does: both sides of a weight sync at the model's true size, and one verdict."""

import importlib.metadata
import json
import logging
import os
import resource
import tempfile
import time
import warnings
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from harness.rollout.cpu_mode import cpu_environment
from harness.runtime import cpu_standins
from harness.runtime.fork_server import collecting_nothing
from harness.tools.full_size.question import Options, Question, read_question

SHOWN = 12
"""How many problems are printed; the JSON has all."""


def run(name: str, options: Options, words: Sequence[str] = ()) -> int:
    """Print the verdict and return the exit code. words: keys of a run's config. Raise ConfigError, UnsupportedEnvironment."""
    if options.against:
        from harness.tools.full_size import compare

        return compare.against(name, options, words)
    with tempfile.TemporaryDirectory() as scratch:
        return _answer(name, options, read_question(name, options, words, Path(scratch)))


def _answer(name: str, options: Options, question: Question) -> int:
    started = time.monotonic()
    folder, arguments = question.folder, question.arguments
    cpu_standins.activate()
    os.environ.update(cpu_environment(1))
    from harness.rollout.sglang_api import meta_model

    meta_model.prepare_import(folder, draft=bool(options.speculative_algorithm))
    warnings.filterwarnings("ignore")
    logging.disable(logging.ERROR)  # SGLang tells what a CPU lacks; what it cannot build, it raises
    with collecting_nothing():
        import torch

        from harness.rollout.sglang_api.absent_hardware import AssumedGpu
        from harness.tools.full_size import draft_model, engine_ranks, whole_run
        from harness.tools.full_size.findings import Findings
        from harness.tools.full_size.sync_plan import Rates
        from harness.tools.full_size.trainer_names import trainer_names
        from harness.weights.fusing import fusing_groups

        meta_model.import_all(folder)
    imported = time.monotonic()
    names = trainer_names(folder, getattr(torch, question.dtype))
    layout = names.layout
    mtp = draft_model.mtp_layout(folder, layout) if options.speculative_algorithm else ()
    groups = fusing_groups(layout)
    shape = engine_ranks.EngineShape(
        folder=folder, arguments=arguments, tp=question.tp, pp=question.pp, processes=len(os.sched_getaffinity(0))
    )
    print(
        f"{name}: {len(layout):,} names, {sum(view.nbytes for view in layout) / 1e9:.1f} GB; imports {imported - started:.1f} s"
    )
    peaks = whole_run.measure_trainer(folder, question.run, shape.processes) if question.run else {}
    try:
        ranks = engine_ranks.examine(shape, groups, options.all_ranks)
        draft = draft_model.examine_draft(shape, ranks, layout, mtp) if mtp else None
    except engine_ranks.RankFailed as error:
        if options.json:
            table = _as_table(folder, arguments, layout, (), (), ()) | {"cannot_build": str(error)}
            Path(options.json).write_text(json.dumps(table, indent=1))
        print(f"VERDICT: the engine cannot be built: {error}")
        return 1
    found = Findings.of(ranks)
    problems = [*found.problems, *(draft.findings.problems if draft else ())]
    untold = [*found.untold, *(draft.findings.untold if draft else ())]
    largest = max(ranks, key=lambda each: each.nbytes)
    seconds = time.monotonic() - started
    print(
        f"engine: {len(ranks)} ranks, {largest.parameters:,} parameters and {largest.nbytes / 1e9:.2f} GB on rank {largest.rank};"
        f" {_how_given(ranks, len(layout))}; {seconds:.1f} s, {_peak_gb():.2f} GB of memory for a process at most"
    )
    if draft:
        print(_of_draft(draft))
    whole = None
    if question.run:
        whole = whole_run.examine_run(
            question.run, options.nproc_per_node, options.gpu_memory_gib, folder, names, groups, ranks, peaks
        )
        rates = Rates(
            same_gpu=whole_run.GPU_RATE, nvlink=whole_run.NVLINK_RATE, network=options.network_gb_per_second * 1e9
        )
        print("\n".join(whole.as_lines(options.gpu_memory_gib, rates)))
    if options.json:
        table = _as_table(folder, arguments, layout, ranks, problems, untold)
        if draft:
            table["draft"] = {
                "sent": _names(draft.mtp),
                "ranks": _ranks(draft.ranks),
                "filled_by_trainer": sorted(draft.filled_by_trainer),
            }
        if whole:
            table["run"] = whole.table()
        Path(options.json).write_text(json.dumps(table, indent=1))
    if asked := sorted(set().union(*(each.asked_of_gpu for each in ranks))):
        print(
            f"SGLang asked torch.cuda for {', '.join(asked)} and was told those of an {AssumedGpu.name}, which is absent"
        )
    if found.kv_cache_scales:
        print(
            "not filled, as published checkpoints lack them and SGLang sets them itself: scales of the attention's KV cache"
        )
    if found.padding:
        print(f"in every layer alike, as padding is: {found.padding[0]}; {len(found.padding)} such")
    for line in problems[:SHOWN]:
        print(f"  {line}")
    if untold:
        print(f"not followed, as the loader computes with them: {len(untold)} names, such as {untold[0]}")
    if problems:
        more = f", of which {SHOWN} are shown" if len(problems) > SHOWN else ""
        print(
            f"VERDICT: {len(problems)} problem(s){more}: the trainer's weights do not all arrive; first: {problems[0]}"
        )
        return 1
    followed = "every name" if not untold else f"every name that could be followed ({len(layout) - len(untold):,})"
    arrives = f"{followed} arrives whole, and every parameter of the engine is filled{_draft_verdict(draft)}"
    if whole and not whole.memory.fits:
        print(f"VERDICT: {arrives}, but the run does not fit its GPUs; first: {whole.memory.problems[0]}")
        return 1
    print(f"VERDICT: {arrives}" + (f"; {whole.memory.verdict()}" if whole else ""))
    return 0


def _of_draft(draft: Any) -> str:
    """Return the lines about the draft model, and what a sync does for it."""
    largest = max(draft.ranks, key=lambda each: each.nbytes)
    filled = (
        f"{len(draft.filled_by_trainer)} of its parameters" if draft.filled_by_trainer else "none of its parameters"
    )
    return (
        f"draft model: {largest.built} on {len(draft.ranks)} ranks, {largest.parameters:,} parameters and"
        f" {largest.nbytes / 1e9:.2f} GB on rank {largest.rank}, besides the target's embedding and head; given"
        f" {len(draft.mtp):,} names of the MTP layer, as published checkpoints have them\n"
        f"  transformers' class has no MTP layer: what such a trainer sends fills {filled}, so a sync leaves the draft"
        " model's weights as they were"
    )


def _draft_verdict(draft: Any) -> str:
    if not draft:
        return ""
    return "; the draft model takes the MTP layer's names, but a trainer with transformers' class sends none of them"


def _how_given(ranks: Sequence[Any], names: int) -> str:
    whole = sum(1 for each in ranks if sum(len(group.views) for group in each.groups) == names)
    if whole == len(ranks):
        return f"each was given all {names:,} names"
    return f"{whole} were given all {names:,} names, the others those of each kind of layer"


def _peak_gb() -> float:
    """Return the peak memory of this process and of its largest child, whichever is more, in GB."""
    users = (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)
    return max(resource.getrusage(user).ru_maxrss for user in users) * 1024 / 1e9


def _as_table(
    folder: Path, arguments: Mapping[str, Any], layout: Sequence[Any], ranks: Sequence[Any], problems: Sequence[str],
    untold: Sequence[str],
) -> dict[str, Any]:  # fmt: skip
    """Return what was found, for JSON: two such tables of two releases can be compared line by line."""
    return {
        "model": folder.name,
        "arguments": dict(arguments),
        "sent": _names(layout),
        "versions": {package: importlib.metadata.version(package) for package in ("sglang", "transformers", "torch")},
        "cannot_build": "",
        "ranks": _ranks(ranks),
        "held": _held(ranks),
        "problems": list(problems),
        "not_followed": list(untold),
    }


def _names(layout: Sequence[Any]) -> dict[str, list[Any]]:
    return {view.name: [str(view.dtype).removeprefix("torch."), list(view.shape)] for view in layout}


def _held(ranks: Sequence[Any]) -> list[dict[str, Any]]:
    """Return the parameters by name, once for all ranks that hold the same."""
    alike: list[dict[str, Any]] = []
    for each in ranks:
        same = next((group for group in alike if group["parameters"] == each.held), None)
        if same is None:
            alike.append(same := {"ranks": [], "parameters": each.held})
        same["ranks"].append(each.rank)
    return alike


def _ranks(ranks: Sequence[Any]) -> list[dict[str, int]]:
    return [{"rank": each.rank, "parameters": each.parameters, "bytes": each.nbytes} for each in ranks]
