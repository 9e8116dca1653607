"""Remove the emulation's folder once the launcher is gone, however it ended. Standard library only."""

import shutil
import sys
import time
from pathlib import Path

if __name__ == "__main__":
    sys.stdin.buffer.read()  # to the end: the launcher holds the other end
    for _ in range(100):
        shutil.rmtree(sys.argv[1], ignore_errors=True)
        if not Path(sys.argv[1]).exists():
            break
        time.sleep(0.1)  # hosts may still be ending
