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
import tomllib
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from datetime import datetime, timedelta
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
from harness.tools.environments import REPOSITORY, uv_environment
from harness.tools.process_tree import run_tree

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
PYTHONS = ("3.12", "3.11", "3.10", "3.13", "3.9")
OWN_NEEDS = ("accelerate", "datasets", "jinja2", "psutil", "rich", "safetensors", "tyro")
"""What a script of this repository imports beside SGLang and its dependencies."""
GRACE_DAYS = (1, 5)
"""How long after a release its own pins may have been published: kernels often follow within days. The second is tried only
if the first does not resolve."""
EXTRAS_UNTIL = Version("0.5.2")
"""Up to this sglang its engine's dependencies stand in extras."""
CUDA_ONLY = [
    "sgl-kernel",
    "sglang-kernel",
    "flashinfer-python",
    "flashinfer-cubin",
    "flashinfer-jit-cache",
    "flash-attn-4",
    "quack-kernels",
    "tilelang",
    "humming-kernels",
    "tokenspeed-mla",
    "cuda-python",
    "cuda-tile",
    "nvidia-cutlass-dsl",
    "nvidia-mathdx",
    "nvshmem4py-cu13",
    "sgl-deep-gemm",
    "sgl-deep-ep",
    "sgl-flash-mla",
    "sgl-fa4",
    "torchaudio",
    "torchcodec",
    "torch-memory-saver",
    "decord2",
]
"""What SGLang's CPU mode does without."""
_CUDA_LIBRARIES = re.compile(r"(nvidia-|cuda-)")
_NETWORK = re.compile(
    r"error sending request|dns error|client error \(connect\)|operation timed out|request timed out|network is unreachable"
    r"|connection (?:refused|reset|closed|timed out)|error decoding response body|failed to download.*timed? ?out|tls handshake",
    re.IGNORECASE,
)
_DISK = re.compile(r"no space left on device|disk quota exceeded|os error 28|os error 122", re.IGNORECASE)
_LONGEST = 300


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
    installed_seconds: float = 0.0
    """What making it took; 0 if it was there."""

    def variables(self, no_gpu: bool, imports_harness: bool = False) -> dict[str, str]:
        """Return this process's variables, with the environment's programs and packages first.

        no_gpu: SGLang, if it is there, runs in its CPU mode, with the harness's stand-ins. imports_harness: the script is
        one of this checkout, which no candidate has installed.
        """
        left_out = ("VIRTUAL_ENV", "PYTHONHOME", "PYTHONPATH")
        found = {name: value for name, value in os.environ.items() if name not in left_out}
        folder = Path(self.python).parent
        found["PATH"] = os.pathsep.join([str(folder), os.environ.get("PATH", os.defpath)])
        if (folder.parent / "pyvenv.cfg").exists():
            found["VIRTUAL_ENV"] = str(folder.parent)
        standins = str(STANDINS)
        paths = list(self.paths)
        if no_gpu and "sglang" in self.freeze:
            found = cpu_environment(1) | found
            paths.insert(0, standins)
        inherited = [each for each in os.environ.get("PYTHONPATH", "").split(os.pathsep) if each not in ("", standins)]
        checkout = [str(REPOSITORY)] if imports_harness else []
        found["PYTHONPATH"] = os.pathsep.join(dict.fromkeys([*paths, *inherited, *checkout]))
        return found | {"PYTHONNOUSERSITE": "1", "HARNESS_VENV": "none"}

    def with_freeze(self) -> "Environment":
        """Return the same with what is really installed, by its own Python. Raises Unavailable if that does not start."""
        command = [self.python, "-c", _FREEZE]
        run = subprocess.run(command, capture_output=True, text=True, env=self.variables(no_gpu=False))
        if run.returncode:
            last = run.stderr.strip().rpartition("\n")[2].strip(" .") or "no output"
            raise Unavailable(f"its Python {self.python} does not start: {last}.")
        found: dict[str, str] = json.loads(run.stdout)
        return replace(self, freeze=dict(sorted(found.items())))

    def check_version(self, package: str, wanted: str) -> None:
        """Raise Unavailable if a run would see another version of the package than the candidate's."""
        seen = self.freeze.get(name_of(package))
        if seen is None or Version(seen) != Version(wanted):
            where = " (PYTHONPATH may hide it)" if os.environ.get("PYTHONPATH") else ""
            raise Unavailable(f"its environment has {package} {seen or 'not at all'} in place of {wanted}{where}.")

    def probe(self, code: str, package: str) -> list[str]:
        """Return the command of --probe; nothing for `none`."""
        if code == "none":
            return []
        return [self.python, "-c", *([_PROBE, package] if code == "auto" else [code])]


def own_version(package: str) -> str:
    with suppress(importlib.metadata.PackageNotFoundError):
        return importlib.metadata.version(package)
    return ""


def name_of(requirement: str) -> str:
    return str(canonicalize_name(re.split(r"[^\w.-]", requirement.strip(), maxsplit=1)[0]))


@dataclass(frozen=True, slots=True)
class Uv:
    """uv, with the package sources that it is given and the variables of its processes."""

    sources: tuple[str, ...]
    variables: dict[str, str]

    @classmethod
    def over(cls, store: Path, sources: Sequence[str]) -> "Uv":
        """Give the store a cache of its own if uv's is on another file system, as links do not cross. Raises WrongQuestion."""
        variables = {n: v for n, v in uv_environment().items() if n not in ("PYTHONPATH", "VIRTUAL_ENV")}
        variables.setdefault("UV_HTTP_TIMEOUT", "60")
        run = subprocess.run([uv_binary(), "cache", "dir"], capture_output=True, text=True, env=variables)
        store.mkdir(parents=True, exist_ok=True)
        if _device(Path(run.stdout.strip() or "/")) != _device(store):
            variables["UV_CACHE_DIR"] = str(store / "uv-cache")
        return cls(tuple(sources), variables)

    def ask(self, words: Sequence[str], stdin: str = "", **variables: str) -> str:
        command, environment = [uv_binary(), *words, "--color", "never"], self.variables | variables
        run = subprocess.run(command, capture_output=True, text=True, env=environment, input=stdin)
        _check_uv(run.returncode, run.stderr)
        return run.stdout

    def install(self, words: Sequence[str], folder: Path, lock: int) -> None:
        """Run `uv WORDS`, with its output in folder/install.log; it ends with this process. Raises Unavailable, Pause."""
        log = folder / "install.log"
        with log.open("wb") as output:
            command = [uv_binary(), *words, "--color", "never"]
            ended = run_tree(command, output=output, env=self.variables, inherit=(lock,))
        _check_uv(ended.code, log.read_text(errors="replace"))

    def has_python(self, version: str) -> bool:
        if version == f"{sys.version_info[0]}.{sys.version_info[1]}":
            return True
        command = [uv_binary(), "python", "find", version, "--system", "--no-python-downloads"]
        return subprocess.run(command, capture_output=True, env=self.variables).returncode == 0


def uv_binary() -> str:
    """Return the uv beside this Python, or on PATH. Raises WrongQuestion."""
    beside = Path(sys.executable).with_name("uv")
    found = str(beside) if beside.exists() else shutil.which("uv")
    if not found:
        raise WrongQuestion(
            f"uv, which makes the environments, is neither beside {sys.executable} nor on PATH; install it with pip."
        )
    return found


def uv_problem(stderr: str) -> Exception:
    """Return Unreachable or NoDisk if uv lacked the network or the disk, else Unavailable."""
    if _DISK.search(stderr):
        return NoDisk("no space is left on the disk of the store or of uv's cache.")
    lines = [line for line in stderr.splitlines() if line.strip()]
    lines = [line for line in lines if not line.lstrip().startswith(("warning", "hint", "Using"))]
    last = next((i for i in reversed(range(len(lines))) if "\u2570" in lines[i] or "error" in lines[i].lower()), 0)
    text = " ".join(" ".join(lines[last:]).encode("ascii", "ignore").decode().split()).strip(" .")
    text = re.sub(r"^error: No solution found when resolving dependencies(?: cause)?: ", "", text)
    if _NETWORK.search(stderr):
        return Unreachable(f"a package index could not be reached ({text[:_LONGEST]}).")
    return Unavailable(f"uv: {text[:_LONGEST]}." if text else "uv failed without a message.")


def _check_uv(code: int, stderr: str) -> None:
    if code < 0:
        raise Pause(f"uv was killed by signal {-code}.")
    if code:
        raise uv_problem(stderr)


def _device(path: Path) -> int:
    while not path.exists():
        path = path.parent
    return os.stat(path).st_dev


@dataclass(kw_only=True)
class Provider:
    """Where the environments of candidates come from."""

    store: Store

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

    python: str
    """Over whose packages a site-packages folder is laid."""

    def resolve(self, candidate: Candidate) -> None:
        self._find(candidate)

    def make(self, candidate: Candidate) -> Environment:
        return self._find(candidate).with_freeze()

    def _find(self, candidate: Candidate) -> Environment:
        folder = Path(candidate.folder)
        python = folder / "bin" / "python"
        if python.exists():
            return Environment(python=str(python))
        site = folder / "site" if (folder / "site").is_dir() else folder
        if not any(site.glob("*.dist-info")) and not any(site.glob("*/__init__.py")):
            raise Unavailable(f"{folder} is neither an environment (bin/python) nor a site-packages folder.")
        return Environment(python=self.python, paths=(str(site),))


@dataclass(kw_only=True)
class Commits(Provider):
    """Each commit of a checkout, unpacked, first on the path of one Python."""

    checkout: Path
    python: str

    def make(self, candidate: Candidate) -> Environment:
        key = f"commit-{candidate.name[:16]}-{_digest(str(self.checkout))}"
        folder, seconds = self.store.ensure(
            key, lambda folder, lock: export_commit(self.checkout, candidate.name, folder / "files")
        )
        files = folder / "files"
        path = next((files / name for name in ("python", "src") if (files / name).is_dir()), files)
        return Environment(python=self.python, paths=(str(path),), key=key, installed_seconds=seconds).with_freeze()


@dataclass(kw_only=True)
class Overlay(Provider):
    """Each candidate's package alone, without its dependencies, over the packages of one Python."""

    package: str
    python: str
    uv: Uv

    def resolve(self, candidate: Candidate) -> None:
        self.uv.ask([*self._install(candidate, self.store.root / "resolving"), "--dry-run", "--quiet"])

    def make(self, candidate: Candidate) -> Environment:
        identity = _digest(self.package, candidate.name, self.python, *self.uv.sources)
        key = f"over-{self.package}-{candidate.name}-{identity}"

        def fill(folder: Path, lock: int) -> None:
            self.uv.install([*self._install(candidate, folder / "site"), "--link-mode", "hardlink"], folder, lock)

        folder, seconds = self.store.ensure(key, fill)
        paths = (str(folder / "site"),)
        return Environment(python=self.python, paths=paths, key=key, installed_seconds=seconds).with_freeze()

    def _install(self, candidate: Candidate, target: Path) -> list[str]:
        words = ["pip", "install", "--no-deps", "--target", str(target), "--python", self.python, *self.uv.sources]
        return [*words, f"{self.package}=={candidate.name}"]


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
    """Minor versions, the preferred one first; those that are not on this machine are passed over."""
    uv: Uv
    locks: Path
    """The folder of resolutions: CANDIDATE.txt."""
    _cpu_torch: dict[str, bool] = field(default_factory=dict)

    def resolve(self, candidate: Candidate) -> None:
        lock = self._lock(candidate)
        if lock.exists():
            return
        python = self._python(candidate)
        self.locks.mkdir(parents=True, exist_ok=True)
        problems = []
        for cutoff in self._cutoffs(candidate):
            try:
                resolved = self._compile(candidate, python, cutoff)
            except Unavailable as error:
                problems.append(error)
                continue
            until = f"# packages published until {cutoff}" if cutoff else "# packages as of today"
            temporary = lock.with_suffix(".new")
            temporary.write_text("\n".join([f"# python {python}", until, *resolved, ""]))
            temporary.replace(lock)
            return
        raise problems[0]

    def make(self, candidate: Candidate) -> Environment:
        self.resolve(candidate)
        lock = self._lock(candidate)
        pins = lock.read_text()
        key = f"{self.package}-{candidate.name}-{_digest(pins, *self.uv.sources, str(self.no_gpu))}"
        folder, seconds = self.store.ensure(key, lambda folder, descriptor: self._install(folder, lock, descriptor))
        python = str(folder / "venv" / "bin" / "python")
        return Environment(python=python, key=key, installed_seconds=seconds).with_freeze()

    def _lock(self, candidate: Candidate) -> Path:
        return self.locks / f"{candidate.name}.txt"

    def _python(self, candidate: Candidate) -> str:
        allowed = SpecifierSet()
        with suppress(InvalidSpecifier):
            allowed = SpecifierSet(candidate.requires_python)
        for each in self.pythons:
            if allowed.contains(f"{each}.99"):
                return each
        raise Unavailable(f"it wants Python {candidate.requires_python}, which is not on this machine.")

    def _cutoffs(self, candidate: Candidate) -> list[str]:
        """Return values of --exclude-newer in the order in which they are tried; "" for today."""
        if not self.dated or not candidate.time:
            return [""]
        published = max(datetime.fromisoformat(each) for each in (candidate.time, self.held_since) if each)
        return [(published + timedelta(days=days)).strftime("%Y-%m-%dT%H:%M:%SZ") for days in GRACE_DAYS]

    def _compile(self, candidate: Candidate, python: str, cutoff: str) -> list[str]:
        """Return lines of package==version. Raises Unavailable, Pause."""
        words = ["pip", "compile", "-", "--quiet", "--no-header", "--no-annotate", "--python-version", python]
        words += [*self.uv.sources, *(["--exclude-newer", cutoff] if cutoff else [])]
        old_sglang = self.package == "sglang" and Version(candidate.name) <= EXTRAS_UNTIL
        extras = "[srt,torch_memory_saver]" if old_sglang else ""
        asked = [f"{self.package}{extras}=={candidate.name}", *self.requirements]
        if self.requirements and self.held_since:  # --hold may pin the candidate's package: the candidate wins
            overrides = self.locks / f"{candidate.name}.overrides"
            overrides.write_text(f"{self.package}=={candidate.name}\n")
            words += ["--overrides", str(overrides)]
        if self.no_gpu and "sglang" in map(name_of, asked):
            excludes = self.locks / f"{candidate.name}.excludes"  # its own: others are resolved beside it
            excludes.write_text("\n".join(name for name in CUDA_ONLY if name != name_of(self.package)) + "\n")
            words += ["--excludes", str(excludes)]
        lines = [line for line in self.uv.ask(words, "\n".join(asked)).split("\n") if "==" in line]
        if self.no_gpu and self._torch(lines):
            lines = [line for line in lines if not _CUDA_LIBRARIES.match(line)]
        return lines

    def _torch(self, lines: Sequence[str]) -> list[str]:
        """Return uv's arguments for the CPU build of the torch that the lines pin; none if it is not within reach."""
        pin = next((line.split(" ")[0] for line in lines if line.startswith("torch==")), "")
        for extra in ([], ["--torch-backend", "cpu"]) if pin and "+" not in pin else ():
            arguments = [*extra, f"{pin}+cpu"]
            key = " ".join(arguments)
            if key not in self._cpu_torch:
                words = ["pip", "install", "--dry-run", "--quiet", "--no-deps", "--target", str(self.locks / "none")]
                words += ["--python", sys.executable, *self.uv.sources, *arguments]
                try:
                    self.uv.ask(words, UV_HTTP_TIMEOUT="15", UV_HTTP_RETRIES="0")
                    self._cpu_torch[key] = True
                except (Unavailable, Pause):
                    self._cpu_torch[key] = False
            if self._cpu_torch[key]:
                return arguments
        return []

    def _install(self, folder: Path, lock: Path, descriptor: int) -> None:
        venv, pins = folder / "venv", lock.read_text().splitlines()
        words = ["venv", "--quiet", "--python", pins[0].removeprefix("# python "), "--no-project"]
        self.uv.install([*words, "--no-python-downloads", str(venv)], folder, descriptor)
        install = ["pip", "install", "--no-deps", "--link-mode", "hardlink", "--python", str(venv / "bin" / "python")]
        install += self.uv.sources
        if self.no_gpu and (torch := self._torch(pins)):
            self.uv.install([*install, *torch], folder, descriptor)
        self.uv.install([*install, "-r", str(lock)], folder, descriptor)


def _digest(*parts: str) -> str:
    return hashlib.sha256("\n".join(parts).encode()).hexdigest()[:12]


def provider_of(question: Question, folder: Path, no_gpu: bool) -> Provider:
    """Return the provider that the options ask for. folder: of the bisect. Raises WrongQuestion, IndexUnreachable."""
    options, store = question.options, store_of(question.options)
    python = options.python if os.sep in options.python else sys.executable
    if not Path(python).exists():
        raise WrongQuestion(f"--python must be an interpreter or a version of this machine, got {options.python}.")
    if options.environments:
        return Prepared(store=store, python=python)
    if options.git:
        return Commits(store=store, checkout=Path(options.git), python=python)
    uv = Uv.over(store.root, package_sources(options))
    if options.only_package:
        return Overlay(store=store, package=options.package, python=python, uv=uv)
    own = f"{sys.version_info[0]}.{sys.version_info[1]}"
    pythons = (options.python,) if options.python else (own, *(each for each in PYTHONS if each != own))
    pythons = tuple(each for each in pythons if uv.has_python(each))
    if not pythons:
        raise WrongQuestion(f"--python must be an interpreter or a version of this machine, got {options.python}.")
    held = _held(question)
    return Pinned(
        store=store,
        package=options.package,
        requirements=(*held, *(OWN_NEEDS if is_of_this_repository(question) else ())),
        held_since="" if options.wheels else _published(held),
        dated=not options.wheels and not options.today,
        no_gpu=no_gpu,
        pythons=pythons,
        uv=uv,
        locks=folder / "resolutions",
    )


def package_sources(options: Options) -> list[str]:
    """Return uv's arguments that name where packages come from."""
    return ["--no-index", "--find-links", options.wheels] if options.wheels else index_arguments()


def store_of(options: Options) -> Store:
    root = Path(options.store).absolute() if options.store else default_root()
    return Store(root, int(options.store_gib * GIB))


def _held(question: Question) -> tuple[str, ...]:
    """Return the requirements of --hold; without it, this Python's sglang if something else moves."""
    options = question.options
    if options.hold == ("none",) or (not options.hold and (name_of(options.package) == "sglang" or options.wheels)):
        return ()
    if not options.hold:
        own = own_version("sglang")
        if not own:
            raise WrongQuestion(
                f"--package {options.package} holds sglang, which this Python does not have; give --hold sglang==VERSION, or"
                " --hold none."
            )
        return (f"sglang=={own}",)
    for each in options.hold:
        try:
            Requirement(each)
        except InvalidRequirement as error:
            raise WrongQuestion(f"--hold must be requirements such as sglang==0.5.20, got {each!r}.") from error
    return options.hold


def _published(held: tuple[str, ...]) -> str:
    """Return when the newest requirement with a version was published."""
    times = [""]
    for each in held:
        if match := re.search(r"==\s*([\w.]+)", each):
            found = releases(name_of(each)).get(Version(match[1]))
            if found is None:
                raise WrongQuestion(f"--hold {each}: there is no such release.")
            times.append(found.time)
    return max(times)


@dataclass(frozen=True, slots=True)
class Unmet:
    """A requirement, and the version ("" for none) that is there in its place."""

    package: str
    wants: str
    has: str


def unmet_requirements(paths: Sequence[str], package: str, freeze: Mapping[str, str]) -> list[Unmet]:
    """Return what a candidate asks for and does not get, if its files lie over packages that are not its own."""
    found = []
    for text in _requirements(paths, package):
        with suppress(InvalidRequirement):
            asked = Requirement(text)
            name = str(canonicalize_name(asked.name))
            has = freeze.get(name, "")
            applies = asked.marker is None or asked.marker.evaluate({"extra": ""})
            if applies and not (has and asked.specifier.contains(has, prereleases=True)):
                found.append(Unmet(name, str(asked.specifier) or "any", has))
    return sorted(found, key=lambda each: (not each.has, each.package))


def _requirements(paths: Sequence[str], package: str) -> list[str]:
    """Return those of its metadata, or of the pyproject.toml of a checkout; none if the files are gone."""
    for path in paths:
        for found in importlib.metadata.distributions(path=[path]):
            if name_of(found.metadata["Name"] or "") == name_of(package):
                return found.requires or []
        for project in (Path(path) / "pyproject.toml", Path(path).parent / "pyproject.toml"):
            if project.is_file():
                with suppress(tomllib.TOMLDecodeError):  # of a commit that is broken
                    return list(tomllib.loads(project.read_text("utf-8")).get("project", {}).get("dependencies", []))
                return []
    return []


def package_root(paths: Sequence[str], python: str, package: str) -> Path | None:
    """Return the folder that holds the package's module in an environment, if it is still there."""
    module = module_of(package)
    roots = [Path(each) for each in paths]
    roots += sorted(Path(python).parent.parent.glob("lib/python3*/site-packages")) if python else []
    return next((r for r in roots if (r / module / "__init__.py").is_file() or (r / f"{module}.py").is_file()), None)
