"""Environments that are quick to have: one package, a commit or a prepared folder laid over packages that are there."""

import hashlib
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from harness.tools.bisection import commits, uv
from harness.tools.bisection.candidates import Candidate
from harness.tools.bisection.environment import Environment
from harness.tools.bisection.store import Store
from harness.tools.bisection.uv import Unavailable


@dataclass
class Overlay:
    """Each candidate's package alone, without its dependencies, over the packages of one Python."""

    package: str
    python: str
    store: Store
    sources: tuple[str, ...]
    """uv's arguments that say where packages come from."""
    environment: dict[str, str]
    """Of uv's processes."""

    def resolve(self, candidate: Candidate) -> None:
        target = self.store.root / "resolving"
        uv.ask([*self._install(candidate, target), "--dry-run", "--quiet"], self.environment)

    def make(self, candidate: Candidate) -> Environment:
        started = time.monotonic()
        identity = (self.package, candidate.name, self.python, *self.sources)
        key = f"over-{self.package}-{candidate.name}-{_digest(*identity)}"

        def fill(folder: Path, lock: int) -> dict[str, Any]:
            words = self._install(candidate, folder / "site")
            uv.install([*words, "--link-mode", "hardlink"], self.environment, folder / "install.log", lock)
            return {"seconds": time.monotonic() - started}

        known = self.store.facts(key) is not None
        folder, facts = self.store.ensure(key, fill)
        bare = Environment(
            python=self.python,
            paths=(str(folder / "site"),),
            freeze={},
            key=key,
            installed_seconds=0.0 if known else facts["seconds"],
        )
        return bare.with_freeze()

    def release(self, environment: Environment) -> None:
        self.store.release(environment.key)

    def _install(self, candidate: Candidate, target: Path) -> list[str]:
        words = ["pip", "install", "--no-deps", "--target", str(target), "--python", self.python, *self.sources]
        return [*words, f"{self.package}=={candidate.name}"]


@dataclass
class Commits:
    """Each commit of a checkout, unpacked, first on the path of one Python."""

    checkout: Path
    python: str
    store: Store

    def resolve(self, candidate: Candidate) -> None:
        """A commit of the checkout can always be had."""

    def make(self, candidate: Candidate) -> Environment:
        started = time.monotonic()
        key = f"commit-{candidate.name[:16]}-{_digest(str(self.checkout))}"

        def fill(folder: Path, lock: int) -> dict[str, Any]:
            commits.export(self.checkout, candidate.name, folder / "files")
            return {"seconds": time.monotonic() - started}

        known = self.store.facts(key) is not None
        folder, facts = self.store.ensure(key, fill)
        return Environment(
            python=self.python,
            paths=(str(commits.import_folder(folder / "files")),),
            freeze={},
            key=key,
            installed_seconds=0.0 if known else facts["seconds"],
        ).with_freeze()

    def release(self, environment: Environment) -> None:
        self.store.release(environment.key)


@dataclass
class Prepared:
    """A folder for each version that was made before: an environment with bin/python, or a site-packages folder that goes
    over the packages of one Python."""

    python: str
    _known: dict[str, Environment] = field(default_factory=dict)

    def resolve(self, candidate: Candidate) -> None:
        self._laid(Path(candidate.folder))

    def make(self, candidate: Candidate) -> Environment:
        if candidate.name not in self._known:
            self._known[candidate.name] = self._laid(Path(candidate.folder)).with_freeze()
        return self._known[candidate.name]

    def release(self, environment: Environment) -> None:
        """It is not ours to remove."""

    def _laid(self, folder: Path) -> Environment:
        """Before anything of it is started. Raises Unavailable."""
        python = folder / "bin" / "python"
        if python.exists():
            return Environment(python=str(python), freeze={})
        site = folder / "site" if (folder / "site").is_dir() else folder
        if not any(site.glob("*.dist-info")) and not any(site.glob("*/__init__.py")):
            raise Unavailable(f"{folder} is neither an environment (bin/python) nor a site-packages folder.")
        return Environment(python=self.python, paths=(str(site),), freeze={})


def _digest(*parts: str) -> str:
    return hashlib.sha256("\n".join(parts).encode()).hexdigest()[:12]
