"""What launch/full_size.py does: both sides of a weight sync at the model's true size, and one verdict."""

import json
import logging
import os
import resource
import time
import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from harness.cluster.mesh import ParallelDims
from harness.config.layers import ConfigError
from harness.rollout.cpu_mode import cpu_environment
from harness.runtime import cpu_standins
from harness.runtime.fork_server import collecting_nothing

SHIPPED = Path(__file__).resolve().parents[3] / "configs" / "models"
SHOWN = 12
"""How many problems are printed; the JSON has all."""

MTP_ALGORITHMS = ("NEXTN", "EAGLE")
"""Those of SGLang's that take the draft model from the model's own checkpoint; NEXTN is another name of EAGLE."""


@dataclass(kw_only=True)
class Options:
    """MODEL is a folder with a config.json, or the name of a folder of configs/models."""

    tp: int = 1
    """Tensor-parallel ranks of the engine."""
    pp: int = 1
    """Pipeline stages of the engine."""
    ep: int = 1
    """Expert-parallel ranks of the engine (SGLang's ep_size)."""
    dp_attention: int = 1
    """Data-parallel groups of the engine's attention (SGLang's dp_size with enable_dp_attention)."""
    dtype: str = "bfloat16"
    """What both sides compute in."""
    speculative_algorithm: str = ""
    """NEXTN or EAGLE, as SGLang's argument: examine the draft model too, which serves the model's own layer for multi-token
    prediction."""
    all_ranks: bool = False
    """Give every name to every rank's loader. Otherwise the ranks between the first and the last of a stage get one layer of
    each kind."""
    json: str = ""
    """Write what was found there too."""


def model_folder(name: str) -> Path:
    """Return the folder of MODEL. Raise ConfigError if it has no config.json that can be read."""
    folder = Path(name) if (Path(name) / "config.json").is_file() else SHIPPED / name
    if (os.sep in name and folder.parent == SHIPPED) or not (folder / "config.json").is_file():
        shipped = ", ".join(sorted(each.parent.name for each in SHIPPED.glob("*/config.json")))
        raise ConfigError(f"MODEL must be a folder with a config.json, or one of {shipped}; got {name}.")
    try:
        fields = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    except ValueError as error:
        raise ConfigError(f"{folder}/config.json must be JSON, got {error}.") from None
    if not isinstance(fields, dict) or not isinstance(fields.get("architectures"), list):
        raise ConfigError(f"{folder}/config.json must name the model's class in architectures.")
    return folder.resolve()


def server_arguments(options: Options) -> dict[str, Any]:
    """Return SGLang's server arguments. Raise ConfigError for numbers that no engine can have."""
    ParallelDims(dp=1, tp=options.tp, pp=options.pp).validate(options.tp * options.pp)
    for name in ("ep", "dp_attention"):
        value = getattr(options, name)
        if value < 1 or options.tp % value:
            raise ConfigError(
                f"--{name.replace('_', '-')} must be 1 or more and divide --tp {options.tp}, got {value}."
            )
    found = {"tp_size": options.tp, "pp_size": options.pp, "ep_size": options.ep, "dtype": options.dtype}
    if options.dp_attention > 1:
        found |= {"dp_size": options.dp_attention, "enable_dp_attention": True}
    if options.speculative_algorithm:
        if options.speculative_algorithm not in MTP_ALGORITHMS:
            raise ConfigError(
                f"--speculative-algorithm must be {' or '.join(MTP_ALGORITHMS)}, whose draft model is in the model's own"
                f" checkpoint; got {options.speculative_algorithm}."
            )
        found["speculative_algorithm"] = options.speculative_algorithm
    return found


def check_heads(folder: Path, options: Options) -> None:
    """Raise ConfigError if the attention's heads cannot be divided over its ranks."""
    fields = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    heads = (fields.get("text_config") or fields).get("num_attention_heads")
    ranks = options.tp // options.dp_attention
    if isinstance(heads, int) and heads % ranks:
        raise ConfigError(
            f"--tp {options.tp} must divide the model's {heads} attention heads over {ranks} ranks evenly."
        )


def run(name: str, options: Options) -> int:
    """Print the verdict and return the exit code. Raise ConfigError, UnsupportedEnvironment."""
    started = time.monotonic()
    folder, arguments = model_folder(name), server_arguments(options)
    check_heads(folder, options)
    cpu_standins.activate()
    os.environ.update(cpu_environment(1))
    from harness.rollout.sglang_api import meta_model

    meta_model.prepare_import(folder, draft=bool(options.speculative_algorithm))
    warnings.filterwarnings("ignore")
    logging.disable(logging.ERROR)  # SGLang tells what a CPU lacks; what it cannot build, it raises
    with collecting_nothing():
        import torch

        from harness.tools.full_size import draft_model, engine_ranks
        from harness.tools.full_size.findings import Findings
        from harness.tools.full_size.trainer_names import trainer_layout
        from harness.weights.fusing import fusing_groups

        meta_model.import_all()
    imported = time.monotonic()
    layout = trainer_layout(folder, getattr(torch, options.dtype))
    mtp = draft_model.mtp_layout(folder, layout) if options.speculative_algorithm else ()
    groups = fusing_groups(layout)
    shape = engine_ranks.EngineShape(
        folder=folder, arguments=arguments, tp=options.tp, pp=options.pp, processes=len(os.sched_getaffinity(0))
    )
    print(
        f"{name}: {len(layout):,} names, {sum(view.nbytes for view in layout) / 1e9:.1f} GB; imports {imported - started:.1f} s"
    )
    try:
        ranks = engine_ranks.examine(shape, groups, options.all_ranks)
        draft = draft_model.examine_draft(shape, ranks, layout, mtp) if mtp else None
    except engine_ranks.RankFailed as error:
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
    if options.json:
        table = _as_table(folder, arguments, layout, ranks, problems, untold)
        if draft:
            table["draft"] = {
                "sent": _names(draft.mtp),
                "ranks": _ranks(draft.ranks),
                "filled_by_trainer": sorted(draft.filled_by_trainer),
            }
        Path(options.json).write_text(json.dumps(table, indent=1))
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
    print(f"VERDICT: {followed} arrives whole, and every parameter of the engine is filled{_draft_verdict(draft)}")
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
        "ranks": _ranks(ranks),
        "problems": list(problems),
        "not_followed": list(untold),
    }


def _names(layout: Sequence[Any]) -> dict[str, list[Any]]:
    return {view.name: [str(view.dtype).removeprefix("torch."), list(view.shape)] for view in layout}


def _ranks(ranks: Sequence[Any]) -> list[dict[str, int]]:
    return [{"rank": each.rank, "parameters": each.parameters, "bytes": each.nbytes} for each in ranks]
