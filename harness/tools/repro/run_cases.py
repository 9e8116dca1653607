"""Run cases: one and show it, or many side by side as far as there are GPUs for them.

Each variant is a process tree of its own, of which nothing is left when it has ended.
"""

import importlib.metadata
import os
import re
import shutil
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import CancelledError, ThreadPoolExecutor
from contextlib import contextmanager, suppress
from dataclasses import replace
from pathlib import Path

from harness.runtime.errors import CANNOT_RUN_HERE, UnsupportedEnvironment
from harness.tools.hosts import kernel
from harness.tools.process_tree import SupervisorKilled, run_tree
from harness.tools.repro.case import CANNOT, GPUS, Case, Variant
from harness.tools.repro.case_result import CaseResult, write_result
from harness.tools.repro.case_verdict import EXIT_CODES, CaseVerdict, VariantOutcome, decisive_lines, judge

REPOSITORY = Path(__file__).resolve().parents[3]
REPORTED = ("sglang", "torch", "transformers", "torch_memory_saver")
LAUNCHER_VARIABLES = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
LINGER_SECONDS = 15.0
"""Time for a variant to end once it has shown its signature: many a dead scheduler leaves a parent that waits forever."""


class VariantOver(Exception):
    """The variant has shown its signature without ending, or has used up its time."""


def run_case(
    slug: str,
    case: Case,
    gpus: Sequence[str],
    *,
    control: bool = False,
    timeout_seconds: float | None = None,
    show: Callable[[str], None] = print,
    stop: threading.Event | None = None,
) -> CaseResult:
    """Run both variants, or the control alone, and judge them.

    gpus: that it may use, as CUDA_VISIBLE_DEVICES names them. timeout_seconds: of each variant, if below the case's own.
    show: called with each piece of text for the user. stop: ends what runs, and raises CancelledError.
    """
    case = replace(case, timeout_seconds=min(case.timeout_seconds, timeout_seconds or case.timeout_seconds))
    show(f"{slug}: {case.title}\n{case.difference()}")
    outcomes: dict[Variant, VariantOutcome] = {}
    variants: tuple[Variant, ...] = ("healthy",) if control else ("broken", "healthy")
    try:
        check_requirements(case, gpus)
        for variant in variants:
            outcomes[variant] = outcome = run_variant(slug, case, variant, gpus, stop or threading.Event())
            lines = "".join(f"\n  | {line}" for line in decisive_lines(case, outcome.output))
            show(f"\n{variant}: {outcome.ending()}, {outcome.seconds:.1f} s{lines}")
            if outcome.exit_code == CANNOT_RUN_HERE and (reason := outcome.after(CANNOT)):
                raise UnsupportedEnvironment(reason)
        verdict = judge(case, outcomes)
    except UnsupportedEnvironment as error:
        verdict = CaseVerdict(kind="cannot run here", sentence=str(error))
    except SupervisorKilled as error:
        verdict = CaseVerdict(kind="proves nothing", sentence=str(error))
    show(f"\n{verdict.kind}: {verdict.sentence}")
    decisive = {name: decisive_lines(case, each.output) for name, each in outcomes.items()}
    return CaseResult(
        slug=slug,
        verdict=verdict.kind,
        exit_code=verdict.exit_code,
        sentence=verdict.sentence,
        device=device_of(case, gpus),
        versions=installed_versions(),
        variants={name: replace(each, output="\n".join(decisive[name])) for name, each in outcomes.items()},
    )


def run_cases(
    cases: Mapping[str, Case],
    folder: Path,
    gpus: Sequence[str],
    *,
    control: bool = False,
    timeout_seconds: float | None = None,
) -> dict[str, CaseResult]:
    """Run all cases, print a line for each, and write its result into the folder; return the results by slug.

    An engine takes a GPU where there is one; without GPUs the cases run one after the other. Those that take most GPUs
    start first, since one that waits for two would wait for all others.
    """
    free, stop = FreeGpus(gpus), threading.Event()

    def run(slug: str) -> CaseResult:
        with free.take(min(cases[slug].gpus(len(gpus)), len(gpus))) as taken:
            options = {"control": control, "timeout_seconds": timeout_seconds}
            result = run_case(slug, cases[slug], taken, show=lambda _: None, stop=stop, **options)  # type: ignore[arg-type]
        seconds = sum(each.seconds for each in result.variants.values())
        print(f"{result.verdict:<15} {slug:<32} {seconds:5.0f} s  {result.sentence}", flush=True)
        write_result(folder, result)
        return result

    order = sorted(cases, key=lambda slug: -cases[slug].gpus(len(gpus)))
    with ThreadPoolExecutor(max_workers=max(1, len(gpus)) + 1) as pool:
        try:
            return dict(sorted((result.slug, result) for result in pool.map(run, order)))
        except BaseException:  # KeyboardInterrupt too: the pool would wait for every case
            stop.set()
            pool.shutdown(wait=False, cancel_futures=True)
            raise


def exit_code_of(results: Mapping[str, CaseResult]) -> int:
    """Return 1 if any case was reproduced, else 125 if any could not run or proved nothing, else 0."""
    codes = {result.exit_code for result in results.values()}
    return 1 if 1 in codes else max(codes, default=0)


def count_verdicts(results: Mapping[str, CaseResult]) -> str:
    """Return how many cases there are of each verdict."""
    verdicts = [result.verdict for result in results.values()]
    return ", ".join(f"{verdicts.count(kind)} {kind}" for kind in EXIT_CODES if kind in verdicts)


class FreeGpus:
    """GPUs that no case uses; cases that take none run one at a time."""

    def __init__(self, names: Sequence[str]) -> None:
        self._free = list(names)
        self._change = threading.Condition()
        self._alone = threading.Lock()

    @contextmanager
    def take(self, count: int) -> Iterator[list[str]]:
        """Wait for that many, and give them back at the end."""
        if not count:
            with self._alone:
                yield []
            return
        with self._change:
            self._change.wait_for(lambda: len(self._free) >= count)
            taken, self._free = self._free[:count], self._free[count:]
        try:
            yield taken
        finally:
            with self._change:
                self._free += taken
                self._change.notify_all()


def program_command(slug: str, variant: Variant) -> list[str]:
    """Return the command of a variant, to run in the repository's root."""
    return [sys.executable, "-m", "harness.tools.repro.cases", slug, variant]


def run_variant(slug: str, case: Case, variant: Variant, gpus: Sequence[str], stop: threading.Event) -> VariantOutcome:
    """Run one variant to its end, at most LINGER_SECONDS after it has shown its whole signature."""
    with tempfile.TemporaryDirectory(prefix="repro-") as folder:
        log = Path(folder) / "output"
        began = time.monotonic()
        deadlines = [began + case.timeout_seconds]

        def tick() -> None:
            if stop.is_set():
                raise CancelledError
            if min(deadlines) < time.monotonic():
                raise VariantOver
            if case.signature and not case.number and len(deadlines) == 1:
                output = log.read_text(encoding="utf-8", errors="replace")
                if all(re.search(each, output) for each in case.signature):
                    deadlines.append(time.monotonic() + LINGER_SECONDS)

        code = None
        with log.open("wb") as output, suppress(VariantOver):
            command, environment = program_command(slug, variant), variant_environment(folder, gpus)
            code = run_tree(command, output=output, cwd=REPOSITORY, env=environment, tick=tick).code
        seconds = time.monotonic() - began
        return VariantOutcome(exit_code=code, output=log.read_text(encoding="utf-8", errors="replace"), seconds=seconds)


def variant_environment(folder: str, gpus: Sequence[str]) -> dict[str, str]:
    """Return this environment without a launcher's variables, which would make the variant a rank of its run."""
    launcher = [name for name in os.environ if name.startswith(("TORCHELASTIC_", "HARNESS_"))]
    kept = {name: value for name, value in os.environ.items() if name not in (*launcher, *LAUNCHER_VARIABLES)}
    path = os.pathsep.join([str(REPOSITORY), *filter(None, [kept.get("PYTHONPATH")])])
    visible = {"CUDA_VISIBLE_DEVICES": ",".join(gpus)} if gpus else {}
    return kept | {"PYTHONPATH": path, "TMPDIR": folder} | visible


def check_requirements(case: Case, gpus: Sequence[str]) -> None:
    """Raise UnsupportedEnvironment if the case cannot run here, before anything heavy starts."""
    from packaging.requirements import Requirement

    if (needed := GPUS[case.needs]) > len(gpus):
        raise UnsupportedEnvironment(f"it needs {needed} GPU(s), and this process can use {len(gpus)}.")
    if case.needs == "hosts" and (refusal := kernel.refusal()):
        raise UnsupportedEnvironment(f"it needs hosts in namespaces, which this machine refuses ({refusal}).")
    installed = installed_versions()
    for requirement in map(Requirement, (*case.requires, *(["sglang"] if case.engine else []))):
        version = installed.get(requirement.name)
        if version is None or not requirement.specifier.contains(version, prereleases=True):
            raise UnsupportedEnvironment(f"it needs {requirement}, and {version or 'none'} is installed.")


def visible_gpus() -> list[str]:
    """Return the GPUs of nvidia-smi that CUDA_VISIBLE_DEVICES leaves, as that names them; without importing torch."""
    if shutil.which("nvidia-smi") is None:
        return []
    listed = subprocess.run(["nvidia-smi", "-L"], capture_output=True, text=True).stdout.count("GPU ")
    visible = os.environ.get("CUDA_VISIBLE_DEVICES", ",".join(str(number) for number in range(listed)))
    return [each.strip() for each in visible.split(",") if each.strip()][:listed]


def device_of(case: Case, gpus: Sequence[str]) -> str:
    """Return what the case runs on here: "2-core CPU", "1 x NVIDIA H200"."""
    if not (count := min(case.gpus(len(gpus)), len(gpus))):
        return f"{os.cpu_count()}-core CPU"
    query = ["nvidia-smi", "--query-gpu=name", "--format=csv,noheader"]
    names = subprocess.run(query, capture_output=True, text=True).stdout.splitlines()
    return f"{count} x {names[0].strip() if names else 'GPU'}"


def installed_versions() -> dict[str, str]:
    """Return the installed ones of the packages on which failures depend."""
    found = {}
    for package in REPORTED:
        with suppress(importlib.metadata.PackageNotFoundError):
            found[package] = importlib.metadata.version(package)
    return found
