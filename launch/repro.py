"""Have a known failure on purpose: the smallest real thing that fails that way, beside a control that passes.

    python launch/repro.py list [--needs cpu one_gpu several_gpus hosts] [--no-engine] [--names]
    python launch/repro.py show SLUG
    python launch/repro.py run SLUG... | --all [--needs CLASS...] [--no-engine] [--control] [--seconds N] [--json FOLDER]
    python launch/repro.py record FOLDER [--date YYYY-MM-DD]

The two variants differ in one thing, which is printed, and run one after the other in sessions of their own; whatever
they started is ended. --control runs the healthy one alone. Several cases run side by side as far as there are GPUs for
them. record writes what was seen into the catalogue of failures.

Exit codes of run: 1 the failure was reproduced (--control: the control failed); 0 it was not, since this version has it fixed,
or never had it (--control: the control passed); 125 it cannot run here, or what ran proves nothing (the control failed as well), with
the reason; 2 a mistake in what was asked. Of several cases: 1 if any was reproduced, else 125 if any could not run or proved
nothing, else 0. On a machine with GPUs, all that is worth a run there:

    python launch/repro.py run --all --needs one_gpu several_gpus --seconds 100 --json FOLDER
"""

import argparse
import datetime
import sys
import tempfile
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # run from a checkout, installed or not

from harness.config.layers import ConfigError
from harness.config.options import Parser
from harness.runtime.errors import report_user_error
from harness.runtime.exit import exit_with
from harness.tools import environments
from harness.tools.repro import requirements, telling
from harness.tools.repro.case import GPUS, Case, UnknownCase, entry_of, load, slugs
from harness.tools.repro.result import as_seen, read_result, record


def main(arguments: list[str]) -> int:
    """Everything before a run is instant."""
    try:
        asked = parser().parse_args(arguments)
        return int(asked.do(asked))
    except (UnknownCase, telling.WrongRequest, ConfigError) as error:
        return report_user_error(error, rank=0)


def parser() -> argparse.ArgumentParser:
    made = Parser(prog="launch/repro.py", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = made.add_subparsers(dest="command", required=True)
    chosen = Parser(add_help=False)
    chosen.add_argument("--needs", nargs="+", choices=tuple(GPUS), default=tuple(GPUS), help="only these classes")
    chosen.add_argument("--no-engine", action="store_true", help="only those without an engine, which take seconds")
    listing = commands.add_parser("list", parents=[chosen], help="all cases, or some of them")
    listing.add_argument("--names", action="store_true", help="nothing but the slugs")
    listing.set_defaults(do=show_list)
    showing = commands.add_parser("show", help="what one case does, and what was seen of it")
    showing.add_argument("slug")
    showing.set_defaults(do=lambda asked: print(telling.described(asked.slug, load(asked.slug))) or 0)
    running = commands.add_parser("run", parents=[chosen], help="have failures")
    running.add_argument("slugs", nargs="*", metavar="SLUG")
    running.add_argument("--all", action="store_true", help="all cases, or those of --needs and --no-engine")
    running.add_argument("--control", action="store_true", help="run the healthy variant alone")
    running.add_argument("--seconds", type=float, help="end each variant after so many, if the case does not earlier")
    running.add_argument("--json", type=Path, metavar="FOLDER", help="write SLUG.json there for each case")
    running.set_defaults(do=run)
    recording = commands.add_parser("record", help="write results of run --json into the catalogue")
    recording.add_argument("folder", type=Path)
    recording.add_argument("--date", default=datetime.date.today().isoformat(), help="on which they were had")
    recording.set_defaults(do=record_all)
    return made


def chosen_cases(asked: argparse.Namespace) -> dict[str, Case]:
    """Those of --needs and --no-engine."""
    cases = {slug: load(slug) for slug in slugs()}
    return {slug: c for slug, c in cases.items() if c.is_of(asked.needs) and not (asked.no_engine and c.engine)}


def show_list(asked: argparse.Namespace) -> int:
    for slug, case in chosen_cases(asked).items():
        print(slug if asked.names else telling.in_one_line(slug, case))
    return 0


def run(asked: argparse.Namespace) -> int:
    environments.need("psutil")
    from harness.tools.repro import one, session

    if bool(asked.slugs) == asked.all:
        raise telling.WrongRequest("run takes either slugs or --all; `list` shows what there is.")
    cases = chosen_cases(asked) if asked.all else {slug: load(slug) for slug in asked.slugs}
    if len(cases) == 1:
        return one.run(*next(iter(cases.items())), control=asked.control, seconds=asked.seconds, folder=asked.json)
    options = [*(["--control"] if asked.control else []), *(["--seconds", str(asked.seconds)] if asked.seconds else [])]
    with tempfile.TemporaryDirectory(prefix="repro-results-") as unasked:
        results = session.run_all(cases, asked.json or Path(unasked), requirements.gpus(), options)
    print(session.counted(results))
    return session.exit_code(results)


def record_all(asked: argparse.Namespace) -> int:
    for file in sorted(asked.folder.glob("*.json")):
        result = read_result(asked.folder, file.stem)
        entry = entry_of(result.slug, load(result.slug)).slug
        seen = as_seen(result, asked.date)
        done = "left out, since it shows nothing" if seen is None else "recorded" if record(entry, seen) else "known"
        print(f"{result.slug}: {result.verdict}: {done} ({entry}.toml)")
    return 0


if __name__ == "__main__":
    exit_with(main, sys.argv[1:])
