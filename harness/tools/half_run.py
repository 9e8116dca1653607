"""Half a run, to find the half that fails: the engine alone, or the learner alone on responses that a run has saved.

Both are jobs of harness.run with the reference's own step, of which they leave out what the other half does.
"""

from dataclasses import dataclass, replace
from typing import Any

from harness.cluster.mesh import build_meshes
from harness.config.run_folder import write_config
from harness.ppo import Metrics, Ppo
from harness.rollout.memory_stages import trim_heap
from harness.runtime.observer import RunContext
from harness.tools.saved_rollouts import SavedRollouts
from harness.train import (
    Inputs,
    as_config_error,
    build_trainer,
    common_arguments,
    import_sglang,
    read_inputs,
    start_engine,
    start_record,
    take_step,
)
from harness.trainer.batch import Batch
from harness.weights.verify import Verification

ABSENT: Any = None  # a part that half a run has not, and never asks for


class EngineAlone(Ppo):
    """The rollout of a step, on the weights that the engine has loaded."""

    def step(self, index: int) -> Metrics:
        """Generate, score and validate; return the metrics of the responses. A collective call of all ranks."""
        batch = self.answer(index)
        self.events.observer.responded(index, batch)
        self.show_sample(index, batch)
        with self.events.phase("free_caches", index):
            trim_heap()
        return {**self.response_metrics(batch), "step": index}


@dataclass(kw_only=True, slots=True)
class LearnerAlone(Ppo):
    """The updates of a step, on responses that are read back."""

    saved: SavedRollouts

    def step(self, index: int) -> Metrics:
        """Read the responses, and learn from them; return the metrics. A collective call of all ranks."""
        rollout, metrics = self.rollout(index)
        metrics |= self.learn(index, rollout)
        with self.events.phase("free_caches", index):
            trim_heap()
        return metrics | {"step": index}

    def respond(self, index: int) -> Batch:
        """Return the step's responses, as they were saved."""
        return self.saved.load(index)


def engine_alone(run: RunContext) -> str:
    """Run the engine alone, on the model's own checkpoint; return the verdict. A collective call of all ranks."""
    record = start_record(run)
    run, inputs = _resolved(run, initial_weights="checkpoint")
    meshes = build_meshes(run.dims, run.world.device.type)
    with record.timed("sglang_import"):
        import_sglang(run.events)
    with record.timed("engine"):
        engine = start_engine(run, meshes.engines, inputs.model_folder)
    run.events.observer.built("engine", engine)
    ppo = EngineAlone(
        **common_arguments(run, inputs),
        engine=engine,
        memory=ABSENT,
        sync=ABSENT,
        verification=ABSENT,
        actor=ABSENT,
        critic=None,
        reference=None,
    )
    for index in range(run.config.run.steps):
        take_step(ppo, index, record)
    with run.events.phase("shutdown", waiting_for="the engine's processes to end"):
        engine.shutdown()
    return f"PASSED: {len(record.steps)} steps of the engine alone"


def learner_alone(run: RunContext) -> str:
    """Run the learner alone, on rollout.load; return the verdict. A collective call of all ranks."""
    record = start_record(run)
    run, inputs = _resolved(run)
    saved = SavedRollouts.of(run.config, run.world.rank)
    assert saved is not None
    with as_config_error():
        saved.check(run.config.rollout, run.config.run.steps)
    with run.events.phase("build_trainer", waiting_for="actor, critic and reference"):
        meshes = build_meshes(run.dims, run.world.device.type)
        actor, critic, reference = build_trainer(run, meshes.fsdp, inputs, record)
    for name, part in (("actor", actor), ("critic", critic)):
        if part is not None:
            run.events.observer.built(name, part)
    verification = Verification(
        config=run.config,
        world=run.world,
        events=run.events,
        memory=ABSENT,
        sync=ABSENT,
        source=inputs.model_folder,
        prompts=(),
    )
    ppo = LearnerAlone(
        **common_arguments(run, inputs),
        engine=ABSENT,
        memory=ABSENT,
        sync=ABSENT,
        verification=verification,
        actor=actor,
        critic=critic,
        reference=reference,
        saved=saved,
    )
    for index in range(run.config.run.steps):
        take_step(ppo, index, record)
    return f"PASSED: {len(record.steps)} steps of the learner alone, on the rollouts in {run.config.rollout.load}"


def _resolved(run: RunContext, **engine: Any) -> tuple[RunContext, Inputs]:
    """Return the run as it will be, its config written, and its inputs: there is no sync that could be verified."""
    run, inputs = read_inputs(run)
    config = replace(run.config, weights=replace(run.config.weights, verify="off"))
    run = replace(run, config=replace(config, engine=replace(config.engine, **engine)))
    if run.world.rank == 0:
        write_config(run.folder, run.config, run.world.device_type)
    return run, inputs
