"""Compare what an engine holds and generates with what it holds and generates after a reload from disk."""

import shutil
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch.distributed as dist

from harness.cluster.world import all_gather
from harness.rollout.engine import RolloutEngine
from harness.weights.loader import EngineLoader
from harness.weights.verification.snapshot import changed_tensors, snapshot_weights

GREEDY = {"temperature": 0.0, "max_new_tokens": 8, "ignore_eos": True}
Output = list[tuple[float, int]]
"""(log-prob, token) of one greedy response."""


@dataclass(frozen=True, kw_only=True, slots=True)
class ReloadComparison:
    """What a reload of the same weights changed; the same on every rank."""

    changed: list[str]
    """The engine's tensors that hold something else."""
    same_outputs: bool
    """Greedy responses were the same bit for bit."""
    apart: float
    """Mean |difference| of their log-probs, in nats."""


def compare_with_reload(loader: EngineLoader, prompts: Sequence[Sequence[int]], folder: Path) -> ReloadComparison:
    """Have the engine load the folder, which is then deleted, and compare. A collective call of all ranks."""
    engine = loader.engine
    first, before = greedy_outputs(engine, prompts), snapshot_weights(engine)
    engine.update_weights_from_disk(str(folder))
    dist.barrier()
    if dist.get_rank() == 0:
        shutil.rmtree(folder, ignore_errors=True)
    changed, second = changed_tensors(loader, before), greedy_outputs(engine, prompts)
    return ReloadComparison(
        changed=changed,
        same_outputs=all(all_gather(first == second)),
        apart=max(all_gather(output_difference(first, second))),
    )


def greedy_outputs(engine: RolloutEngine, prompts: Sequence[Sequence[int]]) -> list[Output]:
    """Return greedy responses. One prompt a call, so that neither timing nor a neighbour in the batch can change them.

    A collective call of the engine's ranks; the same on each.
    """
    engine.flush_cache()  # a prompt whose prefix is cached is computed in another order
    answers = [
        engine.generate(input_ids=[list(prompt)], sampling_params=GREEDY, return_logprob=True)[0] for prompt in prompts
    ]
    return [
        [(float(entry[0]), int(entry[1])) for entry in answer["meta_info"]["output_token_logprobs"]]
        for answer in answers
    ]


def output_difference(before: Sequence[Output], after: Sequence[Output]) -> float:
    """Return the mean |difference| of log-probs, in nats, up to and with the first token that differs.

    The largest log-prob at a position is a continuous function of the weights, whichever of two tokens has it.
    """
    gaps = []
    for old, new in zip(before, after, strict=True):
        for (old_log_prob, old_token), (new_log_prob, new_token) in zip(old, new, strict=True):
            gaps.append(abs(old_log_prob - new_log_prob))
            if old_token != new_token:
                break
    return sum(gaps) / len(gaps)
