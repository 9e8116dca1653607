"""A user's mistake: one sentence from rank 0, exit code 2."""

import sys
import time

EXIT_CODE = 2

SPEAK_FIRST_SECONDS = 1.0
"""How long other ranks wait: torchrun ends all ranks at the first exit, rank 0 perhaps in mid-word."""


def say_mistake(error: Exception, rank: int) -> int:
    """Print the sentence on rank 0; returns the exit code."""
    if rank == 0:
        print(f"error: {error}", file=sys.stderr, flush=True)
    else:
        time.sleep(SPEAK_FIRST_SECONDS)
    return EXIT_CODE
