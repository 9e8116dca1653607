"""What launch/full_size.py is asked: MODEL and options, as a folder with a config.json, SGLang's arguments, and a run's
config.
"""

import json
import math
import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from harness.cluster.mesh import ParallelDims
from harness.config.draft_rules import sends_mtp_layer
from harness.config.engine_rules import argument_problem
from harness.config.facts import Device, Facts
from harness.config.layers import ConfigError, Layer, nearest, shown
from harness.config.model_rules import COUNTS, CPU_PADS, model_rules
from harness.config.precision import Dtype, RolloutPrecision
from harness.config.resolve import resolve, sentence
from harness.config.rules import BrokenRule
from harness.config.schema import Config
from harness.rollout import sglang_api
from harness.rollout.sglang_api.probe import engine_facts
from harness.runtime.errors import UnsupportedEnvironment
from harness.task.tiny_models import is_tiny, save_config, tiny_config, tiny_fields
from harness.tools.command_line import parse
from harness.tools.environments import REPOSITORY
from harness.tools.full_size.passed_on import PassedOn, divided

SHIPPED = REPOSITORY / "configs" / "models"
MTP_ALGORITHMS = ("NEXTN", "EAGLE")
"""Those of SGLang's that take the draft model from the model's own checkpoint; NEXTN is another name of EAGLE."""
SECTIONS = ("parallel", "model", "engine", "weights", "memory")
"""Of a run's config, those whose rules hold for a run that nobody starts."""
OPTION_OF = {
    "model.name": "MODEL",
    "model.dtype": "--dtype",
    "model.rollout_precision": "--rollout-precision",
    "parallel.tp": "--tp",
    "parallel.pp": "--pp",
    "parallel.dp": "--nnodes and --nproc-per-node",
    "engine.args.ep_size": "--ep",
    "engine.args.speculative_algorithm": "--speculative-algorithm",
}
"""Key of a run -> what stands for it on the command line of a MODEL that is no config."""
REPLACED = ("tp", "pp", "ep", "dp_attention", "dtype", "rollout_precision", "speculative_algorithm")
"""Options in whose place the config of a run has keys."""
OF_RUN = ("nproc_per_node", "gpu_memory_gib")
"""Options that say nothing about an engine alone."""
TABLES = ("text_config", "rope_scaling", "rope_parameters", "quantization_config")
"""Fields of config.json that are tables, where a model has them."""
LEAN = {
    "algorithm": {"advantage": "grpo", "kl_placement": "none"},
    "actor": {"gradient_checkpointing": True},
    "weights": {"transport": "pull"},
}
"""The run of a MODEL that is no config: an actor alone, whose weights go by pull."""


@dataclass(kw_only=True)
class Options:
    """MODEL is a folder with a config.json, the name of a folder of configs/models, or the TOML config of a run.

    With --nnodes, or a TOML config, the whole run is examined: what the fullest GPU holds in each stage of a step.
    --section.key VALUE then sets any key of the run's config, as for launch/ppo.py, and what the
    options below leave at their defaults; without a TOML config the trainer has an actor alone, with gradient
    checkpointing, and weights.transport = "pull".
    """

    tp: int = 1
    """Tensor-parallel ranks of the engine."""
    pp: int = 1
    """Pipeline stages of the engine."""
    ep: int = 1
    """Expert-parallel ranks of the engine (SGLang's ep_size)."""
    dp_attention: int = 1
    """Data-parallel groups of the engine's attention (SGLang's dp_size with enable_dp_attention)."""
    dtype: Dtype = "bfloat16"
    """What both sides compute in."""
    rollout_precision: RolloutPrecision = "same"
    """Precision of the engine's weights, as model.rollout_precision of a run. fp8_block: a trainer of a model in
    bfloat16 quantizes its weights at each sync. Leave it out for a model whose config.json has a
    quantization_config."""
    speculative_algorithm: str = ""
    """NEXTN or EAGLE, as SGLang's argument: examine the draft model too, which serves the model's own layer for
    multi-token prediction."""
    all_ranks: bool = False
    """Give every name to every rank's loader. Otherwise each rank gets one layer of each kind, and the ranks of a stage
    share the others."""
    names: str = ""
    """What somebody's own exporter sends, in place of what transformers' class would save: a safetensors file, its index
    (files that it names may be absent), a folder with them, the file that --json writes, or module:function, which
    yields (name, tensor). Only names, dtypes and shapes are read. First come three lists: sent and not expected,
    expected and not sent, other shapes or dtypes."""
    json: str = ""
    """Write what was found there too."""
    page: str = ""
    """Write what was found there as one HTML page, which needs no network: a table of the engine's ranks and layers, and
    of a whole run the memory of the fullest GPU."""
    against: str = ""
    """A release of SGLang, such as 0.5.17: ask it too, with the transformers that it asks for, and print what differs.
    It is installed as launch/bisect_versions.py does. Exit code 0: the same names are sent and arrive, though
    parameters of the engine may differ in shape or bytes; 1: a name is sent, arrives or is followed in one alone, or
    one cannot build the model."""
    nnodes: int = 0
    """Hosts of a whole run. Its engines, of tp x pp ranks each, fill them. 0: examine one engine alone."""
    nproc_per_node: int = 8
    """Ranks, and so GPUs, of each host of a whole run."""
    gpu_memory_gib: float = 140.0
    """Memory of one GPU of a whole run in GiB, that of an H200; 80 for an H100 or A100. Only of a whole run."""


@dataclass(frozen=True, kw_only=True)
class Question:
    """What is asked, checked as far as it can be without SGLang."""

    folder: Path
    """With a config.json."""
    quantized: Path | None = None
    """Where the engine's config.json is to be written, if it is quantized. Otherwise it has the trainer's."""
    tp: int
    pp: int
    dtype: str
    arguments: dict[str, Any]
    """SGLang's server arguments."""
    precision: RolloutPrecision = "same"
    """The precision of the engine's weights."""
    passed_on: PassedOn = field(default_factory=PassedOn)
    """Which of the run's engine.args are among them, and which are not."""
    run: Config | None = None
    """The whole run, if it is asked about."""

    @property
    def has_draft(self) -> bool:
        """Whether the engine has a draft model: the model's own MTP layer."""
        return sends_mtp_layer(self.arguments)

    @property
    def engine_folder(self) -> Path:
        """The folder with the engine's config.json."""
        return self.quantized or self.folder


def read_question(name: str, options: Options, words: Sequence[str], scratch: Path) -> Question:
    """Return what is asked. words: keys of a run's config. scratch: a folder for the config.json of a model made on the
    spot.

    Raise ConfigError for what cannot be, UnsupportedEnvironment for what cannot be answered here.
    """
    if name.endswith(".toml"):
        check_numbers(options, of_run=True)
        return _of_config(parse([name, *words], sections=SECTIONS).config, options, scratch)
    check_numbers(options, of_run=bool(options.nnodes))
    if options.names and options.nnodes:
        raise ConfigError("--names is about one engine; leave out --nnodes.")
    if words and not options.nnodes:
        raise ConfigError(f"{words[0]} is a key of a whole run, which --nnodes asks about; add --nnodes HOSTS.")
    folder, arguments = model_folder(name), server_arguments(options)
    run = _run_of(folder, arguments, options, words)
    set_by_words = tuple(word.partition("=")[0] for word in words)
    option_of = {key: option for key, option in OPTION_OF.items() if f"--{key}" not in set_by_words}
    question = _of_run(run, folder, scratch, option_of)
    if options.nnodes:
        return question
    return replace(question, run=None, arguments=question.arguments | arguments)


def check_numbers(options: Options, of_run: bool) -> None:
    """Raise ConfigError for a number that no engine or run can have, and for one of a run if none is asked about."""
    for name in ("tp", "pp", "ep", "dp_attention", "nproc_per_node"):
        if (value := getattr(options, name)) < 1:
            raise ConfigError(f"{_flag(name)} must be 1 or more, got {value}.")
    if options.nnodes < 0:
        raise ConfigError(f"--nnodes must be 0 (one engine alone) or more, got {options.nnodes}.")
    if not 0 < options.gpu_memory_gib < math.inf:
        raise ConfigError(f"--gpu-memory-gib must be above 0, such as 80, got {options.gpu_memory_gib:g}.")
    for name in OF_RUN if not of_run else ():
        if (value := getattr(options, name)) != getattr(Options, name):
            raise ConfigError(f"{_flag(name)} {value:g} is for a whole run; add --nnodes HOSTS, or leave it out.")


def _flag(name: str) -> str:
    """Return an option as it is written on the command line."""
    return f"--{name.replace('_', '-')}"


def _run_of(folder: Path, arguments: Mapping[str, Any], options: Options, words: Sequence[str]) -> Config:
    """Return the config of a run that trains the model, or the smallest one with the engine that is asked about.

    arguments: those of server_arguments. words: keys that the run sets. Raise ConfigError.
    """
    own = ["tp_size", "pp_size", "dtype"] + (["ep_size"] if options.ep == 1 else [])
    if not options.nnodes and options.rollout_precision == "same":
        own.append("speculative_algorithm")  # what a run needs for a draft model, an engine alone does not
    size = options.tp * options.pp
    ranks = options.nnodes * options.nproc_per_node or size
    if ranks % size:
        raise ConfigError(
            f"--nnodes {options.nnodes} times --nproc-per-node {options.nproc_per_node} is {ranks} ranks; engines of"
            f" --tp {options.tp} times --pp {options.pp} must fill them."
        )
    table = LEAN | {
        "parallel": {"dp": ranks // size, "tp": options.tp, "pp": options.pp},
        "model": {
            "name": str(folder),
            "dtype": options.dtype,
            "weights": "random",
            "rollout_precision": options.rollout_precision,
        },
        "engine": {"device": "cuda", "args": {key: value for key, value in arguments.items() if key not in own}},
    }
    run = parse(words, sections=SECTIONS, base=[Layer("launch/full_size.py", table)]).config
    _refuse_contradictions(run, table, options)
    return run


def _refuse_contradictions(run: Config, table: Mapping[str, Any], options: Options) -> None:
    """Raise ConfigError if a key of the run says otherwise than MODEL, or than an option that is given.

    table: what MODEL and the options say.
    """
    for section in ("model", "parallel"):
        for name, wanted in table[section].items():
            key, given = f"{section}.{name}", getattr(getattr(run, section), name)
            option = OPTION_OF.get(key, "")
            may_be_set = name in ("dtype", "rollout_precision") and getattr(options, name) == getattr(Options, name)
            if option and given != wanted and not may_be_set:
                raise ConfigError(
                    f"{key} = {shown(given)} contradicts {option}, by which it is {shown(wanted)}; give {option} instead."
                )
    for name, wanted in table["engine"]["args"].items():
        key, given = f"engine.args.{name}", run.engine.args.get(name)
        if given != wanted:
            option = OPTION_OF.get(key, "--dp-attention")
            raise ConfigError(
                f"{key} = {shown(given)} contradicts {option}, by which it is {shown(wanted)}; give one of the two."
            )


def _of_config(config: Config, options: Options, scratch: Path) -> Question:
    """Return the question about the run of a TOML config. Raise ConfigError for options that its keys replace."""
    if options.names:
        raise ConfigError("--names is about one engine; give a MODEL that is no config of a run.")
    for name in REPLACED:
        if getattr(options, name) != getattr(Options, name):
            raise ConfigError(f"{_flag(name)} is for a MODEL; the config of a run has parallel, model and engine.args.")
    ranks = ParallelDims.of(config.parallel).world_size
    if options.nnodes and options.nnodes * options.nproc_per_node != ranks:
        raise ConfigError(
            f"--nnodes {options.nnodes} times --nproc-per-node {options.nproc_per_node} must be the config's {ranks} ranks."
        )
    model = config.model
    if not is_tiny(model.name):
        return _of_run(config, model_folder(model.name), scratch, {})
    # Rotary positions have no weights, but SGLang's CPU mode builds MLA with some kinds of them only.
    rope = {key: value for key, value in tiny_fields(model.name, "cpu").items() if key == "rope_parameters"}
    save_config(tiny_config(model.name, _device(config), rope | model.overrides), scratch, model.dtype)
    return _of_run(config, scratch, scratch, {})


def _of_run(run: Config, folder: Path, scratch: Path, option_of: Mapping[str, str]) -> Question:
    """Return the question about a run. folder: with the model's config.json. option_of: the option that stands for a
    key.

    Raise ConfigError or UnsupportedEnvironment.
    """
    check_run(run, read_fields(folder), option_of)
    parallel, passed_on = run.parallel, divided(run.engine.args)
    basic = {"tp_size": parallel.tp, "pp_size": parallel.pp, "dtype": run.model.dtype}
    return Question(
        folder=folder,
        quantized=scratch / "fp8" if run.model.precision.is_quantized else None,
        tp=parallel.tp,
        pp=parallel.pp,
        dtype=run.model.dtype,
        arguments=passed_on.arguments | basic,
        precision=run.model.rollout_precision,
        passed_on=passed_on,
        run=run,
    )


def _device(run: Config) -> Device:
    """Return the device of the run: CUDA, unless engine.device is "cpu"."""
    return "cpu" if run.engine.device == "cpu" else "cuda"


def check_run(run: Config, model: Mapping[str, Any], option_of: Mapping[str, str]) -> None:
    """Raise what the run itself would raise about its model, its mesh and the engine's arguments.

    model: the fields of its config.json. A model that is published quantized is no mistake here, unlike in a run,
    unless the run quantizes it too. option_of: the option that stands for a key.
    """
    facts = Facts(device=_device(run), sglang=engine_facts(sglang_api.probe()), model=model)
    if run.model.precision.is_quantized:
        resolve(run, facts, SECTIONS)
    unquantized = {name: value for name, value in model.items() if name != "quantization_config"}
    for wrong in _wrong(run, replace(facts, model=unquantized)):
        text, option = sentence(run, wrong), option_of.get(wrong.key)
        if option:
            text = text.replace(f"{wrong.key} = ", f"{option} ", 1).replace(wrong.key, option, 1)
        text = text.replace(f"; {CPU_PADS}", "")  # launch/full_size.py builds what a GPU would hold
        raise (UnsupportedEnvironment if wrong.unsupported else ConfigError)(text)


def _wrong(run: Config, facts: Facts) -> Iterator[BrokenRule]:
    """Yield what is wrong with the engine's arguments, with the mesh for them, and with the model."""
    arguments, tp = run.engine.args, run.parallel.tp
    for name, value in arguments.items():
        if facts.sglang and (problem := argument_problem(facts.sglang, name, value)):
            yield BrokenRule(f"engine.args.{name}", problem)
        if name in ("ep_size", "dp_size") and value is not None and (value < 1 or tp % value):
            yield BrokenRule(f"engine.args.{name}", f"must be 1 or more and divide parallel.tp = {tp}")
    heads = _language(facts.model or {}).get("num_attention_heads")
    ranks = tp // (arguments.get("dp_size") or 1)
    if type(heads) is int and heads % ranks:
        yield BrokenRule(
            "parallel.tp", f"the model's {heads} attention heads cannot be divided over {ranks} ranks evenly"
        )
    # With these, not all tensor-parallel ranks share heads and dense layers, as the rules take them to.
    shared_by_fewer = arguments.get("enable_dp_attention") or arguments.get("moe_dense_tp_size")
    for wrong in model_rules(run, facts, _device(run)):
        if wrong.key.partition(".")[0] in SECTIONS and not (shared_by_fewer and wrong.key == "parallel.tp"):
            yield wrong


def model_folder(name: str) -> Path:
    """Return the folder of MODEL. Raise ConfigError if it has no config.json that can be read."""
    folder = Path(name)
    if not (folder / "config.json").is_file() and os.sep not in name:
        folder = SHIPPED / name
    if not (folder / "config.json").is_file():
        shipped = sorted(each.parent.name for each in SHIPPED.glob("*/config.json"))
        hint = nearest(Path(name).name.lower(), shipped, f"those are {', '.join(shipped)}")
        raise ConfigError(f"MODEL must be a folder with a config.json, or one of configs/models; got {name}; {hint}.")
    read_fields(folder)
    return folder.resolve()


def read_fields(folder: Path) -> dict[str, Any]:
    """Return the fields of a folder's config.json. Raise ConfigError if they are no model's."""
    file = folder / "config.json"
    try:
        found = json.loads(file.read_text(encoding="utf-8"))
    except ValueError as error:
        raise ConfigError(f"{file} must be JSON, got {error}.") from None
    if not isinstance(found, dict):
        raise ConfigError(f"{file} must be a JSON object with the model's fields, got {shown(found)[:80]}.")
    classes = found.get("architectures")
    if not isinstance(classes, list) or not classes or not all(isinstance(each, str) and each for each in classes):
        wanted = 'a list with the name of the model\'s class, such as ["Qwen2ForCausalLM"]'
        raise ConfigError(f"architectures in {file} must be {wanted}, got {shown(classes)}.")
    _check_types(found, file)
    return dict(found)


def _check_types(found: Mapping[str, Any], file: Path) -> None:
    """Raise ConfigError for a field whose type neither transformers nor SGLang accepts."""
    if not isinstance(kind := found.get("model_type"), str | None):
        raise ConfigError(f'model_type in {file} must be a name, such as "qwen2", got {shown(kind)}.')
    for name in TABLES:
        if not isinstance(table := found.get(name), dict | None):
            raise ConfigError(f"{name} in {file} must be a table of fields, or be left out, got {shown(table)}.")
    for name in COUNTS.split():
        # Some classes have a list, with a number for each layer.
        if isinstance(number := found.get(name), str | float | bool | dict):
            raise ConfigError(f"{name} in {file} must be a whole number, got {shown(number)}.")
    if inner := found.get("text_config"):
        _check_types(inner, file)


def _language(found: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return the fields of the language model."""
    return found.get("text_config") or found


def server_arguments(options: Options) -> dict[str, Any]:
    """Return SGLang's server arguments. Raise ConfigError for numbers that no engine can have."""
    for name in ("ep", "dp_attention"):
        value = getattr(options, name)
        if options.tp % value:
            raise ConfigError(f"{_flag(name)} must be 1 or more and divide --tp {options.tp}, got {value}.")
    found: dict[str, Any] = {
        "tp_size": options.tp,
        "pp_size": options.pp,
        "ep_size": options.ep,
        "dtype": options.dtype,
    }
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
