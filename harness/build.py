"""Build the parts of a run: the engine, the trainer's models, the weight sync and its checks."""

import faulthandler
import sys
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from contextlib import contextmanager, nullcontext, suppress
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import TypeVar
from unittest.mock import patch

import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.distributed.device_mesh import DeviceMesh

from harness.cluster.mesh import build_meshes
from harness.cluster.placement import place
from harness.half_runs import EngineAlone, TrainerAlone
from harness.inputs import Inputs
from harness.learning import Learning
from harness.observer import RunContext
from harness.ppo import Ppo
from harness.rollout import sglang_api
from harness.rollout.engine import RolloutEngine
from harness.rollout.engine_ranks import check_gpus
from harness.rollout.memory_stages import MemoryStages, gpu_free_bytes
from harness.rollout.verl_engine import VerlEngine
from harness.rollouts import Rollouts
from harness.runtime.events import EventLog
from harness.runtime.fork_server import collecting_nothing
from harness.runtime.processes import end_failed, in_background
from harness.runtime.run_record import RunRecord
from harness.seeds import seed_of
from harness.trainer.actor import Actor, Reference
from harness.trainer.critic import Critic
from harness.trainer.model import load_causal_lm
from harness.trainer.routing import routed_shape
from harness.weight_changes import WeightChanges
from harness.weights.sent_model import SentModel
from harness.weights.sync import WeightSync
from harness.weights.verification.proof import Proof
from harness.weights.verification.run_parts import RunParts
from harness.weights.worker.kept_copies import find_copies

T = TypeVar("T")


def build(run: RunContext, inputs: Inputs, record: RunRecord) -> Ppo:
    """Return every part of a PPO run on this rank. A collective call of all ranks."""
    meshes = build_meshes(run.dims, run.world.device.type)
    prepare_process(run, record)
    build_models = partial(build_trainer, run, meshes.fsdp, inputs, record)
    # On a CPU the models are built while the engine's processes start. On a GPU they wait for it: SGLang sizes its KV
    # cache by the memory that is free, and must release it before there is room for the trainer.
    at_once = run.world.device.type == "cpu" and run.engine_class is None
    background = _on_a_thread(build_models) if at_once else None
    rollouts = build_rollouts(run, meshes.engines, inputs, record)
    find_early_copies(run, rollouts.engine)
    memory = start_memory_stages(run, rollouts.engine)
    with run.events.phase("build_trainer", "actor, critic and reference"):
        learning = background.result() if background else build_models()
    sync = build_sync_of_actor(run, rollouts.engine, learning.actor, inputs)
    parts = RunParts(
        config=run.config,
        world=run.world,
        events=run.events,
        memory=memory,
        sync=sync,
        actor=learning.actor,
        source=inputs.engine_folder,
    )
    announce_learners(run, learning)
    return Ppo(
        config=run.config,
        events=run.events,
        rollouts=rollouts,
        learning=learning,
        memory=memory,
        sync=sync,
        proof=Proof(parts, rollouts.respond),
        saved=inputs.saved,
    )


def build_engine_alone(run: RunContext, inputs: Inputs, record: RunRecord) -> EngineAlone:
    """Return the parts of a run without a trainer (rollout.only). A collective call of all ranks."""
    meshes = build_meshes(run.dims, run.world.device.type)
    prepare_process(run, record)
    rollouts = build_rollouts(run, meshes.engines, inputs, record)
    memory = start_memory_stages(run, rollouts.engine)
    return EngineAlone(config=run.config, events=run.events, rollouts=rollouts, memory=memory, saved=inputs.saved)


def build_trainer_alone(run: RunContext, inputs: Inputs, record: RunRecord) -> TrainerAlone:
    """Return the parts of a run without an engine (rollout.load). A collective call of all ranks."""
    faulthandler.enable()
    meshes = build_meshes(run.dims, run.world.device.type)
    with run.events.phase("build_trainer", "actor, critic and reference"):
        learning = build_trainer(run, meshes.fsdp, inputs, record)
    announce_learners(run, learning)
    assert inputs.saved, "read_inputs opens what rollout.load names"
    return TrainerAlone(events=run.events, tokenizer=inputs.tokenizer, learning=learning, saved=inputs.saved)


def prepare_process(run: RunContext, record: RunRecord) -> None:
    """Import SGLang where an engine is built, before anything else runs on a thread."""
    with record.timed("sglang_import"):
        import_sglang(run)
    faulthandler.enable()  # after every import: some of them install a SIGSEGV handler that shows no Python frames


def build_rollouts(run: RunContext, mesh: DeviceMesh, inputs: Inputs, record: RunRecord) -> Rollouts:
    """Start the engine; return it with the prompts that it is asked. mesh: over dp, tp and pp.

    A collective call of all ranks.
    """
    with record.timed("engine"):
        engine = start_engine(run, mesh, inputs.engine_folder)
    run.observer.built("engine", engine)
    return Rollouts(
        config=run.config,
        world=run.world,
        dims=run.dims,
        events=run.events,
        prompts=inputs.prompts,
        validation_prompts=inputs.validation_prompts,
        tokenizer=inputs.tokenizer,
        reward=inputs.reward,
        engine=engine,
        routed_shape=routed_shape(str(inputs.model_folder)) if run.config.rollout.routing != "off" else None,
    )


def announce_learners(run: RunContext, learning: Learning) -> None:
    """Tell the observers of the models that learn."""
    for learner in (learning.actor, learning.critic):
        if learner:
            run.observer.built(learner.role, learner)


def _on_a_thread(build_models: Callable[[], T]) -> Future[T]:
    """Build the trainer's models on a thread.

    DTensor uses fake tensors. In torch 2.11 built for CUDA, the first thread that does so on a machine without a GPU
    must outlive all others that do: their device guard is a thread-local variable of the first one. So this one uses
    them first. Otherwise the next operation on a DTensor after the new thread's end is a SIGSEGV.
    """
    with FakeTensorMode():
        pass
    return in_background(build_models, "build-trainer")


def import_sglang(run: RunContext) -> None:
    """Import SGLang on a rank that builds an engine, which takes seconds.

    No other thread may import anything meanwhile.
    """
    with run.events.phase("import_sglang", waiting_for="SGLang's import"), collecting_nothing():
        if builds_engine(run):
            sglang_api.import_engine()


def builds_engine(run: RunContext) -> bool:
    """Return whether this rank's process builds an sglang.Engine, for which it must import all of SGLang."""
    engines = place(run.dims, run.world.locations, run.world.device_type)
    return run.engine_class is not None or any(
        node.builder == run.world.rank for engine in engines for node in engine.nodes
    )


def start_engine(run: RunContext, mesh: DeviceMesh, model_folder: Path) -> RolloutEngine:
    """Return this rank's engine, serving, on the GPUs that the config says. mesh: over dp, tp and pp.

    A collective call of all ranks. Raise EngineFailed if it does not start.
    """
    engine = make_engine(run, mesh, model_folder)
    check_gpus(run.world, engine, run.config.parallel.colocate)
    return engine


def make_engine(run: RunContext, mesh: DeviceMesh, model_folder: Path) -> RolloutEngine:
    """Return this rank's engine, serving. A collective call of the engine's ranks.

    Raise EngineFailed if it does not start.
    """
    config, world, events, parallel = run.config, run.world, run.events, run.config.parallel
    arguments = {
        "device": world.device_type,
        "dtype": config.model.dtype,
        # Engines of one run must not sample alike.
        "random_seed": seed_of(config.run.seed, place=world.rank // (parallel.tp * parallel.pp)),
        "load_format": "dummy" if config.engine.initial_weights == "dummy" else "auto",
        # Prompts leave and responses arrive as token ids, so that no tokenizer or detokenizer of SGLang can differ or
        # fail. Only to find stop strings does SGLang need its tokenizer.
        "skip_tokenizer_init": not config.rollout.stop,
    }
    if config.rollout.routing != "off":
        arguments["enable_return_routed_experts"] = True
    if config.engine.initial_weights == "dummy" and config.model.weights == "checkpoint":
        events.say("the engine starts with dummy weights, so that a tensor missing from the first sync shows")
    waiting = "SGLang's schedulers to start and load the model; their output is in the run directory, in engines/"
    with events.phase("start_engine", waiting_for=waiting), _main_module_hidden():
        engine: RolloutEngine = (run.engine_class or VerlEngine)(
            mesh["tp", "pp"] if parallel.pp > 1 else mesh["tp"],
            log_dir=run.folder / "engines",
            base_port=config.engine.base_port,
            colocate=parallel.colocate,
            preset=config.engine.preset,
            on_death=lambda message: end_failed(message, message, "", events.fail),
            record_call=partial(_record_call, events),
            model_path=str(model_folder),
            **arguments | config.engine.args,
        )
    events.say(
        f"engine up: sglang {engine.version} in {type(engine).__name__}, {parallel.dp} engine(s) of tp {parallel.tp},"
        f" pp {parallel.pp}, {engine.nnodes} host(s) each"
    )
    record = engine.record()
    events.fact(
        "engine",
        version=engine.version,
        device=world.device_type,
        preset=config.engine.preset,
        **asdict(record),
    )
    return engine


def find_early_copies(run: RunContext, engine: RolloutEngine) -> None:
    """Note the copies of its first weights that the engine made while it captured CUDA graphs, before anything else is
    loaded.
    """
    if run.config.weights.verify and engine.can_ask:
        with run.events.phase("verify_copies", "the search of each scheduler for copies of its weights"):
            engine.ask(find_copies)


def start_memory_stages(run: RunContext, engine: RolloutEngine) -> MemoryStages:
    """Return what releases and resumes the engine's memory. Release it at once, if there is nothing in it to keep."""
    config, events, gpu = run.config, run.events, run.world.engine_gpu
    free_bytes = gpu_free_bytes(gpu) if engine.has_memory_saver and gpu is not None else None
    memory = MemoryStages(
        engine,
        free_bytes,
        config.memory.resume,
        holds_graphs=engine.holds_graphs,
        say=events.say,
        fact=events.fact,
    )
    if engine.has_memory_saver and config.engine.initial_weights == "dummy":
        with events.phase("first_release", waiting_for="the engine to free its memory for the trainer"):
            memory.release_all()
    return memory


def build_trainer(run: RunContext, mesh: DeviceMesh, inputs: Inputs, record: RunRecord) -> Learning:
    """Return the actor, the critic if advantages are GAE's, the reference if the KL counts.

    A collective call of all ranks.
    """
    config, device = run.config, run.world.device
    precision = config.model.precision
    compute, master = getattr(torch, precision.computed), getattr(torch, precision.stored)

    def load(dtype: torch.dtype, **how: bool) -> torch.nn.Module:
        return load_causal_lm(
            str(inputs.model_folder),
            dtype,
            device,
            mesh,
            weights=config.model.weights,
            seed=config.run.seed,
            attention=inputs.attention,
            compute_dtype=compute,
            **how,
        )

    if device.type == "cuda":
        torch.cuda.set_device(device)  # each thread has its own current device
    critic = reference = None
    with record.timed("models"):
        actor = Actor(load(master, gradient_checkpointing=config.actor.gradient_checkpointing), config, mesh, device)
        if config.algorithm.has_critic:
            value_model = load(master, gradient_checkpointing=config.actor.gradient_checkpointing, value_head=True)
            critic = Critic(value_model, config, mesh, device)
        if config.algorithm.kl_placement != "none":
            # It is never updated, so it can be kept in the dtype in which it computes.
            reference = Reference(load(compute), config, mesh, device)
    weight_changes: dict[str, WeightChanges] = {
        learner.role: WeightChanges(role=learner.role, model=learner.model, config=config)
        for learner in (actor, critic)
        if learner
    }
    return Learning(
        config=config,
        world=run.world,
        events=run.events,
        actor=actor,
        critic=critic,
        reference=reference,
        weight_changes=weight_changes,
    )


def build_sync_of_actor(run: RunContext, engine: RolloutEngine, actor: Actor, inputs: Inputs) -> WeightSync:
    """Build the sync of the actor's weights, and announce it. A collective call of all ranks."""
    offloaded = "actor" in run.config.memory.offload_parameters
    # What quantizes reads the weights when it is built.
    with actor.on_device() if run.config.model.precision.is_quantized else nullcontext():
        sync = build_sync(run, engine, actor.model, inputs.model_folder, offloaded=offloaded)
    run.observer.built("sync", sync)
    return sync


def build_sync(
    run: RunContext, engine: RolloutEngine, model: nn.Module, model_folder: Path, *, offloaded: bool = False
) -> WeightSync:
    """Return what brings the model's weights to the engine, by weights.transport. A collective call of all ranks.

    offloaded: the model's memory is given up between syncs.
    """
    config = run.config
    return WeightSync(
        engine,
        SentModel.of_run(config, model, model_folder, run.world.device),
        transport=config.weights.transport,
        folder=config.weights.folder or run.folder,
        bucket_size_mib=config.weights.bucket_size_mib,
        check=config.weights.verify,
        offloaded=offloaded,
    )


@contextmanager
def _main_module_hidden() -> Iterator[None]:
    """Keep processes that are spawned in this block from importing the program's main module.

    multiprocessing has each spawned process import it first. A script that calls harness.run.run without
    `if __name__ == "__main__":` would start a second run there. SGLang's processes need nothing of it.
    """
    with patch.multiple(sys.modules["__main__"], __file__=None, __spec__=None, create=True):
        yield


def _record_call(events: EventLog, name: str, seconds: float, succeeded: bool) -> None:
    with suppress(OSError):  # on a full disk the call's own failure must be raised
        events.fact("engine_call", call=name, seconds=seconds, ok=succeeded)
