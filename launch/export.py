"""One file to paste into an issue: a run, or a config, as a program that needs only torch, transformers and sglang.

    python launch/export.py configs/cpu/quickstart.toml --run.steps 2 > repro.py
    python launch/export.py runs/20261121-054327 > repro.py

At most 360 lines, started by the torchrun line in its first comment: launch/minimal.py with this run's model, mesh, engine
arguments and weight sync. Of a run also the environment and what was expected and seen, as comments; and it fails in the
same way: the same name in the catalogue of failures, the same exit code. Where code of the run failed that is not in the
file, the file does it on purpose, at "THE FAULT". --nnodes and --nproc-per-node as for launch/ppo.py --dry-run; TOML files
and --section.key VALUE as for launch/ppo.py. Exit codes: 0 written, 2 the command line or config is wrong.
"""

import sys

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
    environments.need("torch", "msgspec")
    from harness.tools.diagnose.diagnose import diagnose
    from harness.tools.diagnose.log_lines import log_files
    from harness.tools.export.program import MOST_LINES, render
    from harness.tools.export.subject import read_subject

    try:
        if not arguments:
            raise ValueError("there is nothing to export; give a TOML file or a run directory.")
        subject = read_subject(arguments)
        finding = diagnose(log_files([arguments[0]])).finding if subject.seen and subject.seen.code else None
        text = render(subject, finding.entry.slug if finding else "")
    except (ValueError, OSError) as error:
        return report_user_error(error, rank=0)
    lines = len(text.splitlines())
    if lines > MOST_LINES:
        print(
            f"warning: {lines} lines are more than {MOST_LINES}: a shorter model.overrides or engine.args helps",
            file=sys.stderr,
        )
    sys.stdout.write(text)
    return 0


if __name__ == "__main__":
    exit_with(main, sys.argv[1:])
