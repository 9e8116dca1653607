"""Let a script of this folder import harness from its own checkout, on any Python, installed there or not."""

import importlib.util
import os
import sys
from pathlib import Path

CHECKOUT = Path(__file__).resolve().parents[1]


def use() -> None:
    """Start this process over with the checkout on PYTHONPATH, unless `import harness` finds the checkout already.

    Exit with 2 and one sentence if this Python is too old, or ignores PYTHONPATH.
    """
    if sys.version_info < (3, 11):  # noqa: UP036 - whatever python3 is may run this
        found = ".".join(map(str, sys.version_info[:3]))
        print(f"error: {sys.argv[0]} needs Python 3.11 or newer, and this is {found}.", file=sys.stderr)
        sys.exit(2)
    found_harness = importlib.util.find_spec("harness")
    if found_harness and found_harness.origin and Path(found_harness.origin).resolve().parents[1] == CHECKOUT:
        return
    if sys.flags.ignore_environment:
        print(f"error: {sys.argv[0]} needs PYTHONPATH, or `pip install -e {CHECKOUT}`; drop -I or -E.", file=sys.stderr)
        sys.exit(2)
    given = [entry for entry in os.environ.get("PYTHONPATH", "").split(os.pathsep) if entry]
    os.environ["PYTHONPATH"] = os.pathsep.join([str(CHECKOUT), *given])
    os.execv(sys.executable, sys.orig_argv)
