"""Verification: the checks around every sync of a run, at the level that weights.verify sets.

Each level also does what the levels before it do:

    off        measure the difference of log-probs, and fail on nothing
    log_probs  before each sync, overwrite what it is to fill (poison); after it, and again after the rollout, compare 64-bit
               fingerprints of what the engine holds with the trainer's; compare the log-probs of the engine's responses
    bytes      read every element back after each sync; the first sync must leave what SGLang itself loads from disk
    full       before each sync, sync changed weights, compare the log-probs of engine and trainer on them, and compare the
               engine with a reload from disk

An engine that cannot be asked what it holds (one behind HTTP) has no fingerprints and cannot be read back. Then only
log-probs are compared, and the verdict says so.

harness/ppo.py calls the checks in this order:

    before the first step   load_baseline, log_probs.set_baseline
    before a sync           rehearsal.rehearse, held.poison
    after it                held.check_after_sync; of the last one reloads.write_last_sync and check_last_sync
    after the rollout       held.check_after_rollout
    with the log-probs      held.check_forward, log_probs.check_routing, log_probs.check
"""

from collections.abc import Mapping, Sequence
from pathlib import Path

from harness.cluster.world import all_gather
from harness.weights.verification.checked_run import CheckedRun
from harness.weights.verification.disk_reload import DiskReloads
from harness.weights.verification.held import HeldWeights
from harness.weights.verification.log_prob_checks import LogProbChecks
from harness.weights.verification.rehearsal import Rehearsal
from harness.weights.verification.summary import mismatch_of_precisions, report_section, verdict_phrase
from harness.weights.verification.tolerance import Tolerance


class Verification:
    """All checks of a run's syncs on one rank, by what they look at."""

    def __init__(self, run: CheckedRun, prompts: Sequence[Sequence[int]]) -> None:
        """prompts: token ids, from which the engine generates before and after a reload."""
        self.run = run
        self.held = HeldWeights(run=run)
        """What the engine holds."""
        self.tolerance = Tolerance(run=run)
        self.log_probs = LogProbChecks(run=run, tolerance=self.tolerance, held=self.held)
        """What the engine computes."""
        self.reloads = DiskReloads(run=run, tolerance=self.tolerance, prompts=prompts)
        """What a reload from disk changes."""
        self.rehearsal = Rehearsal(run=run, tolerance=self.tolerance, held=self.held, reloads=self.reloads)
        """All of that with changed weights, before the sync that counts."""
        self.why_no_baseline = ""

    def load_baseline(self) -> bool:
        """Have the engine, whether its memory is released or not, load the model's own checkpoint from disk.

        Return False if no baseline is wanted (level off) or none can be taken; the console says why. A collective call.
        """
        run = self.run
        self.why_no_baseline = why_no_own_load(run)
        if self.why_no_baseline:
            if run.reaches("log_probs"):
                then = "what passes is measured on the first rollout"
                if run.precision.is_quantized or run.precision.computed == "float32":
                    then = f"up to {self.tolerance.allowed.mean:.2g} passes"
                run.events.say(f"no baseline of the log-prob difference, as {self.why_no_baseline}: {then}")
            return False
        if run.config.engine.initial_weights == "dummy":
            run.memory.resume_weights()
            run.memory.resume_kv_cache()
            run.load_own_checkpoint()
        self.held.note_others()
        if run.reaches("bytes"):
            self.held.note_own_load()
        return True

    def verdict(self, rollouts: Sequence[Mapping[str, float]]) -> str:
        """Return the verdict's phrase on the syncs before these rollouts, given their metrics; log the report's
        section.
        """
        run, reloads, allowed = self.run, self.reloads, self.tolerance.allowed
        baseline, not_covered = self.tolerance.baseline, list(self.held.not_covered)
        asked, can_ask = run.config.weights.verify, run.sync.engine.can_ask
        was_exact = reloads.is_exact if reloads.last_sync_is_equal else None
        mismatch = mismatch_of_precisions(run.precision, rollouts, baseline, was_exact)
        lines = report_section(
            level=run.level,
            mismatch=mismatch,
            asked=asked,
            can_ask=can_ask,
            rollouts=rollouts,
            baseline=baseline,
            why_no_baseline=self.why_no_baseline,
            allowed=allowed,
            is_exact=reloads.is_exact,
            not_covered=not_covered,
            seconds=run.events.seconds,
        )
        run.events.fact("verification", lines=lines)
        return verdict_phrase(run.level, asked, can_ask, rollouts, allowed, not_covered, mismatch)


def why_no_own_load(run: CheckedRun) -> str:
    """Return why the engine is not to load the model's own checkpoint for a baseline, or cannot; "" if it is.

    Collective.
    """
    if not run.reaches("log_probs"):
        return "it is not wanted at level off"
    if run.config.model.weights == "random":
        return "random weights are in no checkpoint"
    if run.config.engine.initial_weights == "checkpoint":
        return ""
    engine = run.sync.engine
    if not engine.can_ask:
        return (
            "this engine's weights cannot be overwritten after it, and a tensor that a sync leaves out would not show"
        )
    # Every scheduler reads the path that its engine's head gives; a hub id is no path on any host.
    path = Path(engine.group.broadcast(str(run.source)))
    seen = all_gather((run.world.host, path.exists()))
    blind = sorted({host for host, found in seen if not found})
    return f"the model's folder is not on {', '.join(blind)}" if blind and any(found for _, found in seen) else ""
