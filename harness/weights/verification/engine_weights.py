"""What the engine holds, around every sync: each element that the sync is to fill, and each that it must not touch.

around_sync     before it, overwrite what it is to fill (poison), so that whatever it does not bring shows; after
it, compare fingerprints, what the loader computes or derives, and what no sync fills
after_rollout   the same fingerprints again, and copies of old weights that the engine computed with
"""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field

from harness.cluster.world import all_gather
from harness.rollout.served_models import DRAFT, STALE_DRAFT
from harness.rollout.sglang_api.engine_calls import cached_prefix_tokens
from harness.weights.presync_checks import first_of
from harness.weights.verification.comparison import (
    FingerprintComparison,
    ReloadFindings,
    changed,
    changed_since,
    compare_fingerprints,
    load_again,
)
from harness.weights.verification.refusals import of_all_ranks, refuse
from harness.weights.verification.run_parts import RunParts
from harness.weights.verification.trainer_sums import TrainerSums, as_computed, tensor_sums, trainer_sums
from harness.weights.worker import kept_copies
from harness.weights.worker.kept_trace import OwnLoad, fingerprint_everything, unwritten

STALE_COPY = "stale-copy-of-weights"
"""The failure's name in the catalogue of launch/diagnose.py."""
OF_DRAFT = (f"{DRAFT}:", f"{DRAFT}.")
Fingerprints = dict[int, dict[str, int]]
"""Engine rank -> fingerprints by name."""


@dataclass(kw_only=True, slots=True)
class SyncRecord:
    """What was done and found around one sync. The verdict says nothing that no record has."""

    number: int
    """Of the sync, by which its poison differs from that of the one before."""
    poisoned: int = 0
    """Tensors that a scheduler overwrote before it, the fewest of any."""
    sums: TrainerSums | None = None
    """Of what it sent, and of the trainer's model at that time."""
    compared: FingerprintComparison | None = None
    reloaded: ReloadFindings = field(default_factory=ReloadFindings)
    """What loading again showed of what fingerprints do not compare."""
    others: Fingerprints = field(default_factory=dict)
    """Of what no sync fills and of what the loader derives, right after it."""
    held: int = 0
    """Tensors that were compared again after the rollout."""
    forward: int = 0
    """The trainer's parameters whose forward pass was compared with them."""

    def metrics(self) -> dict[str, float]:
        """Return how many tensors were sent, and how they were checked, for metrics.jsonl."""
        counts = {"poisoned": self.poisoned, "held": self.held, "forward": self.forward}
        if self.compared:
            counts |= {"": self.compared.tensors, "compared": self.compared.compared, "derived": self.reloaded.derived}
        return {f"sync_tensors_{what}".removesuffix("_"): float(count) for what, count in counts.items()}


@dataclass(kw_only=True, slots=True)
class EngineWeights:
    """The checks of what the engine holds. Every method is a collective call of all ranks."""

    run: RunParts
    own_load: OwnLoad | None = None
    """What SGLang itself loaded from the model's own checkpoint, until a sync of the same weights has matched it."""
    others: Fingerprints = field(default_factory=dict)
    """Of what no sync fills, as it was before the first one."""
    frozen: Mapping[str, int] | None = None
    """Of the layer that is sent and that nothing trains, as it was read from the checkpoint."""
    sync: SyncRecord = field(default_factory=lambda: SyncRecord(number=-1))
    """The last one."""
    equals_own_load: bool = False
    """The first sync left what SGLang itself had loaded."""
    unused: dict[str, None] = field(default_factory=dict)
    """Old copies of weights that the engine keeps, and does not compute with."""
    not_covered: dict[str, None] = field(default_factory=dict)
    """Sentences on what no sync's checks covered."""

    def note_own_load(self) -> None:
        """Note what SGLang has loaded from the model's own checkpoint: the first sync must leave the same."""
        if self.run.compares_held:
            loader = self.run.sync.loader
            loader.trace_once()
            self.others = loader.other_tensors()
            with loader.engine.weight_update():
                self.own_load = loader.engine.ask(fingerprint_everything)

    def note_frozen(self) -> None:
        """Note the layer that nothing trains, as it is before anything is sent."""
        if self.run.verifies and self.frozen is None:
            self.frozen = tensor_sums(as_computed(self.run.sync.sent.draft_layer.tensors, None))

    @contextmanager
    def around_sync(self, *, changed_weights: bool = False) -> Iterator[None]:
        """Raise WeightsDidNotArrive, naming tensors, if the sync in this block leaves other weights than it should.

        changed_weights: all of them were changed before it (proof.py, rehearse).
        """
        self.note_frozen()
        self.sync = SyncRecord(number=self.sync.number + 1)
        self._poison()
        yield
        self._check_sync(changed_weights)
        if not changed_weights:
            self._check_own_load()

    def _poison(self) -> None:
        if self.run.compares_held:
            with self.run.events.phase("verify_poison", "the engine to overwrite its weights"):
                everyone = all_gather(self.run.sync.loader.poison(self.sync.number))
            found = [each for of_engine in everyone for each in of_engine]
            self.sync.poisoned = min(each.tensors for each in found)
            left = dict.fromkeys(name for each in found for name in each.left)
            self.not_covered |= {
                f"{name} is of a dtype that cannot be overwritten before a sync": None for name in left
            }

    def _check_sync(self, changed_weights: bool) -> None:
        """Compare every tensor that can be followed, what the loader computes, and what no sync fills."""
        run, sync, seen = self.run, self.run.sync, self.sync
        if not run.verifies:
            return
        after = f"{run.when}: after the sync the engine"
        with run.events.phase("verify_fingerprints", "the fingerprints of what trainer and schedulers hold"):
            seen.sums = sums = trainer_sums(sync)
            # First of all: whatever the sender has spoilt is no fault of the engine.
            refuse(sums.sent_otherwise, f"{run.when}: the sync sent other values than the trainer's model holds")
            if not changed_weights:
                spoilt = [name for name, before in (self.frozen or {}).items() if sums.held[name] != before]
                said = "the sync sent other values than the checkpoint has, of what nothing trains"
                refuse(spoilt, f"{run.when}: {said}")
            if not sync.engine.can_ask:
                return
            with sync.engine.weight_update():  # one session for all
                seen.compared = compare_fingerprints(sync.weights, sync.loader, sums.sent)
                seen.reloaded = load_again(sync.weights, sync.loader, seen.compared.left)
                self._refuse_wrong(seen.compared.wrong, f"{after} holds other weights")
                seen.others = sync.loader.other_tensors(derived=True)
                self.others = self.others or sync.loader.other_tensors()
                cached = self._cached_prefixes()
        self.not_covered |= dict.fromkeys([*seen.reloaded.not_covered, *sync.unfilled])
        refuse(seen.reloaded.wrong, f"{after} holds other weights")
        not_renewed = of_all_ranks(sync.loader.not_renewed)
        refuse(not_renewed, f"{after} holds tensors that its loader has derived once and does not renew")
        refuse(changed(self.others, seen.others), f"{after} has changed what no sync fills")
        refuse(cached, f"{after} has a prefix cache that is not empty (cache-not-flushed)")

    def _refuse_wrong(self, names: Sequence[str], sentence: str) -> None:
        """Raise WeightsDidNotArrive if there are names of tensors that the engine holds otherwise than they were sent.

        Say of each how much of it was never written: so much of it still holds the poison.
        """
        if not names:
            return
        everyone = all_gather(self.run.sync.engine.ask(unwritten, self.sync.number))
        never = [
            name
            for name in names
            if any((found := each.get(name.removeprefix(f"{DRAFT}: "))) and found[0] == found[1] for each in everyone)
        ]
        if all(name.startswith(OF_DRAFT) for name in names):
            sentence += f", in its {DRAFT} model alone" + f" ({STALE_DRAFT})" * (len(never) == len(names))
        refuse([f"{name}{how_unwritten(name.removeprefix(f'{DRAFT}: '), everyone)}" for name in names], sentence)

    def _cached_prefixes(self) -> list[str]:
        """Return one sentence for each scheduler whose prefix cache has keys and values of older weights."""
        everyone = all_gather(self.run.sync.engine.ask(cached_prefix_tokens))
        if None in everyone:
            self.not_covered["whether the prefix cache is empty after a sync: this SGLang's cannot be found"] = None
        return [f"{tokens} tokens in that of rank {rank}" for rank, tokens in enumerate(everyone) if tokens]

    def _check_own_load(self) -> None:
        """Raise WeightsDidNotArrive unless the first sync, of unchanged weights, leaves what SGLang itself loaded.

        The only check that does not trust our names: two experts swapped in them would be fingerprinted swapped.
        """
        run, before = self.run, self.own_load
        if before is None:
            return
        self.own_load = None
        with run.events.phase("verify_first_sync", "the engine's weights, to compare them with its own load from disk"):
            wrong = changed_since(before, run.sync.loader)
        source = f"it loaded itself from {run.source}"
        refuse(wrong, f"{run.when}: after the first sync the engine holds other weights than {source}")
        self.equals_own_load = True
        if left := of_all_ranks(before.left):
            why = "the engine computes them of tensors that are sent rounded"
            self.not_covered[f"with SGLang's own load: {first_of(left)}, as {why}"] = None
        if rounded := of_all_ranks(before.rounded):
            run.events.say(f"compared with SGLang's own load as a sync rounds them: {first_of(rounded)}")

    # After a rollout

    def after_rollout(self) -> None:
        """Raise WeightsDidNotArrive if the engine has generated with copies of old weights, or no longer holds what was
        sent.
        """
        self.refuse_stale(self.look_for_copies())
        run, sync, seen = self.run, self.run.sync, self.sync
        if not (run.compares_held and seen.sums):
            return
        sync.engine.flush_cache()  # SGLang must be idle
        waiting = "the schedulers' fingerprints of what they hold after the rollout"
        with run.events.phase("verify_held", waiting), sync.engine.weight_update():
            found = compare_fingerprints(sync.weights, sync.loader, seen.sums.sent)
            now = sync.loader.other_tensors(derived=True)
        what = f"{run.when}: after the rollout the engine"
        refuse(found.wrong, f"{what} holds other weights than the sync brought")
        refuse(changed(seen.others, now), f"{what} has changed what no sync fills, or what is derived")
        seen.held = found.compared

    def look_for_copies(self) -> dict[str, str]:
        """Return the copies of its weights that the engine made to compute with, and that are not what the weights are
        now: by name a sentence. Note those that are, for the next time.

        To be asked before the engine releases its memory.
        """
        run = self.run
        if not run.compares_held:
            return {}
        with run.events.phase("verify_copies", "the search of each scheduler for copies of its weights"):
            found = all_gather(run.sync.engine.ask(kept_copies.stale_copies))
            run.sync.engine.ask(kept_copies.find_copies)
        ranks: dict[tuple[str, str], list[str]] = {}
        for rank, stale in enumerate(found):
            for pair in stale.items():
                ranks.setdefault(pair, []).append(str(rank))
        return {
            name: f"{name}, a copy that the engine made of {of} and that no update reaches, on rank {', '.join(on)}"
            for (name, of), on in ranks.items()
            if name not in self.unused
        }

    def refuse_stale(self, stale: Mapping[str, str]) -> None:
        """Raise WeightsDidNotArrive if the engine has computed with copies of old weights."""
        sentence = (
            f"{self.run.when}: the engine has generated with old weights beside those that it holds ({STALE_COPY})"
        )
        refuse(list(stale.values()), sentence)

    def excuse(self, stale: Mapping[str, str]) -> None:
        """Note copies of old weights that the engine's log-probs do not show. Those of a draft model do not count: it
        decides no log-prob.
        """
        self.refuse_stale({name: each for name, each in stale.items() if name.startswith(OF_DRAFT)})
        for name, sentence in stale.items():
            self.unused[name] = None
            self.run.events.say(f"note: {sentence}; the log-probs on other weights agree, so nothing computes with it")


def how_unwritten(name: str, by_rank: Sequence[Mapping[str, tuple[int, int]]]) -> str:
    """Return what the schedulers say of a tensor that is not as it was sent; "" if none of them can tell.

    by_rank: of each rank's scheduler, name -> (elements that still hold the poison, all elements).
    """
    known = {rank: each[name] for rank, each in enumerate(by_rank) if name in each}
    if not known:
        return ""
    parts = [f"{still} of {size} elements on rank {rank}" for rank, (still, size) in known.items() if still]
    if not parts:
        return ": written, with other values"
    more = [f"{len(parts) - 4} more ranks"] if len(parts) > 4 else []
    return f": never written: {', '.join([*parts[:4], *more])}"
