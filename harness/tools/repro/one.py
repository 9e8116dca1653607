"""One case, run and told."""

import signal
import sys
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

from harness.runtime.errors import UnsupportedEnvironment
from harness.tools.repro import requirements, runner
from harness.tools.repro.case import Case, Variant
from harness.tools.repro.result import make_result, write_result
from harness.tools.repro.telling import differs
from harness.tools.repro.variant import CANNOT
from harness.tools.repro.verdict import Outcome, Verdict, decisive, judge, judge_twin, said


def run(
    slug: str, case: Case, *, control: bool = False, seconds: float | None = None, folder: Path | None = None
) -> int:
    """Run both variants, or the control alone, print what is proven, and return its exit code.

    seconds: a limit for each variant, if below the case's own. folder: where the result is written.
    """
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))  # as Ctrl-C does: what runs is ended first
    case = replace(case, seconds=min(case.seconds, seconds or case.seconds))
    print(f"{slug}: {case.title}\n{differs(case)}", flush=True)
    outcomes: dict[Variant, Outcome] = {}
    verdict = _verdict(slug, case, control, outcomes)
    print(f"\n{verdict.kind}: {verdict.sentence}")
    if folder:
        facts = {"device": requirements.device(case), "versions": requirements.versions()}
        write_result(folder, make_result(slug, case, verdict, outcomes, **facts))  # type: ignore[arg-type]
    return verdict.exit_code


def _verdict(slug: str, case: Case, control: bool, outcomes: dict[Variant, Outcome]) -> Verdict:
    try:
        requirements.check(case)
    except UnsupportedEnvironment as error:
        return Verdict(kind="cannot run here", sentence=str(error))
    variants: tuple[Variant, ...] = ("healthy",) if control else ("broken", "healthy")
    for variant in variants:
        outcomes[variant] = runner.run(slug, case, variant)
        print(f"\n{variant}: {outcomes[variant].how()}, {outcomes[variant].seconds:.1f} s")
        print("\n".join(f"  | {line}" for line in decisive(case, outcomes[variant].output)), flush=True)
        if reason := said(outcomes[variant], CANNOT):
            return Verdict(kind="cannot run here", sentence=reason)
    return _judged(case, outcomes)


def _judged(case: Case, outcomes: Mapping[Variant, Outcome]) -> Verdict:
    if "broken" not in outcomes:
        return judge_twin(case, outcomes["healthy"])
    return judge(case, outcomes["broken"], outcomes["healthy"])
