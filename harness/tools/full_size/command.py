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

KV_CACHE_SCALES = (".k_scale", ".v_scale")
"""Parameters that a quantized attention has for a KV cache in float8. Without them SGLang takes 1.0."""


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

    meta_model.prepare_import(folder)
    warnings.filterwarnings("ignore")
    logging.disable(logging.ERROR)  # SGLang tells what a CPU lacks; what it cannot build, it raises
    with collecting_nothing():
        import torch

        from harness.tools.full_size import engine_ranks
        from harness.tools.full_size.trainer_names import trainer_layout
        from harness.weights.fusing import fusing_groups
        from harness.weights.presync_checks import coverage_problems

        meta_model.import_all()
    imported = time.monotonic()
    layout = trainer_layout(folder, getattr(torch, options.dtype))
    groups = fusing_groups(layout)
    shape = engine_ranks.EngineShape(
        folder=folder, arguments=arguments, tp=options.tp, pp=options.pp, processes=len(os.sched_getaffinity(0))
    )
    print(
        f"{name}: {len(layout):,} names, {sum(view.nbytes for view in layout) / 1e9:.1f} GB; imports {imported - started:.1f} s"
    )
    try:
        ranks = engine_ranks.examine(shape, groups, options.all_ranks)
    except engine_ranks.RankFailed as error:
        print(f"VERDICT: the engine cannot be built: {error}")
        return 1
    given, coverage = engine_ranks.given_to_all(ranks)
    scales = {name for each in coverage for name in each.missing if name.endswith(KV_CACHE_SCALES)}
    unfilled = {name for each in coverage for name in scales if each.missing.get(name, (0, 0))[0]}
    problems = [each for each in coverage_problems(given, coverage) if each.partition(":")[0] not in unfilled]
    in_part, padding = engine_ranks.filled_in_part(ranks)
    problems += in_part
    untold = sorted({name for each in ranks for name in each.coverage.opaque})
    largest = max(ranks, key=lambda each: each.nbytes)
    seconds = time.monotonic() - started
    print(
        f"engine: {len(ranks)} ranks, {largest.parameters:,} parameters and {largest.nbytes / 1e9:.2f} GB on rank {largest.rank};"
        f" {_how_given(ranks, len(layout))}; {seconds:.1f} s, {_peak_gb():.2f} GB of memory for a process at most"
    )
    if options.json:
        Path(options.json).write_text(
            json.dumps(_as_table(folder, arguments, layout, ranks, problems, untold), indent=1)
        )
    if unfilled:
        print(
            "not filled, as published checkpoints lack them and SGLang sets them itself: scales of the attention's KV cache"
        )
    if padding:
        print(f"in every layer alike, as padding is: {padding[0]}; {len(padding)} such")
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
    print(f"VERDICT: {followed} arrives whole, and every parameter of the engine is filled")
    return 0


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
        "sent": {view.name: [str(view.dtype).removeprefix("torch."), list(view.shape)] for view in layout},
        "ranks": [{"rank": each.rank, "parameters": each.parameters, "bytes": each.nbytes} for each in ranks],
        "problems": list(problems),
        "not_followed": list(untold),
    }
