"""Environments with each release's own pins, as they resolved when it was published."""

import hashlib
import re
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from datetime import datetime, timedelta
from pathlib import Path
from typing import Any

from packaging.specifiers import InvalidSpecifier, SpecifierSet
from packaging.version import Version

from harness.tools.bisection import uv
from harness.tools.bisection.candidates import Candidate
from harness.tools.bisection.environment import Environment, canonical
from harness.tools.bisection.store import Store
from harness.tools.bisection.uv import Unavailable

PYTHONS = ("3.12", "3.11", "3.10", "3.13", "3.9")
GRACE_DAYS = (1, 5)
"""How long after a release its own pins may have been published: kernels often follow within days. The second only where
the first does not resolve."""
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


@dataclass
class Pinned:
    """A virtual environment for each candidate: it and its dependencies."""

    package: str
    requirements: tuple[str, ...]
    """Of every environment, beside the candidate: what is held, and what the script needs."""
    held_since: str
    """When the newest of what is held was published, in ISO 8601; "" where nothing is."""
    today: bool
    no_gpu: bool
    pythons: tuple[str, ...]
    """Minor versions, the preferred one first; those that are not on this machine are passed over."""
    store: Store
    sources: tuple[str, ...]
    environment: dict[str, str]
    locks: Path
    """Where resolutions are kept: CANDIDATE.txt."""
    dated: bool = True
    """Whether --exclude-newer makes sense: a folder of wheels has no dates."""
    _cpu_torch: dict[str, bool] = field(default_factory=dict)
    _pythons_here: dict[str, bool] = field(default_factory=dict)

    def resolve(self, candidate: Candidate) -> None:
        lock = self._lock(candidate)
        if lock.exists():
            return
        python = self._python(candidate)
        cutoffs = self._cutoffs(candidate)
        problem: Unavailable | None = None
        for cutoff in cutoffs:
            try:
                resolved = self._compile(candidate, python, cutoff)
            except Unavailable as error:
                problem = problem or error
                continue
            self.locks.mkdir(parents=True, exist_ok=True)
            header = [
                f"# python {python}",
                f"# packages published until {cutoff}" if cutoff else "# packages as of today",
            ]
            temporary = lock.with_suffix(".new")
            temporary.write_text("\n".join([*header, *resolved, ""]))
            temporary.replace(lock)
            return
        assert problem
        raise problem

    def make(self, candidate: Candidate) -> Environment:
        started = time.monotonic()
        self.resolve(candidate)
        lock = self._lock(candidate)
        text = lock.read_text()
        identity = hashlib.sha256("\n".join([text, *self.sources, str(self.no_gpu)]).encode()).hexdigest()[:12]
        key = f"{self.package}-{candidate.name}-{identity}"

        def fill(folder: Path, descriptor: int) -> dict[str, Any]:
            self._install(folder, lock, text, descriptor)
            return {"seconds": time.monotonic() - started}

        known = self.store.facts(key) is not None
        folder, facts = self.store.ensure(key, fill)
        seconds = 0.0 if known else facts["seconds"]
        return Environment(
            python=str(folder / "venv" / "bin" / "python"), freeze={}, key=key, installed_seconds=seconds
        ).with_freeze()

    def release(self, environment: Environment) -> None:
        self.store.release(environment.key)

    def _lock(self, candidate: Candidate) -> Path:
        return self.locks / f"{candidate.name}.txt"

    def _python(self, candidate: Candidate) -> str:
        """The first that the release allows."""
        try:
            allowed = SpecifierSet(candidate.requires_python)
        except InvalidSpecifier:
            allowed = SpecifierSet()
        for each in self.pythons:
            if allowed.contains(f"{each}.99") and self._is_here(each):
                return each
        raise Unavailable(f"it wants Python {candidate.requires_python}, which is not on this machine.")

    def _is_here(self, python: str) -> bool:
        if python not in self._pythons_here:
            self._pythons_here[python] = uv.has_python(python, self.environment)
        return self._pythons_here[python]

    def _cutoffs(self, candidate: Candidate) -> list[str]:
        """Of --exclude-newer, in the order in which they are tried; "" for today."""
        if self.today or not self.dated or not candidate.time:
            return [""]
        published = max(datetime.fromisoformat(each) for each in (candidate.time, self.held_since) if each)
        return [(published + timedelta(days=days)).strftime("%Y-%m-%dT%H:%M:%SZ") for days in GRACE_DAYS]

    def _compile(self, candidate: Candidate, python: str, cutoff: str) -> list[str]:
        """Lines of package==version. Raises Unavailable, Pause."""
        words = [
            "pip",
            "compile",
            "-",
            "--quiet",
            "--no-header",
            "--no-annotate",
            "--python-version",
            python,
            *self.sources,
        ]
        words += ["--exclude-newer", cutoff] if cutoff else []
        self.locks.mkdir(parents=True, exist_ok=True)
        own = f"{self.package}{_extras(self.package, candidate.name)}=={candidate.name}"
        asked = [own, *self.requirements]
        if len(self.requirements) and self.held_since:  # what is held pins the candidate's package: the candidate wins
            overrides = self.locks / f"{candidate.name}.overrides"
            overrides.write_text(f"{self.package}=={candidate.name}\n")
            words += ["--overrides", str(overrides)]
        if self.no_gpu and "sglang" in map(canonical, asked):
            excludes = self.locks / f"{candidate.name}.excludes"  # its own: others are resolved beside it
            excludes.write_text("\n".join(name for name in CUDA_ONLY if name != canonical(self.package)) + "\n")
            words += ["--excludes", str(excludes)]
        resolved = uv.ask(words, self.environment, "\n".join(asked)).split("\n")
        lines = [line for line in resolved if "==" in line]
        if self.no_gpu and self._torch(lines):
            lines = [line for line in lines if not _CUDA_LIBRARIES.match(line)]
        return lines

    def _torch(self, lines: Sequence[str]) -> list[str]:
        """uv's arguments for the CPU build of the torch that the lines pin; none where it is not within reach."""
        pin = next((line.split(" ")[0] for line in lines if line.startswith("torch==")), "")
        if not pin or "+" in pin:
            return []
        for extra in ([], ["--torch-backend", "cpu"]):
            arguments = [*extra, f"{pin}+cpu"]
            key = " ".join(arguments)
            if key not in self._cpu_torch:
                words = ["pip", "install", "--dry-run", "--quiet", "--no-deps", "--target", str(self.locks / "none")]
                quick = {**self.environment, "UV_HTTP_TIMEOUT": "15", "UV_HTTP_RETRIES": "0"}
                try:
                    uv.ask([*words, "--python", sys.executable, *self.sources, *arguments], quick)
                    self._cpu_torch[key] = True
                except Exception as error:
                    if not isinstance(error, Unavailable | uv.Pause):
                        raise
                    self._cpu_torch[key] = False
            if self._cpu_torch[key]:
                return arguments
        return []

    def _install(self, folder: Path, lock: Path, text: str, descriptor: int) -> None:
        log, venv = folder / "install.log", folder / "venv"
        python = re.search(r"# python (\S+)", text)
        assert python
        words = ["venv", "--quiet", "--python", python[1], "--no-project", "--no-python-downloads", str(venv)]
        uv.install(words, self.environment, log, descriptor)
        install = [
            "pip",
            "install",
            "--no-deps",
            "--link-mode",
            "hardlink",
            "--python",
            str(venv / "bin" / "python"),
            *self.sources,
        ]
        if self.no_gpu and (torch := self._torch(text.splitlines())):
            uv.install([*install, *torch], self.environment, log, descriptor)
        uv.install([*install, "-r", str(lock)], self.environment, log, descriptor)


def _extras(package: str, version: str) -> str:
    return "[srt,torch_memory_saver]" if package == "sglang" and Version(version) <= EXTRAS_UNTIL else ""
