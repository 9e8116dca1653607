"""Find mistakes before any rank starts: collect the facts that can be known without other ranks, and resolve the
config.

--check, --dry-run and the quickstart use it, and so does the first rank of each host before it imports torch. It reads
config.json, rows and the source of installed packages without importing them. Resolved.not_checked names what it could
not read; a file that is there but broken raises ConfigError.
"""

import ast
import importlib.util
import json
import os
import shlex
import shutil
import sys
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, Literal, TypeVar

from harness.cluster.mesh import ParallelDims
from harness.config.checkpoint_folder import checkpoint_to_resume
from harness.config.facts import Device, Facts
from harness.config.layers import ConfigError
from harness.config.mistakes import NOTHING_READ, KeysRead, Mistake
from harness.config.model_fields import WEIGHT_INDEX, is_hub_model, json_object, model_fields
from harness.config.resolve import SECTIONS, Resolved, resolve
from harness.config.rollout_folder import check_to_load, check_to_save
from harness.config.rules import in_ranges
from harness.config.run_folder import check_run_folder, check_writable
from harness.config.schema import Config, named_paths
from harness.rollout import sglang_api
from harness.rollout.sglang_api.probe import SourceTree, annotations, engine_facts, installed, methods
from harness.runtime.cpu_standins import no_gpu
from harness.runtime.errors import UnsupportedEnvironment, report_user_error
from harness.task.data import Row, file_of, is_hub_id, load_rows
from harness.task.rewards import is_reward
from harness.task.tiny_models import ARCHITECTURES, CONFIG_CLASSES, NOT_OVERRIDABLE, is_tiny, tiny_fields
from harness.tools import environments
from harness.tools.command_line import read_command
from harness.tools.models_code import unasked_code
from harness.tools.rewards.more_rewards import check_math_verify, check_reward
from harness.tools.trackers.trackers import check_trackers

T = TypeVar("T")
LARGEST_CHECKED = 16 << 20  # bytes of a file of rows that is read before the run
HUB_SECONDS = 10.0  # how long the hub may take to answer
WEIGHTS = ("*.safetensors", "*.bin")
TOKENIZERS = ("tokenizer.json", "tokenizer_config.json", "tokenizer.model", "vocab.json", "*.tiktoken")
PREPARED = Path("runs/data/addition")
"""Where configs/cpu/addition.toml has what launch/prepare_data.py makes."""
MODEL_JSON = (
    "config.json", "generation_config.json", "tokenizer_config.json", "tokenizer.json", "special_tokens_map.json",
    "added_tokens.json", "vocab.json", "chat_template.json",
)  # fmt: skip
"""What transformers and SGLang read of a model's folder, if it is there."""
SHARED_MEMORY = "/dev/shm"
SHARED_MEMORY_PER_RANK = 4 << 20
"""Bytes. Less is sure to fail: two ranks of a tiny model used 1.1 MiB (2026-11-28). The doctor asks for comfort."""
CAUSAL_MODELS = "models/auto/modeling_auto.py", "MODEL_FOR_CAUSAL_LM_MAPPING_NAMES"
"""Where transformers lists its causal language models by model_type."""


def check_plan(
    config: Config,
    *,
    device: Device = "cuda",
    whole: bool = True,
    ranks: Sequence[int] = (0,),
    reading: KeysRead = NOTHING_READ,
    environment: Mapping[str, str] | None = None,
) -> Resolved:
    """Resolve the config for a machine that may not be this one.

    Raise ConfigError or UnsupportedEnvironment, for all mistakes at once.

    device: what engine.device = "auto" means; CUDA has more rules. A hub's model is looked up in the local cache only.
    whole: False for a plan alone, for which config.json is enough of a model, and nothing is written. ranks: those of
    the first host. reading: who set which key, and what is wrong with the command line. environment: of the ranks, if
    they will run on this machine.
    """
    search = Search(config, reading=reading, ranks=ranks, writes=whole, whole_model=whole)
    return search.resolve(device, environment=environment)


def go_on_in_environment() -> None:
    """Restart this script in the environment, if there is one and this Python lacks sglang.

    More can be checked there.
    """
    if not has_sglang():
        environments.restart_in_environment()


def has_sglang() -> bool:
    """Return whether this Python has sglang: whether it is the one that will run the ranks."""
    return importlib.util.find_spec("sglang") is not None


def check_here(
    config: Config,
    sections: Collection[str] = SECTIONS,
    *,
    ranks: Sequence[int] = (0,),
    writes: bool = False,
    reading: KeysRead = NOTHING_READ,
) -> Resolved:
    """Resolve the config for this host. Raise ConfigError or UnsupportedEnvironment, for all mistakes at once.

    ranks: those of this host. writes: whether one of them is rank 0, which writes most files. reading: as for
    check_plan.
    """
    return _resolve_here(Search(config, sections, reading=reading, ranks=ranks, writes=writes, on_hub=True))


def _resolve_here(search: "Search") -> Resolved:
    why_no_gpu = no_gpu(os.environ)
    search.attempt("network.interface", check_interface, search.config.network.interface, os.environ)
    search.attempt(SHARED_MEMORY, check_shared_memory, search.config, os.environ)
    if search.writes:  # rank 0 alone has trackers
        search.attempt("trackers.names", check_trackers, search.config)
    return search.resolve("cpu" if why_no_gpu else "cuda", why_no_gpu, os.environ)


class Search:
    """Collects the facts about a config that can be known without torch and without other ranks, and its mistakes."""

    def __init__(
        self,
        config: Config,
        sections: Collection[str] = SECTIONS,
        *,
        reading: KeysRead = NOTHING_READ,
        ranks: Sequence[int] = (0,),
        writes: bool = False,
        whole_model: bool = True,
        on_hub: bool = False,
    ) -> None:
        """whole_model: whether a model needs its tokenizer and its weights, and not only config.json. on_hub: whether
        to ask the hub, and to download a config.json from it. The others are as for check_here.
        """
        self.given, self.sections, self.reading, self.ranks = config, sections, reading, ranks
        self.writes, self.whole_model, self.on_hub = writes, whole_model, on_hub
        self.config, out_of_range = in_ranges(config)
        self.spoilt = reading.spoilt_sections | {each.key.partition(".")[0] for each in out_of_range}
        """Sections of which a key is not known."""
        self.found: list[Mistake] = []
        self.unknown: dict[str, str] = {}
        """For a fact that is not known: why, as part of a sentence."""
        self.rows: dict[str, list[Row]] = {}
        """Config section ("task", "validation") -> the rows of its source that could be read."""

    def resolve(self, device: Device, why_no_gpu: str = "", environment: Mapping[str, str] | None = None) -> Resolved:
        """Look at everything, and resolve the config. Raise what is wrong."""
        facts = self.facts(device, why_no_gpu, environment)
        return resolve(self.given, facts, self.sections, self.reading.plus(self.found))

    def facts(self, device: Device, why_no_gpu: str, environment: Mapping[str, str] | None) -> Facts:
        """Return what is known, for a device that is meant by engine.device = "auto"."""
        config = self.config
        sglang = model_types = overridable = None
        try:
            sglang = engine_facts(sglang_api.probe())
        except ModuleNotFoundError:
            self.unknown["sglang"] = "sglang is not installed in this Python"
        try:
            tree = installed("transformers")
            model_types = causal_model_types(tree)
            overridable = overridable_fields(tree, config.model.name) if is_tiny(config.model.name) else None
        except ModuleNotFoundError:
            self.unknown["model_types"] = "transformers is not installed in this Python"
        self.look_at_paths()
        model = None
        is_there = "model" not in self.spoilt and not any(each.key == "model.name" for each in self.found)
        if is_there:
            device_of_model: Device = device if config.engine.device == "auto" else config.engine.device
            words = config.model.name, config.model.overrides, device_of_model
            model = self.attempt("model.name", model_fields, *words, download=self.on_hub)
        if model is None:
            self.unknown["model"] = "it is on the hub, and not in the cache of this machine"
        return Facts(
            device=device,
            why_no_gpu=why_no_gpu,
            environment=environment,
            sglang=sglang,
            model=model,
            code=self.attempt("model.name", unasked_code, config, download=self.on_hub and is_there) or {},
            model_types=model_types,
            overridable=overridable,
            rows=len(self.rows["task"]) if "task" in self.rows and "rows" not in self.unknown else None,
            unknown=self.unknown,
        )

    def look_at_paths(self) -> None:
        """Check every file and folder that the config names. Nothing is made, and no code of the user's runs."""
        named = {key for key, _ in named_paths(self.config, "read", self.sections)}
        if self.writes:
            named |= {"run.dir"} | {key for key, _ in named_paths(self.config, "written", self.sections)}
        for key, check in CHECKS.items():
            is_known = key not in DESCRIBED or key.partition(".")[0] not in self.spoilt
            if key in named and is_known:
                self.attempt(key, check, self)

    def model(self) -> None:
        """Check that the model is there, with all of its files."""
        name = self.config.model.name
        check_model_files(self.config, self.whole_model)
        if self.on_hub and is_hub_model(name):
            _look_up("model", "model.name", name)

    def engine_model(self, name: str) -> None:
        """Check that another model of the engine is there, which engine.args names."""
        given = self.config.engine.args[name]
        if not Path(given).exists() and not is_hub_model(given):
            remedy = "give a folder that exists, or a hub id (OWNER/NAME)"
            raise ConfigError(f'engine.args.{name} = "{given}" is not a folder here; {remedy}.')

    def task(self) -> None:
        """Read the rows to train on, as far as that is possible at once."""
        task = self.config.task
        self._read("task", task.source, task.split, task.rows, task.rows_seed)

    def validation(self) -> None:
        """Read the rows to validate on, as far as that is possible at once."""
        wanted = self.config.validation
        self._read("validation", wanted.source, wanted.split, wanted.rows, wanted.rows_seed)

    def _read(self, section: str, sources: Sequence[str], split: str, rows: int, seed: int) -> None:
        before = len(self.found)
        for each in sources:
            self.attempt(f"{section}.source", find_rows, each, split)
        if len(self.found) > before:
            return
        self.rows[section], why = read_rows(sources, split, rows, seed)
        if why:
            self.unknown["rows" if section == "task" else section] = why
        for name in filter(is_hub_id, sources) if self.on_hub else ():
            _look_up("dataset", f"{section}.source", name)

    def reward(self) -> None:
        """Check the reward, and whether it can score the rows."""
        name = self.config.task.reward
        if not is_reward(name):  # of which a rule tells
            return
        if ":" in name:
            self.unknown["reward"] = "the run imports it, before its engine starts"
        check_reward(name, [row for rows in self.rows.values() for row in rows])
        if self.on_hub:
            check_math_verify(name)

    def saved_rollouts(self) -> None:
        """Check that the responses to learn from are there."""
        check_to_load(self.config, self.ranks, steps_are_known=not self.config.run.epochs)

    def folder_to_save(self) -> None:
        """Check where responses will be saved."""
        check_writable("rollout.save", self.config.rollout.save)
        check_to_save(self.config)

    def checkpoint(self) -> None:
        """Check the checkpoint to resume from."""
        checkpoint_to_resume(self.config, steps_are_known=not self.config.run.epochs)

    def checkpoints(self) -> None:
        """Check where checkpoints will be saved."""
        if self.config.checkpoint.every:
            check_writable("checkpoint.folder", self.config.checkpoint.folder)
            if not self.config.checkpoint.resume:  # otherwise self.checkpoint asks
                self.checkpoint()

    def attempt(self, key: str, check: Callable[..., T], *given: Any, **options: Any) -> T | None:
        """Return what a check returns. Keep what it raises as a mistake of this key, and return None."""
        try:
            return check(*given, **options)
        except ValueError as error:
            self.found.append(Mistake(f"{str(error).removesuffix('.')}.", key))
        except OSError as error:
            where = f"{error.filename}: " if error.filename else ""
            self.found.append(Mistake(f"{key} cannot be used: {where}{error.strerror}; give another path.", key))
        return None


CHECKS: Mapping[str, Callable[[Search], None]] = {
    "run.dir": lambda search: check_run_folder(search.config.run.dir),
    "model.name": Search.model,
    "engine.args.tokenizer_path": lambda search: search.engine_model("tokenizer_path"),
    "engine.args.speculative_draft_model_path": lambda search: search.engine_model("speculative_draft_model_path"),
    "task.source": Search.task,
    "validation.source": Search.validation,
    "task.reward": Search.reward,
    "rollout.load": Search.saved_rollouts,
    "rollout.save": Search.folder_to_save,
    "weights.folder": lambda search: check_writable("weights.folder", search.config.weights.folder),
    "checkpoint.folder": Search.checkpoints,
    "checkpoint.resume": Search.checkpoint,
}
"""Each key that names files (schema.named_paths) -> its check, in this order. It raises ValueError or OSError."""
DESCRIBED = ("model.name", "task.source", "validation.source")
"""Keys whose files the other keys of their section describe: looked at only if all of these are known."""


def check_interface(wanted: str, environment: Mapping[str, str]) -> None:
    """Raise NetworkError if this host lacks the interface that network.interface or GLOO_SOCKET_IFNAME names."""
    from harness.cluster.network import INTERFACE_VARIABLE, choose, own_interfaces  # needs psutil

    variable = environment.get(INTERFACE_VARIABLE, "")
    if wanted or variable:
        choose(wanted, variable, own_interfaces(), "127.0.0.1", [])


def check_shared_memory(config: Config, environment: Mapping[str, str]) -> None:
    """Raise ConfigError if /dev/shm of this host has no room for the engines of a run: a full one ends a process with
    SIGBUS, which names nothing.
    """
    ranks = int(environment.get("LOCAL_WORLD_SIZE") or ParallelDims.of(config.parallel).world_size)
    needed = 0 if config.rollout.load else ranks * SHARED_MEMORY_PER_RANK
    with suppress(OSError):  # another system's
        if (free := shutil.disk_usage(SHARED_MEMORY).free) < needed:
            raise ConfigError(
                f"{SHARED_MEMORY} has {free >> 10} KiB free, and the engines of {ranks} ranks need at least"
                f" {needed >> 10}: remove what dead processes left there, or give a container more (--shm-size=16g)."
            )


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
    reading: KeysRead = NOTHING_READ,
) -> None:
    """Check that torchrun started this process; on the first rank of each host, check everything that can be known
    there. Rank 0 prints the warnings.

    reading: as for check_plan. Raise ValueError, or UnsupportedEnvironment.
    """
    if "RANK" not in environment:  # what is wrong with the words comes first
        resolve(config, sections=sections, reading=reading)
        check_started(config, script, arguments, environment)
    if environment.get("LOCAL_RANK", "0") != "0":
        return
    if why := environments.what_lacks("torch", "psutil", "transformers", "sglang"):
        raise ConfigError(why)
    rank = int(environment["RANK"])
    ranks = range(rank, rank + int(environment.get("LOCAL_WORLD_SIZE", "1")))
    search = Search(config, sections, reading=reading, ranks=ranks, writes=rank == 0, on_hub=True)
    search.attempt("parallel.dp", check_started, search.config, script, arguments, environment)
    # For what it refuses and warns of; the run resolves it with what its inputs tell.
    resolved = _resolve_here(search)
    if rank == 0:
        for sentence in resolved.warnings:
            print(f"warning: {sentence}", file=sys.stderr, flush=True)


def device_of(config: Config) -> Device:
    """Return what engine.device = "auto" means on this host, as far as no_gpu knows."""
    if config.engine.device != "auto":
        return config.engine.device
    return "cpu" if no_gpu() else "cuda"


def find_rows(source: str, split: str) -> None:
    """Raise ValueError or OSError unless a source of rows is there, or may be on the hub."""
    if source != "arithmetic" and not is_hub_id(source):
        file_of(source, split).stat()


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
        hint = f"; give a folder that exists, a hub id (OWNER/NAME), or a tiny model: {', '.join(ARCHITECTURES)}"
        if folder == PREPARED / "model":
            hint = f"; make it with: python3 launch/prepare_data.py {PREPARED.name} {PREPARED}"
        raise ConfigError(f'model.name = "{name}" is not a folder here{hint}.')
    for file in (folder / each for each in MODEL_JSON):
        if os.path.lexists(file):
            json_object(file)
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
    except (ValueError, LookupError, TypeError, AttributeError, RecursionError):
        raise ConfigError(f"{index} is no index of safetensors files; copy or download it again.") from None
    if missing:
        raise ConfigError(
            f"{folder} lacks {len(missing)} of the {len(named)} files of weights that {index.name} names,"
            f" {missing[0]} first; copy or download them."
        )


def check_safetensors(file: Path) -> None:
    """Raise ConfigError unless safetensors can open the file: a download or a copy may have been cut short.

    A Python without safetensors leaves that to the ranks.
    """
    if not file.is_file():
        raise ConfigError(f"{file} is not a regular file; copy or download it again.")
    if importlib.util.find_spec("safetensors"):
        from safetensors import SafetensorError, safe_open

        try:
            with safe_open(file, framework="numpy"):
                return
        except SafetensorError as error:
            raise ConfigError(
                f"{file} ({file.stat().st_size} bytes) cannot be read: {error}; copy or download it again."
            ) from error


def causal_model_types(transformers: SourceTree) -> frozenset[str] | None:
    """Return every model_type for which this transformers has a causal language model.

    None if this release keeps the list in another place.
    """
    path, name = CAUSAL_MODELS
    table = transformers.assigned(path).get(name)
    pairs = [node.elts[0] for node in ast.walk(table) if isinstance(node, ast.Tuple)] if table else []
    return frozenset(str(node.value) for node in pairs if isinstance(node, ast.Constant)) or None


def overridable_fields(transformers: SourceTree, name: str) -> set[str]:
    """Return the fields of a tiny model's config, read from the source of transformers."""
    folder, name_of_class = CONFIG_CLASSES[name]
    own = transformers.find_class(name_of_class, f"models/{folder}/configuration_{folder}.py")
    base = transformers.find_class("PreTrainedConfig", "configuration_utils.py")
    found = set(tiny_fields(name, "cpu"))
    for each in (own, base):
        found |= set(annotations(each)) | set(methods(each).get("__init__", ()))
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
        command = read_command(words)
        config, ranks = command.config, ParallelDims.of(command.config.parallel).world_size
        check_here(config, ranks=range(ranks), writes=True, reading=command.reading)
    except (ValueError, UnsupportedEnvironment) as error:
        return report_user_error(error, rank=0)
    print(ranks)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
