"""Reproduce a known failure with a minimal program, next to a control run that passes.

    python launch/repro.py list [--needs cpu one_gpu several_gpus hosts] [--no-engine]
    python launch/repro.py show NAME
    python launch/repro.py run NAME... | --all [--needs CLASS...] [--no-engine]

NAME is the name of a case, of a failure that launch/diagnose.py prints, or the number of an issue that the catalogue
links, such as 14178. The two variants of a case differ in one thing, which is printed. They run one after the other,
and all processes that they start are ended.

Exit codes of run: 1 reproduced; 0 not reproduced, because this version has it fixed or never had it; 125 the case
cannot run here, or proves nothing because the control failed too; 2 the command line is wrong. Of several cases: 1 if
any was reproduced, else 125 if any could not run or proved nothing, else 0.
"""

import argparse
import sys

import _checkout

_checkout.use()

from harness.config.layers import ConfigError
from harness.runtime.errors import report_user_error
from harness.runtime.installed import as_typed
from harness.tools import environments
from harness.tools.command_line import Parser, exit_with
from harness.tools.hosts.host_plan import visible_gpus
from harness.tools.repro.case import GPUS, Case, UnknownCase, all_cases, describe, find

COMMANDS = ("list", "show", "run")


def main(arguments: list[str]) -> int:
    """Return the exit code."""
    try:
        if arguments and not arguments[0].startswith("-") and arguments[0] not in COMMANDS:
            name, commands = arguments[0], ", ".join(COMMANDS)
            raise ConfigError(f"{name} is none of {commands}; to reproduce a failure: launch/repro.py run {name}")
        options = parser().parse_args(arguments)
        environments.need("psutil")  # the cases do
        return int(options.do(options))
    except (UnknownCase, ConfigError) as error:
        return report_user_error(error, rank=0)


def parser() -> argparse.ArgumentParser:
    prog, description = as_typed("launch/repro.py"), as_typed(__doc__ or "")
    made = Parser(prog=prog, description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = made.add_subparsers(dest="command", required=True)
    chosen = Parser(add_help=False)
    chosen.add_argument(
        "--needs", nargs="+", choices=tuple(GPUS), default=tuple(GPUS), help="only cases of these classes"
    )
    chosen.add_argument(
        "--no-engine", action="store_true", help="only cases without an engine: seconds, or a minute for a true size"
    )
    command = commands.add_parser("list", parents=[chosen], help="all cases, or some of them")
    command.set_defaults(do=show_list)
    command = commands.add_parser("show", help="show what a case does, and where it was seen")
    command.add_argument("name", metavar="NAME")
    command.set_defaults(do=show)
    command = commands.add_parser("run", parents=[chosen], help="reproduce failures")
    command.add_argument("names", nargs="*", metavar="NAME")
    command.add_argument("--all", action="store_true", help="all cases, or those of --needs and --no-engine")
    command.set_defaults(do=run)
    return made


def chosen_cases(options: argparse.Namespace) -> list[Case]:
    """Return the cases of --needs and --no-engine."""
    cases = all_cases().values()
    return [case for case in cases if case.needs in options.needs and not (options.no_engine and case.engine)]


def show_list(options: argparse.Namespace) -> int:
    for case in chosen_cases(options):
        print(f"{case.slug:<32} {case.needs:<13} {'engine' if case.engine else '':<7} {case.title}")
    return 0


def show(options: argparse.Namespace) -> int:
    """Print one case, or all cases of a failure or of an issue."""
    print(as_typed("\n\n".join(describe(case) for case in find(options.name))))
    return 0


def run(options: argparse.Namespace) -> int:
    from harness.tools.repro import run_cases

    if bool(options.names) == options.all:
        raise ConfigError("give either names of cases or --all; `launch/repro.py list` shows the names.")
    cases = chosen_cases(options) if options.all else [case for name in options.names for case in find(name)]
    if not cases:
        raise ConfigError("no case is of these --needs with --no-engine; `launch/repro.py list` shows them all.")
    gpus = visible_gpus()
    with run_cases.sharing_imports(cases, gpus) as server:
        verdicts = [run_cases.run_case(case, gpus, server) for case in cases]
    if len(cases) > 1:
        print(run_cases.count_verdicts(verdicts))
    return run_cases.exit_code_of(verdicts)


if __name__ == "__main__":
    exit_with(main, sys.argv[1:])
