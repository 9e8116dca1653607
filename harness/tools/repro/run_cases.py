"""Run both variants of a case, judge them and show the verdict.

Each variant runs as a separate process tree, and no process of it is left afterwards. Where its case allows it, the
variant is forked from a process that has done the imports (shared_imports.py).
"""

import importlib.metadata
import os
import re
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import get_args

from packaging.requirements import Requirement

from harness.config.layers import ConfigError
from harness.runtime.errors import CANNOT_RUN_HERE, UnsupportedEnvironment
from harness.runtime.events import working
from harness.runtime.fork_server import ForkServer, ServerGone
from harness.tools.full_size.compare import environment_of
from harness.tools.hosts import kernel
from harness.tools.repro import cases, shared_imports
from harness.tools.repro.case import CANNOT, GPUS, Case, Variant
from harness.tools.repro.forked_tree import run_forked_tree
from harness.tools.run_tree import SupervisorKilled, run_tree

REPOSITORY = Path(__file__).resolve().parents[3]
LAUNCHER_VARIABLES = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
LINGER_SECONDS = 15.0
"""Time for a variant to end once it has shown its signature: many a dead scheduler leaves a parent that waits
forever."""
SHOWN_LINES, LINE_WIDTH = 10, 200
EXIT_CODES = {
    "reproduced": 1,
    "not reproduced": 0,
    "cannot run here": CANNOT_RUN_HERE,
    "proves nothing": CANNOT_RUN_HERE,  # the control failed too, or the broken variant failed in another way
}


class VariantOver(Exception):
    """The variant has shown its signature without ending, or has used up its time."""


@dataclass(frozen=True, kw_only=True)
class VariantOutcome:
    """How one variant ended."""

    exit_code: int | None  # negative for a signal; None if it was still running at its time limit
    output: str  # standard output and standard error of all its processes
    seconds: float

    def ending(self) -> str:
        """Describe how it ended."""
        return f"no end after {self.seconds:.0f} s" if self.exit_code is None else f"exit code {self.exit_code}"


@contextmanager
def sharing_imports(chosen: Sequence[Case], gpus: Sequence[str]) -> Iterator[ForkServer | None]:
    """Have a server for run_case() in this block, if cases that can run here would use it."""
    able = [case for case in chosen if shared_imports.may_fork(case, gpus) and not _refusal(case, gpus)]
    modules = shared_imports.modules_of(able)
    if not modules:
        yield None
        return
    environment = variant_environment(tempfile.gettempdir(), gpus)
    server = ForkServer.start(modules, environment)
    try:
        yield server
    finally:
        server.close()


def _refusal(case: Case, gpus: Sequence[str]) -> str:
    try:
        check_requirements(case, gpus)
    except UnsupportedEnvironment as error:
        return str(error)
    return ""


def run_case(case: Case, gpus: Sequence[str], server: ForkServer | None = None) -> str:
    """Run both variants, print everything on the way, and return the verdict (one of EXIT_CODES).

    gpus: the GPUs that the case may use, as CUDA_VISIBLE_DEVICES names them. server: from sharing_imports().
    """
    print(f"{case.slug}: {case.title}\n{case.difference()}", flush=True)
    try:
        check_requirements(case, gpus)
        for release in {*case.releases} - {installed_version("sglang")}:
            environment_of(release)  # here, as what a variant prints is only shown at its end
        broken, healthy = (run_and_show(case, variant, gpus, server) for variant in get_args(Variant))
        verdict, sentence = judge(case, broken, healthy)
    except (UnsupportedEnvironment, ConfigError) as error:
        verdict, sentence = "cannot run here", str(error)
    except SupervisorKilled as error:
        verdict, sentence = "proves nothing", str(error)
    print(f"\n{verdict}: {sentence}\n", flush=True)
    return verdict


def run_and_show(case: Case, variant: Variant, gpus: Sequence[str], server: ForkServer | None = None) -> VariantOutcome:
    """Run one variant, and print how it ended. Raise UnsupportedEnvironment if it says that it cannot run here."""
    with working(f"running the {variant} variant of {case.slug}"):
        outcome = run_variant(case, variant, gpus, case.timeout_seconds, server)
    lines = "".join(f"\n  | {line}" for line in decisive_lines(case, outcome.output))
    print(f"\n{variant}: {outcome.ending()}, {outcome.seconds:.1f} s{lines}", flush=True)
    refusal = re.search(rf"^{CANNOT}(.*)", outcome.output, re.MULTILINE)
    if refusal and outcome.exit_code == CANNOT_RUN_HERE:
        raise UnsupportedEnvironment(refusal[1])
    return outcome


def judge(case: Case, broken: VariantOutcome, healthy: VariantOutcome) -> tuple[str, str]:
    """Return the verdict (one of EXIT_CODES), and why."""
    if reason := _problem(case, healthy):
        return "proves nothing", f"the healthy control failed too ({reason}), so the repro proves nothing."
    matches = [re.search(each, broken.output) for each in case.signature]
    if all(matches):
        shown = ", ".join(f'"{" ".join(match[0].split())}"' for match in matches if match)
        return "reproduced", f"{shown}; its control passed."
    if reason := _problem(case, broken):
        return "proves nothing", f"the broken variant failed in another way: {reason}."
    return "not reproduced", "both variants pass: it is fixed in this version, or never was in it."


def _problem(case: Case, outcome: VariantOutcome) -> str:
    """Return why a variant did not pass, empty if it did."""
    if outcome.exit_code != 0:
        return outcome.ending()
    found = next((match for each in case.signature if (match := re.search(each, outcome.output))), None)
    return f'it shows "{found[0]}"' if found else ""


def decisive_lines(case: Case, output: str) -> list[str]:
    """Return the first match of each pattern with the lines around it, else the last lines; at most SHOWN_LINES."""
    lines = [line.strip()[:LINE_WIDTH] for line in output.splitlines() if line.strip()]
    matches = ((n for n, line in enumerate(lines) if re.search(each, line)) for each in case.signature)
    near = {n + offset for each in matches for n in islice(each, 1) for offset in (-1, 0, 1)}
    return [line for n, line in enumerate(lines) if n in near][:SHOWN_LINES] or lines[-SHOWN_LINES:]


def run_variant(
    case: Case, variant: Variant, gpus: Sequence[str], seconds: float, server: ForkServer | None = None
) -> VariantOutcome:
    """Run one variant to its end, at most LINGER_SECONDS after it has shown its whole signature."""
    with tempfile.TemporaryDirectory(prefix="repro-") as folder:
        log = Path(folder) / "output"
        began = time.monotonic()
        deadlines = [began + seconds]

        def tick() -> None:
            if min(deadlines) < time.monotonic():
                raise VariantOver
            if len(deadlines) == 1:
                output = log.read_text(encoding="utf-8", errors="replace")
                if all(re.search(each, output) for each in case.signature):
                    deadlines.append(time.monotonic() + LINGER_SECONDS)

        code = None
        with log.open("wb") as output, suppress(VariantOver):
            command, environment = program_command(case, variant), variant_environment(folder, gpus)
            ended = None
            if server and shared_imports.may_fork(case, gpus):
                name, words = shared_imports.task_of(case, variant)
                with suppress(ServerGone):
                    ended = run_forked_tree(
                        server, name, words, output=output, cwd=REPOSITORY, env=environment, tick=tick
                    )
            if not ended:
                ended = run_tree(command, output=output, cwd=REPOSITORY, env=environment, tick=tick)
            code = ended.code
        taken = time.monotonic() - began
        return VariantOutcome(exit_code=code, output=log.read_text(encoding="utf-8", errors="replace"), seconds=taken)


def program_command(case: Case, variant: Variant) -> list[str]:
    """Return the command of a variant, to run in the repository's root."""
    return [sys.executable, "-m", cases.__name__, case.slug, variant]


def variant_environment(folder: str, gpus: Sequence[str]) -> dict[str, str]:
    """Return this environment without a launcher's variables, which would make the variant a rank of its run."""
    launcher = [name for name in os.environ if name.startswith(("TORCHELASTIC_", "HARNESS_"))]
    kept = {name: value for name, value in os.environ.items() if name not in (*launcher, *LAUNCHER_VARIABLES)}
    path = os.pathsep.join([str(REPOSITORY), *filter(None, [kept.get("PYTHONPATH")])])
    visible = {"CUDA_VISIBLE_DEVICES": ",".join(gpus)} if gpus else {}
    return kept | {"PYTHONPATH": path, "TMPDIR": folder} | visible


def check_requirements(case: Case, gpus: Sequence[str]) -> None:
    """Raise UnsupportedEnvironment if the case cannot run here, before anything heavy starts."""
    if (needed := GPUS[case.needs]) > len(gpus):
        raise UnsupportedEnvironment(f"it needs {needed} GPU(s), and this process can use {len(gpus)}.")
    if case.needs == "hosts" and (refusal := kernel.refusal()):
        raise UnsupportedEnvironment(f"it needs hosts in namespaces, which this machine refuses ({refusal}).")
    for requirement in map(Requirement, (*case.requires, *(["sglang"] if case.engine else []))):
        version = installed_version(requirement.name)
        if version is None or not requirement.specifier.contains(version, prereleases=True):
            raise UnsupportedEnvironment(f"it needs {requirement}, and {version or 'none'} is installed.")


def installed_version(package: str) -> str | None:
    """Return the version of an installed package."""
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


def exit_code_of(verdicts: Sequence[str]) -> int:
    """Return 1 if any case was reproduced, else 125 if any could not run or proved nothing, else 0."""
    codes = {EXIT_CODES[verdict] for verdict in verdicts}
    return 1 if 1 in codes else max(codes, default=0)


def count_verdicts(verdicts: Sequence[str]) -> str:
    """Return how many cases there are of each verdict."""
    counts = Counter(verdicts)
    return ", ".join(f"{counts[kind]} {kind}" for kind in EXIT_CODES if counts[kind])
