"""Where a candidate is run: an environment with its own pins, or its package alone laid over the packages of one Python.

uv resolves, downloads and links; store.py keeps what it made. Everything that a candidate's run sees of this process, the
interpreter, the paths and the variables, is in Environment.
"""

import hashlib
import importlib.metadata
import json
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from datetime import datetime, timedelta
from functools import cache
from pathlib import Path

from packaging.requirements import InvalidRequirement, Requirement
from packaging.specifiers import InvalidSpecifier, SpecifierSet
from packaging.utils import canonicalize_name
from packaging.version import Version

from harness.rollout.cpu_mode import cpu_environment
from harness.runtime.cpu_standins import STANDINS
from harness.runtime.units import GIB
from harness.tools.bisection.candidates import Candidate, export_commit, index_arguments, releases
from harness.tools.bisection.causes import module_of
from harness.tools.bisection.question import Options, Question, WrongQuestion, is_of_this_repository
from harness.tools.bisection.store import NoDisk, Pause, Store, Unreachable, default_root
from harness.tools.environments import REPOSITORY, cpu_torch, uv_environment
from harness.tools.process_tree import run_tree

_FREEZE = """
import importlib.metadata as m, json, re
found = {d.metadata["Name"]: d.version for d in reversed(list(m.distributions()))}
print(json.dumps({re.sub(r"[-_.]+", "-", name).lower(): version for name, version in found.items() if name}))
"""
PROBE = """
import importlib, importlib.metadata as m, re, sys
same = lambda name: re.sub(r"[-_.]+", "-", name).lower() == sys.argv[1]
named = [n for n, found in m.packages_distributions().items() if any(map(same, found)) and n.isidentifier()]
for name in {sys.argv[2]} & {*named} or named or [sys.argv[2]]:
    importlib.import_module(name)
"""
"""Imports a package; its arguments are the package's normal name and that of its module, as far as that is known."""
PYTHONS = ("3.12", "3.11", "3.10", "3.13", "3.9")
OWN_NEEDS = ("accelerate", "datasets", "jinja2", "msgspec", "psutil", "rich", "safetensors")
"""What a script of this repository imports beside SGLang and its dependencies."""
GRACE = timedelta(days=5)
"""How long after a release its own pins may have been published: kernels often follow within days."""
EXTRAS_UNTIL = Version("0.5.2")
"""Up to this sglang its engine's dependencies stand in extras."""
_SGL = ["sgl-kernel", "sglang-kernel", "sgl-deep-gemm", "sgl-deep-ep", "sgl-flash-mla", "sgl-fa4", "flash-attn-4"]
_FLASHINFER = ["flashinfer-python", "flashinfer-cubin", "flashinfer-jit-cache"]
_KERNELS = ["quack-kernels", "tilelang", "humming-kernels", "tokenspeed-mla", "torch-memory-saver"]
_NVIDIA = ["cuda-python", "cuda-tile", "nvidia-cutlass-dsl", "nvidia-mathdx", "nvshmem4py-cu13"]
CUDA_ONLY = [*_SGL, *_FLASHINFER, *_KERNELS, *_NVIDIA, "torchaudio", "torchcodec", "decord2"]
"""What SGLang's CPU mode does without."""
_CUDA_LIBRARIES = re.compile(r"(nvidia-|cuda-)")
_NETWORK = re.compile(
    r"error sending request|dns error|client error \(connect\)|operation timed out|request timed out|network is unreachable"
    r"|connection (?:refused|reset|closed|timed out)|error decoding response body|failed to download.*timed? ?out|tls handshake",
    re.IGNORECASE,
)
_DISK = re.compile(r"no space left on device|disk quota exceeded|os error 28|os error 122", re.IGNORECASE)


class Unavailable(Exception):
    """A candidate that cannot be had here; one sentence. It is skipped, never bad."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Environment:
    """An interpreter, what goes first on its PYTHONPATH, and the version of every package that it sees."""

    python: str
    paths: tuple[str, ...] = ()
    freeze: Mapping[str, str] = field(default_factory=dict)
    key: str = ""
    """In the store; "" for what was there before."""

    def variables(self, no_gpu: bool, imports_harness: bool = False) -> dict[str, str]:
        """Return this process's variables, with the environment's programs and packages first.

        no_gpu: SGLang, if it is there, runs in its CPU mode, with the harness's stand-ins. imports_harness: the script is
        one of this checkout, which no candidate has installed.
        """
        found = {name: value for name, value in os.environ.items() if name not in ("VIRTUAL_ENV", "PYTHONHOME")}
        folder, standins = Path(self.python).parent, str(STANDINS)
        found["PATH"] = os.pathsep.join([str(folder), os.environ.get("PATH", os.defpath)])
        if (folder.parent / "pyvenv.cfg").exists():
            found["VIRTUAL_ENV"] = str(folder.parent)
        inherited = [each for each in os.environ.get("PYTHONPATH", "").split(os.pathsep) if each not in ("", standins)]
        paths = [*self.paths, *inherited, *([str(REPOSITORY)] if imports_harness else [])]
        if no_gpu and "sglang" in self.freeze:
            found = cpu_environment(1) | found
            paths.insert(0, standins)
        found["PYTHONPATH"] = os.pathsep.join(dict.fromkeys(paths))
        return found | {"PYTHONNOUSERSITE": "1", "HARNESS_VENV": "none"}

    def with_freeze(self) -> "Environment":
        """Return the same with what is really installed, by its own Python. Raises Unavailable if that does not start."""
        command = [self.python, "-c", _FREEZE]
        run = subprocess.run(command, capture_output=True, text=True, env=self.variables(no_gpu=False))
        if run.returncode:
            last = run.stderr.strip().rpartition("\n")[2].strip(" .") or "no output"
            raise Unavailable(f"its Python {self.python} does not start: {last}.")
        return replace(self, freeze=dict(sorted(json.loads(run.stdout).items())))


def _uv_variables() -> dict[str, str]:
    found = {"UV_HTTP_TIMEOUT": "60"} | uv_environment()
    return {name: value for name, value in found.items() if name not in ("PYTHONPATH", "VIRTUAL_ENV")}


def _ask_uv(words: Sequence[str], stdin: str = "") -> str:
    """Return what `uv WORDS` prints. Raises Unavailable, Pause."""
    command = [uv_binary(), *words, "--color", "never"]
    run = subprocess.run(command, capture_output=True, text=True, env=_uv_variables(), input=stdin)
    if run.returncode:
        raise uv_problem(run.stderr, run.returncode)
    return run.stdout


def _install_by_uv(words: Sequence[str], folder: Path, lock: int) -> None:
    """Run `uv WORDS`, with its output in folder/install.log; it ends with this process. Raises Unavailable, Pause."""
    log, command = folder / "install.log", [uv_binary(), *words, "--color", "never"]
    with log.open("wb") as output:
        ended = run_tree(command, output=output, env=_uv_variables(), inherit=(lock,))
    if ended.code:
        raise uv_problem(log.read_text(errors="replace"), ended.code)


def _has_python(version: str) -> bool:
    with suppress(Unavailable):
        return bool(_ask_uv(["python", "find", version, "--system", "--no-python-downloads"]))
    return False


def uv_binary() -> str:
    """Return the uv beside this Python, or on PATH. Raises WrongQuestion."""
    beside = Path(sys.executable).with_name("uv")
    if found := str(beside) if beside.exists() else shutil.which("uv"):
        return found
    raise WrongQuestion(
        f"uv, which makes the environments, must be beside {sys.executable} or on PATH: pip install uv."
    )


def uv_problem(stderr: str, code: int = 1) -> Exception:
    """Return Pause, Unreachable or NoDisk if uv was killed or lacked the network or the disk, else Unavailable."""
    if code < 0:
        return Pause(f"uv was killed by signal {-code}.")
    if _DISK.search(stderr):
        return NoDisk("no space is left on the disk of the store or of uv's cache.")
    text = " ".join(stderr.encode("ascii", "ignore").decode().split())
    text = re.split(r"error: |resolving dependencies(?: cause)?: ", text)[-1][:300].strip(" .")
    if _NETWORK.search(stderr):
        return Unreachable(f"a package index could not be reached ({text}).")
    return Unavailable(f"uv: {text or 'it failed without a message'}.")


@dataclass(kw_only=True)
class Provider:
    """Where the environments of candidates come from."""

    store: Store
    python: str = sys.executable
    """Over whose packages those of a candidate are laid, unless it has an environment of its own."""

    def resolve(self, candidate: Candidate) -> None:
        """Find out, installing nothing, whether it can be had. Raises Unavailable, Pause."""

    def make(self, candidate: Candidate) -> Environment:
        """Return its environment, made if it is not there, kept until release. Raises Unavailable, Pause."""
        raise NotImplementedError

    def release(self, environment: Environment) -> None:
        self.store.release(environment.key)


@dataclass(kw_only=True)
class Prepared(Provider):
    """A folder for each version that was made before: an environment with bin/python, or a site-packages folder."""

    def make(self, candidate: Candidate) -> Environment:
        folder = Path(candidate.folder)
        python, site = folder / "bin" / "python", folder / "site" if (folder / "site").is_dir() else folder
        if python.exists():
            return Environment(python=str(python)).with_freeze()
        if not any(site.glob("*.dist-info")) and not any(site.glob("*/__init__.py")):
            raise Unavailable(f"{folder} is neither an environment (bin/python) nor a site-packages folder.")
        return Environment(python=self.python, paths=(str(site),)).with_freeze()


@dataclass(kw_only=True)
class Commits(Provider):
    """Each commit of a checkout, unpacked, first on the path of one Python."""

    checkout: Path

    def make(self, candidate: Candidate) -> Environment:
        key = f"commit-{candidate.name[:16]}-{_digest(str(self.checkout))}"
        folder = self.store.ensure(key, lambda new, lock: export_commit(self.checkout, candidate.name, new / "files"))
        files = folder / "files"
        path = next((files / name for name in ("python", "src") if (files / name).is_dir()), files)
        return Environment(python=self.python, paths=(str(path),), key=key).with_freeze()


@dataclass(kw_only=True)
class Overlay(Provider):
    """Each candidate's package alone, without its dependencies, over the packages of one Python."""

    package: str
    sources: list[str]

    def resolve(self, candidate: Candidate) -> None:
        _ask_uv([*self._install(candidate, self.store.root / "resolving"), "--dry-run", "--quiet"])

    def make(self, candidate: Candidate) -> Environment:
        key = (
            f"over-{self.package}-{candidate.name}-{_digest(self.package, candidate.name, self.python, *self.sources)}"
        )
        folder = self.store.ensure(
            key, lambda new, lock: _install_by_uv(self._install(candidate, new / "site"), new, lock)
        )
        return Environment(python=self.python, paths=(str(folder / "site"),), key=key).with_freeze()

    def _install(self, candidate: Candidate, target: Path) -> list[str]:
        words = ["pip", "install", "--no-deps", "--link-mode", "hardlink", "--target", str(target)]
        return [*words, "--python", self.python, *self.sources, f"{self.package}=={candidate.name}"]


@dataclass(kw_only=True)
class Pinned(Provider):
    """A virtual environment for each candidate: it and its dependencies, as they resolved when it was published."""

    package: str
    requirements: tuple[str, ...]
    """Of every environment, beside the candidate: those of --hold, and what the script needs."""
    held_since: str
    """When the newest of --hold was published, in ISO 8601; "" if nothing is."""
    dated: bool
    """Whether to leave out what was published later; a folder of wheels has no dates."""
    no_gpu: bool
    pythons: tuple[str, ...]
    """Minor versions of this machine, the preferred one first."""
    sources: list[str]
    locks: Path
    """The folder of resolutions: CANDIDATE.txt."""

    def resolve(self, candidate: Candidate) -> None:
        lock = self._lock(candidate)
        if lock.exists():
            return
        self.locks.mkdir(parents=True, exist_ok=True)
        allowed, cutoff = SpecifierSet(), ""
        with suppress(InvalidSpecifier):
            allowed = SpecifierSet(candidate.requires_python)
        python = next((each for each in self.pythons if allowed.contains(f"{each}.99")), "")
        if not python:
            raise Unavailable(f"it wants Python {candidate.requires_python}, which is not on this machine.")
        if self.dated and candidate.time:
            published = max(datetime.fromisoformat(each) for each in (candidate.time, self.held_since) if each)
            cutoff = (published + GRACE).strftime("%Y-%m-%dT%H:%M:%SZ")
        lines = [f"# python {python}", f"# packages published until {cutoff or 'today'}"]
        temporary = lock.with_suffix(".new")
        temporary.write_text("\n".join([*lines, *self._compile(candidate, python, cutoff), ""]))
        temporary.replace(lock)

    def make(self, candidate: Candidate) -> Environment:
        self.resolve(candidate)
        lock = self._lock(candidate)
        key = f"{self.package}-{candidate.name}-{_digest(lock.read_text(), *self.sources, str(self.no_gpu))}"
        folder = self.store.ensure(key, lambda new, descriptor: self._install(new, lock, descriptor))
        python = str(folder / "venv" / "bin" / "python")
        return Environment(python=python, key=key).with_freeze()

    def _lock(self, candidate: Candidate) -> Path:
        return self.locks / f"{candidate.name}.txt"

    def _compile(self, candidate: Candidate, python: str, cutoff: str) -> list[str]:
        words = ["pip", "compile", "-", "--quiet", "--no-header", "--no-annotate", "--python-version", python]
        words += [*self.sources, *(["--exclude-newer", cutoff] if cutoff else [])]
        old_sglang = self.package == "sglang" and Version(candidate.name) <= EXTRAS_UNTIL
        extras = "[srt,torch_memory_saver]" if old_sglang else ""
        asked = [f"{self.package}{extras}=={candidate.name}", *self.requirements]
        given: dict[str, list[str]] = {}
        if self.held_since:  # --hold may pin the candidate's package
            given["overrides"] = asked[:1]
        if self.no_gpu and "sglang" in (Requirement(each).name for each in asked):
            given["excludes"] = [name for name in CUDA_ONLY if name != canonicalize_name(self.package)]
        for option, lines in given.items():
            file = self.locks / f"{candidate.name}.{option}"  # its own: others are resolved beside it
            file.write_text("\n".join(lines) + "\n")
            words += [f"--{option}", str(file)]
        pins = [line for line in _ask_uv(words, "\n".join(asked)).split("\n") if "==" in line]
        return [pin for pin in pins if not _CUDA_LIBRARIES.match(pin)] if self._torch(pins) else pins

    def _torch(self, lines: Sequence[str]) -> list[str]:
        """Return uv's arguments for the CPU build of the torch that the lines pin; none with a GPU, or out of reach."""
        pin = next((line.split(" ")[0] for line in lines if line.startswith("torch==")), "")
        return _cpu_torch(pin, *self.sources) if self.no_gpu and pin and "+" not in pin else []

    def _install(self, folder: Path, lock: Path, descriptor: int) -> None:
        venv, pins = folder / "venv", lock.read_text().splitlines()
        words = ["venv", "--quiet", "--python", pins[0].removeprefix("# python "), "--no-project"]
        _install_by_uv([*words, "--no-python-downloads", str(venv)], folder, descriptor)
        install = ["pip", "install", "--no-deps", "--link-mode", "hardlink", "--python", str(venv / "bin" / "python")]
        install += self.sources
        if torch := self._torch(pins):
            _install_by_uv([*install, *torch], folder, descriptor)
        _install_by_uv([*install, "-r", str(lock)], folder, descriptor)


@cache
def _cpu_torch(pin: str, *sources: str) -> list[str]:
    target = str(default_root() / "none")
    return cpu_torch([uv_binary(), "pip", "install", "--target", target, "--python", sys.executable, *sources], pin)


def _digest(*parts: str) -> str:
    return hashlib.sha256("\n".join(parts).encode()).hexdigest()[:12]


def provider_of(question: Question, folder: Path, no_gpu: bool) -> Provider:
    """Return the provider that the options ask for. folder: of the bisect. Raises WrongQuestion, Unreachable."""
    options, store = question.options, store_of(question.options)
    python = options.python if os.sep in options.python else sys.executable
    wrong = WrongQuestion(f"--python must be an interpreter or a version of this machine, got {options.python}.")
    if not Path(python).exists():
        raise wrong
    if options.environments:
        return Prepared(store=store, python=python)
    if options.git:
        return Commits(store=store, checkout=Path(options.git), python=python)
    sources = package_sources(options)
    if options.only_package:
        return Overlay(store=store, package=options.package, python=python, sources=sources)
    own = f"{sys.version_info[0]}.{sys.version_info[1]}"
    asked = (options.python,) if options.python else dict.fromkeys((own, *PYTHONS))
    pythons = tuple(each for each in asked if each == own or _has_python(each))
    if not pythons:
        raise wrong
    held = _held(options)
    return Pinned(
        store=store,
        package=options.package,
        requirements=(*held, *(OWN_NEEDS if is_of_this_repository(question) else ())),
        held_since="" if options.wheels else max(("", *map(_published, held))),
        dated=not options.wheels and not options.today,
        no_gpu=no_gpu,
        pythons=pythons,
        sources=sources,
        locks=folder / "resolutions",
    )


def package_sources(options: Options) -> list[str]:
    return ["--no-index", "--find-links", options.wheels] if options.wheels else index_arguments()


def store_of(options: Options) -> Store:
    root = Path(options.store).absolute() if options.store else default_root()
    return Store(root, int(options.store_gib * GIB))


def _held(options: Options) -> tuple[str, ...]:
    """Return the requirements of --hold; without it, this Python's sglang if something else moves."""
    if options.hold == ("none",) or (not options.hold and (options.package == "sglang" or options.wheels)):
        return ()
    try:
        own = () if options.hold else (f"sglang=={importlib.metadata.version('sglang')}",)
        return tuple(str(Requirement(each)) for each in options.hold) or own
    except InvalidRequirement as error:
        raise WrongQuestion(f"--hold must be requirements such as sglang==0.5.20: {error}.") from error
    except importlib.metadata.PackageNotFoundError as error:
        raise WrongQuestion(
            "this Python has no sglang to hold; give --hold sglang==VERSION, or --hold none."
        ) from error


def _published(requirement: str) -> str:
    if not (match := re.search(r"==\s*([\w.]+)", requirement)):
        return ""
    found = releases(Requirement(requirement).name).get(Version(match[1]))
    if found is None:
        raise WrongQuestion(f"--hold {requirement}: there is no such release.")
    return found.time


def unmet_requirements(paths: Sequence[str], package: str, freeze: Mapping[str, str]) -> dict[str, tuple[str, str]]:
    """Return what an overlaid package asks for and does not get: name -> what is wanted, and the version ("": none) there."""
    found = {}
    named = (each for each in importlib.metadata.distributions(path=list(paths)) if each.name)
    own = next((each for each in named if canonicalize_name(each.name) == canonicalize_name(package)), None)
    for text in (own.requires if own else None) or ():
        with suppress(InvalidRequirement):
            asked = Requirement(text)
            has = freeze.get(canonicalize_name(asked.name), "")
            applies = asked.marker is None or asked.marker.evaluate({"extra": ""})
            if applies and not (has and asked.specifier.contains(has, prereleases=True)):
                found[asked.name] = (str(asked.specifier) or "any", has)
    return found


def package_root(paths: Sequence[str], python: str, package: str) -> Path | None:
    """Return the folder that holds the package's module in an environment, if it is still there."""
    module = module_of(package)
    roots = [Path(each) for each in paths]
    roots += sorted(Path(python).parent.parent.glob("lib/python3*/site-packages")) if python else []
    return next((r for r in roots if (r / module / "__init__.py").is_file() or (r / f"{module}.py").is_file()), None)
