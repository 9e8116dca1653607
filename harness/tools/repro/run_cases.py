"""Run cases, judge and show them, and keep the results: as files, and as [[seen]] tables in the catalogue of failures.

Each variant is a process tree of its own, of which nothing is left when it has ended.
"""

import importlib.metadata
import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, replace
from pathlib import Path

import msgspec
from packaging.requirements import Requirement

from harness.runtime.errors import CANNOT_RUN_HERE, UnsupportedEnvironment
from harness.tools.diagnose.entries import FOLDER, Measurement, read_entry
from harness.tools.hosts import kernel
from harness.tools.process_tree import SupervisorKilled, run_tree
from harness.tools.repro.case import ABSENT, CANNOT, GPUS, Case, Variant, load

REPOSITORY = Path(__file__).resolve().parents[3]
REPORTED = ("sglang", "torch", "transformers", "torch_memory_saver")
LAUNCHER_VARIABLES = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
LINGER_SECONDS = 15.0
"""Time for a variant to end once it has shown its signature: many a dead scheduler leaves a parent that waits forever."""
SHOWN_LINES, LINE_WIDTH = 10, 200
EXIT_CODES = {
    "reproduced": 1,
    "not reproduced": 0,  # it passed, or said that this version has no such thing; and the control passed
    "cannot run here": CANNOT_RUN_HERE,
    "proves nothing": CANNOT_RUN_HERE,  # the control failed too, or the broken variant failed in another way
    "the control passed": 0,
    "the control failed": 1,
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

    def after(self, beginning: str) -> str:
        """Return the rest of the first line that begins so, empty without one."""
        lines = (line for line in self.output.splitlines() if line.startswith(beginning))
        return next(lines, beginning).removeprefix(beginning)

    def cannot_run(self) -> str:
        """Return why it could not run here, empty if it could."""
        return self.after(CANNOT) if self.exit_code == CANNOT_RUN_HERE else ""


@dataclass(frozen=True, kw_only=True)
class CaseResult:
    """What SLUG.json holds."""

    slug: str
    verdict: str
    exit_code: int
    sentence: str  # the verdict's, with what was measured
    device: str
    versions: Mapping[str, str]
    variants: Mapping[Variant, VariantOutcome]  # those that ran, with the decisive lines of their output


def run_case(case: Case, gpus: Sequence[str], control: bool = False, seconds: float | None = None) -> CaseResult:
    """Run both variants, or the control alone, judge them, and print all that on the way.

    gpus: that it may use, as CUDA_VISIBLE_DEVICES names them. seconds: limit of a variant, if below the case's own.
    """
    print(f"{case.slug}: {case.title}\n{case.difference()}", flush=True)
    limit = min(case.timeout_seconds, seconds or case.timeout_seconds)
    outcomes: dict[Variant, VariantOutcome] = {}
    variants: tuple[Variant, ...] = ("healthy",) if control else ("broken", "healthy")
    try:
        check_requirements(case, gpus)
        for variant in variants:
            outcomes[variant] = outcome = run_variant(case, variant, gpus, limit)
            lines = "".join(f"\n  | {line}" for line in decisive_lines(case, outcome.output))
            print(f"\n{variant}: {outcome.ending()}, {outcome.seconds:.1f} s{lines}", flush=True)
            if outcome.cannot_run():
                break
        kind, sentence = judge(case, outcomes)
    except UnsupportedEnvironment as error:
        kind, sentence = "cannot run here", str(error)
    except SupervisorKilled as error:
        kind, sentence = "proves nothing", str(error)
    print(f"\n{kind}: {sentence}\n", flush=True)
    decisive = {name: "\n".join(decisive_lines(case, each.output)) for name, each in outcomes.items()}
    return CaseResult(
        slug=case.slug,
        verdict=kind,
        exit_code=EXIT_CODES[kind],
        sentence=sentence,
        device=device_of(case, gpus),
        versions=installed_versions(),
        variants={name: replace(each, output=decisive[name]) for name, each in outcomes.items()},
    )


def judge(case: Case, outcomes: Mapping[Variant, VariantOutcome]) -> tuple[str, str]:
    """Return the verdict (one of EXIT_CODES), and why; outcomes: of both variants, or of the healthy one."""
    for outcome in outcomes.values():
        if reason := outcome.cannot_run():
            return "cannot run here", reason
    healthy = outcomes["healthy"]
    measured, reason = _measured(case, healthy), _problem(case, healthy)
    if "broken" not in outcomes:
        if reason:
            return "the control failed", f"{reason}."
        return "the control passed", f"{healthy.ending()}{measured}."
    if reason:
        return "proves nothing", f"the healthy control failed too ({reason}), so the repro proves nothing."
    broken, number = outcomes["broken"], case.number
    matches = [re.search(each, broken.output) for each in case.signature]
    if all(matches) and (number is None or number.read(broken.output) > number.broken_above):
        shown = [f'"{" ".join(match[0].split())}"' for match in matches if match]
        shown += [f"{number.name}: {number.read(broken.output):g}"] if number else []
        return "reproduced", f"{', '.join(shown)}; its control passed{measured}."
    if reason := _problem(case, broken):
        return "proves nothing", f"the broken variant failed in another way: {reason}."
    fixed = f"both variants pass{_measured(case, broken)}: it is fixed in this version, or never was in it."
    return "not reproduced", broken.after(ABSENT) or fixed


def _problem(case: Case, outcome: VariantOutcome) -> str:
    """Return why a variant did not pass, empty if it did."""
    if outcome.exit_code != 0:
        return outcome.ending()
    for each in case.signature:
        if found := re.search(each, outcome.output):
            return f'it shows "{found[0]}"'
    number = case.number
    if number and not outcome.after(ABSENT) and not (value := number.read(outcome.output)) < number.healthy_below:
        return f"{number.name} is {value:g}, not below {number.healthy_below:g}"
    return ""


def _measured(case: Case, outcome: VariantOutcome) -> str:
    return f" ({case.number.name}: {case.number.read(outcome.output):g})" if case.number else ""


def decisive_lines(case: Case, output: str) -> list[str]:
    """Return the first match of each pattern with the lines around it, else the last lines; at most SHOWN_LINES."""
    lines = [line.strip()[:LINE_WIDTH] for line in output.splitlines() if line.strip()]
    wanted = [*case.signature, *([f"{re.escape(case.number.name)}: "] if case.number else []), CANNOT, ABSENT]
    first = [next((n for n, line in enumerate(lines) if re.search(each, line)), None) for each in wanted]
    near = {n + beside for n in first if n is not None for beside in (-1, 0, 1)}
    return [line for n, line in enumerate(lines) if n in near][:SHOWN_LINES] or lines[-SHOWN_LINES:]


def run_variant(case: Case, variant: Variant, gpus: Sequence[str], seconds: float) -> VariantOutcome:
    """Run one variant to its end, at most LINGER_SECONDS after it has shown its whole signature."""
    with tempfile.TemporaryDirectory(prefix="repro-") as folder:
        log = Path(folder) / "output"
        began = time.monotonic()
        deadlines = [began + seconds]

        def tick() -> None:
            if min(deadlines) < time.monotonic():
                raise VariantOver
            if case.signature and not case.number and len(deadlines) == 1:
                output = log.read_text(encoding="utf-8", errors="replace")
                if all(re.search(each, output) for each in case.signature):
                    deadlines.append(time.monotonic() + LINGER_SECONDS)

        code = None
        with log.open("wb") as output, suppress(VariantOver):
            command, environment = program_command(case, variant), variant_environment(folder, gpus)
            code = run_tree(command, output=output, cwd=REPOSITORY, env=environment, tick=tick).code
        taken = time.monotonic() - began
        return VariantOutcome(exit_code=code, output=log.read_text(encoding="utf-8", errors="replace"), seconds=taken)


def program_command(case: Case, variant: Variant) -> list[str]:
    """Return the command of a variant, to run in the repository's root."""
    return [sys.executable, "-m", "harness.tools.repro.cases", case.slug, variant]


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
    visible = os.environ.get("CUDA_VISIBLE_DEVICES", ",".join(map(str, range(listed))))
    return [each.strip() for each in visible.split(",") if each.strip()][:listed]


def device_of(case: Case, gpus: Sequence[str]) -> str:
    """Return what the case runs on here: "2-core CPU", "1 x NVIDIA H200". An engine takes a GPU wherever there is one."""
    if not (count := min(GPUS[case.needs] or int(case.engine), len(gpus))):
        return f"{os.cpu_count()}-core CPU"
    query = ["nvidia-smi", "--query-gpu=name", "--format=csv,noheader"]
    return f"{count} x {subprocess.run(query, capture_output=True, text=True).stdout.partition(chr(10))[0].strip()}"


def installed_versions() -> dict[str, str]:
    """Return the installed ones of the packages on which failures depend."""
    found = {}
    for package in REPORTED:
        with suppress(importlib.metadata.PackageNotFoundError):
            found[package] = importlib.metadata.version(package)
    return found


def exit_code_of(results: Sequence[CaseResult]) -> int:
    """Return 1 if any case was reproduced, else 125 if any could not run or proved nothing, else 0."""
    codes = {result.exit_code for result in results}
    return 1 if 1 in codes else max(codes, default=0)


def count_verdicts(results: Sequence[CaseResult]) -> str:
    """Return how many cases there are of each verdict."""
    counts = Counter(result.verdict for result in results)
    return ", ".join(f"{counts[kind]} {kind}" for kind in EXIT_CODES if counts[kind])


def write_result(folder: Path, result: CaseResult) -> None:
    """Write FOLDER/SLUG.json."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / f"{result.slug}.json").write_text(json.dumps(asdict(result), indent=1) + "\n", encoding="utf-8")


def record(file: Path, date: str, catalogue: Path = FOLDER) -> str:
    """Add the result of a file to the [[seen]] of the catalogue's entry; return what was done, in one line."""
    result = msgspec.json.decode(file.read_bytes(), type=CaseResult)
    entry = catalogue / f"{load(result.slug).failure}.toml"
    done = f"{result.slug}: {result.verdict}: {{}} ({entry.name})"
    if result.verdict not in ("reproduced", "not reproduced"):
        return done.format("left out, since it shows nothing")
    shown = f"launch/repro.py run {result.slug}: {result.verdict}: {result.sentence}"
    seen = Measurement(versions=result.versions, date=date, device=result.device, result=shown)
    if seen in read_entry(entry).seen:
        return done.format("known")
    versions = ", ".join(f"{name} = {json.dumps(version)}" for name, version in seen.versions.items())
    lines = ["[[seen]]", f"versions = {{ {versions} }}"]
    lines += [f"{name} = {json.dumps(getattr(seen, name))}" for name in ("date", "device", "result")]
    text = entry.read_text(encoding="utf-8")
    entry.write_text(text.replace("[[examples]]", "\n".join([*lines, "", "[[examples]]"]), 1), encoding="utf-8")
    return done.format("recorded")
