"""How a check ends the run: one exception for each thing that can be shown, and the sentence that names the tensors."""

from collections.abc import Sequence

from harness.rollout.served_models import DRAFT, STALE_DRAFT
from harness.weights.presync_checks import first_of


class WeightsDidNotArrive(RuntimeError):
    """The engine computes with other weights than the trainer holds."""


class WrongRoutingRecord(RuntimeError):
    """The experts that the engine says tokens took are not those that it computed with."""


class NoBaseline(RuntimeError):
    """Engine and trainer are further apart on the same weights than rounding explains: a difference after a sync would
    prove nothing.
    """


def refuse(wrong: Sequence[str], sentence: str) -> None:
    """Raise WeightsDidNotArrive if anything is wrong.

    It names the known failure if only the engine's draft model is.
    """
    if wrong:
        if all(each.startswith((f"{DRAFT}:", f"{DRAFT}.")) for each in wrong):
            sentence += f", in its {DRAFT} model alone ({STALE_DRAFT})"
        raise WeightsDidNotArrive(f"{sentence}: {first_of(wrong)}")
