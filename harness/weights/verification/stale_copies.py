"""Name the weights of which the engine still uses an old copy after a sync (worker/kept_copies.py finds them)."""

from harness.cluster.world import all_gather
from harness.rollout.engine import RolloutEngine
from harness.weights.worker import kept_copies

STALE_COPY = "stale-copy-of-weights"
"""The failure's name in the catalogue of launch/diagnose.py."""


def describe_stale_copies(engine: RolloutEngine) -> list[str]:
    """Return one sentence for each copy that has stayed as it was on some rank. A collective call of all ranks."""
    places: dict[tuple[str, str], list[str]] = {}
    for rank, found in enumerate(all_gather(engine.ask(kept_copies.stale_copies))):
        for pair in found.items():
            places.setdefault(pair, []).append(str(rank))
    return [
        f"{name}, a copy that the engine made of {of} and that no update reaches, on rank {', '.join(ranks)}"
        for (name, of), ranks in places.items()
    ]
