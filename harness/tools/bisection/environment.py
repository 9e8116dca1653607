"""The environment that a candidate is run in: an interpreter, what lies over its packages, and every package's version."""

import importlib.metadata
import json
import os
import re
import subprocess
import sys
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Protocol

from packaging.utils import canonicalize_name
from packaging.version import Version

from harness.rollout.cpu.activate import engine_environment, standins_path
from harness.tools.bisection.candidates import Candidate
from harness.tools.bisection.uv import Unavailable

_FREEZE = """
import importlib.metadata as m, json, re
found = {}
for dist in m.distributions():
    name = dist.metadata["Name"]
    if name:
        found.setdefault(re.sub(r"[-_.]+", "-", name).lower(), dist.version)
print(json.dumps(found))
"""
_PROBE = """
import importlib, importlib.metadata as m, re, sys
package = sys.argv[1]
module = re.sub(r"[-.]", "_", package)
normal = lambda name: re.sub(r"[-_.]+", "-", name).lower()
named = [n for n, ds in m.packages_distributions().items() if normal(package) in map(normal, ds)]
public = [n for n in named if n.isidentifier() and not n.startswith("_")]
for name in [module] if module in named or not public else public:
    importlib.import_module(name)
"""


@dataclass(frozen=True, kw_only=True, slots=True)
class Environment:
    """Where a candidate can be run."""

    python: str
    paths: tuple[str, ...] = ()
    """What goes first on PYTHONPATH."""
    freeze: Mapping[str, str]
    """Package -> version, of all that it sees."""
    key: str = ""
    """In the store; "" for what was there before."""
    installed_seconds: float = 0.0
    """What making it took; 0 where it was there."""

    def variables(self, no_gpu: bool) -> dict[str, str]:
        """The variables of a process in it: this process's, with its programs and packages first. no_gpu: SGLang, where it is
        there, runs in its CPU mode, with the harness's stand-ins."""
        told = {
            name: value for name, value in os.environ.items() if name not in ("VIRTUAL_ENV", "PYTHONHOME", "PYTHONPATH")
        }
        folder = Path(self.python).parent
        told["PATH"] = os.pathsep.join([str(folder), os.environ.get("PATH", os.defpath)])
        if (folder.parent / "pyvenv.cfg").exists():
            told["VIRTUAL_ENV"] = str(folder.parent)
        paths, standins = list(self.paths), str(standins_path())
        if no_gpu and "sglang" in self.freeze:
            for name, value in engine_environment(1).items():
                told.setdefault(name, value)
            paths.insert(0, standins)
        inherited = [each for each in os.environ.get("PYTHONPATH", "").split(os.pathsep) if each]
        told["PYTHONPATH"] = os.pathsep.join([*paths, *(each for each in inherited if each not in (*paths, standins))])
        return told | {"PYTHONNOUSERSITE": "1", "HARNESS_VENV": "none"}

    def as_dict(self) -> dict[str, Any]:
        return asdict(self)

    def with_freeze(self) -> "Environment":
        """The same, with what is really installed. Raises Unavailable where its Python does not start."""
        return Environment(
            python=self.python,
            paths=self.paths,
            key=self.key,
            freeze=frozen(self),
            installed_seconds=self.installed_seconds,
        )


class Provider(Protocol):
    """Where environments come from."""

    def resolve(self, candidate: Candidate) -> None:
        """Find out, installing nothing, whether it can be had. Raises Unavailable, Pause."""

    def make(self, candidate: Candidate) -> Environment:
        """Its environment, made where it is not there, kept until release. Raises Unavailable, Pause."""

    def release(self, environment: Environment) -> None:
        """It may be removed."""


def check_version(environment: Environment, package: str, wanted: str) -> None:
    """Raises Unavailable where a run would see another version of the package than the candidate's."""
    seen = environment.freeze.get(canonical(package))
    if seen is None or Version(seen) != Version(wanted):
        where = " (PYTHONPATH may hide it)" if os.environ.get("PYTHONPATH") else ""
        raise Unavailable(f"its environment has {package} {seen or 'not at all'} in place of {wanted}{where}.")


def frozen(environment: Environment) -> dict[str, str]:
    """Package -> version, as the environment's own Python sees it. Raises Unavailable."""
    run = subprocess.run(
        [environment.python, "-c", _FREEZE], capture_output=True, text=True, env=environment.variables(no_gpu=False)
    )
    if run.returncode:
        raise Unavailable(f"its Python {environment.python} does not start: {_last_line(run.stderr)}.")
    found: dict[str, str] = json.loads(run.stdout)
    return dict(sorted(found.items()))


def probe_command(environment: Environment, probe: str, package: str) -> list[str]:
    """Of --probe; nothing for `none`."""
    if probe == "none":
        return []
    return [environment.python, "-c", *([_PROBE, package] if probe == "auto" else [probe])]


def base_python(asked: str) -> str:
    """The interpreter that candidates are laid over: that of --python where it is a path, else this one."""
    return asked if os.sep in asked else sys.executable


def own_version(package: str) -> str:
    """Of this Python's; "" where it is not installed."""
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return ""


def canonical(requirement: str) -> str:
    """The normal name of a requirement's package."""
    return str(canonicalize_name(re.split(r"[^\w.-]", requirement.strip(), maxsplit=1)[0]))


def _last_line(text: str) -> str:
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    return lines[-1].rstrip(".") if lines else "it says nothing"
