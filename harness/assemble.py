"""All parts of a run, built in the order that wastes least time, and conducted to a verdict."""

import faulthandler
import json
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any, Literal, TypeVar

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from transformers.utils.logging import disable_progress_bar

from harness.cluster.mesh import ParallelDims, build_mesh
from harness.cluster.world import World
from harness.config.layers import ConfigError
from harness.config.schema import Config
from harness.events import EventLog
from harness.mistake import CannotRunHere
from harness.models.names import ARCHITECTURES, is_tiny
from harness.models.tiny import save_tiny_model
from harness.ppo import Ppo
from harness.report import Report
from harness.rollout import sglang_api
from harness.rollout.cpu.activate import require_absorbed_mla
from harness.rollout.memory import MemoryStages, gpu_free_bytes
from harness.rollout.shipped_verl_engine import ShippedVerlEngine
from harness.rollout.verl_engine import VerlEngine
from harness.task.data import PromptSampler, Row, load_rows, tokenize_prompts
from harness.timeline import gather_stages
from harness.trainer.actor import Actor, Reference
from harness.trainer.advantages import AdaptiveKl, FixedKl
from harness.trainer.critic import Critic
from harness.trainer.model import load_causal_lm, load_value_model
from harness.trainer.offload import Offloaded
from harness.weights.devices import check_gpus
from harness.weights.proof import section, verdict
from harness.weights.reload import Reload, check_shared
from harness.weights.sync import WeightSync
from harness.weights.transports import choose_transport
from harness.weights.verify import Verification, check_level

T = TypeVar("T")


def conduct(config: Config, world: World, dims: ParallelDims, events: EventLog, folder: Path, launched: float) -> int:
    """Build, step, check, report; the exit code. A collective call of all ranks. After a failure engine processes live on."""
    disable_progress_bar()  # transformers': of every rank, for a second each
    report = Report(folder=folder, config=config, world=world, launched=launched)
    events.say(f"imported torch and transformers; run directory {folder}")
    ppo = assemble(config, world, dims, events, folder, report)
    with report.timed("baseline"):
        ppo.take_baseline()
    for index in range(config.run.steps):
        started = time.monotonic()
        metrics = ppo.step(index)
        metrics["seconds"] = time.monotonic() - started
        if index == 0 and ppo.first_token_at is not None:
            report.startup["first_sync"] = events.seconds["sync"][0]
            report.startup["first_generate"] = events.seconds["generate"][0]  # kernels compile in it
            report.startup["first_token"] = ppo.first_token_at - launched
            events.say(report.startup_line())
        report.add(metrics, gather_stages(events.phase_memory, index))
        events.say(report.step_line(metrics))
    report.finish(ppo.final_check(config.run.steps))
    # Only where all went well: it is a collective call, and a rank that failed alone would wait in it for the others.
    with events.phase("shutdown", waiting_for="the engine's processes to end"):
        ppo.sync.close()
        ppo.engine.shutdown()
    rollouts = [*report.steps, report.final]
    report.verification = section(ppo.verification, rollouts, events.seconds)
    if world.rank == 0:
        report.write()
    events.say(report.verdict(verdict(ppo.verification, rollouts)))
    return 0


def assemble(config: Config, world: World, dims: ParallelDims, events: EventLog, folder: Path, report: Report) -> Ppo:
    """Every part of the run on this rank. The trainer's models are built while the engine's schedulers start."""
    api = sglang_api.probe()
    with what_was_asked(), events.phase("inputs", waiting_for="the task's rows, the model's folder and the tokenizer"):
        sglang_api.check_arguments(api, config.engine.args, {})
        check_level(config, api)
        transport = choose_transport(config, api, "cpu" if world.device.type == "cpu" else "cuda")
        checkpoints = checkpoint_folder(config, world, folder)
        rows = load_rows(config.task.source, config.task.split, config.task.rows)
        model_folder = make_model_folder(config, world, folder, rows)
        tokenizer = load_tokenizer(model_folder)
        prompts = PromptSampler(
            tokenize_prompts(
                rows, tokenizer, config.task.template, config.task.max_prompt_tokens, config.task.overlong
            ),
            config.rollout.prompts_per_step,
            config.run.seed,
        )
    events.say(f"{len(prompts.prompts)} prompts of {len(rows)} rows ({config.task.source})")
    chosen = ', which is what "auto" means here' if config.weights.transport == "auto" else ""
    events.say(f'weights.transport = "{transport}"{chosen}')
    if world.device.type == "cpu":
        check_mla_on_cpu(model_folder)
    if config.model.weights == "checkpoint" and config.engine.initial_weights == "dummy":
        events.say("the engine starts on dummy weights: what the first sync does not bring will show")
    mesh = build_mesh(dims, "cpu")
    ranks_mesh = init_device_mesh(world.device.type, (world.world_size,), mesh_dim_names=("fsdp",))
    with report.timed("sglang_import"), events.phase("import_sglang", waiting_for="SGLang's import"):
        sglang_api.import_engine()
    faulthandler.enable()  # after every import: some of them install a SIGSEGV handler that shows no Python
    shipped = config.engine.implementation == "sglang"

    def start_trainer() -> Future[tuple[Actor, Critic | None, Reference | None]]:
        return in_background(lambda: build_trainer(config, world, ranks_mesh, model_folder, report))

    # On a GPU after the engine: sglang sizes its KV cache by what is free, and may go to sleep before the trainer comes.
    trainer = start_trainer() if world.device.type == "cpu" or shipped else None
    waiting = "SGLang's schedulers to start and load the model; their output is in the run directory, in engines/"
    with report.timed("engine"), events.phase("start_engine", waiting_for=waiting):
        if shipped and trainer:
            trainer.result()  # sglang's VerlEngine uses the mesh's own groups, which the trainer's thread uses too
        engine = (ShippedVerlEngine if shipped else VerlEngine)(
            mesh["tp", "pp"] if dims.pp > 1 else mesh["tp"],
            log_dir=folder / "engines",
            base_port=config.engine.base_port,
            engine_gpus=config.parallel.engine_gpus,
            model_path=str(model_folder),
            **engine_arguments(config, world),
        )
    maker = "sglang's own VerlEngine" if shipped else "the harness's VerlEngine"
    events.say(
        f"engine up: sglang {api.version} behind {maker}, {dims.dp} engine(s) of tp {dims.tp}, pp {dims.pp},"
        f" {engine.nnodes} host(s) each"
    )
    if engine.dropped_defaults:
        dropped = ", ".join(engine.dropped_defaults)
        events.say(f"sglang {api.version} does not know these harness defaults, dropped: {dropped}")
    check_gpus(world, engine, config.parallel.engine_gpus)  # while the engine is awake: it reads the weights
    memory = make_memory_stages(config, world, events, engine)
    if engine.has_memory_saver and config.engine.initial_weights == "dummy":
        with events.phase("first_sleep", waiting_for="the engine to free its memory for the trainer"):
            memory.sleep()
    with events.phase("build_trainer", waiting_for="actor, critic and reference"):
        actor, critic, reference = (trainer or start_trainer()).result()
    sync = WeightSync(engine, actor.model, replace(config.weights, transport=transport), folder)
    return Ppo(
        config=config,
        world=world,
        dims=dims,
        events=events,
        engine=engine,
        memory=memory,
        sync=sync,
        verification=Verification(
            config=config,
            world=world,
            events=events,
            memory=memory,
            sync=sync,
            reload=Reload(sync=sync, world=world, source=model_folder, folder=checkpoints),
            prompts=[prompt.input_ids for prompt in prompts.prompts[:4]],
        ),
        actor=actor,
        critic=critic,
        reference=reference,
        kl_control=kl_control(config),
        prompts=prompts,
        tokenizer=tokenizer,
    )


def make_memory_stages(config: Config, world: World, events: EventLog, engine: VerlEngine) -> MemoryStages:
    """The engine's stages, measured where this rank's engine rank runs."""
    gpu = world.engine_gpu if engine.has_memory_saver else None
    return MemoryStages(
        engine,
        free_bytes=None if gpu is None else gpu_free_bytes(gpu),
        wake=config.memory.wake,
        say=events.say,
        fact=events.fact,
    )


def checkpoint_folder(config: Config, world: World, folder: Path) -> Path:
    """Where the trainer's checkpoints go for comparison. Where engines will load any, all hosts are known to see it."""
    parent = Path(config.weights.folder).resolve() if config.weights.folder else folder
    if config.weights.verify == "full" or config.weights.transport == "disk":
        check_shared(parent, world, "weights.folder" if config.weights.folder else "run.dir")
    return parent / f"{folder.name}-reload"


@contextmanager
def what_was_asked() -> Iterator[None]:
    """A ValueError in here is the user's mistake: data, model or engine arguments that are not there or not right."""
    try:
        yield
    except ValueError as error:
        raise ConfigError(str(error)) from error


def engine_arguments(config: Config, world: World) -> dict[str, Any]:
    """What the run asks of its engines, and the user's own arguments over it."""
    dp_index = world.rank // (config.parallel.tp * config.parallel.pp)
    return {
        "device": "cpu" if world.device.type == "cpu" else "cuda",
        "dtype": config.model.dtype,
        # Engines of one run must not sample alike.
        "random_seed": config.run.seed * 1009 + dp_index,
        "load_format": "dummy" if config.engine.initial_weights == "dummy" else "auto",
        # Prompts leave and responses arrive as token ids; no tokenizer or detokenizer can then differ or fail.
        "skip_tokenizer_init": True,
    } | config.engine.args


def make_model_folder(config: Config, world: World, folder: Path, rows: list[Row]) -> Path:
    """The folder that trainer and engine load: for a tiny model made here, once on each host; else as configured."""
    if not is_tiny(config.model.name):
        return Path(config.model.name)
    target = folder / f"model-host{world.hosts.index(world.host)}"
    first_on_host = next(seat.rank for seat in world.seats if seat.host == world.host)
    if world.rank == first_on_host:
        texts = [row.question + row.answer for row in rows]
        device: Literal["cpu", "cuda"] = "cpu" if world.device.type == "cpu" else "cuda"
        save_tiny_model(
            config.model.name,
            target,
            config.run.seed,
            config.model.dtype,
            device,
            config.model.shape,
            texts=texts,
            weights=config.model.weights == "checkpoint",
        )
    dist.barrier()
    return target


def check_mla_on_cpu(model_folder: Path) -> None:
    """Raise CannotRunHere for a model with MLA (DeepSeek) where this sglang's CPU mode cannot serve it."""
    config = model_folder / "config.json"
    if config.is_file() and "kv_lora_rank" in json.loads(config.read_text(encoding="utf-8")):
        try:
            require_absorbed_mla()
        except NotImplementedError as error:
            raise CannotRunHere(str(error)) from error


def build_trainer(
    config: Config, world: World, ranks_mesh: DeviceMesh, model_folder: Path, report: Report
) -> tuple[Actor, Critic | None, Reference | None]:
    """Actor, critic where GAE needs one, reference where the KL counts. A collective call of all ranks."""
    dtype = getattr(torch, config.model.dtype)

    def load(load_model: Callable[..., nn.Module], checkpointing: bool) -> nn.Module:
        return load_model(
            str(model_folder),
            dtype,
            world.device,
            ranks_mesh,
            weights=config.model.weights,
            seed=config.run.seed,
            gradient_checkpointing=checkpointing,
        )

    if world.device.type == "cuda":
        torch.cuda.set_device(world.device)  # the current device is each thread's own
    with report.timed("models"):
        model = load(load_causal_lm, config.actor.gradient_checkpointing)
        offloaded = Offloaded.of(config.memory, "actor")
        actor = Actor(model, config.actor, config.algorithm, config.rollout, ranks_mesh, world.device, offloaded)
        critic = reference = None
        if config.algorithm.advantage == "gae":
            value_model = load(load_value_model, config.critic.gradient_checkpointing)
            offloaded = Offloaded.of(config.memory, "critic")
            critic = Critic(value_model, config.critic, config.rollout, ranks_mesh, world.device, offloaded)
        if config.algorithm.kl_placement != "none":
            frozen = load(load_causal_lm, False)
            offloaded = Offloaded.of(config.memory, "reference")
            reference = Reference(frozen, config.rollout.temperature, ranks_mesh, world.device, offloaded)
    return actor, critic, reference


def load_tokenizer(model_folder: Path) -> Any:
    """The tokenizer beside the model. Raises ConfigError where there is no such model."""
    from transformers import AutoTokenizer

    try:
        return AutoTokenizer.from_pretrained(str(model_folder))
    except (OSError, ValueError) as error:
        cause = str(error).strip().splitlines()[0]
        raise ConfigError(
            f'model.name = "{model_folder}" is no tiny model ({", ".join(ARCHITECTURES)}), and neither a folder nor a hub'
            f" id whose tokenizer can be loaded here: {cause}"
        ) from error


def kl_control(config: Config) -> FixedKl | AdaptiveKl:
    """A fixed coefficient, or one that holds the KL at its target."""
    algorithm = config.algorithm
    if algorithm.kl_target == 0:
        return FixedKl(algorithm.kl_coefficient)
    return AdaptiveKl(algorithm.kl_coefficient, algorithm.kl_target, algorithm.kl_horizon)


def in_background(work: Callable[[], T]) -> Future[T]:
    """Run in a daemon thread, which does not hold up an exit when its collectives can never end."""
    future: Future[T] = Future()

    def target() -> None:
        try:
            future.set_result(work())
        except BaseException as error:
            future.set_exception(error)

    threading.Thread(target=target, name="build-trainer", daemon=True).start()
    return future
