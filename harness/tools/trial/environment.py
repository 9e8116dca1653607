"""The environment of a trial: an interpreter, paths and variables; and how uv makes one of a release, with the pins of
its day.
"""

import fcntl
import hashlib
import json
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from datetime import datetime, timedelta
from functools import cache
from pathlib import Path
from typing import Any

from packaging.requirements import InvalidRequirement, Requirement
from packaging.specifiers import InvalidSpecifier, SpecifierSet
from packaging.utils import canonicalize_name

from harness.config.mistakes import ConfigError
from harness.rollout.engine_settings import CPU_MODE, cpu_environment
from harness.runtime import redact
from harness.runtime.cpu_standins import STANDINS
from harness.runtime.errors import UnsupportedEnvironment
from harness.runtime.events import working
from harness.runtime.installed import INSTALLED
from harness.tools.environments import REPOSITORY, cpu_torch, has_gpu, start_in_cpu_mode, uv_environment
from harness.tools.run_tree import run_tree
from harness.tools.trial.indexes import Candidate, Pause, between, index_arguments, releases

_FREEZE = """
import importlib.metadata as m, json, re
found = {d.metadata["Name"]: d.version for d in reversed(list(m.distributions()))}
print(json.dumps({re.sub(r"[-_.]+", "-", name).lower(): version for name, version in found.items() if name and version and name != "harness-sglang-cpu"}))
"""
OWN_NEEDS = ("accelerate", "datasets", "jinja2", "msgspec", "psutil", "rich", "safetensors")
"""What a script of this repository imports besides SGLang and its dependencies."""
GRACE = timedelta(days=5)
"""How long after a release its own pins may have been published: kernels often follow within days."""
_SGL = ["sgl-kernel", "sglang-kernel", "sgl-deep-gemm", "sgl-deep-ep", "sgl-flash-mla", "sgl-fa4", "flash-attn-4"]
_FLASHINFER = ["flashinfer-python", "flashinfer-cubin", "flashinfer-jit-cache"]
_KERNELS = ["quack-kernels", "tilelang", "humming-kernels", "tokenspeed-mla", "torch-memory-saver"]
_NVIDIA = ["cuda-python", "cuda-tile", "nvidia-cutlass-dsl", "nvidia-mathdx", "nvshmem4py-cu13"]
CUDA_ONLY = [*_SGL, *_FLASHINFER, *_KERNELS, *_NVIDIA, "torchaudio", "torchcodec", "decord2"]
"""What SGLang's CPU mode does without."""
_CUDA_LIBRARIES = re.compile(r"(nvidia-|cuda-)")
_MODULES = {"sglang-kernel": "sgl_kernel", "flashinfer-python": "flashinfer", "pyyaml": "yaml", "pillow": "PIL"}
_NETWORK = re.compile(
    r"error sending request|dns error|client error \(connect\)|operation timed out|request timed out|network is unreachable"
    r"|connection (?:refused|reset|closed|timed out)|error decoding response body|failed to download.*timed? ?out|tls handshake",
    re.IGNORECASE,
)
_DISK = re.compile(r"no space left on device|disk quota exceeded|os error 28|os error 122", re.IGNORECASE)


def module_of(package: str) -> str:
    """Return the name under which a package is imported, guessed from the package's own name."""
    normal = canonicalize_name(package)
    return _MODULES.get(normal, normal.replace("-", "_"))


@dataclass(frozen=True, kw_only=True, slots=True)
class Environment:
    """An interpreter, the folders to put first on its PYTHONPATH, and the version of every package that it then
    finds.
    """

    python: str
    paths: tuple[str, ...] = ()
    freeze: Mapping[str, str] = field(default_factory=dict)
    sources: tuple[str, ...] = ()
    """uv's arguments for where its packages come from, if uv made it."""

    def variables(self, cpu_mode: bool, imports_harness: bool = False) -> dict[str, str]:
        """Return this process's variables, with the environment's programs and packages first.

        cpu_mode: add the variables and stand-ins of SGLang's CPU mode. imports_harness: add this package to the path,
        because no candidate has harness installed.
        """
        own = without_cpu_mode(os.environ)
        found = {name: value for name, value in own.items() if name not in ("VIRTUAL_ENV", "PYTHONHOME")}
        folder, standins = Path(self.python).parent, str(STANDINS)
        found["PATH"] = os.pathsep.join([str(folder), os.environ.get("PATH", os.defpath)])
        if (folder.parent / "pyvenv.cfg").exists():
            found["VIRTUAL_ENV"] = str(folder.parent)
        inherited = [each for each in os.environ.get("PYTHONPATH", "").split(os.pathsep) if each not in ("", standins)]
        if not imports_harness:  # launch/bisect_versions.py put it there for itself
            inherited = [each for each in inherited if each != str(REPOSITORY)]
        paths = [*self.paths, *inherited, *([str(harness_alone())] if imports_harness else [])]
        if cpu_mode:
            found = cpu_environment(1) | found
            paths.insert(0, standins)
        elif own.keys() != os.environ.keys():  # what this Python has set when it started, that one need not
            found.setdefault("SGLANG_USE_CPU_ENGINE", "0")
        found["PYTHONPATH"] = os.pathsep.join(dict.fromkeys(paths))
        return found | {"PYTHONNOUSERSITE": "1", "HARNESS_VENV": "none"}

    def with_freeze(self) -> "Environment":
        """Return it with the versions that its own Python finds. Raises UnsupportedEnvironment if that does not
        start.
        """
        command = [self.python, "-c", _FREEZE]
        # Not in the user's folder: Python would import a json.py that lies there.
        run = subprocess.run(command, capture_output=True, text=True, env=self.variables(cpu_mode=False), cwd="/")
        if run.returncode:
            last = run.stderr.strip().rpartition("\n")[2].strip(" .") or "no output"
            raise UnsupportedEnvironment(f"its Python {self.python} does not start: {last}.")
        return replace(self, freeze=dict(sorted(json.loads(run.stdout).items())))


def run_script(environment: Environment, words: Sequence[str], **options: Any) -> subprocess.CompletedProcess[str]:
    """Run a script of this repository, or a module of it (words: -P -m MODULE), in an environment that imports harness
    and runs SGLang in its CPU mode.

    options: of subprocess.run.
    """
    variables = environment.variables(cpu_mode=True, imports_harness=True)
    return subprocess.run([environment.python, *words], env=variables, text=True, **options)


def without_cpu_mode(environment: Mapping[str, str]) -> dict[str, str]:
    """Return the environment without what a Python in CPU mode has set in it when it started."""
    is_set = environment.get("SGLANG_USE_CPU_ENGINE") == "1"
    return {name: value for name, value in environment.items() if not is_set or CPU_MODE.get(name) != value}


def store_root() -> Path:
    """Return the folder in which environments are kept for later. Users may delete it at any time."""
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache").absolute() / "harness-bisect"


def harness_alone() -> Path:
    """Return a folder that has harness, and of other packages none that would hide a candidate's."""
    if not INSTALLED:
        return REPOSITORY
    return keep(f"harness-{digest(str(REPOSITORY))}", lambda folder: (folder / "harness").symlink_to(REPOSITORY))


def keep(key: str, fill: Callable[[Path], None]) -> Path:
    """Return the folder store_root()/key; let fill() fill it if it does not exist or was left incomplete.

    If another process is filling it, wait. Raises Pause if the disk is full or cannot be written.
    """
    root = store_root()
    folder = root / key
    try:
        root.mkdir(parents=True, exist_ok=True)
        with (root / f"{key}.lock").open("w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            if not (folder / "complete").exists():
                shutil.rmtree(folder, ignore_errors=True)  # what a killed process left
                folder.mkdir()
                fill(folder)
                (folder / "complete").touch()
    except OSError as error:
        raise Pause(f"environments cannot be kept in {root}: {error.strerror or error}.") from error
    return folder


def digest(*parts: str) -> str:
    return hashlib.sha256("\n".join(parts).encode()).hexdigest()[:12]


# uv.


def uv_binary() -> str:
    """Return the uv next to this Python, or on PATH. Raises ConfigError."""
    beside = Path(sys.executable).with_name("uv")
    if found := str(beside) if beside.exists() else shutil.which("uv"):
        return found
    raise ConfigError(f"uv makes the environments, and {sys.executable} has none: pip install uv.")


def _uv_variables() -> dict[str, str]:
    """Return the environment of uv, and so of the build backends that it starts: this process's without secrets.

    What uv reaches its indexes with stays, logins in it too.
    """
    found = {"UV_HTTP_TIMEOUT": "60"} | uv_environment()
    of_indexes = re.compile(r"UV_|PIP_|(?:\w+_)?PROXY$", re.IGNORECASE)
    return {
        name: value
        for name, value in found.items()
        if name not in ("PYTHONPATH", "VIRTUAL_ENV")
        and (redact.variable(name, value) == value or of_indexes.match(name))
    }


def _uv(words: Sequence[str], log: Path) -> str:
    """Run `uv WORDS` with its output in `log`, and return that. If this process dies, uv ends too.

    Raises UnsupportedEnvironment, Pause.
    """
    with log.open("wb") as output:
        ended = run_tree([uv_binary(), *words, "--color", "never"], output=output, env=_uv_variables())
    said = log.read_text(errors="replace")
    if ended.code:
        raise uv_problem(said, ended.code)
    return said


def uv_problem(said: str, code: int = 1) -> Exception:
    """Return Pause if uv was killed or lacked the network or the disk, else UnsupportedEnvironment."""
    if code < 0:
        return Pause(f"uv was killed by signal {-code}.")
    if _DISK.search(said):
        return Pause(f"no space is left on the disk of {store_root()} or of uv's cache.")
    text = " ".join(said.encode("ascii", "ignore").decode().split())
    text = re.split(r"error: |resolving dependencies(?: cause)?: ", text)[-1][:300].strip(" .")
    if _NETWORK.search(said):
        return Pause(f"a package index could not be reached ({text}).")
    return UnsupportedEnvironment(f"uv: {text or 'it failed without a message'}.")


def find_python(wanted: str) -> str:
    """Return an interpreter of this machine. wanted: its path, or its version, such as 3.12 or >=3.10,<3.13.

    Raises UnsupportedEnvironment.
    """
    if os.sep not in wanted:
        command = [uv_binary(), "python", "find", wanted, "--system", "--no-python-downloads"]
        run = subprocess.run(command, capture_output=True, text=True, env=_uv_variables())
        if run.returncode:
            raise uv_problem(run.stderr)
        return run.stdout.strip()
    if not Path(wanted).exists():
        raise UnsupportedEnvironment(f"there is no {wanted}.")
    return str(Path(wanted).absolute())  # candidates are not looked at from this folder


@cache
def python_version(python: str) -> str:
    """Return an interpreter's version, such as 3.12.3. Raises UnsupportedEnvironment if it does not start."""
    command = [python, "-I", "-c", "import platform; print(platform.python_version())"]
    try:
        run = subprocess.run(command, capture_output=True, text=True)
    except OSError as error:
        raise UnsupportedEnvironment(f"{python} does not start: {error.strerror}.") from error
    if run.returncode:
        raise UnsupportedEnvironment(f"{python} does not start: {run.stderr.strip().rpartition(chr(10))[2]}.")
    return run.stdout.strip()


# An environment of a release.


@dataclass(kw_only=True)
class Pinned:
    """Makes a virtual environment for each release: it and its dependencies, as they resolved when it was published."""

    package: str
    requirements: tuple[str, ...] = ()
    """Of every environment, besides the release: those of --hold, and what the script needs."""
    held_since: str = ""
    """When the newest of --hold was published, in ISO 8601; "" if nothing is held."""
    cpu_mode: bool
    """Whether SGLang runs in its CPU mode, which needs the CPU build of torch and no CUDA libraries."""
    python: str = sys.executable
    keeps_python: bool = False
    """Whether a release that does not allow this Python gets it all the same, and not another one."""
    sources: tuple[str, ...]
    locks: Path
    """The folder of resolutions: RELEASE.txt."""

    def make(self, candidate: Candidate) -> Environment:
        """Return its environment, made if there is none yet. Raises UnsupportedEnvironment, Pause."""
        lock = self.locks / f"{candidate.name}.txt"
        if not lock.exists():
            self._resolve(candidate, lock)
        text = lock.read_text()
        python, build = (re.findall(rf"^# {name} ?(.*)$", text, re.M)[0] for name in ("python", "torch"))
        sources = (*self.sources, *build.split())
        key = f"{self.package}-{candidate.name}-{digest(text, *sources, str(self.cpu_mode))}"
        venv = keep(key, lambda new: self._install(new, lock, python, build.split())) / "venv"
        if self.cpu_mode:
            start_in_cpu_mode(venv)
        return replace(Environment(python=str(venv / "bin" / "python")).with_freeze(), sources=sources)

    def _resolve(self, candidate: Candidate, lock: Path) -> None:
        """Write the lock: the pins, the Python, and the arguments with which uv finds the build of torch."""
        self.locks.mkdir(parents=True, exist_ok=True)
        python, new = self._python_for(candidate), lock.with_suffix(".new")
        words = ["pip", "compile", "--quiet", "--no-header", "--no-annotate", "--no-python-downloads"]
        words += ["--python", python, *self.sources]
        if candidate.time:  # a folder of wheels has no dates
            published = max(datetime.fromisoformat(each) for each in (candidate.time, self.held_since) if each)
            words += ["--exclude-newer", (published + GRACE).strftime("%Y-%m-%dT%H:%M:%SZ")]
        asked = [f"{self.package}=={candidate.name}", *self.requirements]
        given = {"in": asked, "overrides": asked[:1]}  # what --hold names may pin another version of the package
        if self.cpu_mode:
            given["excludes"] = [name for name in CUDA_ONLY if name != canonicalize_name(self.package)]
        for option, lines in given.items():
            file = self.locks / f"{candidate.name}.{option}"
            file.write_text("\n".join(lines) + "\n")
            words += [str(file)] if option == "in" else [f"--{option}", str(file)]
        pins = [line for line in _uv(words, lock.with_suffix(".log")).split("\n") if "==" in line]
        torch = next((line.split(" ")[0] for line in pins if line.startswith("torch==") and "+" not in line), "")
        build = _cpu_torch(torch, *self.sources) if self.cpu_mode and torch else ()
        if build:
            pins = [build[-1] if pin.startswith("torch==") else pin for pin in pins if not _CUDA_LIBRARIES.match(pin)]
        backend = "--torch-backend cpu" if "--torch-backend" in build else ""
        new.write_text("\n".join([f"# python {python}", f"# torch {backend}", *pins, ""]))
        new.replace(lock)

    def _python_for(self, candidate: Candidate) -> str:
        """Return this Python, or which versions the release allows, so that uv takes another one."""
        with suppress(InvalidSpecifier):
            allowed = SpecifierSet(candidate.requires_python)
            if not self.keeps_python and not allowed.contains(python_version(self.python), prereleases=True):
                return candidate.requires_python
        return self.python

    def _install(self, folder: Path, lock: Path, python: str, build: Sequence[str]) -> None:
        venv, log = str(folder / "venv"), folder / "install.log"
        _uv(["venv", "--quiet", "--python", python, "--no-project", "--no-python-downloads", venv], log)
        install = ["pip", "install", "--no-deps", "--link-mode", "hardlink", "--python", f"{venv}/bin/python"]
        if build:  # for torch alone, as other packages would be looked for there too
            _uv([*install, *self.sources, *build, *re.findall(r"^torch==\S+", lock.read_text(), re.M)], log)
        _uv([*install, *self.sources, "-r", str(lock)], log)


@cache
def _cpu_torch(pin: str, *sources: str) -> list[str]:
    return cpu_torch([uv_binary(), "pip", "install", "--target", os.devnull, "--python", sys.executable, *sources], pin)


def of_release(release: str) -> Environment:
    """Return the environment of a release of SGLang for scripts of this repository, which is kept.

    Raises ConfigError if there is no such release, UnsupportedEnvironment if it cannot be installed here.
    """
    no_gpu = not has_gpu()
    locks = store_root() / f"releases-{'cpu' if no_gpu else 'gpu'}"
    made = Pinned(
        package="sglang", requirements=OWN_NEEDS, cpu_mode=no_gpu, sources=tuple(index_arguments()), locks=locks
    )
    try:
        if (locks / f"{release}.txt").exists():  # it was resolved before: no index is needed
            candidate = Candidate(name=release)
        else:
            [candidate] = between(releases("sglang"), release, release, "sglang")
        with working(f"installing sglang {release}"):
            return made.make(candidate)
    except (UnsupportedEnvironment, Pause) as error:
        raise UnsupportedEnvironment(f"sglang {release} cannot be installed: {error}") from error


def published(requirement: str) -> str:
    """Return when the release that a requirement pins was published, in any build; "" if it pins none.

    Raises ConfigError, Pause.
    """
    try:
        asked = Requirement(requirement)
    except InvalidRequirement as error:
        raise ConfigError(f"--hold must be requirements such as sglang==0.5.23: {error}.") from error
    if asked.url:
        remedy = "give NAME==VERSION, and name the folder of its wheel in PIP_FIND_LINKS"
        raise ConfigError(f"--hold cannot be an address, got {requirement}; {remedy}.")
    if not any(each.operator in ("==", "===") for each in asked.specifier):
        return ""
    public = SpecifierSet(re.sub(r"\+[\w.]+", "", str(asked.specifier)))
    found = [each.time for version, each in releases(asked.name).items() if public.contains(version.public, True)]
    if not found:
        raise ConfigError(f"--hold {requirement}: there is no such release.")
    return max(found)
