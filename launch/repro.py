"""Reproduce a known failure with a minimal program, next to a control run that passes.

    python launch/repro.py list [--needs cpu one_gpu several_gpus hosts] [--no-engine] [--names]
    python launch/repro.py show SLUG
    python launch/repro.py run SLUG... | --all [--needs CLASS...] [--no-engine] [--control] [--seconds N] [--json FOLDER]
    python launch/repro.py record FOLDER [--date YYYY-MM-DD]

The two variants differ in one thing, which is printed, and run one after the other; all processes that they start are ended.
--control runs the healthy one alone. record writes results into the catalogue of failures.

Exit codes of run: 1 the failure was reproduced (--control: the control failed); 0 it was not, since this version has it fixed,
or never had it (--control: the control passed); 125 it cannot run here, or what ran proves nothing (the control failed too),
with the reason; 2 the command line is wrong. Of several cases: 1 if any was reproduced, else 125 if any could not run or
proved nothing, else 0. On a machine with GPUs, all that is worth a run there:

    python launch/repro.py run --all --needs one_gpu several_gpus --seconds 100 --json FOLDER
"""

import argparse
import datetime
import signal
import sys
from pathlib import Path

import _checkout

_checkout.use()

from harness.config.layers import ConfigError
from harness.runtime.errors import report_user_error
from harness.tools import environments
from harness.tools.command_line import Parser, exit_with
from harness.tools.repro.case import GPUS, Case, UnknownCase, all_cases, describe, load


def main(arguments: list[str]) -> int:
    """Return the exit code."""
    try:
        options = parser().parse_args(arguments)
        return int(options.do(options))
    except (UnknownCase, ConfigError) as error:
        return report_user_error(error, rank=0)


def parser() -> argparse.ArgumentParser:
    made = Parser(prog="launch/repro.py", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = made.add_subparsers(dest="command", required=True)
    chosen = Parser(add_help=False)
    chosen.add_argument("--needs", nargs="+", choices=tuple(GPUS), default=tuple(GPUS), help="only these classes")
    chosen.add_argument("--no-engine", action="store_true", help="only those without an engine, which take seconds")
    command = commands.add_parser("list", parents=[chosen], help="all cases, or some of them")
    command.add_argument("--names", action="store_true", help="only the slugs")
    command.set_defaults(do=show_list)
    command = commands.add_parser("show", help="what one case does, and when it was seen")
    command.add_argument("slug")
    command.set_defaults(do=lambda options: print(describe(load(options.slug))) or 0)
    command = commands.add_parser("run", parents=[chosen], help="reproduce failures")
    command.add_argument("slugs", nargs="*", metavar="SLUG")
    command.add_argument("--all", action="store_true", help="all cases, or those of --needs and --no-engine")
    command.add_argument("--control", action="store_true", help="run the healthy variant alone")
    command.add_argument("--seconds", type=float, help="time limit of each variant, if below the case's own")
    command.add_argument("--json", type=Path, metavar="FOLDER", help="write SLUG.json there for each case")
    command.set_defaults(do=run)
    command = commands.add_parser("record", help="write results of run --json into the catalogue")
    command.add_argument("folder", type=Path)
    command.add_argument("--date", default=datetime.date.today().isoformat(), help="the date of the results")
    command.set_defaults(do=record_all)
    return made


def chosen_cases(options: argparse.Namespace) -> list[Case]:
    """Return those of --needs and --no-engine."""
    cases = all_cases().values()
    return [case for case in cases if case.is_of(options.needs) and not (options.no_engine and case.engine)]


def show_list(options: argparse.Namespace) -> int:
    for case in chosen_cases(options):
        needs = f"{case.needs}, one_gpu" if case.on_gpu else case.needs
        line = f"{case.slug:<32} {needs:<13} {'engine' if case.engine else '':<7} {case.title}"
        print(case.slug if options.names else line)
    return 0


def run(options: argparse.Namespace) -> int:
    environments.need("psutil")
    from harness.tools.repro import run_cases

    if bool(options.slugs) == options.all:
        raise ConfigError("run takes either slugs or --all; `list` shows what there is.")
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))  # as Ctrl-C: ends what runs first
    cases = chosen_cases(options) if options.all else [load(slug) for slug in options.slugs]
    gpus, results = run_cases.visible_gpus(), []
    for case in cases:
        results.append(run_cases.run_case(case, gpus, options.control, options.seconds))
        if options.json:
            run_cases.write_result(options.json, results[-1])
    if len(cases) > 1:
        print(run_cases.count_verdicts(results))
    return run_cases.exit_code_of(results)


def record_all(options: argparse.Namespace) -> int:
    environments.need("psutil")
    from harness.tools.repro.run_cases import record

    for file in sorted(options.folder.glob("*.json")):
        print(record(file, options.date))
    return 0


if __name__ == "__main__":
    exit_with(main, sys.argv[1:])
