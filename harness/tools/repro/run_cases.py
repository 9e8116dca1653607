"""Run both variants of a case, judge them and show the verdict.

Each variant runs as a separate process tree, and no process of it is left afterwards. Where its case allows it, the
variant is forked from a process that has done the imports (shared_imports.py).
"""

import importlib.metadata
import os
import re
import sys
import tempfile
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from itertools import islice
from pathlib import Path
from typing import Any, get_args

from packaging.requirements import Requirement

from harness.config.mistakes import ConfigError
from harness.runtime.errors import CANNOT_RUN_HERE, UnsupportedEnvironment
from harness.runtime.events import working
from harness.runtime.fork_server import ForkServer, ServerGone
from harness.tools.hosts import kernel
from harness.tools.repro import cases, shared_imports
from harness.tools.repro.case import GPUS, Case, Variant
from harness.tools.repro.forked_tree import run_forked_tree
from harness.tools.run_tree import Ended, run_tree
from harness.tools.trial.environment import Environment, of_release
from harness.tools.trial.trial import Outcome, Signature, Trial, run_trial

REPOSITORY = Path(__file__).resolve().parents[3]
LAUNCHER_VARIABLES = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
SHOWN_LINES, LINE_WIDTH = 10, 200
EXIT_CODES = {
    "reproduced": 1,
    "not reproduced": 0,
    "cannot run here": CANNOT_RUN_HERE,
    "proves nothing": CANNOT_RUN_HERE,  # the control failed too, or the broken variant failed in another way
}


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
    ended: list[Outcome] = []
    try:
        check_requirements(case, gpus)
        is_here = case.release in ("", installed_version("sglang"))
        environment = None if is_here else of_release(case.release)
        for variant in get_args(Variant):
            with working(f"running the {variant} variant of {case.slug}"):
                made, output = run_variant(case, variant, gpus, case.timeout_seconds, server, environment)
            lines = "".join(f"\n  | {line}" for line in decisive_lines(case, output))
            print(f"\n{variant}: {made.ending}, {made.seconds:.1f} s{lines}", flush=True)
            ended.append(made)
            if made.verdict == "skip":
                break
        verdict, sentence = judge(*ended)
    except (UnsupportedEnvironment, ConfigError) as error:
        verdict, sentence = "cannot run here", str(error)
    print(f"\n{verdict}: {sentence}\n", flush=True)
    return verdict


def judge(broken: Outcome, healthy: Outcome | None = None) -> tuple[str, str]:
    """Return the verdict (one of EXIT_CODES), and why. There is no healthy one if the broken one could not run."""
    last = healthy or broken
    if last.verdict == "skip":
        return "proves nothing" if last.may_pass else "cannot run here", last.reason
    if last.verdict != "good":
        return "proves nothing", f"the healthy control failed too ({last.reason}), so the repro proves nothing."
    if broken.verdict == "bad":
        return "reproduced", f"{broken.reason}; its control passed."
    if broken.verdict == "other":
        return "proves nothing", f"the broken variant failed in another way: {broken.reason}."
    return "not reproduced", "both variants pass: it is fixed in this version, or never was in it."


def decisive_lines(case: Case, output: str) -> list[str]:
    """Return the first match of each pattern with the lines around it, else the last lines; at most SHOWN_LINES."""
    lines = [line.strip()[:LINE_WIDTH] for line in output.splitlines() if line.strip()]
    matches = ((n for n, line in enumerate(lines) if re.search(each, line)) for each in case.signature)
    near = {n + offset for each in matches for n in islice(each, 1) for offset in (-1, 0, 1)}
    return [line for n, line in enumerate(lines) if n in near][:SHOWN_LINES] or lines[-SHOWN_LINES:]


def run_variant(
    case: Case,
    variant: Variant,
    gpus: Sequence[str],
    seconds: float,
    server: ForkServer | None = None,
    environment: Environment | None = None,
) -> tuple[Outcome, str]:
    """Run one variant to its end; return how it ended and its output.

    environment: of another release of SGLang.
    """

    def run(command: Sequence[str], **options: Any) -> Ended:
        if server and not environment and shared_imports.may_fork(case, gpus):
            with suppress(ServerGone):
                return run_forked_tree(server, *shared_imports.task_of(case, variant), **options)
        return run_tree(command, **options)

    with tempfile.TemporaryDirectory(prefix="repro-") as folder:
        trial = Trial(
            command=program_command(case, variant, environment),
            variables=variant_environment(folder, gpus, environment),
            cwd=REPOSITORY,
            folder=Path(folder),
            signature=Signature(words=case.signature),
            limit=seconds,
        )
        return run_trial(trial, run), trial.output()


def program_command(case: Case, variant: Variant, environment: Environment | None = None) -> list[str]:
    """Return the command of a variant, to run in the repository's root."""
    python = [environment.python, "-P"] if environment else [sys.executable]
    return [*python, "-m", cases.__name__, case.slug, variant]


def variant_environment(folder: str, gpus: Sequence[str], environment: Environment | None = None) -> dict[str, str]:
    """Return this environment without a launcher's variables, which would make the variant a rank of its run."""
    path = os.pathsep.join([str(REPOSITORY), *filter(None, [os.environ.get("PYTHONPATH")])])
    own = (
        environment.variables(cpu_mode=True, imports_harness=True)
        if environment
        else {**os.environ, "PYTHONPATH": path}
    )
    launcher = [name for name in own if name.startswith(("TORCHELASTIC_", "HARNESS_"))]
    kept = {name: value for name, value in own.items() if name not in (*launcher, *LAUNCHER_VARIABLES)}
    return kept | {"TMPDIR": folder} | ({"CUDA_VISIBLE_DEVICES": ",".join(gpus)} if gpus else {})


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
