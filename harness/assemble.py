"""All parts of a run, built in the order that wastes least time, and conducted to a verdict."""

import time
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import replace
from pathlib import Path
from typing import Any, TypeVar

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from transformers.utils.logging import disable_progress_bar

from harness.cluster.mesh import ParallelDims, build_meshes
from harness.cluster.world import World
from harness.config.layers import ConfigError
from harness.config.rules import warnings
from harness.config.schema import Config
from harness.parts import as_config_error, import_sglang, make_model_folder, start_engine, trainer_attention
from harness.ppo import Ppo
from harness.rollout import sglang_api
from harness.rollout.memory import MemoryStages, gpu_free_bytes
from harness.rollout.verl_engine import VerlEngine
from harness.runtime.background import in_background
from harness.runtime.events import EventLog
from harness.runtime.memory_gauge import gather_stages
from harness.runtime.run_folder import write_config
from harness.task.architectures import ARCHITECTURES
from harness.task.data import PromptSampler, load_rows, tokenize_prompts
from harness.tools.report.run_report import Report
from harness.tools.report.write import write_reports_of_passed_run
from harness.trainer.actor import Actor, Reference
from harness.trainer.advantages import AdaptiveKl, FixedKl
from harness.trainer.critic import Critic
from harness.trainer.model import Attention, load_causal_lm, load_value_model
from harness.trainer.offload import Offloaded
from harness.weights.reload import Reload, check_shared
from harness.weights.sync import WeightSync
from harness.weights.transports import choose_transport
from harness.weights.verification_summary import report_section, verdict_phrase
from harness.weights.verify import Verification, check_level

T = TypeVar("T")


def conduct(config: Config, world: World, dims: ParallelDims, events: EventLog, folder: Path, launched: float) -> int:
    """Build, step, check, report; the exit code. A collective call of all ranks. After a failure engine processes live on."""
    disable_progress_bar()  # transformers': of every rank, for a second each
    report = Report(folder=folder, config=config, world=world, launched=launched)
    events.say(f"imported torch and transformers; run directory {folder}")
    for sentence in warnings(config):
        events.say(f"warning: {sentence}")
    ppo = assemble(config, world, dims, events, folder, report)
    with report.timed("baseline"):
        ppo.take_baseline()
    for index in range(config.run.steps):
        started = time.monotonic()
        metrics = ppo.step(index)
        metrics["seconds"] = time.monotonic() - started
        metrics |= {f"seconds/{name}": seconds for name, seconds in events.step_seconds[index].items()}
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
    report.verification = report_section(ppo.verification, rollouts, events.seconds)
    if world.rank == 0:
        report.write()
    events.say(report.verdict(verdict_phrase(ppo.verification, rollouts)))
    if world.rank == 0:
        write_reports_of_passed_run(folder)
    return 0


def assemble(config: Config, world: World, dims: ParallelDims, events: EventLog, folder: Path, report: Report) -> Ppo:
    """Every part of the run on this rank. The trainer's models are built while the engine's schedulers start."""
    api = sglang_api.probe()
    with as_config_error(), events.phase("inputs", waiting_for="the task's rows, the model's folder and the tokenizer"):
        sglang_api.check_arguments(api, config.engine.args, {})
        check_level(config, api)
        transport, reason = choose_transport(config, api, world.device_type)
        checkpoints = checkpoint_folder(config, world, folder)
        rows = load_rows(config.task.source, config.task.split, config.task.rows)
        model_folder = make_model_folder(config, world, folder, rows)
        tokenizer = load_tokenizer(model_folder)
        attention = trainer_attention(config, model_folder, world.device_type, events)
        prompts = PromptSampler(
            tokenize_prompts(
                rows, tokenizer, config.task.template, config.task.max_prompt_tokens, config.task.long_prompts
            ),
            config.rollout.prompts_per_step,
            config.run.seed,
        )
    events.say(f"{len(prompts.prompts)} prompts of {len(rows)} rows ({config.task.source})")
    config = replace(config, weights=replace(config.weights, transport=transport))
    report.config = config
    events.say(f'weights.transport = "{transport}" ({reason})')
    if world.rank == 0:
        write_config(folder, config, world.device_type)
    if config.model.weights == "checkpoint" and config.engine.initial_weights == "dummy":
        events.say("the engine starts on dummy weights: what the first sync does not bring will show")
    meshes = build_meshes(dims, world.device.type)
    with report.timed("sglang_import"):
        import_sglang(config, world, dims, events, [transport])
    shipped = config.engine.implementation == "sglang"

    def start_trainer() -> Future[tuple[Actor, Critic | None, Reference | None]]:
        return in_background(
            lambda: build_trainer(config, world, meshes.fsdp, model_folder, attention, report), "build-trainer"
        )

    # On a GPU after the engine: sglang sizes its KV cache by what is free, and may go to sleep before the trainer comes.
    trainer = start_trainer() if world.device.type == "cpu" or shipped else None
    with report.timed("engine"):
        if shipped and trainer:
            trainer.result()  # sglang's VerlEngine uses the mesh's own groups, which the trainer's thread uses too
        engine = start_engine(config, world, meshes.engines, events, folder, model_folder)
    memory = make_memory_stages(config, world, events, engine)
    if engine.has_memory_saver and config.engine.initial_weights == "dummy":
        with events.phase("first_release", waiting_for="the engine to free its memory for the trainer"):
            memory.release_all()
    with events.phase("build_trainer", waiting_for="actor, critic and reference"):
        actor, critic, reference = (trainer or start_trainer()).result()
    sync = WeightSync(engine, actor.model, config.weights, folder, getattr(torch, config.model.dtype))
    for name, part in (("sync", sync), ("actor", actor.learner), *([("critic", critic.learner)] if critic else [])):
        events.built(name, part)
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
        resume_mode=config.memory.resume,
        say=events.say,
        fact=events.fact,
    )


def checkpoint_folder(config: Config, world: World, folder: Path) -> Path:
    """Where the trainer's checkpoints go for comparison. Where engines will load any, all hosts are known to see it."""
    parent = Path(config.weights.folder).resolve() if config.weights.folder else folder
    if config.weights.verify == "full" or config.weights.transport == "disk":
        check_shared(parent, world, "weights.folder" if config.weights.folder else "run.dir")
    return parent / f"{folder.name}-reload"


def build_trainer(
    config: Config, world: World, ranks_mesh: DeviceMesh, model_folder: Path, attention: Attention, report: Report
) -> tuple[Actor, Critic | None, Reference | None]:
    """Actor, critic where GAE needs one, reference where the KL counts. A collective call of all ranks."""
    compute, master = getattr(torch, config.model.dtype), getattr(torch, config.model.master_dtype)

    def load(load_model: Callable[..., nn.Module], checkpointing: bool, dtype: torch.dtype = master) -> nn.Module:
        return load_model(
            str(model_folder),
            dtype,
            world.device,
            ranks_mesh,
            weights=config.model.weights,
            seed=config.run.seed,
            attention=attention,
            gradient_checkpointing=checkpointing,
            compute_dtype=compute,
        )

    if world.device.type == "cuda":
        torch.cuda.set_device(world.device)  # the current device is each thread's own
    with report.timed("models"):
        model = load(load_causal_lm, config.actor.gradient_checkpointing)
        offloaded = Offloaded.of(config.memory, "actor")
        actor = Actor(model, config.actor, config.algorithm, config.rollout, ranks_mesh, world.device, offloaded)
        critic = reference = None
        if config.algorithm.has_critic:
            value_model = load(load_value_model, config.critic.gradient_checkpointing)
            offloaded = Offloaded.of(config.memory, "critic")
            critic = Critic(value_model, config.critic, config.rollout, ranks_mesh, world.device, offloaded)
        if config.algorithm.kl_placement != "none":
            frozen = load(load_causal_lm, False, compute)  # without updates there is nothing that rounding could lose
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
