"""weights.verify = "full": before each sync, changed weights onto a sentinel fill, compared with a reload from disk.

So a tensor that no sync brings shows even where the update left it as it was, and so does a reload that would differ.
"""

import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import torch.distributed as dist

from harness.cluster.world import all_gather
from harness.rollout.verl_engine import VerlEngine
from harness.tools.verification.perturb import perturb
from harness.tools.verification.snapshot import changed_tensors, snapshot_weights
from harness.weights.verify import Verification, WeightsDidNotArrive, refuse

if TYPE_CHECKING:
    from harness.tools.verification.levels import ReadBackVerification

GREEDY = {"temperature": 0.0, "max_new_tokens": 8, "ignore_eos": True}
Output = list[tuple[float, int]]
"""(log-prob, token) of one greedy response."""


def rehearse(checks: "ReadBackVerification", folder: Path, index: int) -> None:
    """Sync changed weights onto what is in the engine, read them back and compare with a reload from disk. Collective.

    folder: where the changed weights are saved; all hosts see it. The engine's weights are resumed, and of no use until the
    next sync; in between the KV cache is resumed too. Raise WeightsDidNotArrive.
    """
    sync, seed = checks.sync, checks.config.run.seed * 1_000_003 + index
    with checks.timed("perturb", index):
        perturb(sync.live, seed)
    try:
        with checks.timed("push", index, "all ranks to sync changed weights onto sentinel"):
            sync.push()
        checks.check_bytes(index, "a sync of changed weights onto sentinel")
        with checks.timed("save", index, "rank 0 to write the changed weights to disk"):
            sync.save(folder, checks.source, checks.world.rank)
            dist.barrier()
    finally:
        with checks.timed("perturb", index):
            perturb(sync.live, seed)
    with checks.timed("reload", index, "the engine to reload the changed weights from disk, for comparison"):
        _check_reload(checks, folder, index)


def _check_reload(checks: "ReadBackVerification", folder: Path, index: int) -> None:
    engine = checks.sync.engine
    checks.memory.resume_kv_cache()
    first, before = greedy_outputs(engine, checks.prompts), snapshot_weights(engine)
    engine.update_weights_from_disk(str(folder))
    dist.barrier()
    if checks.world.rank == 0:
        shutil.rmtree(folder, ignore_errors=True)
    wrong, second = changed_tensors(checks.sync, before), greedy_outputs(engine, checks.prompts)
    checks.memory.release_all()
    checks.memory.resume_weights()
    what = f"step {index}: a reload of the same weights from disk changed"
    refuse(wrong, f"{what} what the engine holds")
    same = all(all_gather(first == second))
    apart, bound = max(all_gather(output_difference(first, second))), checks.allowed.mean
    if not (same if is_exact(checks) else apart <= bound):
        allowed = "not a bit" if is_exact(checks) else f"{bound:.2g}"
        raise WeightsDidNotArrive(f"{what} greedy log-probs by {apart:.2e} in the mean ({allowed} is allowed)")


def is_exact(checks: Verification) -> bool:
    """Return whether the same weights give the same outputs bit for bit."""
    on_cpu = checks.sync.engine.device_type == "cpu"
    return on_cpu or bool(checks.config.engine.args.get("enable_deterministic_inference"))


def greedy_outputs(engine: VerlEngine, prompts: Sequence[Sequence[int]]) -> list[Output]:
    """Return the greedy responses, one prompt a call: neither timing nor a neighbour in the batch can change them.

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
    """Return the mean |difference| of the log-probs up to, and with, the first token that differs; in nats.

    The largest log-prob at a position is a continuous function of the weights, whichever of two tokens has it.
    """
    gaps = []
    for old, new in zip(before, after, strict=True):
        for (old_log_prob, old_token), (new_log_prob, new_token) in zip(old, new, strict=True):
            gaps.append(abs(old_log_prob - new_log_prob))
            if old_token != new_token:
                break
    return sum(gaps) / len(gaps)
