"""Removes the emulation's folder once the launcher is gone, whichever way it went. Standard library only."""

import shutil
import sys
import time
from pathlib import Path

TRIES, PAUSE_SECONDS = 100, 0.1


def main(folder: Path) -> None:
    """Wait for the end of standard input, whose other end the launcher holds; hosts may take a moment to end after it."""
    sys.stdin.buffer.read()
    for _ in range(TRIES):
        shutil.rmtree(folder, ignore_errors=True)
        if not folder.exists():
            return
        time.sleep(PAUSE_SECONDS)


if __name__ == "__main__":
    main(Path(sys.argv[1]))
