"""How a check ends the run: one exception for each thing that can be shown."""

from collections.abc import Iterable, Sequence

from harness.cluster.world import all_gather
from harness.weights.presync_checks import first_of


class WeightsDidNotArrive(RuntimeError):
    """The engine computes with other weights than the trainer holds."""


class WrongRoutingRecord(RuntimeError):
    """The experts that the engine says tokens took are not those that engine, or a replay in the trainer, computed
    with.
    """


class NoBaseline(RuntimeError):
    """Engine and trainer are further apart on the same weights than rounding explains: a difference after a sync would
    prove nothing.
    """


def of_all_ranks(names: Iterable[str]) -> list[str]:
    """Return the names that any rank has, each once. A collective call of all ranks."""
    return list(dict.fromkeys(name for each in all_gather(list(names)) for name in each))


def refuse(wrong: Sequence[str], sentence: str) -> None:
    """Raise WeightsDidNotArrive, with this sentence before it, if anything is wrong."""
    if wrong:
        raise WeightsDidNotArrive(f"{sentence}: {first_of(wrong)}")
