"""Where every random number of a run comes from: run.seed, the step, and the engine or rank that draws."""

LARGEST = 2**31
"""SGLang hands its seed to numpy, which takes 32 bits."""


def seed_of(run: int, step: int = 0, place: int | None = None) -> int:
    """Return the seed for what is drawn in a step of the run with run.seed = `run`.

    place: the engine or rank, where each must draw other numbers; None for what all draw alike, such as the
    minibatches.
    """
    shared = run * 1_000_003 + step
    return (shared if place is None else shared * 1009 + place) % LARGEST
