"""Whether a case can run here, said before anything heavy starts."""

import importlib.metadata
import os
import shutil
import subprocess

from harness.runtime.errors import UnsupportedEnvironment
from harness.tools.hosts import kernel
from harness.tools.repro.case import GPUS, Case

REPORTED = ("sglang", "torch", "transformers", "torch_memory_saver")


def check(case: Case) -> None:
    """Raises UnsupportedEnvironment, with what is missing."""
    from packaging.requirements import Requirement

    if (needed := GPUS[case.needs]) > (there := len(gpus())):
        raise UnsupportedEnvironment(f"it needs {needed} GPU(s), and this process can use {there}.")
    if case.needs == "hosts" and (refusal := kernel.refusal()):
        raise UnsupportedEnvironment(f"it needs hosts in namespaces, which this machine refuses ({refusal}).")
    for requirement in map(Requirement, (*case.requires, *(["sglang"] if case.engine else []))):
        installed = version(requirement.name)
        if installed is None or not requirement.specifier.contains(installed, prereleases=True):
            raise UnsupportedEnvironment(f"it needs {requirement}, and {installed or 'none'} is installed.")


def gpus() -> list[str]:
    """Those of nvidia-smi that CUDA_VISIBLE_DEVICES leaves, as that names them; asked without torch."""
    if shutil.which("nvidia-smi") is None:
        return []
    listed = subprocess.run(["nvidia-smi", "-L"], capture_output=True, text=True).stdout.count("GPU ")
    visible = os.environ.get("CUDA_VISIBLE_DEVICES", ",".join(str(number) for number in range(listed)))
    return [each.strip() for each in visible.split(",") if each.strip()][:listed]


def device(case: Case) -> str:
    """What the case runs on here, for people."""
    there = len(gpus())
    if not (count := min(case.gpus(there), there)):
        return f"{os.cpu_count()}-core CPU"
    query = ["nvidia-smi", "--query-gpu=name", "--format=csv,noheader"]
    names = subprocess.run(query, capture_output=True, text=True).stdout.splitlines()
    return f"{count} x {names[0].strip() if names else 'GPU'}"


def version(package: str) -> str | None:
    """As installed; None where it is not."""
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


def versions() -> dict[str, str]:
    """Of the packages on which failures depend."""
    return {package: found for package in REPORTED if (found := version(package)) is not None}
