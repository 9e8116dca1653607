"""Find the first release of SGLang, or of any other package, with which a command fails, and what changed with it.

    python3 launch/bisect_versions.py --good 0.5.18 --bad 0.5.21 -- launch/ppo.py configs/cpu/quickstart.toml
    python3 launch/bisect_versions.py --package transformers --good 5.6.0 --bad 5.12.1 --hold sglang==0.5.23 -- script.py
    python3 launch/bisect_versions.py --git ~/sglang --good v0.5.20 --bad main --timeout 10m -- script.py
    python3 launch/bisect_versions.py --resume [FOLDER]           continue a bisect that was stopped
    python3 launch/bisect_versions.py --resume FOLDER --then-git ~/sglang    go on from the release to the commit

The exit code of the command decides, as in git bisect: 0 good, 125 skip, 128 and more stop, any other and any signal
bad. A script gets the candidate's Python; launch/ppo.py and launch/sync.py are started by torchrun with the ranks of
their config. A commit that is found is confirmed: the bad end must pass with that commit reverted, and fail again
without the revert. Exit codes: 0 found; 1 several candidates are left that could not be classified, or the answer is
only probable; 2 the command line is wrong, or an end is not what it was said to be; 3 several causes; 4 paused
(network, disk, a script that asked to stop), 130 interrupted: --resume continues.
"""

import sys

import _checkout

_checkout.use()

from harness.tools import environments
from harness.tools.command_line import exit_with


def main(arguments: list[str]) -> int:
    """Return the exit code."""
    environments.need("httpx", "msgspec", "packaging", "psutil")
    from harness.tools.bisection import bisection

    return bisection.main(arguments, __doc__ or "")


if __name__ == "__main__":
    exit_with(main, sys.argv[1:])
