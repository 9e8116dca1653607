"""The program sglang-rl-harness: the scripts of launch/ that need no checkout, as commands."""

import argparse
import ast
import sys
from pathlib import Path

from harness.runtime.installed import COMMANDS, PROGRAM
from harness.tools.environments import REPOSITORY
from harness.tools.interrupts import become

SCRIPTS = {name: REPOSITORY / "launch" / f"{script}.py" for name, script in COMMANDS.items()}


def main() -> None:
    """Become the script of the command that is asked for. Exit with 2 if there is none."""
    parser = argparse.ArgumentParser(
        prog=PROGRAM,
        usage="%(prog)s COMMAND ...",
        description="Tools for reinforcement learning with SGLang; COMMAND --help says more.",
        formatter_class=argparse.RawDescriptionHelpFormatter,
        epilog="commands:\n" + "\n".join(f"  {name:<13} {summary(script)}" for name, script in SCRIPTS.items()),
    )
    parser.add_argument("command", metavar="COMMAND", choices=COMMANDS, help=argparse.SUPPRESS)
    command = parser.parse_args(sys.argv[1:2]).command
    become([sys.executable, str(SCRIPTS[command]), *sys.argv[2:]])


def summary(script: Path) -> str:
    """Return the first sentence of a script."""
    text = ast.get_docstring(ast.parse(script.read_text(encoding="utf-8"))) or ""
    return text.partition("\n\n")[0].replace("\n", " ")
