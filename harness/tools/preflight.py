"""Mistakes that can be known without other ranks, found before any starts: by --check and --dry-run, by the quickstart, and
by the first rank of each host before torch is imported.

Reads config.json, rows and the source of installed packages, but imports none; what is not installed is not checked.
"""

import difflib
import json
import os
import re
import shlex
import sys
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Literal

from harness.cluster.mesh import ParallelDims
from harness.config.layers import ConfigError, shown
from harness.config.rules import QUANTIZED, check_transport
from harness.config.run_folder import checkpoint_to_resume
from harness.config.schema import Config
from harness.rollout import sglang_api
from harness.rollout.sglang_api import source
from harness.runtime.cpu_standins import torch_is_for_cpu
from harness.runtime.errors import UnsupportedEnvironment, report_user_error
from harness.task.data import Row, file_of, is_hub_id, load_rows, of_validation
from harness.tools import environments
from harness.tools.command_line import parse
from harness.tools.plan.engine_values import check_values
from harness.tools.plan.model_shapes import Fields, UnknownShape, model_fields, model_shape
from harness.tools.plan.refusals import cpu_refusals, padded, refusals
from harness.tools.rewards.more_rewards import check_math_verify, check_reward
from harness.tools.tiny_models import ARCHITECTURES, CONFIG_CLASSES, NOT_OVERRIDABLE, is_tiny, tiny_fields
from harness.tools.trackers.trackers import check_trackers

Device = Literal["cpu", "cuda"]
HUB_ID = re.compile(r"\w[\w.-]*/\w[\w.-]*")
LARGEST_CHECKED = 16 << 20  # bytes of a file of rows that is read before the run
HUB_SECONDS = 10.0  # how long the hub may take to answer
GPU_FILES = ("nvidia[0-9]*", "dxg", "kfd")
"""In /dev: NVIDIA's, those of Windows' Linux, AMD's."""
WEIGHTS = ("*.safetensors", "*.bin")
TOKENIZERS = ("tokenizer.json", "tokenizer_config.json", "tokenizer.model", "vocab.json", "*.tiktoken")


def check_plan(config: Config) -> None:
    """Raise ValueError, one sentence, for what cannot work wherever it runs, UnsupportedEnvironment for what the CPU cannot.

    engine.device = "auto" counts as CUDA, which refuses more. Without network: a hub id is not looked up.
    """
    _check(config, "cpu" if config.engine.device == "cpu" else "cuda", on_hub=False)


def check_here(config: Config) -> list[str]:
    """Raise ValueError or UnsupportedEnvironment, one sentence, for what cannot work on this host; look a hub id up. Return
    warnings, sentences.
    """
    device = device_here(config)
    check_transport(config, device)
    check_interface(config.network.interface, os.environ)
    fields = _check(config, device, on_hub=True)
    return list(padded(fields, config)) if device == "cpu" else []


def check_interface(wanted: str, environment: Mapping[str, str]) -> None:
    """Raise NetworkError where this host lacks the interface that network.interface or GLOO_SOCKET_IFNAME names."""
    from harness.cluster.network import (  # needs more than the standard library
        INTERFACE_VARIABLE,
        choose,
        own_interfaces,
    )

    variable = environment.get(INTERFACE_VARIABLE, "")
    if wanted or variable:
        choose(wanted, variable, own_interfaces(), "127.0.0.1", [])


def check_started(config: Config, script: str, arguments: Sequence[str], environment: Mapping[str, str]) -> None:
    """Before a rank imports torch: torchrun started it, with as many ranks as the mesh has. Raise ValueError."""
    dims = ParallelDims.of(config.parallel)
    if "RANK" not in environment:
        torchrun = environments.torchrun(environments.made() or Path(sys.executable))
        words = [*torchrun, "--nnodes=1", f"--nproc-per-node={dims.world_size}", script, *arguments]
        raise ConfigError(f"RANK is not in the environment; start this with: {shlex.join(words)}")
    world_size = environment.get("WORLD_SIZE", "")
    if world_size.isdecimal() and environment.get("LOCAL_RANK", "0") == "0":
        dims.validate(int(world_size))


def check_rank(config: Config, script: str, arguments: Sequence[str], environment: Mapping[str, str]) -> None:
    """Call check_started and, on the first rank of each host, check_here, whose warnings rank 0 prints. Raise ValueError."""
    check_started(config, script, arguments, environment)
    if environment.get("LOCAL_RANK", "0") != "0":
        return
    if environment["RANK"] == "0":
        check_trackers(config, environment)
    warnings = check_here(config)
    if environment["RANK"] == "0":
        for sentence in warnings:
            print(f"warning: {sentence}", file=sys.stderr, flush=True)


def device_here(config: Config, environment: Mapping[str, str] = os.environ) -> Device:
    """Return what engine.device means on this host. Raise ConfigError where it asks for a GPU that is not there.

    Looks at device files and at torch's build; what a driver refuses shows once torch is imported.
    """
    reason = "it is set" if config.engine.device == "cpu" else no_gpu(environment)
    if config.engine.device == "cuda" and reason:
        raise ConfigError(f'engine.device = "cuda", but {reason}; set engine.device = "cpu".')
    return "cpu" if reason else "cuda"


def no_gpu(environment: Mapping[str, str] = os.environ) -> str:
    """Why there is no GPU to use on this host, as a part of a sentence; empty where there may be one."""
    if environment.get("CUDA_VISIBLE_DEVICES", "0").strip() in ("", "-1"):
        return f"CUDA_VISIBLE_DEVICES = {environment['CUDA_VISIBLE_DEVICES']!r} hides every GPU"
    if not any(next(Path("/dev").glob(pattern), None) for pattern in GPU_FILES):
        return "this host has no GPU"
    return "the torch that is installed here is built for the CPU" if torch_is_for_cpu() else ""


def _check(config: Config, device: Device, on_hub: bool) -> Fields:
    """Return the fields of the model's config; none of a hub's that is neither in the cache nor to be looked up."""
    task, prompts = config.task, config.rollout.prompts_per_step
    if config.engine.args:
        with suppress(ModuleNotFoundError):  # without SGLang: --check on a laptop
            check_values(sglang_api.probe(), config.engine.args)
    fields = _model_fields(config, device, on_hub)
    for sentence in cpu_refusals(fields.get("model_type"), config.engine.args) if device == "cpu" else ():
        raise UnsupportedEnvironment(sentence)
    if device == "cpu" and "kv_lora_rank" in fields:
        require_absorbed_mla()
    if fields:
        check_unquantized(fields, config.model.name)
        for sentence in refusals(fields, config, device):
            raise ConfigError(sentence)
    checkpoint_to_resume(config)
    rows, are_all = check_rows(task.source, task.split, task.rows)
    validation, held_out = config.validation, []
    if validation.source:
        with of_validation():
            held_out = check_rows(validation.source, validation.split, validation.rows)[0]
    check_reward(task.reward, [*rows, *held_out])
    if are_all and len(rows) < prompts:
        raise ConfigError(
            f"rollout.prompts_per_step = {prompts} is more than the {len(rows)} rows of task.source ="
            f" {shown(task.source)}: a step takes no prompt twice."
        )
    if on_hub:
        check_math_verify(task.reward, [*rows, *held_out])
        for each in filter(is_hub_id, task.source):
            _look_up("dataset", "task.source", each)
        for each in filter(is_hub_id, validation.source):
            _look_up("dataset", "validation.source", each)
    return fields


def check_unquantized(model_config: Fields, name: str) -> None:
    """Raise ConfigError for a model whose config.json says that its checkpoint is quantized."""
    found = model_config.get("quantization_config")
    if isinstance(found, Mapping):
        method = f"{found.get('quant_method', 'unknown')}, quantization_config in its config.json"
        raise ConfigError(f'model.name = "{name}" is quantized ({method}): {QUANTIZED}; give a checkpoint that is not.')


def check_rows(sources: Sequence[str], split: str, rows: int) -> tuple[list[Row], bool]:
    """Raise load_rows's ValueError as far as it can be known at once and without network.

    Return the rows that are known, and whether they are all: not of a hub id, of a file that is large or needs pyarrow.
    """
    known = [
        each
        for each in sources
        if not is_hub_id(each) and (each == "arithmetic" or file_of(each, split).stat().st_size <= LARGEST_CHECKED)
    ]
    try:
        return (load_rows(known, split, rows) if known else []), len(known) == len(sources)
    except ModuleNotFoundError:
        return [], False


def require_absorbed_mla() -> None:
    """Raise UnsupportedEnvironment unless the installed SGLang (0.5.12 or newer) can serve an MLA model (DeepSeek) on CPU.

    SGLang logs a plugin that fails and continues, and releases without plugins never ask for ours.
    """
    try:
        sglang = source.installed("sglang")
    except ModuleNotFoundError:  # --check on a laptop
        return
    if not all(map(sglang.has, ("srt/plugins/__init__.py", "srt/models/deepseek_common/attention_backend_handler.py"))):
        raise UnsupportedEnvironment(
            f"an MLA model (DeepSeek) cannot run on CPU with the sglang in {sglang.root}: it has no plugins or no"
            " attention registry for the absorbed method, which sglang 0.5.20 has"
        )


def _model_fields(config: Config, device: Device, on_hub: bool) -> Fields:
    name, folder = config.model.name, Path(config.model.name)
    if is_tiny(name):
        known = shape_fields(name) if config.model.overrides else set()
        for key, value in config.model.overrides.items() if known else ():
            if key not in known:
                nearest = difflib.get_close_matches(key, sorted(known), n=1, cutoff=0.0)[0]
                where = f"is no field of {name}'s config: did you mean {nearest}?"
                raise ConfigError(f"model.overrides.{key} = {value!r} {where}")
        fields = model_fields(name, config.model.overrides, device)
        try:
            model_shape(fields)
        except UnknownShape as error:
            raise ConfigError(f"model.overrides cannot work: {error}.") from error
        return fields
    if not folder.exists() and HUB_ID.fullmatch(name):
        return _hub_config(name, on_hub)
    if not folder.is_dir():
        nearest = difflib.get_close_matches(name, ARCHITECTURES, n=1, cutoff=0.0)[0]
        hint = f"nor a hub id (OWNER/NAME), nor a tiny model; the nearest of these is {nearest}"
        raise ConfigError(f'model.name = "{name}" is no folder here{"" if "/" in name else ", " + hint}.')
    needed = {"config.json": ("config.json",), "tokenizer": TOKENIZERS}
    if config.model.weights == "checkpoint":
        needed["weights"] = WEIGHTS
    for what, patterns in needed.items():
        if not any(next(folder.glob(pattern), None) for pattern in patterns):
            raise ConfigError(f'model.name = "{name}" has no {what}: none of {", ".join(patterns)} is in this folder.')
    try:
        return dict(json.loads((folder / "config.json").read_text(encoding="utf-8")))
    except (TypeError, ValueError) as error:
        raise ConfigError(f"{folder / 'config.json'} is not JSON, or no object: {error}.") from error


def shape_fields(name: str) -> set[str]:
    """Fields of a tiny model's config, read from transformers' source; none where that is not installed."""
    try:
        tree = source.installed("transformers")
    except ModuleNotFoundError:
        return set()
    folder, name_of_class = CONFIG_CLASSES[name]
    own = tree.find_class(name_of_class, f"models/{folder}/configuration_{folder}.py")
    base = tree.find_class("PreTrainedConfig", "configuration_utils.py")
    found = set(tiny_fields(name, "cpu"))
    for each in (own, base):
        found |= set(source.annotations(each)) | set(source.methods(each).get("__init__", ()))
    return found - NOT_OVERRIDABLE


def _look_up(kind: Literal["model", "dataset"], key: str, name: str) -> None:
    """Ask the hub for it once: every later request of every rank would be retried for a minute. Raise ConfigError.

    Nothing under HF_HUB_OFFLINE, where the cache decides.
    """
    from huggingface_hub import HfApi, constants

    if constants.HF_HUB_OFFLINE:
        return
    try:
        HfApi().repo_info(name, repo_type=kind, timeout=HUB_SECONDS)
    except Exception as error:  # of the hub's client, of its HTTP library, of sockets, by release
        cause = next((line for line in str(error).splitlines() if line.strip()), "").strip()
        raise ConfigError(
            f'{key} = "{name}" is no folder here, and as a hub id cannot be loaded: {constants.ENDPOINT} was asked once for'
            f" this {kind} ({type(error).__name__}: {cause}); give a folder, or set HF_HUB_OFFLINE=1 to use what is in the"
            " cache."
        ) from error


def _hub_config(name: str, on_hub: bool) -> Fields:
    """Return the config of a hub's model, downloaded if on_hub and not in the cache; else none. Raise ConfigError."""
    try:
        from huggingface_hub import hf_hub_download
        from huggingface_hub.errors import LocalEntryNotFoundError
    except ModuleNotFoundError:
        return {}
    if on_hub:
        _look_up("model", "model.name", name)
    try:
        file = Path(hf_hub_download(name, "config.json", local_files_only=not on_hub))
    except LocalEntryNotFoundError as error:
        if not on_hub:
            return {}
        raise ConfigError(
            f'model.name = "{name}" is no folder here, and as a hub id cannot be loaded: HF_HUB_OFFLINE is set, and its'
            " config.json is not in the cache."
        ) from error
    return dict(json.loads(file.read_text(encoding="utf-8")))


def main(words: Sequence[str]) -> int:
    """`python -m harness.tools.preflight CONFIG.toml ...`, for the quickstart: check_here; print how many ranks to start."""
    try:
        config = parse(words).config
        check_trackers(config)
        check_here(config)
    except (ValueError, UnsupportedEnvironment) as error:
        return report_user_error(error, rank=0)
    print(ParallelDims.of(config.parallel).world_size)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
