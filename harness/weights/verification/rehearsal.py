"""Rehearsal: at level full, each sync is made once before it counts, with changed weights.

So a tensor that no sync brings shows even if the update left it as it was, and so does a reload that differs. What the
engine has copied of older weights, in whatever form, and computes with shows in the log-probs, at any learning rate:
the changed weights are far from them. That holds for what the trainer never moves too, but not for the draft model,
which decides no log-prob.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace

from harness.seeds import seed_of
from harness.trainer.batch import Batch
from harness.weights.verification.checked_run import CheckedRun
from harness.weights.verification.disk_reload import DiskReloads
from harness.weights.verification.held import HeldWeights
from harness.weights.verification.perturb import perturb
from harness.weights.verification.refusals import WeightsDidNotArrive
from harness.weights.verification.second_look import Scored
from harness.weights.verification.stale_copies import STALE_COPY
from harness.weights.verification.tolerance import Tolerance

Generate = Callable[[], Batch]
"""Return the engine's responses to the step's prompts, with its log-probs of them."""
Score = Callable[[Batch], Scored]
"""Return a batch with the trainer's log-probs of it."""


@dataclass(kw_only=True, slots=True)
class Rehearsal:
    """Syncs of changed weights. Every method is a collective call of all ranks."""

    run: CheckedRun
    tolerance: Tolerance
    held: HeldWeights
    reloads: DiskReloads

    def rehearse(self, generate: Generate, score: Score) -> None:
        """full: before a sync, change every tensor, check a sync of that as a step's own, and change every tensor
        back.
        """
        run = self.run
        if not run.reaches("full"):
            return
        self.held.poison()
        tensors, seed = run.sync.sent.held_tensors(), seed_of(run.config.run.seed, run.events.step or 0)
        with run.events.phase("verify_perturb", "every weight of the trainer to be changed"):
            perturb(tensors, seed)
        try:
            self._sync_changed(generate, score)
        finally:
            with run.events.phase("verify_perturb", "every weight of the trainer to be changed back"):
                perturb(tensors, seed)
        run.memory.resume_weights()

    def _sync_changed(self, generate: Generate, score: Score) -> None:
        """Sync onto the poison; read back, compare with a reload from disk, and compare log-probs."""
        run, phase = self.run, self.run.events.phase
        with phase("verify_push", "all ranks to sync changed weights"):
            run.sync.update_engine()
        self.held.check_bytes("a sync of changed weights")
        folder = self.reloads.write("the changed weights")
        with phase("verify_generate", "the engine's responses with changed weights"):
            run.memory.resume_kv_cache()
            batch = generate()
        self.held.find_copies()
        self.reloads.check(folder, "the changed weights")
        run.memory.release_all()  # the trainer computes without the engine's memory beside it, as in a step
        with phase("verify_changed_log_probs", "the trainer's log-probs with changed weights"):
            self.check_log_probs(score(batch))

    def check_log_probs(self, scored: Scored) -> None:
        """Raise WeightsDidNotArrive if the engine's log-probs on changed weights, which it holds, are not the
        trainer's.
        """
        run, difference = self.run, scored.difference()
        # The changed weights may round otherwise. That is measured, and forgotten: the run's own tolerance stays as it
        # is.
        violations = replace(self.tolerance).violations(difference, scored)
        run.events.fact("changed_log_prob_difference", step=run.events.step, **difference.metrics())
        if violations:
            raise WeightsDidNotArrive(
                f"{run.when}: on changed weights, which the engine holds as they were sent, its log-probs are off by"
                f" {', '.join(violations)}; largest {difference.largest:.2e}: {self._why_they_differ}"
            )

    @property
    def _why_they_differ(self) -> str:
        if self.tolerance.baseline is None:  # they may never have been the same
            return "engine and trainer compute differently, or the engine computes with a copy of old weights"
        return (
            f"it computed the same as the trainer on the model's own checkpoint, so it still computes with something that it made"
            f" of old weights; a copy that no update reaches is suspected ({STALE_COPY})"
        )
