"""Let a script of this folder import harness from its own checkout, on any Python, installed there or not."""

import importlib.util
import os
import signal
import sys
from pathlib import Path

CHECKOUT = Path(__file__).resolve().parents[1]
ROOT = CHECKOUT if (CHECKOUT / "harness").is_dir() else CHECKOUT.parent
"""What holds harness; in a wheel this folder is inside of harness."""


def use() -> None:
    """Start this process over with the checkout on PYTHONPATH, unless `import harness` finds the checkout already.

    Without a GPU, have it find this checkout's stand-ins too (harness/runtime/cpu_standins.py).

    From then on Ctrl-C and SIGTERM end the script with a sentence (harness/tools/interrupts.py). Exit with 2 and one sentence if this Python is too old, or ignores PYTHONPATH.
    """
    if sys.version_info < (3, 11):  # noqa: UP036 - whatever python3 is may run this
        found = ".".join(map(str, sys.version_info[:3]))
        print(f"error: {sys.argv[0]} needs Python 3.11 or newer, and this is {found}.", file=sys.stderr)
        sys.exit(2)
    found_harness = importlib.util.find_spec("harness")
    if found_harness and found_harness.origin and Path(found_harness.origin).resolve().parents[1] == ROOT:
        from harness.runtime import cpu_standins

        if cpu_standins.no_gpu():
            cpu_standins.activate()
        _end_well()
        return
    if sys.flags.ignore_environment:
        print(f"error: {sys.argv[0]} needs PYTHONPATH, or `pip install -e {CHECKOUT}`; drop -I or -E.", file=sys.stderr)
        sys.exit(2)
    given = [entry for entry in os.environ.get("PYTHONPATH", "").split(os.pathsep) if entry]
    os.environ["PYTHONPATH"] = os.pathsep.join([str(ROOT), *given])
    signal.pthread_sigmask(signal.SIG_BLOCK, (signal.SIGINT, signal.SIGTERM))  # until the new process can end well
    os.execv(sys.executable, sys.orig_argv)


def _end_well() -> None:
    from harness.runtime.installed import as_typed
    from harness.tools import interrupts

    main = getattr(sys.modules["__main__"], "__file__", None)
    if not main or Path(main).resolve().parent != CHECKOUT / "launch":
        return  # another program has imported the script
    if "TORCHELASTIC_RUN_ID" in os.environ:
        interrupts.end_quietly()
    else:
        interrupts.end_by_sentence(as_typed(os.path.relpath(sys.argv[0], CHECKOUT)))
