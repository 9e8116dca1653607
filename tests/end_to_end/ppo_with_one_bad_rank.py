"""launch/ppo.py with one fault: rank 1 raises in the advantages of the first step. For tests only."""

import os
import sys
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))


def plant() -> None:
    """Replace the advantages of rank 1 by an exception."""
    from harness import learning

    def fail(*_: Any) -> Any:
        raise ArithmeticError("planted on rank 1")

    if os.environ["RANK"] == "1":
        learning.estimate_advantages = fail


if __name__ == "__main__":
    from tests.end_to_end.planted import run_with

    run_with(plant)
