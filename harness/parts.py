"""What every job builds before its own parts: the model's folder, and an engine for each (tp, pp) group."""

import faulthandler
import json
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NoReturn

import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh
from transformers import AutoConfig

from harness.cluster.mesh import ParallelDims
from harness.cluster.placement import place
from harness.cluster.world import World, hard_exit
from harness.config.layers import ConfigError
from harness.config.schema import Config, TransportName
from harness.rollout import sglang_api
from harness.rollout.cpu.activate import require_absorbed_mla
from harness.rollout.shipped_verl_engine import ShippedVerlEngine
from harness.rollout.verl_engine import VerlEngine
from harness.runtime.errors import UnsupportedEnvironment
from harness.runtime.events import EventLog
from harness.runtime.processes import descendants, end_processes
from harness.task.architectures import is_tiny
from harness.task.data import Row
from harness.task.tiny_models import save_tiny_model
from harness.trainer.model import Attention, choose_attention
from harness.weights.devices import check_gpus


@contextmanager
def as_config_error() -> Iterator[None]:
    """A ValueError in here is the user's mistake: data, model or engine arguments that are not there or not right."""
    try:
        yield
    except ValueError as error:
        raise ConfigError(str(error)) from error


def make_model_folder(config: Config, world: World, folder: Path, rows: list[Row]) -> Path:
    """The folder that trainer and engine load: for a tiny model made here, once on each host; else as configured.

    Raises UnsupportedEnvironment for a model that this sglang's CPU mode cannot serve.
    """
    if not is_tiny(config.model.name):
        target = Path(config.model.name)
        _check_mla(target, world)
        return target
    target = folder / f"model-host{world.hosts.index(world.host)}"
    first_on_host = next(location.rank for location in world.locations if location.host == world.host)
    if world.rank == first_on_host:
        texts = [row.question + row.answer for row in rows]
        save_tiny_model(
            config.model.name,
            target,
            config.run.seed,
            config.model.dtype,
            world.device_type,
            config.model.overrides,
            texts=texts,
            weights=config.model.weights == "checkpoint",
        )
    dist.barrier()
    _check_mla(target, world)
    return target


def trainer_attention(config: Config, model_folder: Path, device: str, events: EventLog) -> Attention:
    """The trainer's attention implementation; the console says why it is not sdpa. Raises ValueError where it cannot be
    what was asked, and UnsupportedEnvironment for one that SGLang's CPU mode does not compute."""
    model_config = AutoConfig.from_pretrained(str(model_folder))
    attention, why = choose_attention(model_config, config.model.attention)
    if why:
        events.say(f'model.attention = "{attention}": {why}')
    capped = getattr(model_config.get_text_config(), "attn_logit_softcapping", None)
    if capped and device == "cpu" and "attention_backend" not in config.engine.args:
        raise UnsupportedEnvironment(
            f"{model_config.model_type} caps attention logits (attn_logit_softcapping), which SGLang's torch_native attention on"
            " the CPU leaves out: it would compute another model."
        )
    return attention


def _check_mla(model_folder: Path, world: World) -> None:
    """Raise UnsupportedEnvironment for a model with MLA (DeepSeek) where this sglang's CPU mode cannot serve it."""
    config = model_folder / "config.json"
    if (
        world.device.type == "cpu"
        and config.is_file()
        and "kv_lora_rank" in json.loads(config.read_text(encoding="utf-8"))
    ):
        try:
            require_absorbed_mla()
        except NotImplementedError as error:
            raise UnsupportedEnvironment(str(error)) from error


def import_sglang(
    config: Config, world: World, dims: ParallelDims, events: EventLog, transports: Sequence[TransportName]
) -> None:
    """Import what an engine needs, apart from starting it: it takes as long, and no other thread may import meanwhile.

    On the CPU only where this rank uses it: the others would take the cores of those that do.
    """
    with events.phase("import_sglang", waiting_for="SGLang's import"):
        placements = place(dims, world.locations, world.device_type)
        builds = any(world.rank == node.builder for placement in placements for node in placement.nodes)
        shipped = config.engine.implementation == "sglang"
        if builds or shipped or world.device_type == "cuda" or "bucket" in transports:
            sglang_api.import_engine()
    faulthandler.enable()  # after every import: some of them install a SIGSEGV handler that shows no Python


def start_engine(
    config: Config, world: World, mesh: DeviceMesh, events: EventLog, folder: Path, model_folder: Path
) -> VerlEngine:
    """This rank's engine, serving, on the GPU that it should be on. mesh: over dp, tp and pp. A collective call.

    Raises EngineFailed where it does not start, ValueError where it runs on another GPU than planned.
    """
    shipped = config.engine.implementation == "sglang"
    parallel = config.parallel
    waiting = "SGLang's schedulers to start and load the model; their output is in the run directory, in engines/"
    with events.phase("start_engine", waiting_for=waiting):
        engine = (ShippedVerlEngine if shipped else VerlEngine)(
            mesh["tp", "pp"] if parallel.pp > 1 else mesh["tp"],
            log_dir=folder / "engines",
            base_port=config.engine.base_port,
            colocate=parallel.colocate,
            defaults=config.engine.defaults,
            on_death=lambda message: _end_with(message, events),
            model_path=str(model_folder),
            **engine_arguments(config, world),
        )
    version = engine.api.version
    maker = "sglang's own VerlEngine" if shipped else "the harness's VerlEngine"
    events.say(
        f"engine up: sglang {version} behind {maker}, {parallel.dp} engine(s) of tp {parallel.tp}, pp {parallel.pp},"
        f" {engine.nnodes} host(s) each"
    )
    events.fact(
        "engine",
        version=version,
        device=world.device_type,
        defaults=config.engine.defaults,
        dropped_defaults=engine.dropped_defaults,
        arguments={name: value for name, value in engine.engine_args.items() if name != "custom_weight_loader"},
    )
    check_gpus(world, engine, parallel.colocate)
    return engine


def _end_with(message: str, events: EventLog) -> NoReturn:
    """On the engine's watching thread: the main one may sit in a collective for minutes."""
    print(message, file=sys.stderr, flush=True)
    events.fail(message)
    end_processes(descendants(), patience_seconds=0)
    hard_exit(1)


def engine_arguments(config: Config, world: World) -> dict[str, Any]:
    """What the run asks of its engines, and the user's own arguments over it."""
    dp_index = world.rank // (config.parallel.tp * config.parallel.pp)
    return {
        "device": world.device_type,
        "dtype": config.model.dtype,
        # Engines of one run must not sample alike.
        "random_seed": config.run.seed * 1009 + dp_index,
        "load_format": "dummy" if config.engine.initial_weights == "dummy" else "auto",
        # Prompts leave and responses arrive as token ids; no tokenizer or detokenizer can then differ or fail.
        "skip_tokenizer_init": True,
    } | config.engine.args
