"""The trainer's view of an engine's loader: what each scheduler would do with the tensors that are sent."""

from dataclasses import dataclass

from harness.rollout.engine import RolloutEngine
from harness.rollout.served_models import DRAFT, role_of
from harness.weights.fusing import FusingGroup
from harness.weights.presync_checks import unfilled_parameters
from harness.weights.traced.coverage import LoadCoverage
from harness.weights.worker import kept_trace


@dataclass(slots=True)
class EngineLoader:
    """The traced loaders of one engine's schedulers.

    Every method is a collective call of all ranks, and needs can_ask.
    """

    engine: RolloutEngine
    groups: tuple[FusingGroup, ...]
    coverage: tuple[LoadCoverage, ...] = ()
    """For each scheduler, in engine order; empty before `trace`."""
    unfilled_at_first: tuple[str, ...] = ()
    """Sentences on the engine's parameters that nothing filled by the first trace: refused then, or known to be no
    failure."""

    def trace(self) -> None:
        """Learn what each scheduler's loader would fill. Those whose last trace still holds do not trace again."""
        with self.engine.weight_update():
            found = self.engine.group.all_gather(self.engine.ask(kept_trace.cover, self.groups))
        is_first = not self.coverage
        self.coverage = tuple(found[rank] for rank in self.engine.group.ranks)
        if is_first:
            self.unfilled_at_first = tuple(map(str, unfilled_parameters(self.coverage)))

    def trace_once(self) -> None:
        """Trace, unless this was done before."""
        if not self.coverage:
            self.trace()

    def fingerprints(self) -> dict[int, dict[str, int]]:
        """Return engine rank -> "<group>/<copy>" -> fingerprint of what that copy filled.

        Trace anew if SGLang has replaced a tensor that was traced. Raise RuntimeError if that does not help.
        """
        self.trace_once()
        found = self._ask_fingerprints()
        if not self._complete(found):
            self.trace()
            found = self._ask_fingerprints()
        if not self._complete(found):
            raise RuntimeError(
                f"the schedulers of ranks {list(found)} must report a fingerprint for each copy they traced"
            )
        return found

    def other_tensors(self, *, derived: bool = False) -> dict[int, dict[str, int]]:
        """Return engine rank -> fingerprints of what no sync fills, or no copy; see worker/kept_trace.py."""
        with self.engine.weight_update():
            by_rank = self.engine.group.all_gather(self.engine.ask(kept_trace.other_tensors, derived))
        return {place: by_rank[rank] for place, rank in enumerate(self.engine.group.ranks)}

    def poison(self, number: int) -> list[kept_trace.Poisoned]:
        """Overwrite all that sync `number` is to fill; return what each scheduler of this engine has overwritten."""
        self.trace_once()
        self.engine.flush_cache()  # SGLang must be idle
        with self.engine.weight_update():
            return list(self.engine.group.all_gather(self.engine.ask(kept_trace.poison, number)).values())

    def _ask_fingerprints(self) -> dict[int, dict[str, int]]:
        with self.engine.weight_update():
            by_rank = self.engine.group.all_gather(self.engine.ask(kept_trace.fingerprints))
        return {place: by_rank[rank] for place, rank in enumerate(self.engine.group.ranks)}

    def _complete(self, found: dict[int, dict[str, int]]) -> bool:
        due = {each.rank: sum(map(len, each.copies)) + len(each.padded) for each in self.coverage}
        return {rank: len(sums) for rank, sums in found.items()} == due

    @property
    def of_draft(self) -> set[str]:
        """Checkpoint names that fill tensors of the engine's draft model alone."""
        roles = [
            (copy.source.name, role_of(copy.into))
            for each in self.coverage
            for copies in each.copies
            for copy in copies
        ]
        return {name for name, role in roles if role == DRAFT} - {name for name, role in roles if role != DRAFT}

    @property
    def opaque(self) -> set[str]:
        """Checkpoint names that arrive in a way that cannot be followed: only loading them again shows whether they
        did.
        """
        return {name for each in self.coverage for name in each.opaque}

    @property
    def computing(self) -> set[str]:
        """Names of the trainer's tensors, as sent, that some scheduler's loader does more with than copy."""
        return {name for each in self.coverage for name in each.computing}

    @property
    def derived_over(self) -> set[str]:
        """Names of the trainer's tensors whose values post_load_weights changes in place after they were loaded."""
        return {name for each in self.coverage for name in each.derived_over}

    @property
    def derives(self) -> bool:
        """Whether some scheduler's loader derives tensors from what it copied, in post_load_weights."""
        return any(each.derives for each in self.coverage)

    @property
    def not_renewed(self) -> list[str]:
        """Tensors that a scheduler derived when it first loaded, and that its loader would leave as they are."""
        return list(dict.fromkeys(name for each in self.coverage for name in each.not_renewed))
