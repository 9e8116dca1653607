"""Proof: what shows that the weights of every sync reached the engine, in the order in which a run asks for it.

    before the first step
        baseline        engine and trainer on the model's own checkpoint: what they compute may differ by rounding alone
        rehearse        a sync of changed weights, with which the engine must compute what the trainer does. It shows
                        what the engine computes with beside its weights, such as a copy of old ones, in whatever form
                        and at any learning rate
    each sync
        around_sync     onto poison; fingerprints of all that it fills, derives and must not touch (engine_weights.py).
                        The first one, of unchanged weights, must leave what SGLang itself loaded from disk
        after_rollout   the same fingerprints again, and copies of old weights
        log_probs       the trainer's forward pass used the weights that were sent, and its log-probs of the responses
                        are the engine's (log_prob_checks.py)

weights.verify = false leaves all of that out, and only measures log-probs. An engine that cannot be asked what it holds
(one behind HTTP) has no fingerprints and no poison: then log-probs alone are compared, and the verdict says so.
"""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Protocol

from harness.cluster.world import all_gather
from harness.seeds import seed_of
from harness.trainer.actor import OldLogProbs
from harness.trainer.batch import Batch
from harness.trainer.rank_sums import all_sum
from harness.weights.log_probs import BASELINE_TOKENS, LEAST_TOKENS
from harness.weights.verification.engine_weights import EngineWeights
from harness.weights.verification.log_prob_checks import LogProbChecks, Scored, Tolerance
from harness.weights.verification.perturb import perturb
from harness.weights.verification.refusals import of_all_ranks, refuse
from harness.weights.verification.run_parts import RunParts
from harness.weights.verification.summary import mismatch_of_precisions, report_section, verdict_phrase
from harness.weights.verification.trainer_sums import forward_sums


class Respond(Protocol):
    """Asks the engine for responses outside of a step's own rollout."""

    def __call__(self, index: int, most_tokens: int = 0) -> Batch:
        """Return responses to the prompts of step `index`; with most_tokens, to some of them and about as many tokens.

        A collective call of all ranks.
        """


class Proof:
    """All checks of a run's syncs on one rank. Every method is a collective call of all ranks."""

    def __init__(self, run: RunParts, respond: Respond) -> None:
        self.run = run
        self.respond = respond
        self.weights = EngineWeights(run=run)
        """What the engine holds."""
        self.tolerance = Tolerance(run=run)
        self.computed = LogProbChecks(run=run, tolerance=self.tolerance)
        """What it computes."""
        self.why_no_baseline = ""
        self.rehearsed = False

    # Before the first step

    def baseline(self) -> None:
        """Measure how far engine and trainer are apart on the same weights, the model's own checkpoint.

        Raise NoBaseline if they are further apart than rounding explains.
        """
        run, phase = self.run, self.run.events.phase
        run.before_steps = "on the model's own checkpoint"
        with phase("load_baseline", "the engine to load the model's own checkpoint from disk"):
            if not self.load_own():
                return
        with phase("verify_baseline", "responses on the model's own checkpoint; kernels compile"):
            batches, tokens = list[Batch](), 0
            while tokens < BASELINE_TOKENS:
                batches.append(self.respond(len(batches)))
                # An engine that answers with next to nothing must not keep this going for ever.
                tokens += max(LEAST_TOKENS, int(all_sum(batches[-1].response_mask.sum())))
            stale = self.weights.look_for_copies()
            run.memory.release_all()
        with run.actor.on_device(), phase("verify_log_probs", "the trainer's log-probs, to compare them"):
            self.computed.set_baseline(self._score(*batches), stale)
        self.weights.excuse(stale)

    def load_own(self) -> bool:
        """Have the engine, whether its memory is released or not, load the model's own checkpoint from disk.

        Return False if no baseline is wanted or none can be taken; the console says why.
        """
        run = self.run
        self.why_no_baseline = why_no_own_load(run)
        if self.why_no_baseline:
            if run.verifies:
                then = "what passes is measured on the first rollout"
                if run.precision.is_quantized or run.precision.computed == "float32":
                    then = f"up to {self.tolerance.allowed.mean:.2g} passes"
                run.events.say(f"no baseline of the log-prob difference, as {self.why_no_baseline}: {then}")
            return False
        if run.config.engine.initial_weights == "dummy":
            run.memory.resume_weights()
            run.memory.resume_kv_cache()
            run.load_own_checkpoint()
        self.weights.note_own_load()
        return True

    def forget_own_load(self) -> None:
        """Do not compare the first sync with SGLang's own load: a resumed run brings other weights."""
        self.weights.own_load = None

    def rehearse(self) -> None:
        """Change every weight, sync, compare the log-probs of engine and trainer, and change every weight back.

        Memory moves as in a step: the KV cache comes back when the actor has left, and the actor when the engine has
        released its memory. Raise WeightsDidNotArrive if the sync did not bring the weights, or if the engine computes
        with something else.
        """
        run, phase, seed = self.run, self.run.events.phase, seed_of(self.run.config.run.seed)
        if not run.verifies:
            return
        run.before_steps = "in the rehearsal"
        tensors = run.sync.sent.held_tensors()
        self.weights.note_frozen()
        with phase("resume_weights", "the engine to take its weights' memory back"):
            run.memory.resume_weights()
        with run.actor.on_device():
            with phase("verify_perturb", "every weight of the trainer to be changed"):
                perturb(tensors, seed)
            push = phase("verify_push", "all ranks to sync changed weights")
            with self.weights.around_sync(changed_weights=True), push:
                run.sync.update_engine()
        with phase("verify_generate", "the engine's responses with changed weights"):
            run.memory.resume_kv_cache()
            batch = self.respond(0, most_tokens=BASELINE_TOKENS)
        stale = self.weights.look_for_copies()
        with phase("release", "the engine to free its memory for the trainer"):
            run.memory.release_all()
        with run.actor.on_device():
            with phase("verify_changed_log_probs", "the trainer's log-probs with changed weights"):
                self.computed.check_rehearsed(self._score(batch), stale)
            with phase("verify_perturb", "every weight of the trainer to be changed back"):
                perturb(tensors, seed)
        self.weights.excuse(stale)
        self.rehearsed = True

    def _score(self, *batches: Batch) -> Scored:
        """Return these batches with the actor's log-probs of them. It must be on the device."""
        trained = [self.run.actor.old_log_probs(each) for each in batches]
        for batch, old in zip(batches, trained, strict=True):
            self.computed.check_routing(batch, old)
        return Scored(batches=batches, trained=[old.log_probs for old in trained], actor=self.run.actor)

    # Each sync

    @contextmanager
    def around_sync(self) -> Iterator[None]:
        """Raise WeightsDidNotArrive, naming tensors, if the sync in this block leaves other weights than it should."""
        with self.weights.around_sync():
            yield

    def after_rollout(self) -> None:
        """Raise WeightsDidNotArrive if the engine has generated with copies of old weights, or no longer holds what was
        sent.
        """
        self.weights.after_rollout()

    def log_probs(self, batch: Batch) -> OldLogProbs:
        """Return the actor's log-probs of the responses.

        The actor must be on the device. Raise WeightsDidNotArrive if the engine's are further from them than rounding,
        or if the forward pass used other weights than were sent; WrongRoutingRecord if they contradict the engine's
        record of experts.
        """
        run = self.run
        with run.events.phase("old_log_probs", "the actor's log-probs of the responses"), self._checked_forward():
            old = run.actor.old_log_probs(batch)
        with run.events.phase("verify_log_probs", "the trainer's log-probs, to compare them"):
            self.computed.check_routing(batch, old)
            self.computed.check(Scored(batches=[batch], trained=[old.log_probs], actor=run.actor))
        return old

    @contextmanager
    def _checked_forward(self) -> Iterator[None]:
        """Raise WeightsDidNotArrive if the actor's forward pass in this block uses other weights than it held at the
        sync.
        """
        run, seen = self.run, self.weights.sync
        if not (run.verifies and seen.sums):
            yield
            return
        with forward_sums(run.actor.model) as computed:
            yield
        refuse(
            of_all_ranks(name for name, found in computed.items() if found != seen.sums.held[name]),
            f"{run.when}: the trainer's forward pass computes with other weights than its parameters hold",
        )
        seen.forward = len(computed)

    # At the end

    def metrics(self) -> dict[str, float]:
        """Return how the last sync was checked, for metrics.jsonl."""
        return self.weights.sync.metrics() if self.run.verifies else {}

    def verdict(self, rollouts: Sequence[Mapping[str, float]]) -> str:
        """Return the verdict's phrase on the syncs before these rollouts, given their metrics; log the report's
        section.
        """
        run, allowed, baseline = self.run, self.tolerance.allowed, self.tolerance.baseline
        verify, can_ask, not_covered = run.verifies, run.sync.engine.can_ask, list(self.weights.not_covered)
        mismatch = mismatch_of_precisions(run.precision, rollouts, baseline)
        lines = report_section(
            verify=verify,
            mismatch=mismatch,
            can_ask=can_ask,
            rollouts=rollouts,
            baseline=baseline,
            why_no_baseline=self.why_no_baseline,
            allowed=allowed,
            rehearsed=self.rehearsed,
            not_covered=not_covered,
            seconds=run.events.seconds,
        )
        run.events.fact("verification", lines=lines)
        once = {
            "the first left what SGLang itself loads": self.weights.equals_own_load,
            "one of changed weights before them": self.rehearsed,
        }
        shown = [phrase for phrase, is_so in once.items() if is_so]
        return verdict_phrase(verify, can_ask, rollouts, allowed, shown, not_covered, mismatch)


def why_no_own_load(run: RunParts) -> str:
    """Return why the engine is not to load the model's own checkpoint for a baseline, or cannot; "" if it is.

    Collective.
    """
    if not run.verifies:
        return "nothing is verified"
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
