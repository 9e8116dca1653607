"""Name the known failure behind a log: anyone's log, offline, in seconds.

    python launch/diagnose.py train.log
    python launch/diagnose.py runs/20261121-054327            a run directory: its verdicts, engines' logs and events
    python launch/diagnose.py rank*.log.gz --json
    kubectl logs job/ppo | python launch/diagnose.py -

Prints the known failure, the lines that show it, how the log ends, its cause and a fix; or "unknown" with the entry that it
looks like, or else the first line of failure and what to look at next; or the last lines, if no failure was recognized.
Prefixes of Ray, torchrun, SGLang, vLLM, srun and Kubernetes, and colours, do not matter. Logs are in UTF-8; gzipped
ones, cut ones too, are read. Exit codes: 0 a known failure, 1 an unknown one, 2 the command line is wrong or a file is
no log, 3 no failure recognized.
"""

import io
import sys
from dataclasses import dataclass

import _checkout

_checkout.use()

from harness.runtime.errors import report_user_error
from harness.runtime.installed import as_typed
from harness.tools.command_line import exit_with, read_options
from harness.tools.diagnose.diagnose import diagnose
from harness.tools.diagnose.diagnosis_text import as_json, as_text
from harness.tools.diagnose.log_lines import check_readable, log_files

EXIT_CODES = {"known": 0, "unknown": 1, "no failure": 3}


@dataclass(kw_only=True)
class Options:
    """LOG is a file (also .gz and .jsonl), a run directory, or - for standard input.

    Give several in the order of ranks.
    """

    json: bool = False
    """Print the diagnosis as JSON."""


def main(arguments: list[str]) -> int:
    """Return the exit code."""
    logs = [word for word in arguments if word == "-" or not word.startswith("-")]
    try:
        words = [word for word in arguments if word not in logs]
        options = read_options(Options, "launch/diagnose.py LOG ...", __doc__ or "", words)
        if not logs:
            raise ValueError("give a log, a run directory, or - for standard input.")
        files = log_files(logs)
        check_readable([file for file in files if file in logs])
        found = diagnose(files)
    except (ValueError, OSError) as error:
        return report_user_error(error, rank=0)
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="backslashreplace")  # a log may hold characters that the console cannot print
    print(as_json(found) if options.json else as_typed(as_text(found)))
    return EXIT_CODES[found.verdict]


if __name__ == "__main__":
    exit_with(main, sys.argv[1:])
