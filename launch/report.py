"""report.md, to paste as an issue, report.html, to look at, and trace.json, for https://ui.perfetto.dev, of any run.

    python launch/report.py runs/20261121-054327

Reads what the run left: config.toml, environment.json, events/, metrics.jsonl, failure-*.json. Every run writes all
three; this writes them again, or for a run that was killed before it could. Exit codes: 0 written, 2 the command line is wrong.
"""

import sys
from pathlib import Path

import _checkout

_checkout.use()

from harness.runtime.errors import report_user_error
from harness.tools import environments
from harness.tools.command_line import exit_with


def main(arguments: list[str]) -> int:
    """Return the exit code."""
    if {"-h", "--help"} & set(arguments):
        print(__doc__)
        return 0
    environments.need("jinja2", "msgspec")
    from harness.tools.report.write_reports import write_reports

    try:
        if len(arguments) != 1:
            raise ValueError(f"{len(arguments)} run directories are given; give one.")
        markdown, page, trace = write_reports(Path(arguments[0]))
    except (ValueError, OSError) as error:
        return report_user_error(error, rank=0)
    print(f"report {markdown}, {page} and {trace}")
    return 0


if __name__ == "__main__":
    exit_with(main, sys.argv[1:])
