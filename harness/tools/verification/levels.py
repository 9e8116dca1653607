"""What weights.verify checks beyond log-probs: fingerprints with them, bytes, full; and which elements of a tensor differ."""

import itertools
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager

from harness.ppo import Ppo
from harness.tools.verification.fingerprint import FingerprintComparison, compare_fingerprints
from harness.tools.verification.readback import weight_differences
from harness.tools.verification.rehearsal import rehearse
from harness.tools.verification.report_section import report_section
from harness.tools.verification.snapshot import changed_tensors, snapshot_weights
from harness.tools.verification.verification_summary import verdict_phrase
from harness.trainer.batch import Batch, from_sequences
from harness.weights.presync_checks import first_of
from harness.weights.verify import Verification, refuse

MOVEMENT_MARGIN = 2.0
"""The next responses move by 0.7 to 1.5 times what `movement` says (qwen2, deepseek_v3; float32, bfloat16)."""


class ReadBackVerification(Verification):
    """log_probs: fingerprints of all that the engine holds too. bytes: all of it read back after every sync. full: also a
    rehearsal before every sync.
    """

    compared: FingerprintComparison | None = None

    def load_baseline(self) -> bool:
        loaded = super().load_baseline()
        if loaded and self.reaches("bytes"):
            self.own_checkpoint = snapshot_weights(self.sync.engine)
        return loaded

    def differences(self) -> Sequence[str]:
        return weight_differences(self.sync)

    def find_suspects(self, index: int) -> str:
        """Return the first tensors that the engine does not hold as the trainer does: all is synced again, and read back."""
        try:
            with self.events.phase("find_suspects", index, "the weights to be synced again, and read back"):
                self.memory.resume_weights()
                self.sync.push()  # what a released engine held is gone; the same sync goes wrong the same way
                listed = first_of(self.differences())
        except Exception as error:  # it must not hide what was found before it
            listed = f"unknown, as the search for them failed ({type(error).__name__}: {error})"
        return f"engine tensors that differ from the trainer's: {listed}"

    def verdict(self, rollouts: Sequence[Mapping[str, float]]) -> str:
        """Return the phrase of the verdict; write the report's section to the events."""
        self.events.fact("verification", lines=report_section(self, rollouts, self.events.seconds))
        return verdict_phrase(self, rollouts)

    def rehearse(self, index: int) -> None:
        """full: sync changed weights onto a sentinel fill, read them back and compare with a reload from disk."""
        super().rehearse(index)
        if self.reaches("full"):
            run_folder = self.events.path.parents[1].name
            rehearse(self, self.sync.folder / f"{run_folder}-reload", index)

    def check_arrival(self, index: int) -> None:
        self.check_fingerprints(index)
        self.check_bytes(index)
        self.check_first_sync(index)

    def check_fingerprints(self, index: int) -> None:
        """log_probs: raise WeightsDidNotArrive, naming checkpoint tensors, unless the engine holds what can be followed."""
        if self.reaches("log_probs") and self.sync.engine.api.custom_weight_loader:
            with self.timed("fingerprints", index, "the schedulers' fingerprints of what they hold"):
                self.compared = compare_fingerprints(self.sync)
                wrong = self.compared.wrong and (self.differences() or self.compared.wrong)
            refuse(wrong, f"step {index}: after the sync the engine holds other weights")

    @contextmanager
    def measured_update(self, ppo: Ppo, index: int, rollout: Batch) -> Iterator[None]:
        """log_probs: measure how far the update within moves the actor's log-probs, for the next sync's check.

        Of each rank's first responses, behind prompts of the next step: an update moves what it trains on further.
        """
        if not self.reaches("log_probs"):
            yield
            return
        few = rollout.select(slice(self.config.actor.microbatch_size))
        responses = [ids[mask.bool()].tolist() for ids, mask in zip(few.input_ids, few.response_mask, strict=True)]
        prompts = itertools.cycle(prompt.input_ids for prompt in ppo.engine_prompts(index + 1))
        unseen = from_sequences(list(itertools.islice(prompts, len(responses))), responses, 0)
        waiting = "the actor's log-probs of a few responses, before and after its update"
        with self.timed("movement", index, waiting):
            before = ppo.actor.log_probs(unseen)[0]
        yield
        with self.timed("movement", index, waiting):
            moved = ppo.actor.log_probs(unseen)[0] - before
            self.movement = ppo.token_mean(moved.abs(), unseen)

    def sync_metrics(self) -> dict[str, float]:
        """Return what is known of the last sync.

        sync_proven_by_log_probs: 1 where `movement` is so far above what is allowed that a sync that did nothing would fail.
        """
        metrics = super().sync_metrics()
        if self.reaches("log_probs"):
            metrics["sync_proven_by_log_probs"] = float(self.movement > MOVEMENT_MARGIN * self.allowed.mean)
        if self.compared:
            metrics |= {"sync_tensors": self.compared.tensors, "sync_tensors_compared": self.compared.compared}
        return metrics

    def check_bytes(self, index: int, what: str = "the sync") -> None:
        """bytes: raise WeightsDidNotArrive, naming checkpoint tensors, unless the engine holds what was sent."""
        if self.reaches("bytes"):
            with self.timed("readback", index, "every tensor to be read back from the engine"):
                wrong = self.differences()
            refuse(wrong, f"step {index}: after {what} the engine holds other weights")

    def check_first_sync(self, index: int) -> None:
        """bytes: raise WeightsDidNotArrive unless the first sync, of unchanged weights, leaves what SGLang itself loaded.

        The only check that does not trust our names: two experts swapped in them would be read back swapped.
        """
        if self.own_checkpoint is not None:
            with self.timed("first_sync", index, "the engine's weights, to compare them with its own load from disk"):
                wrong = changed_tensors(self.sync, self.own_checkpoint)
            self.own_checkpoint = None
            source = f"it loaded itself from {self.source}"
            refuse(wrong, f"step {index}: after the first sync the engine holds other weights than {source}")
