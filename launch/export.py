"""Write one file to attach to an issue: a run, or a config, as a program that needs only torch, transformers and sglang.

    python launch/export.py runs/20261121-054327 > repro.py
    python launch/export.py configs/cpu/quickstart.toml --run.steps 2 > repro.py

The first line of the file is the torchrun command that starts it. The program has the run's model, mesh, engine arguments
and weight sync, and its header says what was expected, what was seen and where. It fails as the run did, with the same
exit code. What failed in code that is not in the file is done on purpose ("THE FAULT"); --arm control leaves that out and
must pass. TOML files, --section.key VALUE, --nnodes and --nproc-per-node are as for launch/ppo.py --dry-run.
Exit codes: 0 written, 2 the command line or config is wrong.
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
    environments.need("torch", "msgspec", "jinja2")
    from harness.tools.diagnose.diagnose import diagnose
    from harness.tools.diagnose.log_lines import log_files
    from harness.tools.export.program import render
    from harness.tools.export.subject import read_subject

    try:
        if not arguments:
            raise ValueError("give a TOML file or a run directory, such as runs/20261121-054327.")
        subject = read_subject(arguments)
        finding = diagnose(log_files([arguments[0]])).finding if subject.seen and subject.seen.code else None
        text = render(subject, finding.entry.slug if finding else "")
    except (ValueError, OSError) as error:
        return report_user_error(error, rank=0)
    if subject.unknown_keys:
        named = ", ".join(subject.unknown_keys)
        print(f"warning: this version does not know these keys of its config.toml: {named}", file=sys.stderr)
    sys.stdout.write(text)
    return 0


if __name__ == "__main__":
    exit_with(main, sys.argv[1:])
