"""Write one file to attach to an issue: a run, or a config, as a program that needs only sglang.

    python launch/export.py runs/20261121-054327 > repro.py
    python launch/export.py runs/20261121-054327 --bisect bisects/20261121-091500-sglang > repro.py
    python launch/export.py runs/20261121-054327 --server > repro.py
    python launch/export.py configs/cpu/quickstart.toml --run.steps 2 > repro.py

The top of the file says how to run it, what was expected and what was found, which command was run, what the bisect
answered and what `python -m sglang.check_env` prints. The program has the run's model, mesh, engine arguments and
weight sync, and fails as the run did, with the same exit code. What failed in code that is not in the file is done on
purpose ("THE FAULT"); --arm control leaves that out and must pass. --server: the file starts SGLang's server by its
command line and speaks HTTP to it, instead of using sglang.Engine. --bisect FOLDER: of a finished bisect; not needed
for a run that a bisect made. TOML files, --section.key VALUE, --nnodes and --nproc-per-node are as for launch/ppo.py
--dry-run. Exit codes: 0 written, 2 the command line or config is wrong.
"""

import sys

import _checkout

_checkout.use()

from harness.runtime.errors import report_user_error
from harness.runtime.events import working
from harness.runtime.installed import as_typed
from harness.tools import environments
from harness.tools.command_line import exit_with


def main(arguments: list[str]) -> int:
    """Return the exit code."""
    if {"-h", "--help"} & set(arguments):
        print(as_typed(__doc__))
        return 0
    environments.need("torch", "msgspec", "jinja2", "packaging", "psutil")
    with working("importing packages", importing=True):
        from harness.tools.export.evidence import gather
        from harness.tools.export.program import check_subject, render
        from harness.tools.export.subject import read_subject

    try:
        words, server, bisect = own_options(arguments)
        if not words:
            raise ValueError("give a TOML file or a run directory, such as runs/20261121-054327.")
        subject = read_subject(words)
        check_subject(subject, server)  # before the evidence, which takes seconds
        with working("gathering what an issue needs"):
            text = render(subject, gather(subject, bisect), server)
    except (ValueError, OSError) as error:
        return report_user_error(error, rank=0)
    if subject.unknown_keys:
        named = ", ".join(subject.unknown_keys)
        print(f"warning: this version does not know these keys of its config.toml: {named}", file=sys.stderr)
    sys.stdout.write(text)
    return 0


def own_options(arguments: list[str]) -> tuple[list[str], bool, str]:
    """Return the words without the options of this script, whether --server is given, and --bisect's folder."""
    words, bisect = [each for each in arguments if each != "--server"], ""
    if given := [each for each in words if each.partition("=")[0] in ("--out", "--output", "-o")]:
        raise ValueError(f"leave {given[0]} out: the file goes to standard output; end the command with > repro.py.")
    if "--bisect" in words:
        at = words.index("--bisect")
        if len(words) == at + 1:
            raise ValueError("--bisect needs the folder of a bisect, such as bisects/20261121-091500-sglang.")
        bisect = words[at + 1]
        words[at : at + 2] = []
    return words, "--server" in arguments, bisect


if __name__ == "__main__":
    exit_with(main, sys.argv[1:])
