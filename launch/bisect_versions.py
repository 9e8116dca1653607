"""Which release of SGLang, or of anything else, broke it: found unattended, with what changed, in a report to paste.

    python launch/bisect_versions.py --good 0.5.9 --bad 0.5.23 -- launch/ppo.py configs/cpu/quickstart.toml
    python launch/bisect_versions.py --good 0.5.13 --bad 0.5.23 --only-package --match update-outside-session -- update.py
    python launch/bisect_versions.py --package transformers --hold sglang==0.5.20 --good 5.6.0 --bad 5.12.1 -- script.py
    python launch/bisect_versions.py --good 0.5.12 --bad 0.5.17 --environments FOLDER --metric logprob_diff --above 0.01 -- script.py
    python launch/bisect_versions.py --git ~/sglang --good v0.5.20 --bad main --timeout 10m -- script.py
    python launch/bisect_versions.py --resume [FOLDER]           continue a bisect that was cut off
    python launch/bisect_versions.py --resume FOLDER --then-git ~/sglang    from the release found to the commit
    python launch/bisect_versions.py status [FOLDER]             what is known so far
    python launch/bisect_versions.py log [FOLDER]                its verdicts, as `replay` reads them
    python launch/bisect_versions.py replay FILE                 a new bisect that takes the verdicts of a log as they stand
    python launch/bisect_versions.py judge [--match ...] -- ...  one run here and now: the script of `git bisect run`

The command's exit code decides, as in git bisect: 0 good, 1 to 124, 126, 127 and a signal bad, 125 skip, 128 and more stop.
A script gets the candidate's Python; launch/ppo.py and launch/sync.py also torchrun with the ranks that their config wants.
Exit codes: 0 found; 1 it hides among candidates that could not be classified, or is only probable; 2 the command line
is wrong; 3 several causes; 4 paused (network, disk, a script that asked to stop), 130 interrupted: --resume continues.
judge: 0 good, 1 bad, 125 else.
"""

import sys

import _checkout

_checkout.use()

from harness.tools import environments
from harness.tools.command_line import exit_with


def main(arguments: list[str]) -> int:
    """Return the exit code."""
    environments.need("msgspec", "packaging", "rich")
    from harness.tools.bisection import verbs

    return verbs.main(arguments, __doc__ or "")


if __name__ == "__main__":
    exit_with(main, sys.argv[1:])
