"""The levels bytes and full of weights.verify; and at every level, which elements of a wrong tensor differ."""

from collections.abc import Mapping, Sequence

from harness.tools.verification.readback import weight_differences
from harness.tools.verification.rehearsal import rehearse
from harness.tools.verification.report_section import report_section
from harness.tools.verification.snapshot import changed_tensors, snapshot_weights
from harness.tools.verification.verification_summary import verdict_phrase
from harness.weights.presync_checks import first_of
from harness.weights.verify import Verification, refuse


class ReadBackVerification(Verification):
    """bytes: all that the engine holds read back after every sync. full: also a rehearsal before every sync."""

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
        super().check_arrival(index)
        self.check_bytes(index)
        self.check_first_sync(index)

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
