"""Find mistakes before any rank starts: collect the facts that can be known without other ranks, and resolve the
config.

--check, --dry-run and the quickstart use it, and so does the first rank of each host before it imports torch. It reads
config.json, rows and the source of installed packages without importing them. Resolved.not_checked names what it could
not read; a file that is there but broken raises ConfigError.
"""

import ast
import difflib
import importlib.util
import json
import os
import shlex
import struct
import sys
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from typing import Literal

from harness.cluster.mesh import ParallelDims
from harness.config.checkpoint_folder import checkpoint_to_resume
from harness.config.facts import Device, Facts
from harness.config.layers import ConfigError
from harness.config.model_fields import is_hub_model, model_fields
from harness.config.resolve import SECTIONS, Resolved, resolve
from harness.config.run_folder import check_run_folder, check_writable
from harness.config.schema import Config
from harness.rollout import sglang_api
from harness.rollout.sglang_api import source
from harness.rollout.sglang_api.engine_facts import engine_facts
from harness.rollout.sglang_api.unasked_code import unasked_code
from harness.runtime.cpu_standins import torch_is_for_cpu
from harness.runtime.errors import UnsupportedEnvironment, report_user_error
from harness.task.data import Row, file_of, is_hub_id, load_rows
from harness.task.tiny_models import ARCHITECTURES, CONFIG_CLASSES, NOT_OVERRIDABLE, is_tiny, tiny_fields
from harness.tools import environments
from harness.tools.command_line import parse
from harness.tools.rewards.more_rewards import check_math_verify, check_reward
from harness.tools.trackers.trackers import check_trackers

LARGEST_CHECKED = 16 << 20  # bytes of a file of rows that is read before the run
LONGEST_HEADER = 100 << 20  # bytes; safetensors itself refuses more
HUB_SECONDS = 10.0  # how long the hub may take to answer
GPU_FILES = ("nvidia[0-9]*", "dxg", "kfd")
"""In /dev: NVIDIA's, those of Windows' Linux, AMD's."""
WEIGHTS = ("*.safetensors", "*.bin")
WEIGHT_INDEX = "model.safetensors.index.json"
TOKENIZERS = ("tokenizer.json", "tokenizer_config.json", "tokenizer.model", "vocab.json", "*.tiktoken")
CAUSAL_MODELS = "models/auto/modeling_auto.py", "MODEL_FOR_CAUSAL_LM_MAPPING_NAMES"
"""Where transformers lists its causal language models by model_type."""


def check_plan(config: Config, *, device: Device = "cuda", whole_model: bool = True) -> Resolved:
    """Resolve the config for a machine that may not be this one.

    Raise ValueError or UnsupportedEnvironment, one sentence.

    device: what engine.device = "auto" means; CUDA has more rules. A hub's model is looked up in the local cache only.
    whole_model: whether a model's folder must have the tokenizer and the weights too, and not only config.json.
    """
    return resolve(config, gather_facts(config, device=device, on_hub=False, whole_model=whole_model))


def go_on_in_environment() -> None:
    """Restart this script in the environment, if there is one and this Python lacks sglang.

    More can be checked there.
    """
    if importlib.util.find_spec("sglang") is None:
        environments.restart_in_environment()


def check_here(config: Config, sections: Collection[str] = SECTIONS) -> Resolved:
    """Resolve the config for this host. Raise ValueError or UnsupportedEnvironment, one sentence."""
    check_interface(config.network.interface, os.environ)
    why_no_gpu = no_gpu(os.environ)
    device: Device = "cpu" if why_no_gpu else "cuda"
    facts = gather_facts(config, sections, device, why_no_gpu, os.environ, on_hub=True)
    return resolve(config, facts, sections)


def gather_facts(
    config: Config,
    sections: Collection[str] = SECTIONS,
    device: Device = "cuda",
    why_no_gpu: str = "",
    environment: Mapping[str, str] | None = None,
    *,
    on_hub: bool,
    whole_model: bool = True,
) -> Facts:
    """Return what can be known without torch and without other ranks. Raise ConfigError for a broken file.

    device: what engine.device = "auto" means. on_hub: whether to ask the hub, and to download a config.json from it.
    whole_model: as in check_plan.
    """
    engine_device: Device = device if config.engine.device == "auto" else config.engine.device
    unknown: dict[str, str] = {}
    sglang = model_types = overridable = rows = None
    try:
        sglang = engine_facts(sglang_api.probe())
    except ModuleNotFoundError:
        unknown["sglang"] = "sglang is not installed in this Python"
    try:
        tree = source.installed("transformers")
        model_types = causal_model_types(tree)
        overridable = overridable_fields(tree, config.model.name) if is_tiny(config.model.name) else None
    except ModuleNotFoundError:
        unknown["model_types"] = "transformers is not installed in this Python"
    check_model_files(config, whole_model)
    if on_hub and is_hub_model(config.model.name):
        _look_up("model", "model.name", config.model.name)
    model = model_fields(config.model.name, config.model.overrides, engine_device, download=on_hub)
    if model is None:
        unknown["model"] = "it is on the hub, and not in the cache of this machine"
    checkpoint_to_resume(config, steps_are_known=not config.run.epochs)
    if "task" in sections:
        rows, why = count_rows(config, on_hub)
        unknown["rows"] = why
    return Facts(
        device=device,
        why_no_gpu=why_no_gpu,
        environment=environment,
        sglang=sglang,
        model=model,
        code=unasked_code(config, download=on_hub),
        model_types=model_types,
        overridable=overridable,
        rows=rows,
        unknown=unknown,
    )


def check_interface(wanted: str, environment: Mapping[str, str]) -> None:
    """Raise NetworkError if this host lacks the interface that network.interface or GLOO_SOCKET_IFNAME names."""
    from harness.cluster.network import INTERFACE_VARIABLE, choose, own_interfaces  # needs psutil

    variable = environment.get(INTERFACE_VARIABLE, "")
    if wanted or variable:
        choose(wanted, variable, own_interfaces(), "127.0.0.1", [])


def check_started(config: Config, script: str, arguments: Sequence[str], environment: Mapping[str, str]) -> None:
    """Before a rank imports torch: check that torchrun started it, with as many ranks as the mesh has.

    Raise ValueError.
    """
    dims = ParallelDims.of(config.parallel)
    if "RANK" not in environment:
        torchrun = environments.torchrun(environments.made() or Path(sys.executable))
        words = [*torchrun, "--nnodes=1", f"--nproc-per-node={dims.world_size}", script, *arguments]
        raise ConfigError(f"torchrun did not start this process; start the run with: {shlex.join(words)}")
    world_size = environment.get("WORLD_SIZE", "")
    if world_size.isdecimal() and environment.get("LOCAL_RANK", "0") == "0":
        dims.validate(int(world_size))


def check_rank(
    config: Config,
    script: str,
    arguments: Sequence[str],
    environment: Mapping[str, str],
    sections: Collection[str] = SECTIONS,
) -> None:
    """Call check_started and, on the first rank of each host, check_here; rank 0 prints its warnings.

    Raise ValueError.
    """
    check_started(config, script, arguments, environment)
    if environment.get("LOCAL_RANK", "0") != "0":
        return
    if environment["RANK"] == "0":
        check_trackers(config)
        check_run_folder(config.run.dir)
        for key, given in written_folders(config, sections).items():
            check_writable(key, given)
    resolved = check_here(
        config, sections
    )  # for what it refuses and warns of; the run resolves it with what its inputs tell
    if environment["RANK"] == "0":
        for sentence in resolved.warnings:
            print(f"warning: {sentence}", file=sys.stderr, flush=True)


def written_folders(config: Config, sections: Collection[str] = SECTIONS) -> dict[str, str]:
    """Return the keys, apart from run.dir, that name a folder which rank 0 will write to, with the folder."""
    given = {
        "weights.folder": config.weights.folder,
        "rollout.save": config.rollout.save,
        "checkpoint.folder": config.checkpoint.folder if config.checkpoint.every else "",
    }
    return {key: folder for key, folder in given.items() if folder and key.split(".")[0] in sections}


def no_gpu(environment: Mapping[str, str] = os.environ) -> str:
    """Return why this host has no usable GPU, as part of a sentence; "" if it may have one.

    Only device files and torch's build are looked at. Problems with the driver show once torch is imported.
    """
    if environment.get("CUDA_VISIBLE_DEVICES", "0").strip() in ("", "-1"):
        return f"CUDA_VISIBLE_DEVICES = {environment['CUDA_VISIBLE_DEVICES']!r} hides every GPU"
    if not any(next(Path("/dev").glob(pattern), None) for pattern in GPU_FILES):
        return "this host has no GPU"
    return "the torch that is installed here is built for the CPU" if torch_is_for_cpu() else ""


def device_of(config: Config) -> Device:
    """Return what engine.device = "auto" means on this host, as far as no_gpu knows."""
    if config.engine.device != "auto":
        return config.engine.device
    return "cpu" if no_gpu() else "cuda"


def count_rows(config: Config, on_hub: bool) -> tuple[int | None, str]:
    """Return how many rows task.source has, or None and why they are not known.

    Raise ValueError for wrong rows and rewards.
    """
    task, validation = config.task, config.validation
    rows, why = read_rows(task.source, task.split, task.rows, task.rows_seed)
    held_out: list[Row] = []
    if validation.source:
        held_out, why_held_out = read_rows(validation.source, validation.split, validation.rows, validation.rows_seed)
        why = why or (f"validation.source: {why_held_out}" if why_held_out else "")
    check_reward(task.reward, [*rows, *held_out])
    if on_hub:
        check_math_verify(task.reward)
        for key, sources in (("task.source", task.source), ("validation.source", validation.source)):
            for name in filter(is_hub_id, sources):
                _look_up("dataset", key, name)
    return (None, why) if why else (len(rows), "")


def read_rows(sources: Sequence[str], split: str, rows: int, seed: int = -1) -> tuple[list[Row], str]:
    """Return the rows that can be read at once and without network, and why the others cannot ("" if these are all).

    Raise load_rows's ValueError.
    """
    known, why = [], ""
    for each in sources:
        if is_hub_id(each):
            why = f"{each} is on the hub"
        elif each != "arithmetic" and file_of(each, split).stat().st_size > LARGEST_CHECKED:
            why = f"{file_of(each, split)} is larger than {LARGEST_CHECKED >> 20} MiB"
        else:
            known.append(each)
    try:
        return (load_rows(known, split, rows, seed) if known else []), why
    except ModuleNotFoundError as error:
        return [], f"{error.name} is not installed in this Python"


def check_model_files(config: Config, whole: bool = True) -> None:
    """Raise ConfigError unless model.name is a tiny model, a hub id, or a folder with all files, none of them cut
    short.

    whole: False if config.json is enough.
    """
    name, folder = config.model.name, Path(config.model.name)
    if is_tiny(name) or is_hub_model(name):
        return
    if not folder.is_dir():
        nearest = difflib.get_close_matches(name, ARCHITECTURES, n=1, cutoff=0.0)[0]
        hint = f", a hub id (OWNER/NAME) or a tiny model; the nearest tiny model is {nearest}"
        if "/" in name:
            hint = f"; give a folder that exists, a hub id (OWNER/NAME), or a tiny model: {', '.join(ARCHITECTURES)}"
        raise ConfigError(f'model.name = "{name}" is not a folder here{hint}.')
    needed: dict[str, tuple[str, ...]] = {"config.json": ("config.json",)}
    if whole:
        needed["tokenizer"] = TOKENIZERS
    if whole and config.model.weights == "checkpoint":
        needed["weights"] = WEIGHTS
    for what, patterns in needed.items():
        if not any(next(folder.glob(pattern), None) for pattern in patterns):
            files = patterns[0] if len(patterns) == 1 else f"one of {', '.join(patterns)}"
            raise ConfigError(f'model.name = "{name}" has no {what}: the folder must have {files}.')
    if "weights" in needed:
        check_index(folder)
        for file in sorted(folder.glob("*.safetensors")):
            check_safetensors(file)


def check_index(folder: Path) -> None:
    """Raise ConfigError unless every file of weights that the model's index names is there: a download may have been
    stopped.
    """
    index = folder / WEIGHT_INDEX
    if not index.is_file() or (folder / "model.safetensors").exists():  # which is read first
        return
    try:
        named = set(json.loads(index.read_text(encoding="utf-8"))["weight_map"].values())
        missing = sorted(each for each in named if not (folder / each).is_file())
    except (ValueError, LookupError, TypeError, AttributeError):
        raise ConfigError(f"{index} is no index of safetensors files; copy or download it again.") from None
    if missing:
        raise ConfigError(
            f"{folder} lacks {len(missing)} of the {len(named)} files of weights that {index.name} names,"
            f" {missing[0]} first; copy or download them."
        )


def check_safetensors(file: Path) -> None:
    """Raise ConfigError unless the file is as long as its header says: a download or a copy may have been cut short."""
    size = file.stat().st_size
    try:
        with file.open("rb") as opened:
            [length] = struct.unpack("<Q", opened.read(8))
            header = json.loads(opened.read(length)) if length <= LONGEST_HEADER else {}
        tensors = [tensor for name, tensor in header.items() if name != "__metadata__"]
        wanted = 8 + length + max((tensor["data_offsets"][1] for tensor in tensors), default=0)
    except (struct.error, ValueError, LookupError, TypeError, AttributeError):
        raise ConfigError(
            f"{file} has no valid safetensors header ({size} bytes); copy or download it again."
        ) from None
    if size != wanted:
        raise ConfigError(f"{file} has {size} bytes, but its header says {wanted}; copy or download it again.")


def causal_model_types(transformers: source.SourceTree) -> frozenset[str] | None:
    """Return every model_type for which this transformers has a causal language model.

    None if this release keeps the list in another place.
    """
    path, name = CAUSAL_MODELS
    table = transformers.assigned(path).get(name)
    pairs = [node.elts[0] for node in ast.walk(table) if isinstance(node, ast.Tuple)] if table else []
    return frozenset(str(node.value) for node in pairs if isinstance(node, ast.Constant)) or None


def overridable_fields(transformers: source.SourceTree, name: str) -> set[str]:
    """Return the fields of a tiny model's config, read from the source of transformers."""
    folder, name_of_class = CONFIG_CLASSES[name]
    own = transformers.find_class(name_of_class, f"models/{folder}/configuration_{folder}.py")
    base = transformers.find_class("PreTrainedConfig", "configuration_utils.py")
    found = set(tiny_fields(name, "cpu"))
    for each in (own, base):
        found |= set(source.annotations(each)) | set(source.methods(each).get("__init__", ()))
    return found - NOT_OVERRIDABLE


def _look_up(kind: Literal["model", "dataset"], key: str, name: str) -> None:
    """Ask the hub once whether it has this: later, every rank would retry each request for a minute. Raise ConfigError.

    Does nothing under HF_HUB_OFFLINE, where the cache decides.
    """
    from huggingface_hub import HfApi, constants

    if constants.HF_HUB_OFFLINE:
        return
    try:
        HfApi().repo_info(name, repo_type=kind, timeout=HUB_SECONDS)
    except Exception as error:  # of the hub's client, of its HTTP library, of sockets, by release
        cause = next((line for line in str(error).splitlines() if line.strip()), "").strip()
        raise ConfigError(
            f'{key} = "{name}" is not a folder here, and {constants.ENDPOINT} did not give the {kind} of that name'
            f" ({type(error).__name__}: {cause}); give a folder, or set HF_HUB_OFFLINE=1 to use what is in the cache."
        ) from error


def main(words: Sequence[str]) -> int:
    """`python -m harness.tools.preflight CONFIG.toml ...`, for the quickstart: check_here; print how many ranks to
    start.
    """
    try:
        config = parse(words).config
        check_trackers(config)
        check_run_folder(config.run.dir)
        check_here(config)
    except (ValueError, UnsupportedEnvironment) as error:
        return report_user_error(error, rank=0)
    print(ParallelDims.of(config.parallel).world_size)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
