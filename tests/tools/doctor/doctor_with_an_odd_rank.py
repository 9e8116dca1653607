"""launch/doctor.py, whose rank 1 has another environment than rank 0: NAME=VALUE, ... as the first argument."""

import os
import runpy
import sys
from pathlib import Path

if __name__ == "__main__":
    changes = dict(pair.split("=") for pair in sys.argv.pop(1).split(","))
    if os.environ["RANK"] == "1":
        os.environ.update(changes)
    script = Path(__file__).resolve().parents[3] / "launch" / "doctor.py"
    sys.path.insert(0, str(script.parent))  # as for a script
    runpy.run_path(str(script), run_name="__main__")
