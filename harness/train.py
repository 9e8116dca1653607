"""The main job: build the parts of a run, loop over its steps, return the verdict."""

import faulthandler
import sys
import time
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, NoReturn

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh
from transformers import AutoConfig, AutoTokenizer
from transformers.utils import cached_file
from transformers.utils.logging import disable_progress_bar

from harness.checkpoint import Checkpoints, StopSignal
from harness.cluster.mesh import build_meshes
from harness.cluster.world import all_gather, hard_exit
from harness.config.layers import ConfigError
from harness.config.rules import warnings
from harness.config.run_folder import checkpoint_to_resume, write_config
from harness.config.schema import TINY_MODELS, Config
from harness.ppo import Metrics, Ppo
from harness.rollout import sglang_api
from harness.rollout.memory_stages import MemoryStages, gpu_free_bytes
from harness.rollout.verl_engine import VerlEngine
from harness.runtime.background import in_background
from harness.runtime.errors import Stopped, UnsupportedEnvironment
from harness.runtime.events import EventLog
from harness.runtime.observer import RunContext
from harness.runtime.processes import descendants, end_processes
from harness.runtime.run_record import RunRecord, step_line
from harness.task.data import Prompt, PromptSampler, Row, load_rows, of_validation, tokenize_prompts
from harness.task.rewards import Reward, load_reward
from harness.trainer.actor import Actor, Reference
from harness.trainer.advantages import KlControl
from harness.trainer.critic import Critic
from harness.trainer.model import Attention, choose_attention, load_causal_lm
from harness.weights.sync import WeightSync
from harness.weights.transports import check_shared, choose_transport
from harness.weights.verify import Verification, check_level


def train(run: RunContext) -> str:
    """Build the parts, run the steps and the check after the last update. Return the verdict. A collective call of all ranks.

    After a failure the engine's processes are still alive: run.py ends them. Raise Stopped where SIGTERM came, and a
    checkpoint was saved.
    """
    record = start_record(run)
    stop = StopSignal() if run.config.checkpoint.every else None
    ppo = build(run, record)
    steps, every = ppo.config.run.steps, ppo.config.checkpoint.every
    with record.timed("baseline"):
        ppo.take_baseline()
    checkpoints, first = open_checkpoints(run, ppo)
    for index in range(first, steps):
        if stop and stop.anywhere():
            if index > first and checkpoints.newest != checkpoints.folder_of(index):
                checkpoints.save(index)
            shut_down(ppo)
            raise Stopped(f"SIGTERM came before step {index} of {steps}; {checkpoints.how_to_resume()}.")
        take_step(ppo, index, record)
        if every and ((index + 1) % every == 0 or index + 1 == steps):
            checkpoints.save(index + 1)
    final = {"step": steps} | ppo.final_check(steps)
    note_validation(ppo, steps, record)
    run.events.observer.measured(record.finish(final, gather_phases(run.events, steps)))
    # Only where all went well: it is a collective call, and a rank that failed alone would wait in it for the others.
    shut_down(ppo)
    claims = ppo.verification.verdict([*record.steps, record.final])
    return f"PASSED: {len(record.steps)} PPO steps; {claims}"


def start_record(run: RunContext) -> RunRecord:
    """Return the record of a run that begins, and say what its config does not do."""
    disable_progress_bar()  # transformers' takes a second on every rank
    record = RunRecord(file=None if run.world.rank else run.folder / "metrics.jsonl", launched=run.launched)
    run.events.say(f"imported torch and transformers; run directory {run.folder}")
    for sentence in warnings(run.config):
        run.events.say(f"warning: {sentence}")
    return record


def take_step(ppo: Ppo, index: int, record: RunRecord) -> None:
    """Run one step; record, announce and print its metrics, and with the first one's where the start took its time."""
    events, started = ppo.events, time.monotonic()
    metrics = ppo.step(index)
    note_validation(ppo, index, record)
    metrics["seconds"] = time.monotonic() - started
    if not record.steps and ppo.first_token_at:
        if "sync" in events.seconds:
            record.startup["first_sync"] = events.seconds["sync"][0]
        record.startup["first_generate"] = events.seconds["generate"][0]  # kernels compile in it
        record.startup["first_token"] = ppo.first_token_at - record.launched
        events.say(record.startup_line(models_beside_engine=ppo.world.device.type == "cpu"))
    events.observer.measured(record.add(metrics, gather_phases(events, index), phase_tokens(ppo.config, metrics)))
    events.say(step_line(metrics))


def note_validation(ppo: Ppo, updates: int, record: RunRecord) -> None:
    """Record what was validated after so many updates, if anything."""
    if updates in ppo.validations:
        ppo.events.observer.measured(record.add_validation(updates, ppo.validations[updates]))


def shut_down(ppo: Ppo) -> None:
    """End the engine; return on every rank when its processes are gone. A collective call of all ranks."""
    with ppo.events.phase("shutdown", waiting_for="the engine's processes to end"):
        ppo.sync.close()
        ppo.engine.shutdown()


def open_checkpoints(run: RunContext, ppo: Ppo) -> tuple[Checkpoints, int]:
    """Return the checkpoints of the run, and its first step: 0, or the one that follows in what it resumes from.

    A collective call of all ranks. Raise ConfigError where the folders, or what is to be resumed, cannot be used.
    """
    wanted = run.config.checkpoint
    folder = Path(wanted.folder).resolve() if wanted.folder else run.folder / "checkpoints"
    if wanted.every:
        check_shared(folder, run.world, "checkpoint.folder" if wanted.folder else "run.dir")
    description = cached_file(str(ppo.verification.source), "config.json")  # of a hub id, in the cache
    checkpoints = Checkpoints(ppo=ppo, folder=folder, source=Path(description).parent)
    found = all_gather(checkpoint_to_resume(run.config))[0]
    if found is None:
        if wanted.resume:
            ppo.events.say(f"no checkpoint in {folder} yet: the run starts at its first step")
        return checkpoints, 0
    return checkpoints, checkpoints.resume(found)


def phase_tokens(config: Config, metrics: Metrics) -> Metrics:
    """Return how many tokens phases of a step compute over all ranks: responses in generate, whole sequences elsewhere."""
    tokens = metrics["tokens"]
    updates = {f"update_{model}": tokens * getattr(config, model).ppo_epochs for model in ("critic", "actor")}
    return {"generate": metrics["response_tokens"], **updates, "step": tokens}


def gather_phases(events: EventLog, step: int) -> dict[str, list[dict[str, float]]]:
    """Take what the log has of one step's phases, in order, of all ranks. A collective call of all ranks."""
    everyone = all_gather(events.step_phases.pop(step, {}))
    return {phase: [each[phase] for each in everyone if phase in each] for phase in everyone[0]}


@dataclass(frozen=True, kw_only=True, slots=True)
class Inputs:
    """What a run reads before its parts are built."""

    model_folder: Path
    tokenizer: Any
    attention: Attention
    """The trainer's."""
    reward: Reward
    prompts: PromptSampler
    validation_prompts: list[Prompt]


def read_inputs(run: RunContext) -> tuple[RunContext, Inputs]:
    """Read the task's rows and the model's folder. Return the run, its config with the steps that run.epochs makes, too.

    Raise ConfigError for what is missing or wrong, UnsupportedEnvironment for what cannot run here. Collective.
    """
    config, task, held_out = run.config, run.config.task, run.config.validation
    with (
        as_config_error(),
        run.events.phase("inputs", waiting_for="the task's rows, the model's folder and the tokenizer"),
    ):
        sglang_api.check_arguments(sglang_api.probe(), config.engine.args, {})
        rows, validation_rows = load_rows(task.source, task.split, task.rows), []
        if held_out.source:
            with of_validation():
                validation_rows = load_rows(held_out.source, held_out.split, held_out.rows)
        reward = load_reward(task.reward, [*rows, *validation_rows], run.rewards)
        model_folder = make_model_folder(run, rows)
        tokenizer = load_tokenizer(model_folder)
        attention = trainer_attention(config, model_folder, run.world.device_type, run.events.say)
        limits = task.max_prompt_tokens, task.long_prompts
        usable = tokenize_prompts(rows, tokenizer, task.template, *limits)
        prompts = PromptSampler(usable, config.rollout.prompts_per_step, config.run.seed)
        validated = tokenize_prompts(validation_rows, tokenizer, task.template, *limits) if validation_rows else []
        check_vocabulary([*usable, *validated], model_folder)
    run.events.say(f"{len(usable)} prompts of {len(rows)} rows ({', '.join(task.source)})")
    if config.run.epochs:
        steps = config.run.epochs * (len(usable) // config.rollout.prompts_per_step)
        run = replace(run, config=replace(config, run=replace(config.run, steps=steps)))
    return run, Inputs(
        model_folder=model_folder,
        tokenizer=tokenizer,
        attention=attention,
        reward=reward,
        prompts=prompts,
        validation_prompts=validated,
    )


def build(run: RunContext, record: RunRecord) -> Ppo:
    """Return every part of the run on this rank. On CPU the trainer's models are built while the engine's schedulers start."""
    world, events, api = run.world, run.events, sglang_api.probe()
    with as_config_error():
        check_level(run.config, api)
        transport, reason = choose_transport(run.config, api, world.device_type)
        check_weights_folder(run)
    run, inputs = read_inputs(run)
    events.say(f'weights.transport = "{transport}" ({reason})')
    config = replace(run.config, weights=replace(run.config.weights, transport=transport))
    run = replace(run, config=config)
    if world.rank == 0:
        write_config(run.folder, config, world.device_type)
    if config.model.weights == "checkpoint" and config.engine.initial_weights == "dummy":
        events.say("engine starts with dummy weights, so tensors missing from the first sync are detected")
    meshes = build_meshes(run.dims, world.device.type)
    with record.timed("sglang_import"):
        import_sglang(events)
    shipped = config.engine.implementation == "sglang"

    def start_trainer() -> Future[tuple[Actor, Critic | None, Reference | None]]:
        return in_background(lambda: build_trainer(run, meshes.fsdp, inputs, record), "build-trainer")

    # On a GPU after the engine: sglang sizes its KV cache by what is free, and releases it before the trainer is built.
    trainer = start_trainer() if world.device.type == "cpu" or shipped else None
    with record.timed("engine"):
        if shipped and trainer:
            trainer.result()  # sglang's VerlEngine uses the mesh's own groups, which the trainer's thread uses too
        engine = start_engine(run, meshes.engines, inputs.model_folder)
    events.observer.built("engine", engine)
    free_bytes = gpu_free_bytes(world.engine_gpu) if engine.has_memory_saver and world.engine_gpu is not None else None
    memory = MemoryStages(engine, free_bytes, config.memory.resume, events.say, events.fact)
    if engine.has_memory_saver and config.engine.initial_weights == "dummy":
        with events.phase("first_release", waiting_for="the engine to free its memory for the trainer"):
            memory.release_all()
    with events.phase("build_trainer", waiting_for="actor, critic and reference"):
        actor, critic, reference = (trainer or start_trainer()).result()
    offloaded, dtype = "actor" in config.memory.offload_parameters, getattr(torch, config.model.dtype)
    sync = WeightSync(engine, actor.model, config.weights, run.folder, dtype, offloaded)
    for name, part in (("sync", sync), ("actor", actor), ("critic", critic)):
        if part is not None:
            events.observer.built(name, part)
    verification = run.classes.get("verification", Verification)(
        config=config,
        world=world,
        events=events,
        memory=memory,
        sync=sync,
        source=inputs.model_folder,
        prompts=[prompt.input_ids for prompt in inputs.prompts.prompts[:4]],
    )
    return Ppo(
        **common_arguments(run, inputs),
        engine=engine,
        memory=memory,
        sync=sync,
        verification=verification,
        actor=actor,
        critic=critic,
        reference=reference,
    )


def common_arguments(run: RunContext, inputs: Inputs) -> dict[str, Any]:
    """Return the arguments of Ppo that do not depend on whether there is an engine, or a trainer."""
    algorithm = run.config.algorithm
    return {
        "config": run.config,
        "world": run.world,
        "dims": run.dims,
        "events": run.events,
        "kl_control": KlControl(algorithm.kl_coefficient, algorithm.kl_target, algorithm.kl_horizon),
        "prompts": inputs.prompts,
        "reward": inputs.reward,
        "tokenizer": inputs.tokenizer,
        "validation_prompts": inputs.validation_prompts,
    }


def build_trainer(
    run: RunContext, mesh: DeviceMesh, inputs: Inputs, record: RunRecord
) -> tuple[Actor, Critic | None, Reference | None]:
    """Return the actor, the critic where GAE needs one, the reference where the KL counts. A collective call of all ranks."""
    config, device = run.config, run.world.device
    compute, master = getattr(torch, config.model.dtype), getattr(torch, config.model.master_dtype)

    load = partial(
        load_causal_lm,
        str(inputs.model_folder),
        device=device,
        mesh=mesh,
        weights=config.model.weights,
        seed=config.run.seed,
        attention=inputs.attention,
        compute_dtype=compute,
    )
    if device.type == "cuda":
        torch.cuda.set_device(device)  # the current device is each thread's own
    critic = reference = None
    with record.timed("models"):
        model = load(dtype=master, gradient_checkpointing=config.actor.gradient_checkpointing)
        actor = Actor(model, config, mesh, device)
        if config.algorithm.has_critic:
            recompute = config.critic.gradient_checkpointing
            value_model = load(dtype=master, gradient_checkpointing=recompute, value_head=True)
            critic = Critic(value_model, config, mesh, device)
        if config.algorithm.kl_placement != "none":
            # Without updates there is nothing that rounding to the compute dtype could lose.
            reference = Reference(load(dtype=compute), config, mesh, device)
    return actor, critic, reference


def start_engine(run: RunContext, mesh: DeviceMesh, model_folder: Path) -> VerlEngine:
    """Return this rank's engine, serving, on the GPU that it should be on. mesh: over dp, tp and pp. A collective call.

    Raise EngineFailed where it does not start.
    """
    config, world, events, parallel = run.config, run.world, run.events, run.config.parallel
    shipped = config.engine.implementation == "sglang"
    arguments = {
        "device": world.device_type,
        "dtype": config.model.dtype,
        # Engines of one run must not sample alike.
        "random_seed": config.run.seed * 1009 + world.rank // (parallel.tp * parallel.pp),
        "load_format": "dummy" if config.engine.initial_weights == "dummy" else "auto",
        # Prompts leave and responses arrive as token ids; no tokenizer or detokenizer can then differ or fail. To find stop
        # strings SGLang needs one: without, a scheduler dies of the first, or, in newer releases, the call is refused.
        "skip_tokenizer_init": not config.rollout.stop,
    }
    waiting = "SGLang's schedulers to start and load the model; their output is in the run directory, in engines/"
    with events.phase("start_engine", waiting_for=waiting):
        engine = (run.classes["engine"] if shipped else VerlEngine)(
            mesh["tp", "pp"] if parallel.pp > 1 else mesh["tp"],
            log_dir=run.folder / "engines",
            base_port=config.engine.base_port,
            colocate=parallel.colocate,
            defaults=config.engine.defaults,
            on_death=lambda message: _end_with(message, events),
            model_path=str(model_folder),
            **arguments | config.engine.args,
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
    return engine


def _end_with(message: str, events: EventLog) -> NoReturn:
    """End this rank from the engine's watching thread: the main one may sit in a collective for minutes."""
    print(message, file=sys.stderr, flush=True)
    events.fail(message)
    end_processes(descendants(), patience_seconds=0)
    hard_exit(1)


def import_sglang(events: EventLog) -> None:
    """Import what an engine needs: it takes as long as starting it, and no other thread may import meanwhile."""
    with events.phase("import_sglang", waiting_for="SGLang's import"):
        sglang_api.import_engine()
    faulthandler.enable()  # after every import: some of them install a SIGSEGV handler that shows no Python


def make_model_folder(run: RunContext, rows: list[Row]) -> Path:
    """Return the folder that trainer and engine load: as configured, or one that is handed in, made once on each host."""
    config, world = run.config, run.world
    target = Path(config.model.name)
    if config.model.name in run.models:
        target = run.folder / f"model-host{world.hosts.index(world.host)}"
        if world.rank == next(location.rank for location in world.locations if location.host == world.host):
            run.models[config.model.name](target, rows)
        dist.barrier()
    return target


def check_vocabulary(prompts: Iterable[Prompt], model_folder: Path) -> None:
    """Raise ValueError for a token that the model has no embedding of: on a GPU it would end the engine in an assertion."""
    size = AutoConfig.from_pretrained(str(model_folder)).get_text_config().vocab_size
    for prompt in prompts:
        if (token := max(prompt.input_ids, default=0)) >= size:
            raise ValueError(
                f"the prompt of {prompt.row.where} has token {token}, but model.name's vocab_size is {size}: give the"
                " model that the tokenizer beside it was made for"
            )


def trainer_attention(config: Config, model_folder: Path, device: str, say: Callable[[str], None]) -> Attention:
    """Return the trainer's attention, by transformers' name; say why where it is not sdpa.

    Raise ValueError where the model cannot have what was asked, UnsupportedEnvironment where SGLang's CPU mode does not
    compute the model's attention.
    """
    attention, why = choose_attention(
        AutoConfig.from_pretrained(str(model_folder)), config.model.attention, config.model.packed
    )
    if why:
        say(f'model.attention = "{attention}": {why}')
    if "attn_logit_softcapping" in why and device == "cpu" and "attention_backend" not in config.engine.args:
        raise UnsupportedEnvironment(
            f"{why}; so does SGLang's torch_native attention on the CPU: it would compute another model."
        )
    return attention


def load_tokenizer(model_folder: Path) -> Any:
    """Return the tokenizer beside the model. Raise ConfigError where there is no such model."""
    try:
        return AutoTokenizer.from_pretrained(str(model_folder))
    except (OSError, ValueError) as error:
        cause = str(error).strip().splitlines()[0]
        raise ConfigError(
            f'model.name = "{model_folder}" is no tiny model ({", ".join(TINY_MODELS)}), and neither a folder nor a hub'
            f" id whose tokenizer can be loaded here: {cause}"
        ) from error


def check_weights_folder(run: RunContext) -> None:
    """Raise ConfigError where engines are to load checkpoints from a folder that a host does not see. Collective."""
    weights = run.config.weights
    folder = Path(weights.folder).resolve() if weights.folder else run.folder
    if weights.verify == "full" or weights.transport == "disk":
        check_shared(folder, run.world, "weights.folder" if weights.folder else "run.dir")


@contextmanager
def as_config_error() -> Iterator[None]:
    """Raise ValueErrors from in here as ConfigError: data, a model or engine arguments that are missing or wrong."""
    try:
        yield
    except ValueError as error:
        raise ConfigError(str(error)) from error
