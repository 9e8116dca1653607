"""Let a script of this folder import harness from its own checkout, on any Python, installed there or not."""

import importlib.util
import os
import sys
from pathlib import Path

CHECKOUT = Path(__file__).resolve().parents[1]


def use() -> None:
    """Start this process over with the checkout on PYTHONPATH, unless `import harness` finds the checkout already.

    Exit with 2 and one sentence where this Python ignores PYTHONPATH.
    """
    found = importlib.util.find_spec("harness")
    if found and found.origin and Path(found.origin).resolve().parents[1] == CHECKOUT:
        return
    if sys.flags.ignore_environment:
        print(f"error: {sys.argv[0]} needs PYTHONPATH, or `pip install -e {CHECKOUT}`; drop -I or -E.", file=sys.stderr)
        sys.exit(2)
    given = [entry for entry in os.environ.get("PYTHONPATH", "").split(os.pathsep) if entry]
    os.environ["PYTHONPATH"] = os.pathsep.join([str(CHECKOUT), *given])
    os.execv(sys.executable, sys.orig_argv)
