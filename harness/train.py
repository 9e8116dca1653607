"""The main job of a run: loop over its steps, save checkpoints, return the verdict. harness/build.py builds the parts."""

import os
import time
from collections.abc import Sequence
from pathlib import Path

from transformers.utils import cached_file
from transformers.utils.logging import disable_progress_bar

from harness.build import build
from harness.checkpoint import Checkpoints, StopSignal, lock_folder
from harness.cluster.world import all_gather
from harness.config.checkpoint_folder import checkpoint_to_resume
from harness.config.schema import Config
from harness.inputs import Inputs, read_inputs
from harness.metrics import Metrics
from harness.observer import RunContext
from harness.ppo import Ppo
from harness.runtime.errors import Stopped
from harness.runtime.events import EventLog
from harness.runtime.run_record import RunRecord, step_line
from harness.weights.transports import check_shared


def train(run: RunContext) -> str:
    """Build the parts, run the steps and the check after the last update; return the verdict. A collective call of all ranks.

    Raise Stopped after SIGTERM, when a checkpoint is saved. After a failure the engine's processes are still alive, and
    run.py ends them.
    """
    record = start_record(run)
    stop = StopSignal() if run.config.checkpoint.every else None
    lock = lock_folder(run.config)
    run, inputs = read_inputs(run)
    ppo = build(run, inputs, record)
    steps, every = run.config.run.steps, run.config.checkpoint.every
    if ppo.verification:
        with record.timed("baseline"):
            ppo.take_baseline()
    checkpoints, first = open_checkpoints(run, ppo, inputs)
    for index in range(first, steps):
        if checkpoints and stop and stop.anywhere():
            if index > first and checkpoints.newest != checkpoints.folder_of(index):
                checkpoints.save(index)
            shut_down(ppo)
            raise Stopped(f"SIGTERM came before step {index} of {steps}; {checkpoints.how_to_resume()}.")
        started = time.monotonic()
        metrics = ppo.step(index)
        record_step(run, ppo, record, index, metrics | {"seconds": time.monotonic() - started})
        if checkpoints and every and ((index + 1) % every == 0 or index + 1 == steps):
            checkpoints.save(index + 1)
    if ppo.sync:
        final = ppo.final_check(steps)
        record_validation(run, ppo, record, steps)
        run.observer.measured(record.finish({"step": steps} | final, gather_phases(run.events, steps)))
    elif ppo.engine:
        ppo.validate(steps)
        record_validation(run, ppo, record, steps)
    # Not in a `finally`: it is a collective call, and a rank that failed alone would wait in it for the others.
    shut_down(ppo)
    if lock is not None:
        os.close(lock)
    return f"PASSED: {verdict(ppo, record)}"


def start_record(run: RunContext) -> RunRecord:
    """Return the record of a run that begins, and say where it writes."""
    disable_progress_bar()  # transformers' costs a second on every rank
    record = RunRecord(file=None if run.world.rank else run.folder / "metrics.jsonl", launched=run.launched)
    run.events.say(f"run directory: {run.folder}")
    return record


def record_step(run: RunContext, ppo: Ppo, record: RunRecord, index: int, metrics: Metrics) -> None:
    """Write, announce and print the metrics of a step; after the first one also say where the start took its time."""
    events = run.events
    record_validation(run, ppo, record, index)
    if not record.steps and ppo.first_token_at:
        if "sync" in events.seconds:
            record.startup["first_sync"] = events.seconds["sync"][0]
        record.startup["first_generate"] = events.seconds["generate"][0]  # kernels compile in it
        record.startup["first_token"] = ppo.first_token_at - record.launched
        events.say(record.startup_line(models_beside_engine=run.world.device.type == "cpu"))
    run.observer.measured(record.add(metrics, gather_phases(events, index), phase_tokens(run.config, metrics)))
    events.say(step_line(metrics, [line for each in ppo.movements.values() if (line := each.line(index))]))


def record_validation(run: RunContext, ppo: Ppo, record: RunRecord, updates: int) -> None:
    """Write and announce what the validation after so many updates found, if there was one."""
    if updates in ppo.validations:
        run.observer.measured(record.add_validation(updates, ppo.validations[updates]))


def shut_down(ppo: Ppo) -> None:
    """End the engine; return on every rank when its processes are gone. A collective call of all ranks."""
    if ppo.engine:
        with ppo.events.phase("shutdown", waiting_for="the engine's processes to end"):
            if ppo.sync:
                ppo.sync.close()
            ppo.engine.shutdown()


def verdict(ppo: Ppo, record: RunRecord) -> str:
    """Return what a run that passed has shown, and the preset that its engine ran with."""
    steps, folder = len(record.steps), ppo.config.rollout.load
    moved = [each.verdict() for each in ppo.movements.values() if each.role == "actor" or each.still]
    if folder:
        return "; ".join([f"{steps} steps of the trainer without an engine, on rollouts of {folder}", *moved])
    preset = f"engine preset {ppo.config.engine.preset}"
    if ppo.verification:
        rollouts = [*record.steps, record.final]
        changed = sum(count > 0 for count in ppo.movements["actor"].moved.values())
        syncs = [ppo.verification.verdict(rollouts), *moved, f"{changed} of the syncs carried changed weights"]
        return "; ".join([f"{steps} PPO steps", *syncs, *unused_draft(rollouts), preset])
    return f"{steps} steps of the engine without a trainer; {preset}"


def unused_draft(rollouts: Sequence[Metrics]) -> list[str]:
    """Return a phrase for the verdict if the engine has a draft model, and no answer has a token that it drafted."""
    lengths = [each["speculation/accept_length"] for each in rollouts if "speculation/accept_length" in each]
    return (
        ["NO ANSWER USED THE DRAFT MODEL: no token that it drafted was accepted"]
        if lengths and max(lengths) == 1
        else []
    )


def open_checkpoints(run: RunContext, ppo: Ppo, inputs: Inputs) -> tuple[Checkpoints | None, int]:
    """Return the checkpoints of the run, None for half a run, and the run's first step: 0, or where it resumes.

    A collective call of all ranks. Raise ConfigError if the folders, or what is to be resumed, cannot be used.
    """
    if not (ppo.actor and ppo.sync and ppo.verification):
        return None, 0
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
        actor=ppo.actor,
        critic=ppo.critic,
        sync=ppo.sync,
        verification=ppo.verification,
    )
    found = all_gather(checkpoint_to_resume(run.config))[0]
    if found is None:
        if wanted.resume:
            run.events.say(f"no checkpoint in {folder} yet: the run starts at its first step")
        return checkpoints, 0
    return checkpoints, checkpoints.resume(found)


def phase_tokens(config: Config, metrics: Metrics) -> Metrics:
    """Return how many tokens phases of a step compute over all ranks: responses in generate, whole sequences elsewhere."""
    tokens = metrics["tokens"]
    updates = {f"update_{model}": tokens * getattr(config, model).ppo_epochs for model in ("critic", "actor")}
    return {"generate": metrics["response_tokens"], **updates, "step": tokens}


def gather_phases(events: EventLog, step: int) -> dict[str, list[dict[str, float]]]:
    """Take the finished phases of one step out of the log: for each, seconds and memory of all ranks. A collective call."""
    everyone = all_gather(events.step_phases.pop(step, {}))
    return {phase: [each[phase] for each in everyone if phase in each] for phase in everyone[0]}
