"""launch/ppo.py with one fault: rank 1 listens for its scheduler in another folder than the one that they share.

For tests only.
"""

import sys
import tempfile
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))


def listen_elsewhere() -> None:
    """Let rank 1 wait for its scheduler in a folder of its own."""
    from harness.rollout import schedulers

    listening = schedulers._listening

    def listen(folder: Path, name: str, engine_rank: int) -> Any:
        return listening(Path(tempfile.mkdtemp()) if engine_rank == 1 else folder, name, engine_rank)

    schedulers._listening = listen


if __name__ == "__main__":
    from tests.end_to_end.planted import run_with

    run_with(listen_elsewhere)
