"""Have a known failure on purpose: the smallest real thing that fails that way, beside a twin that passes.

    python launch/repro.py list [--needs cpu one_gpu several_gpus hosts] [--no-engine] [--names]
    python launch/repro.py show SLUG
    python launch/repro.py run SLUG [--twin] [--json]

The two variants differ in one thing, which is printed, and run one after the other in sessions of their own; whatever
they started is ended. --twin runs the healthy one alone. Exit codes of run: 1 the failure was reproduced (--twin: the
twin failed); 0 it was not, since this version has it fixed, or never had it (--twin: the twin passed); 125 it cannot run
here, or what ran proves nothing, with the reason; 2 a mistake in what was asked. All cases of a machine with two GPUs, with
the results in $OUT, a file a case:

    python launch/repro.py list --needs one_gpu --names | xargs -P 2 --process-slot-var=CUDA_VISIBLE_DEVICES -I{} \\
        sh -c 'timeout 300 python launch/repro.py run {} --json > $OUT/{}.json'
    for s in $(python launch/repro.py list --needs several_gpus --names); do
        timeout 300 python launch/repro.py run $s --json > $OUT/$s.json; done
"""

import argparse
import json
import signal
import sys
from dataclasses import asdict
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # run from a checkout, installed or not

from harness.failures.entries import catalogue
from harness.mistake import CannotRunHere, say_mistake
from harness.repro import requirements, runner
from harness.repro.case import GPUS, Case, UnknownCase, load, module_name, slugs
from harness.repro.verdict import Outcome, Verdict, decisive, judge, passes, said, why_not
from harness.repro.variant import CANNOT


def main(arguments: list[str]) -> int:
    """Everything before a run is instant."""
    asked = parser().parse_args(arguments)
    try:
        if asked.command == "list":
            return show_list(set(asked.needs), asked.no_engine, asked.names)
        case = load(asked.slug)
        return show(asked.slug, case) if asked.command == "show" else run(asked.slug, case, asked.twin, asked.json)
    except UnknownCase as error:
        return say_mistake(error, rank=0)


def parser() -> argparse.ArgumentParser:
    made = argparse.ArgumentParser(
        prog="launch/repro.py", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    commands = made.add_subparsers(dest="command", required=True)
    listing = commands.add_parser("list", help="all cases, or some of them")
    listing.add_argument("--needs", nargs="+", choices=tuple(GPUS), default=tuple(GPUS), help="only these classes")
    listing.add_argument("--no-engine", action="store_true", help="only those that take seconds")
    listing.add_argument("--names", action="store_true", help="nothing but the slugs")
    commands.add_parser("show", help="what one case does").add_argument("slug")
    running = commands.add_parser("run", help="have one failure")
    running.add_argument("slug")
    running.add_argument("--twin", action="store_true", help="run the healthy variant alone")
    running.add_argument("--json", action="store_true", help="print one JSON object")
    return made


def show_list(needs: set[str], no_engine: bool, names: bool) -> int:
    for slug in slugs():
        case = load(slug)
        if case.needs in needs and not (no_engine and case.engine):
            print(slug if names else f"{slug:<32} {case.needs:<13} {'engine' if case.engine else '':<7} {case.title}")
    return 0


def show(slug: str, case: Case) -> int:
    entry = catalogue().get(case.failure or slug)
    seconds = f"at most {case.seconds:.0f} s a variant"
    print(f"{slug}: {case.title}\nneeds: {', '.join((case.needs, *case.requires))}; {seconds}\n{differs(case)}")
    for each in case.signature:
        print(f"signature: {each}")
    if case.number:
        print(f"number: {case.number.name} > {case.number.broken_above:g}; twin < {case.number.healthy_below:g}")
    if entry:
        print("\n".join([f"cause: {entry.cause.strip()}", f"fix: {entry.fix.strip()}", *entry.links]))
    print(f"by hand: python -m {module_name(slug)} broken")
    return 0


def differs(case: Case) -> str:
    return f"differs in: {case.broken} (broken) | {case.healthy} (healthy)"


def run(slug: str, case: Case, twin: bool, as_json: bool) -> int:
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))  # as Ctrl-C does: what runs is ended first
    outcomes: dict[str, Outcome] = {}
    if not as_json:
        print(f"{slug}: {case.title}\n{differs(case)}", flush=True)
    try:
        requirements.check(case)
    except CannotRunHere as error:
        return tell(slug, case, outcomes, Verdict(kind="cannot run here", sentence=str(error)), as_json)
    for variant in ("healthy",) if twin else ("broken", "healthy"):
        outcomes[variant] = runner.run(slug, case, "healthy" if variant == "healthy" else "broken")
        if not as_json:
            print(f"\n{variant}: {outcomes[variant].how()}, {outcomes[variant].seconds:.1f} s")
            print("\n".join(f"  | {line}" for line in decisive(case, outcomes[variant].output)), flush=True)
        if said(outcomes[variant], CANNOT):
            break
    last = list(outcomes.values())[-1]
    return tell(slug, case, outcomes, judge(case, outcomes.get("broken", last), last), as_json, alone=twin)


def tell(
    slug: str, case: Case, outcomes: dict[str, Outcome], verdict: Verdict, as_json: bool, alone: bool = False
) -> int:
    """The verdict, and the exit code it means."""
    code, sentence = verdict.exit_code, f"{verdict.kind}: {verdict.sentence}"
    if alone and verdict.kind != "cannot run here":
        healthy = outcomes["healthy"]
        code = 0 if passes(case, healthy) else 1
        sentence = "the twin passed" if code == 0 else f"the twin failed: {why_not(case, healthy)}."
    if as_json:
        told = {name: asdict(each) | {"output": decisive(case, each.output)} for name, each in outcomes.items()}
        facts = {"slug": slug, "verdict": verdict.kind, "exit_code": code, "sentence": sentence}
        print(json.dumps(facts | {"versions": requirements.versions(), "variants": told}, indent=1))
    else:
        print(f"\n{sentence}")
    return code


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
