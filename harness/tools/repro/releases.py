"""Cases that run in a certain release of SGLang, installed or not."""

import importlib.metadata
import subprocess
import sys

from harness.tools.repro import cases


def use_release(release: str) -> None:
    """Go on in this release of SGLang: if another one is installed, run the variant again where this one is, and exit.

    Install the release as launch/full_size.py --against does. Raise UnsupportedEnvironment if that fails.
    """
    from harness.tools.full_size.compare import environment_of

    if importlib.metadata.version("sglang") == release:
        return
    environment = environment_of(release)
    variables = environment.variables(cpu_mode=True, imports_harness=True)
    command = [environment.python, "-P", "-m", cases.__name__, *sys.argv[1:]]
    sys.exit(subprocess.run(command, env=variables).returncode)
