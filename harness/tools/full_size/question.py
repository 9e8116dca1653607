"""What launch/full_size.py is asked: MODEL and options, as a folder with a config.json, SGLang's arguments, and a run's config."""

import json
import os
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from harness.cluster.mesh import ParallelDims
from harness.config.facts import Device, Facts
from harness.config.layers import ConfigError, Layer
from harness.config.resolve import resolve
from harness.config.schema import Config, RolloutPrecision
from harness.rollout import sglang_api
from harness.rollout.sglang_api.engine_facts import engine_facts
from harness.task.tiny_models import is_tiny, save_config, tiny_config, tiny_fields
from harness.tools.command_line import parse

SHIPPED = Path(__file__).resolve().parents[3] / "configs" / "models"
MTP_ALGORITHMS = ("NEXTN", "EAGLE")
"""Those of SGLang's that take the draft model from the model's own checkpoint; NEXTN is another name of EAGLE."""
SECTIONS = ("parallel", "model", "engine", "weights", "memory")
"""Of a run's config, those whose rules hold for a run that nobody starts."""
LEAN = {
    "algorithm": {"advantage": "grpo", "kl_placement": "none"},
    "actor": {"gradient_checkpointing": True},
    "weights": {"transport": "pull"},
}
"""The run of a MODEL that is no config: an actor alone, whose weights go by pull."""


@dataclass(kw_only=True)
class Options:
    """MODEL is a folder with a config.json, the name of a folder of configs/models, or the TOML config of a run.

    With --nnodes, or a TOML config, the whole run is examined: what each GPU holds in each stage of a step, and what a weight
    sync moves. --section.key VALUE then sets any key of the run's config, as for launch/ppo.py; without a TOML config the
    trainer has an actor alone, with gradient checkpointing, and weights.transport = "pull".
    """

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
    rollout_precision: RolloutPrecision = "same"
    """Precision of the engine's weights, as model.rollout_precision of a run. fp8_block: a trainer of a model in bfloat16
    quantizes its weights at each sync. Leave it out for a model whose config.json has a quantization_config."""
    speculative_algorithm: str = ""
    """NEXTN or EAGLE, as SGLang's argument: examine the draft model too, which serves the model's own layer for multi-token
    prediction."""
    all_ranks: bool = False
    """Give every name to every rank's loader. Otherwise each rank gets one layer of each kind, and the ranks of a stage share
    the others."""
    json: str = ""
    """Write what was found there too."""
    page: str = ""
    """Write what was found there as one HTML page, which needs no network: heat maps of the engine's ranks and layers, and of a
    whole run the memory of each GPU and the bytes that a sync moves."""
    against: str = ""
    """A release of SGLang, such as 0.5.17: ask it too, with the transformers that it asks for, and print what differs. It is
    installed as launch/bisect_versions.py does. Exit code 0: the same names are sent and arrive, though parameters of the
    engine may differ in shape or bytes; 1: a name is sent, arrives or is followed in one alone, or one cannot build the model."""
    nnodes: int = 0
    """Hosts of a whole run. Its engines, of tp x pp ranks each, fill them. 0: examine one engine alone."""
    nproc_per_node: int = 8
    """Ranks, and so GPUs, of each host of a whole run."""
    gpu_memory_gib: float = 140.0
    """Memory of one GPU of a whole run in GiB, that of an H200; 80 for an H100 or A100."""
    network_gb_per_second: float = 0.0
    """What one host receives over the network, in GB per second, to predict the seconds of a sync. 0: not known."""


@dataclass(frozen=True, kw_only=True)
class Question:
    """What is asked, checked as far as it can be without SGLang."""

    folder: Path
    """With a config.json."""
    quantized: Path | None = None
    """Where the engine's config.json is to be written, if its precision is fp8_block. Otherwise it has the trainer's."""
    tp: int
    pp: int
    dtype: str
    arguments: dict[str, Any]
    """SGLang's server arguments."""
    run: Config | None = None
    """The whole run, if it is asked about."""

    @property
    def engine_folder(self) -> Path:
        """The folder with the engine's config.json."""
        return self.quantized or self.folder

    @property
    def precision(self) -> RolloutPrecision:
        """The precision of the engine's weights."""
        return "fp8_block" if self.quantized else "same"


def read_question(name: str, options: Options, words: Sequence[str], scratch: Path) -> Question:
    """Return what is asked. words: keys of a run's config. scratch: a folder for the config.json of a model made on the spot.

    Raise ConfigError for what cannot be.
    """
    if name.endswith(".toml"):
        return _of_config(parse([name, *words], sections=SECTIONS).config, options, scratch)
    folder, arguments = model_folder(name), server_arguments(options)
    check_heads(folder, options.tp, options.dp_attention)
    question = Question(folder=folder, tp=options.tp, pp=options.pp, dtype=options.dtype, arguments=arguments)
    size = options.tp * options.pp
    if not options.nnodes:
        if words:
            raise ConfigError(f"{words[0]} is a key of a whole run, which --nnodes asks about; add --nnodes HOSTS.")
        if options.rollout_precision == "same":
            return question
        return in_precision(question, _run_of(question, options, words, size), scratch)
    ranks = options.nnodes * options.nproc_per_node
    if options.nproc_per_node < 1 or ranks < 1 or ranks % size:
        raise ConfigError(
            f"--nnodes {options.nnodes} times --nproc-per-node {options.nproc_per_node} is {ranks} ranks; engines of"
            f" --tp {options.tp} times --pp {options.pp} must fill them."
        )
    run = _run_of(question, options, words, ranks)
    return replace(in_precision(question, run, scratch), run=run)


def _run_of(question: Question, options: Options, words: Sequence[str], ranks: int) -> Config:
    """Return the config of a run that trains the model on so many ranks. words: keys that it sets. Raise ConfigError."""
    own = ("tp_size", "pp_size", "dtype")
    table = LEAN | {
        "parallel": {"dp": ranks // (options.tp * options.pp), "tp": options.tp, "pp": options.pp},
        "model": {
            "name": str(question.folder),
            "dtype": options.dtype,
            "weights": "random",
            "rollout_precision": options.rollout_precision,
        },
        "engine": {
            "device": "cuda",
            "args": {key: value for key, value in question.arguments.items() if key not in own},
        },
    }
    return parse(words, sections=SECTIONS, base=[Layer("launch/full_size.py", table)]).config


def in_precision(question: Question, run: Config, scratch: Path) -> Question:
    """Return the question with the engine in the precision of a run's config. Raise what the run itself would raise."""
    if run.model.rollout_precision == "same":
        return question
    device: Device = "cpu" if run.engine.device == "cpu" else "cuda"
    fields = json.loads((question.folder / "config.json").read_text(encoding="utf-8"))
    resolve(run, Facts(device=device, sglang=engine_facts(sglang_api.probe()), model=fields), SECTIONS)
    return replace(question, quantized=scratch / "fp8")


def _of_config(config: Config, options: Options, scratch: Path) -> Question:
    """Return the question about the run of a TOML config. Raise ConfigError for options that its keys replace."""
    given = [
        name
        for name in ("tp", "pp", "ep", "dp_attention", "dtype", "rollout_precision")
        if getattr(options, name) != getattr(Options, name)
    ]
    if given:
        raise ConfigError(
            f"--{given[0].replace('_', '-')} is for a MODEL; the config of a run has parallel, model and engine.args."
        )
    parallel, model = config.parallel, config.model
    dims = ParallelDims.of(parallel)
    if options.nnodes and options.nnodes * options.nproc_per_node != dims.world_size:
        raise ConfigError(
            f"--nnodes {options.nnodes} times --nproc-per-node {options.nproc_per_node} must be the config's {dims.world_size} ranks."
        )
    if is_tiny(model.name):
        # Rotary positions have no weights, but SGLang's CPU mode builds MLA with some kinds of them only.
        rope = {key: value for key, value in tiny_fields(model.name, "cpu").items() if key == "rope_parameters"}
        device: Device = "cpu" if config.engine.device == "cpu" else "cuda"
        save_config(tiny_config(model.name, device, rope | model.overrides), scratch, model.dtype)
    folder = scratch if is_tiny(model.name) else model_folder(model.name)
    arguments = {
        name: value
        for name, value in config.engine.args.items()
        if name
        in ("ep_size", "dp_size", "enable_dp_attention", "quantization", "speculative_algorithm", "moe_dense_tp_size")
    }
    check_heads(folder, parallel.tp, int(arguments.get("dp_size") or 1))
    question = Question(
        folder=folder,
        tp=parallel.tp,
        pp=parallel.pp,
        dtype=model.dtype,
        arguments=arguments | {"tp_size": parallel.tp, "pp_size": parallel.pp, "dtype": model.dtype},
        run=config,
    )
    return in_precision(question, config, scratch)


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


def check_heads(folder: Path, tp: int, dp_attention: int) -> None:
    """Raise ConfigError if the attention's heads cannot be divided over its ranks."""
    fields = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    heads = (fields.get("text_config") or fields).get("num_attention_heads")
    ranks = tp // dp_attention
    if isinstance(heads, int) and heads % ranks:
        raise ConfigError(f"--tp {tp} must divide the model's {heads} attention heads over {ranks} ranks evenly.")
