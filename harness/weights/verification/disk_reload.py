"""What a reload from disk shows: of the weights that the engine holds, it must change nothing that it holds or
generates.

At level full each rehearsed sync is compared with one (rehearsal.py), and the last sync of a run whose engine is
quantized from level bytes on: there log-probs do not show whether it arrived.
"""

import shutil
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch.distributed as dist

from harness.cluster.world import all_gather
from harness.rollout.engine import RolloutEngine
from harness.weights.loader import EngineLoader
from harness.weights.log_probs import FLOOR
from harness.weights.verification.checked_run import CheckedRun
from harness.weights.verification.refusals import WeightsDidNotArrive, refuse
from harness.weights.verification.snapshot import changed_tensors, snapshot_weights
from harness.weights.verification.tolerance import Tolerance

GREEDY = {"temperature": 0.0, "max_new_tokens": 8, "ignore_eos": True}
Output = list[tuple[float, int]]
"""(log-prob, token) of one greedy response."""


@dataclass(kw_only=True, slots=True)
class DiskReloads:
    """The comparisons of a run with reloads from disk. Every method is a collective call of all ranks."""

    run: CheckedRun
    tolerance: Tolerance
    prompts: Sequence[Sequence[int]]
    """Token ids, from which the engine generates greedily before and after."""
    last_sync_is_equal: bool = False
    """A reload of what the last sync sent changed nothing."""

    def write_last_sync(self) -> Path | None:
        """After a sync: if it is the last one, and a reload is to be compared with it, write what it sent.

        Return the folder.
        """
        run = self.run
        is_last = run.events.step == run.config.run.steps
        if is_last and run.reaches("bytes") and run.precision.is_quantized:
            return self.write("the quantized weights")
        return None

    def check_last_sync(self, folder: Path | None) -> None:
        """Then, once the engine can generate: raise WeightsDidNotArrive if a reload of that changes what it holds or
        computes.
        """
        if folder:
            self.check(folder, "the quantized weights")
            self.last_sync_is_equal = True

    def write(self, what: str) -> Path:
        """Write what the last sync sent, as the engine loads it, into a new folder."""
        with self.run.events.phase("verify_save", f"rank 0 to write {what} to disk"):
            folder = self.make_folder()
            self.run.sync.save(folder, self.run.source)
            dist.barrier()
        return folder

    def make_folder(self) -> Path:
        """Make the folder where weights are written: a new one, as other runs may use the same weights.folder."""
        run, made = self.run, ""
        if run.world.rank == 0:
            made = tempfile.mkdtemp(prefix=f"{run.events.path.parents[1].name}-reload-", dir=run.sync.folder)
        return Path(all_gather(made)[0])

    def check(self, folder: Path, what: str) -> None:
        """Have the engine reload the folder, which is then deleted.

        Raise WeightsDidNotArrive if that changes anything.
        """
        with self.run.events.phase("verify_reload", f"the engine to reload {what} from disk, for comparison"):
            self.judge(compare_with_reload(self.run.sync.loader, self.prompts, folder))

    def judge(self, found: "ReloadComparison") -> None:
        """Raise WeightsDidNotArrive if a reload of the same weights changed anything."""
        what = f"{self.run.when}: a reload of the same weights from disk changed"
        refuse(found.changed, f"{what} what the engine holds")
        bound = 0.0 if self.is_exact else self._bound
        if not (found.same_outputs if self.is_exact else found.apart <= bound):
            raise WeightsDidNotArrive(f"{what} greedy log-probs by {found.apart:.2e} on average (allowed {bound:.2g})")

    @property
    def _bound(self) -> float:
        """How far the outputs of an engine may be apart on the same weights, if it is not deterministic.

        How far a quantized one is from the trainer says nothing about the engine and itself.
        """
        tolerance = self.tolerance
        return FLOOR[self.run.precision.computed] if tolerance.rounding is None else tolerance.allowed.mean

    @property
    def is_exact(self) -> bool:
        """Whether the engine answers the same, bit for bit, as long as its weights stay the same.

        On a CPU it does, but not with DP attention: there single decode steps vary from one answer to the next by the
        rounding of the dtype, without a reload between (3e-09 in the mean in float32, up to 2e-04 in bfloat16). Prefill
        does not vary. Why is not known; it is not which rank serves the prompt.
        """
        arguments = self.run.config.engine.args
        is_split = arguments.get("enable_dp_attention") or (arguments.get("attn_dp_size") or 1) > 1
        on_cpu = self.run.world.device_type == "cpu" and not is_split
        return on_cpu or bool(arguments.get("enable_deterministic_inference"))


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
