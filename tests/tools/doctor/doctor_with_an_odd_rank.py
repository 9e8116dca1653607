"""launch/doctor.py, whose rank 1 has another environment than rank 0: NAME=VALUE as the first argument."""

import os
import runpy
import sys
from pathlib import Path

if __name__ == "__main__":
    name, _, value = sys.argv.pop(1).partition("=")
    if os.environ["RANK"] == "1":
        os.environ[name] = value
    runpy.run_path(str(Path(__file__).resolve().parents[3] / "launch" / "doctor.py"), run_name="__main__")
