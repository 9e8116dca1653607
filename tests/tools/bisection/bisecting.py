"""launch/bisect_versions.py run from outside, on packages made for the purpose."""

import atexit
import json
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from types import MappingProxyType
from typing import Any

REPOSITORY = Path(__file__).parents[3]
SCRIPT = REPOSITORY / "launch" / "bisect_versions.py"


@cache
def bare_python() -> str:
    """An interpreter without packages, which starts faster than this one."""
    folder = Path(tempfile.mkdtemp(prefix="bare-python-"))
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", str(folder)], check=True)
    atexit.register(shutil.rmtree, folder)
    return str(folder / "bin" / "python")


def git(folder: Path, *words: str, stdin: str | None = None) -> str:
    run = subprocess.run(
        ["git", "-c", "user.name=t", "-c", "user.email=t@t", "-C", str(folder), *words],
        capture_output=True,
        text=True,
        input=stdin,
        check=True,
    )
    return run.stdout.strip()


def commit(checkout: Path, message: str, files: Mapping[str, str] = MappingProxyType({})) -> str:
    """Write the files and commit them; return the hash."""
    for name, text in files.items():
        (checkout / name).parent.mkdir(parents=True, exist_ok=True)
        (checkout / name).write_text(text)
    git(checkout, "add", "--all")
    git(checkout, "commit", "-q", "--allow-empty", "-m", message)
    return git(checkout, "rev-parse", "HEAD")


def repository(folder: Path, commits: Sequence[Mapping[str, str]]) -> list[str]:
    """Make a checkout in which commit N writes its files; return the commits' hashes."""
    git(folder.parent, "init", "-q", "-b", "main", str(folder))
    return [commit(folder, f"commit {number}", files) for number, files in enumerate(commits)]


@dataclass
class Bench:
    """A folder in which bisects are run."""

    folder: Path
    environment: dict[str, str] = field(default_factory=dict)

    def sites(self, codes: Sequence[str], package: str = "moving") -> Path:
        """Site-packages folders 1.0, 1.1, ...: each with one module of that code."""
        for minor, code in enumerate(codes):
            site = self.folder / "sites" / f"1.{minor}"
            (site / package).mkdir(parents=True)
            (site / package / "__init__.py").write_text(code)
            info = site / f"{package}-1.{minor}.dist-info"
            info.mkdir()
            (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {package}\nVersion: 1.{minor}\n")
        return self.folder / "sites"

    def script(self, code: str, name: str = "script.py") -> str:
        """A script that also notes every run in the file `ran`."""
        line = f"open({str(self.folder / 'ran')!r}, 'a').write(os.environ.get('BISECT_CANDIDATE', '?') + '\\n')"
        note = f"import os\nif __name__ == '__main__':  # not in the processes that an engine spawns\n    {line}\n"
        (self.folder / name).write_text(note + code)
        return name

    def ran(self) -> list[str]:
        """Candidates whose runs began, in order."""
        file = self.folder / "ran"
        return file.read_text().split() if file.exists() else []

    def command(self, *words: str) -> list[str]:
        return [sys.executable, str(SCRIPT), *words]

    def variables(self) -> dict[str, str]:
        return {**os.environ, "XDG_CACHE_HOME": str(self.folder / "cache"), **self.environment}

    def bisect(self, *words: str, timeout: float = 120) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            self.command(*words), cwd=self.folder, env=self.variables(), capture_output=True, text=True, timeout=timeout
        )

    def over_sites(self, codes: Sequence[str], script: str, *words: str) -> subprocess.CompletedProcess[str]:
        """Bisect from the first to the last of the sites."""
        sites, ends = self.sites(codes), ["--good", "1.0", "--bad", f"1.{len(codes) - 1}"]
        asked = ["--python", bare_python(), "--package", "moving", "--environments", str(sites), "--dir", "found"]
        return self.bisect(*asked, *ends, *words, "--", self.script(script))

    def state(self, folder: str = "found") -> dict[str, Any]:
        state: dict[str, Any] = json.loads((self.folder / folder / "state.json").read_text())
        return state

    def report(self, folder: str = "found") -> str:
        return (self.folder / folder / "report.md").read_text()
