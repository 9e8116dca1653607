"""Environments for candidates, made by uv: one with its own pins, or its package alone over the packages of one Python.

Environment has all that decides how a candidate runs: the interpreter, the paths and the variables.
"""

import fcntl
import hashlib
import importlib.metadata
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

from packaging.requirements import InvalidRequirement, Requirement
from packaging.specifiers import InvalidSpecifier, SpecifierSet
from packaging.utils import canonicalize_name
from packaging.version import InvalidVersion, Version

from harness.rollout.engine_settings import CPU_MODE, cpu_environment
from harness.runtime import redact
from harness.runtime.cpu_standins import STANDINS
from harness.runtime.installed import INSTALLED
from harness.tools.bisection.candidates import (
    Candidate,
    export_commit,
    export_reverted,
    index_arguments,
    is_build_of,
    releases,
    repository_of,
)
from harness.tools.bisection.question import Options, Pause, Question, WrongQuestion, is_of_this_repository
from harness.tools.environments import REPOSITORY, cpu_torch, start_in_cpu_mode, uv_environment
from harness.tools.run_tree import run_tree

_FREEZE = """
import importlib.metadata as m, json, re
found = {d.metadata["Name"]: d.version for d in reversed(list(m.distributions()))}
print(json.dumps({re.sub(r"[-_.]+", "-", name).lower(): version for name, version in found.items() if name and version and name != "harness-sglang-cpu"}))
"""
_PYTHON_LINE = "# python "
"""How the first line of a resolution begins."""
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
_OF_INDEXES = re.compile(r"UV_|PIP_|(?:\w+_)?PROXY$", re.IGNORECASE)
"""Variables by which uv and pip find indexes and log in to them."""
_DISK = re.compile(r"no space left on device|disk quota exceeded|os error 28|os error 122", re.IGNORECASE)


class Unavailable(Exception):
    """A candidate that cannot be installed or started here; one sentence. It is skipped, never bad."""


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
        """Return it with the versions that its own Python finds. Raises Unavailable if that Python does not start."""
        command = [self.python, "-c", _FREEZE]
        # Not in the user's folder: Python would import a json.py that lies there.
        run = subprocess.run(command, capture_output=True, text=True, env=self.variables(cpu_mode=False), cwd="/")
        if run.returncode:
            last = run.stderr.strip().rpartition("\n")[2].strip(" .") or "no output"
            raise Unavailable(f"its Python {self.python} does not start: {last}.")
        return replace(self, freeze=dict(sorted(json.loads(run.stdout).items())))


def without_cpu_mode(environment: Mapping[str, str]) -> dict[str, str]:
    """Return the environment without what a Python in CPU mode has set in it when it started."""
    is_set = environment.get("SGLANG_USE_CPU_ENGINE") == "1"
    return {name: value for name, value in environment.items() if not is_set or CPU_MODE.get(name) != value}


def store_root() -> Path:
    """Return the folder in which environments are kept for later bisects. Users may delete it at any time."""
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache").absolute() / "harness-bisect"


def harness_alone() -> Path:
    """Return a folder that has harness, and of other packages none that would hide a candidate's."""
    if not INSTALLED:
        return REPOSITORY
    digest = hashlib.sha256(str(REPOSITORY).encode()).hexdigest()
    return keep(store_root(), f"harness-{digest[:12]}", lambda folder: (folder / "harness").symlink_to(REPOSITORY))


def keep(root: Path, key: str, fill: Callable[[Path], None]) -> Path:
    """Return the folder root/key; let fill() fill it if it does not exist or was left incomplete.

    If another process is filling it, wait. Raises Pause if the disk is full or cannot be written.
    """
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


# uv.


def uv_binary() -> str:
    """Return the uv next to this Python, or on PATH. Raises WrongQuestion."""
    beside = Path(sys.executable).with_name("uv")
    if found := str(beside) if beside.exists() else shutil.which("uv"):
        return found
    raise WrongQuestion(f"uv makes the environments, and {sys.executable} has none: pip install uv.")


def _uv_variables() -> dict[str, str]:
    """Return the environment of uv, and so of the build backends that it starts: this process's without secrets.

    What uv reaches its indexes with stays.
    """
    found = {"UV_HTTP_TIMEOUT": "60"} | uv_environment()
    return {
        name: value
        for name, value in found.items()
        if name not in ("PYTHONPATH", "VIRTUAL_ENV")
        and (redact.variable(name, value) == value or _OF_INDEXES.match(name))
    }


def _ask_uv(words: Sequence[str], stdin: str = "") -> str:
    """Return what `uv WORDS` prints. Raises Unavailable, Pause."""
    command = [uv_binary(), *words, "--color", "never"]
    run = subprocess.run(command, capture_output=True, text=True, env=_uv_variables(), input=stdin)
    if run.returncode:
        raise uv_problem(run.stderr, run.returncode)
    return run.stdout


def _install_by_uv(words: Sequence[str], folder: Path) -> None:
    """Run `uv WORDS` with its output in folder/install.log. If this process dies, uv ends too.

    Raises Unavailable, Pause.
    """
    log, command = folder / "install.log", [uv_binary(), *words, "--color", "never"]
    with log.open("wb") as output:
        ended = run_tree(command, output=output, env=_uv_variables())
    if ended.code:
        raise uv_problem(log.read_text(errors="replace"), ended.code)


def find_python(wanted: str) -> str:
    """Return an interpreter of this machine. wanted: its path, or its version, such as 3.12 or >=3.10,<3.13.

    Raises Unavailable, Pause.
    """
    if os.sep not in wanted:
        return _ask_uv(["python", "find", wanted, "--system", "--no-python-downloads"]).strip()
    if not Path(wanted).exists():
        raise Unavailable(f"there is no {wanted}.")
    return str(Path(wanted).absolute())  # candidates are not looked at from this folder


@cache
def python_version(python: str) -> str:
    """Return an interpreter's version, such as 3.12.3. Raises Unavailable if it does not start."""
    command = [python, "-I", "-c", "import platform; print(platform.python_version())"]
    try:
        run = subprocess.run(command, capture_output=True, text=True)
    except OSError as error:
        raise Unavailable(f"{python} does not start: {error.strerror}.") from error
    if run.returncode:
        raise Unavailable(f"{python} does not start: {run.stderr.strip().rpartition(chr(10))[2]}.")
    return run.stdout.strip()


def uv_problem(stderr: str, code: int = 1) -> Exception:
    """Return Pause if uv was killed or lacked the network or the disk, else Unavailable."""
    if code < 0:
        return Pause(f"uv was killed by signal {-code}.")
    if _DISK.search(stderr):
        return Pause(f"no space is left on the disk of {store_root()} or of uv's cache.")
    text = " ".join(stderr.encode("ascii", "ignore").decode().split())
    text = re.split(r"error: |resolving dependencies(?: cause)?: ", text)[-1][:300].strip(" .")
    if _NETWORK.search(stderr):
        return Pause(f"a package index could not be reached ({text}).")
    return Unavailable(f"uv: {text or 'it failed without a message'}.")


# The four ways to get an environment.


@dataclass(kw_only=True)
class Provider:
    """Makes the environments of candidates."""

    store: Path
    python: str = sys.executable
    """The candidate is put over the packages of this Python; Pinned makes a new environment with it."""

    def make(self, candidate: Candidate) -> Environment:
        """Return its environment, made if there is none yet. Raises Unavailable, Pause."""
        raise NotImplementedError


@dataclass(kw_only=True)
class Prepared(Provider):
    """--environments: a folder for each version, which is an environment with bin/python, or a site-packages folder."""

    def make(self, candidate: Candidate) -> Environment:
        folder = Path(candidate.folder)
        if (folder / "bin" / "python").exists():
            return Environment(python=str(folder / "bin" / "python")).with_freeze()
        if not any(folder.glob("*.dist-info")) and not any(folder.glob("*/__init__.py")):
            raise Unavailable(f"{folder} is neither an environment (bin/python) nor a site-packages folder.")
        return Environment(python=self.python, paths=(str(folder),)).with_freeze()


@dataclass(kw_only=True)
class Commits(Provider):
    """--git: each commit of a checkout, unpacked, first on the path of one Python. Nothing is built."""

    checkout: Path
    """The repository, or the folder in it that holds the package."""
    package: str

    def make(self, candidate: Candidate) -> Environment:
        return self._unpacked(
            f"commit-{candidate.name[:16]}", lambda files: export_commit(self._repository, candidate.name, files)
        )

    def make_reverted(self, commit: Candidate, tip: Candidate) -> Environment:
        """Return the environment of `tip` without the changes of `commit`. Raises CannotRevert, Unavailable, Pause."""
        key = f"commit-{tip.name[:16]}-without-{commit.name[:16]}"
        return self._unpacked(key, lambda files: export_reverted(self._repository, commit.name, tip.name, files))

    @property
    def _repository(self) -> Path:
        return repository_of(self.checkout)[0]

    def _unpacked(self, key: str, unpack: Callable[[Path], None]) -> Environment:
        repository, inside = repository_of(self.checkout)
        folder = keep(self.store, f"{key}-{_digest(str(repository))}", lambda new: unpack(new / "files"))
        if not (folder / "files" / inside).is_dir():
            raise Unavailable(f"it has no folder {inside}.")
        path = _import_root(folder / "files" / inside, self.package)
        return Environment(python=self.python, paths=(str(path),)).with_freeze()


def _import_root(files: Path, package: str) -> Path:
    """Return the folder of a commit's files from which the package is imported: python/, src/, or the files' own.

    python/ and src/ may hold something else, such as C++: on the path they would leave the installed package to be
    tested. If the module of the package's name is nowhere, its name may be another one: return the first folder with
    any package.
    """
    folders = [folder for folder in (files / "python", files / "src", files) if folder.is_dir()]
    own = [folder for folder in folders if _holds(folder, module_of(package))]
    return next(iter([*own, *(folder for folder in folders if any(folder.glob("*/__init__.py"))), *folders]))


@dataclass(kw_only=True)
class Overlay(Provider):
    """--only-package: each candidate's package without its dependencies, over the packages of one Python."""

    package: str
    sources: list[str]

    def make(self, candidate: Candidate) -> Environment:
        digest = _digest(self.package, candidate.name, self.python, python_version(self.python), *self.sources)
        key = f"over-{self.package}-{candidate.name}-{digest}"
        folder = keep(self.store, key, lambda new: self._install(candidate, new))
        return Environment(python=self.python, paths=(str(folder / "site"),)).with_freeze()

    def _install(self, candidate: Candidate, folder: Path) -> None:
        words = ["pip", "install", "--no-deps", "--link-mode", "hardlink", "--target", str(folder / "site")]
        words += ["--python", self.python, *self.sources]
        _install_by_uv([*words, f"{self.package}=={candidate.name}"], folder)


@dataclass(kw_only=True)
class Pinned(Provider):
    """A virtual environment for each candidate: it and its dependencies, as they resolved when it was published."""

    package: str
    requirements: tuple[str, ...]
    """Of every environment, besides the candidate: those of --hold, and what the script needs."""
    held_since: str
    """When the newest of --hold was published, in ISO 8601; "" if nothing is held."""
    dated: bool
    """Whether to leave out what was published later; a folder of wheels has no dates."""
    cpu_mode: bool
    """Whether SGLang runs in its CPU mode, which needs the CPU build of torch and no CUDA libraries."""
    keeps_python: bool
    """Whether --python was given; else a candidate that does not allow this Python gets another one."""
    sources: list[str]
    locks: Path
    """The folder of resolutions: CANDIDATE.txt."""

    def make(self, candidate: Candidate) -> Environment:
        lock = self.locks / f"{candidate.name}.txt"
        if not lock.exists():
            self._resolve(candidate, lock)
        digest = _digest(lock.read_text(), python_version(_python_of(lock)), *self.sources, str(self.cpu_mode))
        key = f"{self.package}-{candidate.name}-{digest}"
        venv = keep(self.store, key, lambda new: self._install(new, lock)) / "venv"
        if self.cpu_mode:
            start_in_cpu_mode(venv)
        return Environment(python=str(venv / "bin" / "python")).with_freeze()

    def _resolve(self, candidate: Candidate, lock: Path) -> None:
        self.locks.mkdir(parents=True, exist_ok=True)
        python, cutoff = self._python_for(candidate), ""
        if self.dated and candidate.time:
            published = max(datetime.fromisoformat(each) for each in (candidate.time, self.held_since) if each)
            cutoff = (published + GRACE).strftime("%Y-%m-%dT%H:%M:%SZ")
        lines = [f"{_PYTHON_LINE}{python}", f"# packages published until {cutoff or 'today'}"]
        new = lock.with_suffix(".new")
        new.write_text("\n".join([*lines, *self._compile(candidate, python, cutoff), ""]))
        new.replace(lock)

    def _python_for(self, candidate: Candidate) -> str:
        allowed = SpecifierSet()
        with suppress(InvalidSpecifier):
            allowed = SpecifierSet(candidate.requires_python)
        if self.keeps_python or allowed.contains(python_version(self.python), prereleases=True):
            return self.python
        try:
            return find_python(candidate.requires_python)
        except Unavailable as problem:
            raise Unavailable(
                f"it wants Python {candidate.requires_python}, and none was found: {problem}"
            ) from problem

    def _compile(self, candidate: Candidate, python: str, cutoff: str) -> list[str]:
        words = ["pip", "compile", "-", "--quiet", "--no-header", "--no-annotate", "--python", python]
        words += [*self.sources, *(["--exclude-newer", cutoff] if cutoff else [])]
        asked = [f"{self.package}=={candidate.name}", *self.requirements]
        given = {"overrides": asked[:1]}  # because what --hold names may pin another version of the candidate's package
        if self.cpu_mode:
            given["excludes"] = [name for name in CUDA_ONLY if name != canonicalize_name(self.package)]
        for option, lines in given.items():
            file = self.locks / f"{candidate.name}.{option}"
            file.write_text("\n".join(lines) + "\n")
            words += [f"--{option}", str(file)]
        pins = [line for line in _ask_uv(words, "\n".join(asked)).split("\n") if "==" in line]
        return [pin for pin in pins if not _CUDA_LIBRARIES.match(pin)] if self._torch(pins) else pins

    def _torch(self, lines: Sequence[str]) -> list[str]:
        """Return uv's arguments for the CPU build of the torch that the lines pin; none if another build will do."""
        pin = next((line.split(" ")[0] for line in lines if line.startswith("torch==")), "")
        return _cpu_torch(pin, *self.sources) if self.cpu_mode and pin and "+" not in pin else []

    def _install(self, folder: Path, lock: Path) -> None:
        venv, pins = folder / "venv", lock.read_text().splitlines()
        words = ["venv", "--quiet", "--python", _python_of(lock), "--no-project"]
        _install_by_uv([*words, "--no-python-downloads", str(venv)], folder)
        install = ["pip", "install", "--no-deps", "--link-mode", "hardlink", "--python", str(venv / "bin" / "python")]
        install += self.sources
        if torch := self._torch(pins):
            _install_by_uv([*install, *torch], folder)
        _install_by_uv([*install, "-r", str(lock)], folder)


def _python_of(lock: Path) -> str:
    """Return the interpreter with which a candidate's pins were resolved."""
    return lock.read_text().partition("\n")[0].removeprefix(_PYTHON_LINE)


@cache
def _cpu_torch(pin: str, *sources: str) -> list[str]:
    return cpu_torch([uv_binary(), "pip", "install", "--target", os.devnull, "--python", sys.executable, *sources], pin)


def torch_backend(freeze: Mapping[str, str], sources: Sequence[str]) -> list[str]:
    """Return the arguments with which uv finds the CPU build of torch that an environment has; none if it needs
    none.
    """
    version, _, build = freeze.get("torch", "").partition("+")
    found: list[str] = []
    with suppress(WrongQuestion):  # there is no uv
        found = _cpu_torch(f"torch=={version}", *sources) if build == "cpu" else []
    return ["--torch-backend", "cpu"] if "--torch-backend" in found else []


def _digest(*parts: str) -> str:
    return hashlib.sha256("\n".join(parts).encode()).hexdigest()[:12]


def python_of(options: Options) -> str:
    """Return the interpreter that --python names, by default this one. Raises WrongQuestion, Pause."""
    try:
        return find_python(options.python) if options.python else sys.executable
    except Unavailable as error:
        wrong = f"--python must be an interpreter of this machine or its version, got {options.python}."
        raise WrongQuestion(wrong) from error


def provider_of(question: Question, folder: Path, no_gpu: bool, python: str = "") -> Provider:
    """Return the provider that the options ask for. Raises WrongQuestion, Pause.

    folder: of the bisect. python: the interpreter with which the bisect began; "" to take the one that the options
    name.
    """
    options, store = question.options, store_root()
    python = python or python_of(options)
    if options.environments:
        return Prepared(store=store, python=python)
    if options.git:
        return Commits(store=store, checkout=Path(options.git), package=options.package, python=python)
    sources = package_sources(options)
    if options.only_package:
        return Overlay(store=store, package=options.package, python=python, sources=sources)
    held = _held(question)
    return Pinned(
        store=store,
        package=options.package,
        requirements=(*held, *(OWN_NEEDS if is_of_this_repository(question) else ())),
        held_since="" if options.wheels else max(("", *map(_published, held))),
        dated=not options.wheels,
        cpu_mode=no_gpu and question.runs_sglang,
        python=python,
        keeps_python=bool(options.python),
        sources=sources,
        locks=folder / "resolutions",
    )


def package_sources(options: Options) -> list[str]:
    """Return uv's arguments for where packages come from."""
    return ["--no-index", "--find-links", options.wheels] if options.wheels else index_arguments()


def _held(question: Question) -> tuple[str, ...]:
    """Return the requirements of --hold, checked. Raises WrongQuestion."""
    options = question.options
    try:
        held = tuple(str(Requirement(each)) for each in options.hold)
    except InvalidRequirement as error:
        raise WrongQuestion(f"--hold must be requirements such as sglang==0.5.23: {error}.") from error
    if address := next((each for each in held if Requirement(each).url), ""):
        remedy = "give NAME==VERSION, and name the folder of its wheel in PIP_FIND_LINKS"
        raise WrongQuestion(f"--hold cannot be an address, got {address}; {remedy}.")
    if is_of_this_repository(question) and options.package != "sglang" and not held:
        raise WrongQuestion("the script needs an sglang; give --hold sglang==VERSION.")
    return held


def _published(requirement: str) -> str:
    """Return when the release that a requirement pins was published; "" if it pins none.

    Raises WrongQuestion, Pause.
    """
    asked = Requirement(requirement)
    pins = [each.version for each in asked.specifier if each.operator in ("==", "===")]
    if not pins:
        return ""
    try:
        wanted = Version(Version(pins[0]).public)
    except InvalidVersion as error:
        raise WrongQuestion(f"--hold needs NAME==VERSION, such as sglang==0.5.23, got {requirement}.") from error
    found = [each.time for version, each in releases(asked.name).items() if is_build_of(version, wanted)]
    if not found:
        raise WrongQuestion(f"--hold {requirement}: there is no such release.")
    return max(found)


def unmet_requirements(environment: Environment, package: str) -> dict[str, tuple[str, str]]:
    """Return which requirements an overlaid package runs without: name -> the version it asks for, the installed one or
    "".
    """
    found = {}
    named = (each for each in importlib.metadata.distributions(path=list(environment.paths)) if each.name)
    own = next((each for each in named if canonicalize_name(each.name) == canonicalize_name(package)), None)
    for text in (own.requires if own else None) or ():
        with suppress(InvalidRequirement):
            asked = Requirement(text)
            has = environment.freeze.get(canonicalize_name(asked.name), "")
            applies = asked.marker is None or asked.marker.evaluate({"extra": ""})
            if applies and not (has and asked.specifier.contains(has, prereleases=True)):
                found[asked.name] = (str(asked.specifier) or "any", has)
    return found


def package_root(environment: Environment, package: str) -> Path | None:
    """Return the folder that holds the package's module in an environment, if it is still there."""
    module, roots = module_of(package), [Path(each) for each in environment.paths]
    roots += sorted(Path(environment.python).parent.parent.glob("lib/python3*/site-packages"))
    return next((root for root in roots if _holds(root, module)), None)


def _holds(folder: Path, module: str) -> bool:
    return (folder / module / "__init__.py").is_file() or (folder / f"{module}.py").is_file()
