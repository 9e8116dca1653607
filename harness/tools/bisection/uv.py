"""uv, called for what a bisect needs; its errors told apart: this release cannot be installed, or nothing can be now."""

import os
import re
import shutil
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

from harness.tools.bisection import supervised
from harness.tools.bisection.question import WrongQuestion
from harness.tools.bisection.store import NoDisk, Pause, Unreachable
from harness.tools.environments import uv_environment

_NETWORK = re.compile(
    r"error sending request|dns error|client error \(connect\)|operation timed out|request timed out|network is unreachable"
    r"|connection (?:refused|reset|closed|timed out)|error decoding response body|failed to download.*timed? ?out|tls handshake",
    re.IGNORECASE,
)
_DISK = re.compile(r"no space left on device|disk quota exceeded|os error 28|os error 122", re.IGNORECASE)
_LONGEST = 300


class Unavailable(Exception):
    """A candidate that cannot be had here; one sentence. It is skipped, never bad."""


def binary() -> str:
    """The uv beside this Python, or on PATH. Raises WrongQuestion."""
    beside = Path(sys.executable).with_name("uv")
    found = str(beside) if beside.exists() else shutil.which("uv")
    if not found:
        raise WrongQuestion(
            f"uv, which makes the environments, is neither beside {sys.executable} nor on PATH; install it with pip."
        )
    return found


def environment(store: Path) -> dict[str, str]:
    """Of uv's processes. Where its cache is on another file system than the store, the store gets one of its own, as files
    cannot be linked from one to the other."""
    told = uv_environment()
    told.pop("PYTHONPATH", None)
    told.pop("VIRTUAL_ENV", None)
    told.setdefault("UV_HTTP_TIMEOUT", "60")
    run = subprocess.run([binary(), "cache", "dir"], capture_output=True, text=True, env=told)
    cache = Path(run.stdout.strip() or "/")
    store.mkdir(parents=True, exist_ok=True)
    if _device(cache) != _device(store):
        told["UV_CACHE_DIR"] = str(store / "uv-cache")
    return told


def ask(arguments: Sequence[str], environment: dict[str, str], stdin: str = "") -> str:
    """What uv prints. Raises Unavailable, Pause."""
    run = subprocess.run(
        [binary(), *arguments, "--color", "never"], capture_output=True, text=True, env=environment, input=stdin
    )
    if run.returncode < 0:
        raise Pause(f"uv was killed by signal {-run.returncode}.")
    if run.returncode:
        raise problem(run.stderr)
    return run.stdout


def install(arguments: Sequence[str], environment: dict[str, str], log: Path, lock: int) -> None:
    """Run `uv ARGUMENTS` to its end; it ends with this process. Raises Unavailable, Pause."""
    ended = supervised.run([binary(), *arguments, "--color", "never"], log, environment=environment, inherit=(lock,))
    if ended.code < 0:
        raise Pause(f"uv was killed by signal {-ended.code}.")
    if ended.code:
        raise problem(log.read_text(errors="replace"))


def problem(said: str) -> Exception:
    """Of uv's last words: Unreachable or NoDisk where network or disk is missing, else Unavailable."""
    text = " ".join(line.strip() for line in _reason(said)).encode("ascii", "ignore").decode()
    text = re.sub(r"\s+", " ", text).strip(" .")
    text = re.sub(r"^error: No solution found when resolving dependencies(?: cause)?: ", "", text)
    if _DISK.search(said):
        return NoDisk("no space is left on the disk of the store or of uv's cache.")
    if _NETWORK.search(said):
        return Unreachable(f"a package index could not be reached ({text[:_LONGEST]}).")
    return Unavailable(f"uv: {text[:_LONGEST]}." if text else "uv failed without a word.")


def _reason(said: str) -> list[str]:
    """The lines that say why: uv's tree of causes, without hints."""
    lines = [
        line
        for line in said.splitlines()
        if line.strip() and not line.lstrip().startswith(("warning", "hint", "Using"))
    ]
    last = next((i for i in reversed(range(len(lines))) if "\u2570" in lines[i] or "error" in lines[i].lower()), 0)
    kept = []
    for line in lines[last:]:
        if line.strip().startswith("hint:"):
            break
        kept.append(line)
    return kept


def has_python(version: str, environment: dict[str, str]) -> bool:
    """Whether that minor version is on this machine."""
    if version == f"{sys.version_info[0]}.{sys.version_info[1]}":
        return True
    command = [binary(), "python", "find", version, "--system", "--no-python-downloads"]
    return subprocess.run(command, capture_output=True, env=environment).returncode == 0


def _device(path: Path) -> int:
    while not path.exists():
        path = path.parent
    return os.stat(path).st_dev
