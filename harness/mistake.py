"""What ends a run before it begins, said in one sentence by rank 0: a user's mistake (exit code 2), or a machine that cannot
run it (125, which `git bisect run` reads as skip)."""

import sys
import time

MISTAKE, CANNOT_RUN_HERE = 2, 125

SPEAK_FIRST_SECONDS = 1.0
"""How long other ranks wait: torchrun ends all ranks at the first exit, rank 0 perhaps in mid-word."""


class CannotRunHere(RuntimeError):
    """What was asked is right, but this machine or this sglang cannot do it."""


def say_mistake(error: Exception, rank: int) -> int:
    """Print the sentence on rank 0; returns the exit code."""
    if rank == 0:
        print(f"error: {error}", file=sys.stderr, flush=True)
    else:
        time.sleep(SPEAK_FIRST_SECONDS)
    return CANNOT_RUN_HERE if isinstance(error, CannotRunHere) else MISTAKE
