"""Write report.md (for an issue), report.html (a page) and trace.json (for https://ui.perfetto.dev) of a run.

    python launch/report.py runs/20261121-054327

Every run writes them at its end. Use this to write them again, or for a run that was killed before it could.
Exit codes: 0 written, 2 the folder is not a run directory or cannot be written to.
"""

import sys
from pathlib import Path

import _checkout

_checkout.use()

from harness.runtime.errors import report_user_error
from harness.runtime.installed import as_typed
from harness.tools import environments
from harness.tools.command_line import exit_with


def main(arguments: list[str]) -> int:
    """Return the exit code."""
    if {"-h", "--help"} & set(arguments):
        print(as_typed(__doc__))
        return 0
    environments.need("jinja2", "markdown_it", "msgspec")
    from harness.tools.report.write_reports import write_reports

    try:
        if len(arguments) != 1:
            raise ValueError("give one run directory, such as runs/20261121-054327.")
        markdown, page, trace = write_reports(Path(arguments[0]))
    except (ValueError, OSError) as error:
        return report_user_error(error, rank=0)
    print(f"report {markdown}, {page} and {trace}")
    return 0


if __name__ == "__main__":
    exit_with(main, sys.argv[1:])
