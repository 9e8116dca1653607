"""What the engine holds: around every sync, each element that the sync is to fill, and each that it must not touch.

In the order of a step:

    poison               before the sync: overwrite what it is to fill, so that whatever it does not bring shows
    check_after_sync     fingerprints; at level bytes every element, and once what SGLang itself loaded
    check_after_rollout  copies of old weights that the engine computed with; the same fingerprints again
    check_forward        the trainer's side: its forward pass used the weights that were sent
"""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field

from torch import nn

from harness.cluster.world import all_gather
from harness.rollout.sglang_api.prefix_cache import cached_prefix_tokens
from harness.weights.verification.checked_run import CheckedRun
from harness.weights.verification.computed import fingerprints_of_forward
from harness.weights.verification.fingerprint import (
    FingerprintComparison,
    TrainerSums,
    compare_fingerprints,
    trainer_sums,
)
from harness.weights.verification.readback import read_back
from harness.weights.verification.refusals import refuse
from harness.weights.verification.reload import ReloadFindings, load_again
from harness.weights.verification.snapshot import Snapshot, changed_tensors, snapshot_weights
from harness.weights.verification.stale_copies import STALE_COPY, describe_stale_copies
from harness.weights.worker.kept_copies import find_copies

Fingerprints = dict[int, dict[str, int]]
"""Engine rank -> fingerprints by name."""


@dataclass(kw_only=True, slots=True)
class HeldWeights:
    """The checks of what the engine holds. Every method is a collective call of all ranks."""

    run: CheckedRun
    own_load: Snapshot | None = None
    """What SGLang itself loaded from the model's own checkpoint, until a sync of the same weights has matched it."""
    others: Fingerprints = field(default_factory=dict)
    """Of what no sync fills, as they were before the first one."""
    sums: TrainerSums | None = None
    """Of what the last sync sent, and of the trainer's model at that time."""
    after_sync: Fingerprints = field(default_factory=dict)
    """Of what no sync fills and of what the loader derives, after the last sync."""
    compared: FingerprintComparison | None = None
    """The last comparison of fingerprints."""
    reloaded: ReloadFindings = field(default_factory=ReloadFindings)
    """What loading again showed of what fingerprints do not compare."""
    not_covered: dict[str, None] = field(default_factory=dict)
    """Sentences on what no sync's checks covered."""

    # Before the first sync

    def note_others(self) -> None:
        """Note what no sync fills, as it is before the first one."""
        if self.run.sync.engine.can_ask:
            self.run.sync.loader.trace_once()
            self.others = self.run.sync.loader.other_tensors()

    def note_own_load(self) -> None:
        """Note what SGLang has loaded from the model's own checkpoint: the first sync must leave the same."""
        self.own_load = snapshot_weights(self.run.sync.engine)

    def forget_own_load(self) -> None:
        """Do not compare the first sync with SGLang's own load: it brings other weights than the model's own checkpoint
        has.
        """
        self.own_load = None

    # Around each sync

    def poison(self) -> None:
        """log_probs: before a sync, overwrite in the engine what it is to fill, so that whatever it does not bring
        shows.
        """
        run = self.run
        if run.compares_held:
            with run.events.phase("verify_poison", "the engine to overwrite its weights"):
                left = run.sync.loader.poison(run.events.step or 0)
            everyone = dict.fromkeys(name for names in all_gather(left) for name in names)
            self.not_covered |= {
                f"{name} is of a dtype that cannot be overwritten before a sync": None for name in everyone
            }

    def check_after_sync(self) -> None:
        """Raise WeightsDidNotArrive, naming checkpoint tensors, if the engine holds other weights than were sent."""
        self._check_fingerprints()
        self.check_bytes("the sync")
        self._check_own_load()

    def _check_fingerprints(self) -> None:
        """log_probs: compare every tensor that can be followed, what the loader computes, and what no sync fills."""
        run, sync = self.run, self.run.sync
        if not run.reaches("log_probs"):
            return
        after = f"{run.when}: after the sync the engine"
        with run.events.phase("verify_fingerprints", "the fingerprints of what trainer and schedulers hold"):
            self.sums = trainer_sums(sync)
            refuse(self.sums.sent_otherwise, f"{run.when}: the sync sent other values than the trainer's model holds")
            if not sync.engine.can_ask:
                return
            with sync.engine.weight_update():  # one session for all
                self.compared = compare_fingerprints(sync.weights, sync.loader, self.sums.sent)
                self.reloaded = load_again(sync.weights, sync.loader, self.compared.left)
                wrong = self.compared.wrong and (self.differences() or self.compared.wrong)
                self.after_sync = sync.loader.other_tensors(derived=True)
                self.others = self.others or sync.loader.other_tensors()
                cached = self._cached_prefixes()
        self.not_covered |= dict.fromkeys([*self.reloaded.not_covered, *sync.unfilled])
        others = changed(self.others, self.after_sync)
        refuse(wrong or self.reloaded.wrong, f"{after} holds other weights")
        refuse(others, f"{after} has changed what no sync fills")
        refuse(cached, f"{after} has a prefix cache that is not empty (cache-not-flushed)")

    def _cached_prefixes(self) -> list[str]:
        """Return one sentence for each scheduler whose prefix cache has keys and values of older weights."""
        everyone = all_gather(self.run.sync.engine.ask(cached_prefix_tokens))
        if None in everyone:
            self.not_covered["whether the prefix cache is empty after a sync: this SGLang's cannot be found"] = None
        return [f"{tokens} tokens in that of rank {rank}" for rank, tokens in enumerate(everyone) if tokens]

    def check_bytes(self, what: str) -> None:
        """bytes: raise WeightsDidNotArrive unless the engine holds what was sent."""
        if self.run.reaches("bytes"):
            with self.run.events.phase("verify_readback", "every tensor to be read back from the engine"):
                wrong = self.differences()
            refuse(wrong, f"{self.run.when}: after {what} the engine holds other weights")

    def differences(self) -> Sequence[str]:
        """Return one sentence for each tensor that the engine does not hold as the trainer does."""
        return read_back(self.run.sync.weights, self.run.sync.loader).differences

    def _check_own_load(self) -> None:
        """bytes: raise WeightsDidNotArrive unless the first sync, of unchanged weights, leaves what SGLang itself
        loaded.

        The only check that does not trust our names: two experts swapped in them would be read back swapped.
        """
        run = self.run
        if self.own_load is not None:
            with run.events.phase(
                "verify_first_sync", "the engine's weights, to compare them with its own load from disk"
            ):
                wrong = changed_tensors(run.sync.loader, self.own_load)
            self.own_load = None
            source = f"it loaded itself from {run.source}"
            refuse(wrong, f"{run.when}: after the first sync the engine holds other weights than {source}")

    # After a rollout

    def check_after_rollout(self) -> None:
        """Raise WeightsDidNotArrive if the engine has generated with copies of old weights, or no longer holds what was
        sent.
        """
        self.find_copies()
        self._check_still_held()

    def find_copies(self) -> None:
        """log_probs: before the engine releases its memory, note the copies of its weights that it made to compute
        with.

        Raise WeightsDidNotArrive, naming it, if one that was noted before is not what its weight is now.
        """
        run = self.run
        if run.compares_held:
            with run.events.phase("verify_copies", "the search of each scheduler for copies of its weights"):
                stale = describe_stale_copies(run.sync.engine)
                run.sync.engine.ask(find_copies)
            refuse(
                stale,
                f"{run.when}: the engine has generated with old weights beside those that it holds ({STALE_COPY})",
            )

    def _check_still_held(self) -> None:
        """log_probs: compare the fingerprints again. An update that is applied late, or taken back, shows only now."""
        run, sync = self.run, self.run.sync
        if run.compares_held and self.sums:
            sync.engine.flush_cache()  # SGLang must be idle
            waiting = "the schedulers' fingerprints of what they hold after the rollout"
            with run.events.phase("verify_held", waiting), sync.engine.weight_update():
                found = compare_fingerprints(sync.weights, sync.loader, self.sums.sent)
                now = sync.loader.other_tensors(derived=True)
            what = f"{run.when}: after the rollout the engine"
            refuse(found.wrong, f"{what} holds other weights than the sync brought")
            refuse(changed(self.after_sync, now), f"{what} has changed what no sync fills, or what is derived")

    @contextmanager
    def check_forward(self, model: nn.Module) -> Iterator[None]:
        """log_probs: raise WeightsDidNotArrive if the model's forward pass in this block uses other weights than it
        holds.
        """
        if not (self.run.reaches("log_probs") and self.sums):
            yield
            return
        with fingerprints_of_forward(model) as computed:
            yield
        held = self.sums.held
        wrong = all_gather([name for name, found in computed.items() if found != held[name]])
        refuse(
            list(dict.fromkeys(name for each in wrong for name in each)),
            f"{self.run.when}: the trainer's forward pass computes with other weights than its parameters hold",
        )

    def metrics(self) -> dict[str, float]:
        """Return how many tensors the last sync sent and how they were compared, for metrics.jsonl."""
        if not self.compared:
            return {}
        return {
            "sync_tensors": self.compared.tensors,
            "sync_tensors_compared": self.compared.compared,
            "sync_tensors_derived": self.reloaded.derived,
        }


def changed(before: Mapping[int, Mapping[str, int]], now: Mapping[int, Mapping[str, int]]) -> list[str]:
    """Return one sentence for each tensor of an engine whose fingerprint is another one now.

    A collective call of all ranks.

    before, now: engine rank -> fingerprints by name. One that is not there any more is left out: SGLang has replaced
    it.
    """
    ranks: dict[str, list[str]] = {}
    for rank, known in before.items():
        for name, fingerprint in known.items():
            if now[rank].get(name, fingerprint) != fingerprint:
                ranks.setdefault(name, []).append(str(rank))
    everyone = all_gather([f"{name} on engine rank {', '.join(on)}" for name, on in ranks.items()])
    return list(dict.fromkeys(sentence for each in everyone for sentence in each))
