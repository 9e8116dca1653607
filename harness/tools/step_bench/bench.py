"""Time whole PPO steps by phase, and compare each phase with the fastest that this machine could be."""

import io
import json
import random
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from statistics import median
from typing import Any

import torch
import torch.distributed as dist
from rich.console import Console
from rich.table import Table
from torch.utils.flop_counter import FlopCounterMode

from harness.build import build
from harness.cluster.world import all_gather
from harness.inputs import read_inputs
from harness.observer import RunContext
from harness.ppo import Ppo
from harness.rollout.verl_engine import VerlEngine
from harness.task.data import Prompt
from harness.tools.step_bench.sglang_bench import offline_throughput
from harness.tools.sync.time_syncs import all_gather_row
from harness.train import gather_phases, start_record
from harness.trainer.batch import Batch

MATMULS = 20
LEARNER = ("old_log_probs", "reference_log_probs", "values", "update_critic", "update_actor")
BACKWARD = 3
"""FLOPs of an update over those of a forward: the backward pass costs twice as much. What is recomputed counts once."""


@dataclass(frozen=True, kw_only=True, slots=True)
class PhaseRow:
    """One phase: the median seconds of the slowest rank, and its limit, the fewest seconds that this machine would
    need.
    """

    phase: str
    seconds: float
    limit: float | None = None


@dataclass(frozen=True, kw_only=True, slots=True)
class StepTable:
    """All phases of a step, and its size."""

    preset: str
    """engine.preset: the limit of generation holds for an engine with the same one."""
    seconds: float
    tokens: float
    """Tokens of a step, prompts and responses, over all ranks."""
    response_tokens: float
    matmul_flops: float
    """Per second, of the slowest rank."""
    sampling_seconds: float
    """How long SGLang's bench takes if it samples and returns log-probs as the rollout does. The limit of generation is
    the bench as it is, greedy."""
    phases: Sequence[PhaseRow]

    def of(self, *names: str) -> tuple[float, float]:
        """Return the seconds of these phases and their limits."""
        rows = [row for row in self.phases if row.phase in names]
        return sum(row.seconds for row in rows), sum(row.limit or 0.0 for row in rows)


@dataclass(frozen=True, kw_only=True, slots=True)
class StepBench:
    """What launch/step_bench.py was asked for; called as a job of harness.run."""

    repeats: int
    prompt_tokens: int
    """Length of the random prompts that replace the task's; 0 keeps the task's prompts."""
    json: str

    def __call__(self, run: RunContext) -> str:
        """Run the steps, then measure the limits on the same parts; return the verdict.

        A collective call of all ranks.
        """
        events, world = run.events, run.world
        record = start_record(run)
        run, inputs = read_inputs(run)
        ppo = build(run, inputs, record)
        if self.prompt_tokens:
            model: Any = ppo.learning.actor.model
            vocabulary = model.config.get_text_config().vocab_size  # a tokenizer may have more
            made = random_prompts(ppo.rollouts.prompts.prompts, self.prompt_tokens, vocabulary)
            ppo.rollouts.prompts = replace(ppo.rollouts.prompts, prompts=made)
        ppo.proof.baseline()
        ppo.proof.rehearse()
        steps, tokens = [], []
        for index in range(1 + self.repeats):
            started = time.perf_counter()
            metrics = ppo.step(index)
            phases = {
                phase: max(each["seconds"] for each in ranks) for phase, ranks in gather_phases(events, index).items()
            }
            phases["step"] = max(all_gather(time.perf_counter() - started))
            longest = sorted(phases.items(), key=lambda each: -each[1])
            events.say(f"step {index}, seconds: {', '.join(f'{phase} {each:.3f}' for phase, each in longest)}")
            if index:  # kernels compile in the first
                steps.append(phases)
                tokens.append((metrics["tokens"], metrics["response_tokens"]))
        events.say("measuring the limits")
        with events.phase("bench", waiting_for="SGLang's bench and the trainer's matrix rate"):
            limits, rate, sampling_seconds = measure_limits(ppo, 1 + self.repeats, tokens[-1][0])
        ppo.shut_down()
        seconds = {phase: median(step.get(phase, 0.0) for step in steps) for phase in steps[0]}
        table = StepTable(
            preset=run.config.engine.preset,
            seconds=seconds.pop("step"),
            tokens=median(each[0] for each in tokens),
            response_tokens=median(each[1] for each in tokens),
            matmul_flops=rate,
            sampling_seconds=sampling_seconds,
            phases=[PhaseRow(phase=phase, seconds=each, limit=limits.get(phase)) for phase, each in seconds.items()],
        )
        if events.console:
            events.console.show(as_text(table))
        if world.rank == 0 and self.json:
            Path(self.json).write_text(json.dumps(asdict(table), indent=1), encoding="utf-8")
        return verdict(table)


def random_prompts(prompts: Sequence[Prompt], size: int, tokens: int) -> list[Prompt]:
    """Return as many prompts of `size` random tokens below `tokens` each, the same on every rank."""
    draw = random.Random(size)
    return [replace(prompt, input_ids=[draw.randrange(tokens) for _ in range(size)]) for prompt in prompts]


def measure_limits(ppo: Ppo, index: int, tokens: float) -> tuple[dict[str, float], float, float]:
    """Return the limits of phases in seconds, and StepTable's matmul_flops and sampling_seconds.

    tokens: how many the measured steps computed. A collective call of all ranks; step `index` is rolled out for it.
    """
    actor = ppo.learning.actor
    with ppo.events.in_step(index):
        rollout, metrics = ppo.rollout(index)
    scale, config = tokens / metrics["tokens"], ppo.config
    rate = matmul_flops(ppo.rollouts.world.device, getattr(torch, config.model.dtype))
    forward = forward_flops(lambda: actor.log_probs(rollout), actor) / sum(all_gather(rate)) * scale
    limits = {"old_log_probs": forward, "update_actor": BACKWARD * forward * config.actor.ppo_epochs}
    if ppo.learning.reference:
        limits["reference_log_probs"] = forward
    if critic := ppo.learning.critic:
        limits["values"] = forward_flops(lambda: critic.values(rollout), critic) / sum(all_gather(rate)) * scale
        limits["update_critic"] = BACKWARD * limits["values"] * config.actor.ppo_epochs
    with ppo.events.in_step(index):
        ppo.sync_weights(index)
    with actor.on_device():
        limits["sync"] = all_gather_row(ppo.sync.weights, ppo.rollouts.world, repeats=5).seconds
    limits["generate"], sampling_seconds = (
        sglangs_bench(ppo, index, rollout, sampling) for sampling in (None, config.rollout.sampling)
    )
    ppo.memory.release_all()
    return limits, min(all_gather(rate)), sampling_seconds


def sglangs_bench(ppo: Ppo, index: int, rollout: Batch, sampling: Mapping[str, float] | None) -> float:
    """Return the seconds of SGLang's own bench with the step's prompts and lengths, on all engines at once; the slowest
    counts.

    sampling: as for offline_throughput.
    """
    repeated = [
        each.input_ids
        for each in ppo.rollouts.engine_prompts(index)
        for _ in range(ppo.config.rollout.responses_per_prompt)
    ]
    engine = ppo.rollouts.engine
    assert isinstance(engine, VerlEngine), "SGLang's bench calls an sglang.Engine"
    lengths = [
        length for part in engine.group.all_gather(rollout.response_mask.sum(-1).tolist()).values() for length in part
    ]
    seconds = []
    for _ in range(2):  # the first compiles kernels that only greedy sampling needs
        engine.flush_cache()
        dist.barrier()
        seconds.append(engine.call_engine(lambda it: offline_throughput(it, repeated, lengths, sampling)))
        dist.barrier()
    return float(max(all_gather(min(seconds))))


def matmul_flops(device: torch.device, dtype: torch.dtype) -> float:
    """Return the FLOPs per second that this rank's device reaches in a large matrix product."""
    size = 8192 if device.type == "cuda" else 1024
    finish = torch.cuda.synchronize if device.type == "cuda" else lambda: None
    a, b = (torch.randn(size, size, device=device, dtype=dtype) for _ in range(2))
    a @ b
    finish()
    dist.barrier()
    started = time.perf_counter()
    for _ in range(MATMULS):
        a @ b
    finish()
    return 2 * size**3 * MATMULS / (time.perf_counter() - started)


def forward_flops(forward: Callable[[], object], model: Any) -> float:
    """Return the FLOPs of a forward over all ranks. A collective call of all ranks."""
    kernels = ("flash_attention", "flash_attention_for_cpu", "efficient_attention", "cudnn_attention")
    operations = [getattr(torch.ops.aten, f"_scaled_dot_product_{kernel}") for kernel in kernels]
    counter = FlopCounterMode(display=False, custom_mapping=dict.fromkeys(operations, causal_attention_flops))
    with counter, model.on_device():
        forward()
    return float(sum(all_gather(counter.get_total_flops())))


def causal_attention_flops(query: Sequence[int], key: Sequence[int], value: Sequence[int], *_: Any, **__: Any) -> int:
    """Return the FLOPs of causal attention of these shapes [B, H, T, D]: half of those without a mask.

    torch's own formula ignores the mask, counts nothing on the CPU, and in 2.11 refuses grouped-query attention.
    """
    batch, heads, tokens, size = query
    return batch * heads * tokens * key[2] * (size + value[3])


def as_text(table: StepTable) -> str:
    """Return the phases as a table, longest first."""
    shown = Table(
        title=(
            f"a step of {table.tokens:.0f} tokens, {table.response_tokens:.0f} of responses: {table.seconds:.3f} s,"
            f" engine preset {table.preset}"
        )
    )
    for heading in ("phase", "seconds", "share", "limit", "limit / seconds"):
        shown.add_column(heading, justify="left" if heading == "phase" else "right")
    for row in sorted(table.phases, key=lambda row: -row.seconds):
        limit = ("", "") if row.limit is None else (f"{row.limit:.4f}", f"{row.limit / row.seconds:.2f}")
        shown.add_row(row.phase, f"{row.seconds:.4f}", f"{row.seconds / table.seconds:.1%}", *limit)
    text = io.StringIO()
    Console(width=100, color_system=None, file=text).print(shown)
    return text.getvalue().rstrip()


def verdict(table: StepTable) -> str:
    """Return the step in one sentence: generation, learner and sync with their limits, and the share of the rest."""
    generate, bench = table.of("generate")
    learner, least = table.of(*LEARNER)
    sync, gather = table.of("sync")
    rest = table.seconds - generate - learner - sync
    return (
        f"PASSED: a step of {table.seconds:.3f} s; generation {table.response_tokens / generate:.0f} tokens/s, {bench / generate:.2f}"
        f" of SGLang's own bench ({table.sampling_seconds / generate:.2f} if it samples and returns log-probs too); learner {least / learner:.2g} of {table.matmul_flops / 1e12:.3g} TFLOP/s a rank; sync {sync:.4f} s"
        f" (all-gather {gather:.4f}); everything else {rest / table.seconds:.1%};"
        f" engine preset {table.preset}"
    )
