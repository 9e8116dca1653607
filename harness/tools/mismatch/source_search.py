"""What launch/mismatch.py does once its ranks have met.

First it proves that the engine holds the trainer's weights and scores the same tokens. Only then does a difference of
log-probs say how the two compute. After that it changes one setting at a time, on these weights and tokens, and looks
for the first module whose output differs.
"""

import json
from collections.abc import Sequence
from dataclasses import asdict, replace

import torch.distributed as dist

from harness.build import build
from harness.cluster.mesh import build_meshes
from harness.cluster.world import all_gather
from harness.config.schema import Config
from harness.inputs import Inputs, read_inputs
from harness.observer import RunContext
from harness.ppo import Ppo
from harness.runtime import redact
from harness.runtime.errors import Found
from harness.runtime.fork_server import ForkServer
from harness.tools.mismatch.answer import Answer
from harness.tools.mismatch.baseline import Baseline, Measured
from harness.tools.mismatch.changed_engine import cloned
from harness.tools.mismatch.changes import Changes
from harness.tools.mismatch.engine_scores import WAYS, calling, engine_scores, sequences_of
from harness.tools.mismatch.operators import first_difference
from harness.tools.mismatch.serving import Serving, serving_of
from harness.tools.mismatch.sources import engine_changes, trainer_changes
from harness.tools.mismatch.standalone import Row, standalone_program
from harness.train import start_record
from harness.weights.verification.refusals import WeightsDidNotArrive

ANSWER, PROGRAM = "mismatch.json", "mismatch_repro.py"


def find_mismatch(run: RunContext) -> str:
    """Return the sentence if engine and trainer agree; raise Found if they do not. A collective call of all ranks."""
    record = start_record(run)
    run, inputs = read_inputs(run)
    run = replace(run, config=without_learning(run.config))
    servers = ForkServer.handed_over()
    # On a GPU none can fork: the servers themselves become the first engine's processes.
    ForkServer.hand_over(cloned(servers) if run.world.device_type == "cpu" else servers)
    parts = build(run, inputs, record)
    try:
        run.events.say(f"weights: the engine's fingerprints equal the trainer's{prove_weights(parts)}")
        measured, rows = measure_tokens(run, parts)
    except Found:  # on every rank; an engine that still runs would have its end told below the sentence
        parts.shut_down()
        raise
    meshes = build_meshes(run.dims, run.world.device.type)
    baseline = Baseline(run=run, inputs=inputs, parts=parts, meshes=meshes, measured=measured)
    serving = serving_of(run, inputs, tokens=sum(len(ids) for ids, _ in rows))
    answer = search_sources(baseline, parts, serving, servers)
    for server in servers:
        server.close()
    write(run, inputs, answer, rows, serving)
    dist.barrier()  # torchrun ends rank 0 as soon as another rank exits
    if answer.agrees:
        return f"PASSED: {answer.sentence()}"
    raise Found(answer.sentence())


def prove_weights(parts: Ppo) -> str:
    """Sync the weights as the run does. Return the end of a sentence on what they equal besides the trainer's.

    Where SGLang can load the model's own checkpoint, what it holds then is compared with what the sync leaves:
    fingerprints are of what is sent, and would not show a sender that rounds it. Raise Found if the weights differ.
    """
    proof, engine = parts.proof, parts.rollouts.engine
    if has_loaded := proof.load_own():
        parts.memory.release_all()
    try:
        with parts.events.in_step(0):
            parts.sync_weights(0)
    except WeightsDidNotArrive as error:
        raise Found(f"SOURCE: weights: {error}") from error
    if has_loaded and engine.can_ask:
        return f", and what SGLang itself loads from {proof.run.source}"
    why = proof.why_no_baseline or "this engine cannot be asked what it holds"
    return f"; they were not compared with SGLang's own load of the checkpoint, as {why}"


def without_learning(config: Config) -> Config:
    """Return the config without critic and reference, and with weights that are always proven."""
    algorithm = replace(config.algorithm, advantage="grpo", kl_placement="none")
    return replace(config, algorithm=algorithm, weights=replace(config.weights, verify=True))


def measure_tokens(run: RunContext, parts: Ppo) -> tuple[Measured, list[Row]]:
    """Have the engine generate, and score the same tokens in every way.

    Return the scores, and the sequences of all ranks.

    Raise Found if the engine scores other tokens than it was given.
    """
    engine = parts.rollouts.engine
    with run.events.phase("generate", "the engine's responses; kernels may compile"):
        batch = parts.rollouts.respond(0)
    scored = {}
    with run.events.phase("engine_scores", waiting_for="the engine to score the same tokens by prefill"):
        for how in WAYS:
            found = engine_scores(engine.group, calling(engine), batch, how)
            if wrong := [each for some in all_gather(found.wrong_tokens) for each in some]:
                raise Found(f"SOURCE: tokens: engine and trainer do not score the same ones: {wrong[0]}")
            scored[how] = found.log_probs
        again = engine_scores(engine.group, calling(engine), batch).log_probs
    run.events.say("tokens: the engine scored those that it was given")
    rows = [row for some in all_gather(sequences_of(batch)) for row in some]
    decode = batch.require("rollout_log_probs")
    return Measured(batch=batch, decode=decode, prefill=scored, again=again), rows


def search_sources(baseline: Baseline, parts: Ppo, serving: Serving, started: Sequence[ForkServer]) -> Answer:
    """Change one setting at a time, and compare what the modules return; shut the engine down.

    started: what the engines' processes are forked from on a CPU.
    """
    engine = parts.rollouts.engine
    run, config, dtype = baseline.run, baseline.run.config, baseline.run.config.model.dtype
    with run.events.phase("trainer_scores", waiting_for="the trainer's log-probs of the same tokens"):
        sources = baseline.without_restart()
    with run.events.phase("record", waiting_for="what the modules of engine and trainer compute for one sequence"):
        fields = baseline.different_fields(engine)
        compared, flips = baseline.compare_outputs(calling(engine))
        where = ""
    with run.events.phase("routers", waiting_for="the engine to score the same tokens with routers in float32"):
        sources += baseline.exact_router_of_engine(engine)
    baseline.save_weights()
    baseline.shut_down()
    changes = Changes(baseline=baseline, servers=started)
    sources += [
        changes.in_trainer(each) for each in trainer_changes(config, baseline.inputs.attention, baseline.has_routers)
    ]
    for change in engine_changes(config, serving):
        run.events.fact("mismatch_sources", sources=[asdict(each) for each in sources])
        found, more = changes.in_engine(change, compare=not first_difference(compared, dtype))
        sources += found
        if first_difference(more, dtype):
            compared, where = more, f"an engine with {change.name} {change.how}"
    sources += changes.in_both()
    return Answer(
        dtype=dtype,
        difference=baseline.reported,
        prefill=baseline.prefill,
        sources=sources,
        first=first_difference(compared, dtype),
        compared=compared,
        where=where,
        fields=fields,
        flips=flips,
        rounding=baseline.rounding,
        varies=baseline.varies,
    )


def write(run: RunContext, inputs: Inputs, answer: Answer, rows: Sequence[Row], serving: Serving) -> None:
    """Write the answer and the program that shows it into the run directory, and show the table. Rank 0 does."""
    if run.world.rank == 0:
        (run.folder / ANSWER).write_text(json.dumps(redact.values(answer.as_json()), indent=1, allow_nan=False))
        (run.folder / PROGRAM).write_text(standalone_program(run, inputs, answer, rows, serving))
        if run.events.console:
            run.events.console.show(answer.table())
    if answer.flips is not None:
        run.events.say(
            f"routing: {answer.flips:.1%} of the choices of experts differ in the sequence that was looked at"
        )
    run.events.say(f"all numbers: {run.folder / ANSWER}; to attach to an issue: {run.folder / PROGRAM}")
