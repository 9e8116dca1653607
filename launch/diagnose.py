"""Which known failure a log shows: anyone's log, offline, in seconds.

    python launch/diagnose.py train.log
    python launch/diagnose.py runs/20261121-054327            a run directory: its verdicts, engines' logs and events
    python launch/diagnose.py rank*.log.gz --json
    kubectl logs job/ppo | python launch/diagnose.py -

Prints the slug of the first cause with its confidence (the rule is in harness/tools/diagnose/diagnose.py), the lines that
show it, how the log ends, cause and fix; or "unknown" with the first line that looks like a failure; or that there is none.
Prefixes of Ray, torchrun, SGLang, srun, Kubernetes and colours are skipped; UTF-16 and compressed files are read, also cut
ones. Exit codes: 0 diagnosed, 1 a failure that is not known, 2 the command line is wrong, 3 no failure seen.
"""

import io
import sys
from dataclasses import dataclass

import _checkout

_checkout.use()

from harness.runtime.errors import report_user_error
from harness.tools.command_line import exit_with, read_options
from harness.tools.diagnose.diagnose import diagnose
from harness.tools.diagnose.diagnosis_text import as_json, as_text
from harness.tools.diagnose.log_lines import log_files

EXIT_CODES = {"diagnosed": 0, "unknown": 1, "no failure": 3}


@dataclass(kw_only=True)
class Options:
    """Beside files (also .gz and .jsonl), run directories, or - for standard input; of several, in the order of ranks."""

    json: bool = False
    """Print the diagnosis as JSON."""


def main(arguments: list[str]) -> int:
    """Return the exit code."""
    logs = [word for word in arguments if word == "-" or not word.startswith("-")]
    try:
        words = [word for word in arguments if word not in logs]
        options = read_options(Options, "launch/diagnose.py LOG ...", __doc__ or "", words)
        if not logs:
            raise ValueError("there is nothing to read; give a log, a run directory, or - for standard input.")
        found = diagnose(log_files(logs))
    except (ValueError, OSError) as error:
        return report_user_error(error, rank=0)
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="backslashreplace")  # a log may have what the console's encoding has not
    print(as_json(found) if options.json else as_text(found))
    return EXIT_CODES[found.verdict]


if __name__ == "__main__":
    exit_with(main, sys.argv[1:])
