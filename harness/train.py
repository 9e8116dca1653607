"""The main job of a run: loop over its steps, save checkpoints, return the verdict. harness/build.py builds the
parts.
"""

import os
import time
from collections.abc import Mapping
from pathlib import Path

from transformers.utils import cached_file
from transformers.utils.logging import disable_progress_bar

from harness.build import build, build_engine_alone, build_trainer_alone
from harness.checkpoint import Checkpoints, StopSignal, lock_folder
from harness.cluster.world import all_gather
from harness.config.checkpoint_folder import checkpoint_to_resume
from harness.config.schema import Config
from harness.inputs import Inputs, read_inputs
from harness.metrics import Metrics
from harness.observer import RunContext
from harness.ppo import Ppo
from harness.rollouts import Rollouts
from harness.runtime.errors import Stopped
from harness.runtime.events import EventLog
from harness.runtime.run_record import RunRecord, step_line
from harness.weight_changes import WeightChanges
from harness.weights.transports import check_shared


def train(run: RunContext) -> str:
    """Build the parts, run the steps and the check after the last update; return the verdict.

    A collective call of all ranks.

    Raise Stopped after SIGTERM, when a checkpoint is saved. After a failure the engine's processes are still alive, and
    run.py ends them.
    """
    record = start_record(run)
    if not run.config.rollout.has_both:
        return train_half(run, record)
    stop = StopSignal() if run.config.checkpoint.every else None
    lock = lock_folder(run.config)
    run, inputs = read_inputs(run)
    ppo = build(run, inputs, record)
    steps, every = run.config.run.steps, run.config.checkpoint.every
    with record.timed("baseline"):
        ppo.proof.baseline()
    checkpoints, first = open_checkpoints(run, ppo, inputs)
    with record.timed("rehearsal"):
        ppo.proof.rehearse()
    for index in range(first, steps):
        if stop and stop.anywhere():
            if index > first and checkpoints.newest != checkpoints.folder_of(index):
                checkpoints.save(index)
            ppo.shut_down()
            raise Stopped(f"SIGTERM came before step {index} of {steps}; {checkpoints.how_to_resume()}.")
        started = time.monotonic()
        metrics = ppo.step(index)
        record_rollout(run, ppo.rollouts, record, index)
        record_step(run, ppo.learning.weight_changes, record, metrics | {"seconds": time.monotonic() - started})
        if every and ((index + 1) % every == 0 or index + 1 == steps):
            checkpoints.save(index + 1)
    final = ppo.final_check(steps)
    record_validation(run, ppo.rollouts, record, steps)
    run.observer.measured(record.finish({"step": steps} | final, gather_phases(run.events, steps)))
    run.events.say(ppo.sample)
    # Not in a `finally`: it is a collective call, and a rank that failed alone would wait in it for the others.
    ppo.shut_down()
    if lock is not None:
        os.close(lock)
    return f"PASSED: {ppo.verdict([*record.steps, record.final])}"


def train_half(run: RunContext, record: RunRecord) -> str:
    """Run the steps of the engine alone, or of the trainer alone; return the verdict.

    A collective call of all ranks. Nothing is saved to resume from, so SIGTERM ends the run at once.
    """
    run, inputs = read_inputs(run)
    steps = range(run.config.run.steps)
    if run.config.rollout.only:
        engine = build_engine_alone(run, inputs, record)
        for index in steps:
            started = time.monotonic()
            metrics = engine.step(index)
            record_rollout(run, engine.rollouts, record, index)
            record_step(run, {}, record, metrics | {"seconds": time.monotonic() - started})
        engine.validate(run.config.run.steps)
        record_validation(run, engine.rollouts, record, run.config.run.steps)
        engine.shut_down()
        return f"PASSED: {engine.verdict(record.steps)}"
    trainer = build_trainer_alone(run, inputs, record)
    for index in steps:
        started = time.monotonic()
        metrics = trainer.step(index)
        record_step(run, trainer.learning.weight_changes, record, metrics | {"seconds": time.monotonic() - started})
    return f"PASSED: {trainer.verdict(record.steps)}"


def start_record(run: RunContext) -> RunRecord:
    """Return the record of a run that begins, and say where it writes."""
    disable_progress_bar()  # transformers' costs a second on every rank
    record = RunRecord(file=None if run.world.rank else run.folder / "metrics.jsonl", launched=run.launched)
    run.events.say(f"run directory: {run.folder}")
    return record


def record_rollout(run: RunContext, rollouts: Rollouts, record: RunRecord, index: int) -> None:
    """Write what a validation before the step found; after the first step also say where the start took its time."""
    events = run.events
    record_validation(run, rollouts, record, index)
    if not record.steps and rollouts.first_token_at:
        if "sync" in events.seconds:
            record.startup["first_sync"] = events.seconds["sync"][0]
        record.startup["first_generate"] = events.seconds["generate"][0]  # kernels compile in it
        record.startup["first_token"] = rollouts.first_token_at - record.launched
        events.say(record.startup_line(models_beside_engine=run.world.device.type == "cpu"))


def record_step(
    run: RunContext, weight_changes: Mapping[str, WeightChanges], record: RunRecord, metrics: Metrics
) -> None:
    """Write, announce and print the metrics of a step."""
    index, events = int(metrics["step"]), run.events
    run.observer.measured(record.add(metrics, gather_phases(events, index), phase_tokens(run.config, metrics)))
    events.say(step_line(metrics, [line for each in weight_changes.values() if (line := each.line(index))]))


def record_validation(run: RunContext, rollouts: Rollouts, record: RunRecord, updates: int) -> None:
    """Write and announce what the validation after so many updates found, if there was one."""
    if updates in rollouts.validations:
        run.observer.measured(record.add_validation(updates, rollouts.validations[updates]))


def open_checkpoints(run: RunContext, ppo: Ppo, inputs: Inputs) -> tuple[Checkpoints, int]:
    """Return the checkpoints of the run, and the run's first step: 0, or where it resumes.

    A collective call of all ranks. Raise ConfigError if the folders, or what is to be resumed, cannot be used.
    """
    wanted = run.config.checkpoint
    folder = Path(wanted.folder).resolve() if wanted.folder else run.folder / "checkpoints"
    if wanted.every:
        check_shared(folder, run.world, "checkpoint.folder" if wanted.folder else "run.dir")
    model_config = cached_file(str(inputs.model_folder), "config.json")  # of a hub id, in the cache
    checkpoints = Checkpoints(
        config=run.config,
        events=run.events,
        folder=folder,
        source=Path(model_config).parent,
        actor=ppo.learning.actor,
        critic=ppo.learning.critic,
        sync=ppo.sync,
        proof=ppo.proof,
    )
    found = all_gather(checkpoint_to_resume(run.config))[0]
    if found is None:
        if wanted.resume:
            run.events.say(f"no checkpoint in {folder} yet: the run starts at its first step")
        return checkpoints, 0
    return checkpoints, checkpoints.resume(found)


def phase_tokens(config: Config, metrics: Metrics) -> Metrics:
    """Return how many tokens phases of a step compute over all ranks: responses in generate, whole sequences
    elsewhere.
    """
    tokens = metrics["tokens"]
    updates = dict.fromkeys(("update_critic", "update_actor"), tokens * config.actor.ppo_epochs)
    return {"generate": metrics["response_tokens"], **updates, "step": tokens}


def gather_phases(events: EventLog, step: int) -> dict[str, list[dict[str, float]]]:
    """Take the finished phases of one step out of the log: for each, seconds and memory of all ranks.

    A collective call.
    """
    everyone = all_gather(events.step_phases.pop(step, {}))
    return {phase: [each[phase] for each in everyone if phase in each] for phase in everyone[0]}
