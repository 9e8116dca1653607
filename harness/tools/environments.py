"""The Python environment a run needs, made from pinned files, with the standard library only.

    python3 harness/tools/environments.py [--environment NAME] [--tests]

NAME is a file of configs/environments; without it, HARNESS_ENVIRONMENT, else `cuda-torch2.11` where nvidia-smi answers,
else `cpu`. The environment is made in .venv, or in the folder that HARNESS_VENV names; HARNESS_VENV=none takes the
running interpreter as it is. Exit code 0: it is there; 2: the command line or the Python is wrong; 125: it cannot be
made here.
"""

from __future__ import annotations

import argparse
import ast
import contextlib
import fcntl
import hashlib
import importlib.util
import json
import os
import re
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

REPOSITORY = Path(__file__).resolve().parents[2]
PINS = REPOSITORY / "configs" / "environments"
_STAMP = "harness.json"
_LOCK = "harness.lock"
NETWORK = re.compile(r"connection|error sending request|dns error|name resolution|timed out|unreachable", re.IGNORECASE)


class Unusable(Exception):
    """The environment cannot be made; `exit_code` is 2 (wrong command line or Python) or 125 (not on this machine)."""

    def __init__(self, exit_code: int, sentence: str) -> None:
        super().__init__(sentence)
        self.exit_code = exit_code


@dataclass(frozen=True)
class Wanted:
    """What an environment is made of: the Python minor version and the pinned files, the base file first."""

    python: str
    files: tuple[Path, ...]

    def digests(self) -> dict[str, str]:
        return {file.name: hashlib.sha256(file.read_bytes()).hexdigest() for file in self.files}

    def describe(self) -> str:
        """Return how many packages the files pin, and the sizes that their headers state."""
        texts = [file.read_text() for file in self.files]
        sizes = [size for text in texts for size in re.findall(r"^# About (.+?) on disk", text, re.M)]
        pinned = sum(len(re.findall(r"^[^#\s]+==", text, re.M)) for text in texts)
        return f"{pinned} packages, about {' + '.join(sizes)} on disk"

    def pin(self, package: str) -> str:
        """Return the requirement `package==version` of the base file."""
        return re.findall(rf"^{package}==\S+", self.files[0].read_text(), re.M)[0]


def has_gpu() -> bool:
    """Return whether nvidia-smi is on PATH and succeeds; asked without torch."""
    found = shutil.which("nvidia-smi")
    return found is not None and subprocess.run([found, "-L"], capture_output=True).returncode == 0


def ensure(environment: str | None = None, *, tests: bool = False, folder: Path | None = None) -> Path:
    """Return the interpreter of an environment that is ready, made or completed first where it is not.

    `tests` adds tests.txt. Instant when the stamp in the folder has the digests of the pinned files and the Python
    version. Two processes at once wait for one another; an install that was cut off starts over. Raises Unusable.
    """
    if sys.version_info < (3, 11):  # noqa: UP036 - whatever python3 is may run this
        found = ".".join(map(str, sys.version_info[:3]))
        raise Unusable(2, f"python = {found} is too old: run this with Python 3.11 or newer, such as python3.11")
    asked = str(folder) if folder is not None else os.environ.get("HARNESS_VENV", "")
    if asked == "none":
        return _this_interpreter(("torch", "sglang", "pytest") if tests else ("torch", "sglang"))
    name = environment or os.environ.get("HARNESS_ENVIRONMENT") or ("cuda-torch2.11" if has_gpu() else "cpu")
    names = sorted(file.stem for file in PINS.glob("*.txt") if file.stem != "tests")
    if name not in names:
        raise Unusable(2, f"environment = {name!r} must be one of {', '.join(names)}")
    files = (PINS / f"{name}.txt", PINS / "tests.txt") if tests else (PINS / f"{name}.txt",)
    wanted = Wanted(f"{sys.version_info[0]}.{sys.version_info[1]}", files)
    folder = Path(asked).absolute() if asked else REPOSITORY / ".venv"
    if _missing(folder, wanted):
        if folder.exists() and any(folder.iterdir()) and not (folder / _LOCK).exists():
            remedy = "name a new folder, or 'none' to run as you are"
            raise Unusable(2, f"HARNESS_VENV = {folder} was not made by the harness: {remedy}")
        with _locked(folder):
            if missing := _missing(folder, wanted):
                _make(folder, wanted, missing)
    _install_checkout(folder, wanted)
    return folder / "bin" / "python"


def made() -> Path | None:
    """Return the interpreter of the environment, if there is one; None under HARNESS_VENV=none."""
    asked = os.environ.get("HARNESS_VENV", "")
    python = (Path(asked).absolute() if asked else REPOSITORY / ".venv") / "bin" / "python"
    return python if asked != "none" and python.exists() else None


def need(*packages: str) -> None:
    """Go on in the environment, with the same command line, where this Python lacks one of these packages.

    Ends this process with a sentence and exit code 2 where there is no environment yet, or where it lacks them too.
    """
    lacking = [package for package in packages if importlib.util.find_spec(package) is None]
    python = made()
    if lacking and (python is None or python == Path(sys.executable)):
        lacks = f"{sys.argv[0]} needs {' and '.join(lacking)}, which {sys.executable} lacks"
        remedy = "run `python3 launch/quickstart.py` once, which makes .venv, or use a Python that has them"
        print(f"error: {lacks}; {remedy}.", file=sys.stderr)
        sys.exit(2)
    if lacking:
        os.execv(str(python), [str(python), *sys.argv])


def uv_sources(pip_config: str) -> list[str]:
    """Return uv's arguments for the package sources that `pip config list` prints; uv does not read pip's configuration.

    pip considers every index and link at once, and so does uv with this setting.
    """
    settings: dict[str, str] = {}
    for scope in ("global.", "install.", ":env:."):  # the last one wins, as in pip
        for line in pip_config.splitlines():
            key, _, value = line.partition("=")
            if key.startswith(scope):
                settings[key.removeprefix(scope)] = str(ast.literal_eval(value))
    arguments = ["--no-index"] if settings.get("no-index", "").lower() in ("1", "true", "yes", "on") else []
    for option in ("find-links", "index-url", "extra-index-url", "trusted-host"):
        for value in settings.get(option, "").split():
            if option != "find-links" or "://" in value or Path(value).exists():  # pip passes over absent folders
                arguments += ["--allow-insecure-host" if option == "trusted-host" else f"--{option}", value]
    return [*arguments, "--index-strategy", "unsafe-best-match"] if arguments else []


def torchrun(python: Path) -> list[str]:
    """Return the command that starts torchrun in the environment of `python`."""
    script = python.with_name("torchrun")
    return [str(script)] if script.exists() else [str(python), "-m", "torch.distributed.run"]


def _this_interpreter(packages: tuple[str, ...]) -> Path:
    lacking = [package for package in packages if importlib.util.find_spec(package) is None]
    if lacking:
        raise Unusable(125, f"HARNESS_VENV = none, but {sys.executable} has no {' and no '.join(lacking)}")
    if not any(any(Path(entry).glob("sglang_rl_harness-*.dist-info")) for entry in sys.path if entry):
        install = f"{sys.executable} -m pip install --no-deps -e {REPOSITORY}"
        _say(f"`import harness` works inside {REPOSITORY}; from elsewhere after: {install}")
    return Path(sys.executable)


def _install_checkout(folder: Path, wanted: Wanted) -> None:
    """Install this checkout editable, so that `import harness` works from any folder; do nothing where that is done."""
    site = folder / "lib" / f"python{wanted.python}" / "site-packages"
    found = [json.loads(file.read_text())["url"] for file in site.glob("sglang_rl_harness-*.dist-info/direct_url.json")]
    if found == [REPOSITORY.as_uri()]:
        return
    uv = [str(folder / "bin" / "uv"), "pip", "install", "--quiet", "--python", str(folder / "bin" / "python")]
    _run([*uv, "--offline", "--no-deps", "--no-build-isolation", "-e", str(REPOSITORY)], "install this checkout")


def _missing(folder: Path, wanted: Wanted) -> tuple[Path, ...]:
    """Return the files yet to be installed: none, all, or all but the base file."""
    try:
        stamp = json.loads((folder / _STAMP).read_text())
    except (FileNotFoundError, json.JSONDecodeError):
        return wanted.files
    missing = tuple(file for file in wanted.files if stamp["files"].get(file.name) != wanted.digests()[file.name])
    usable = stamp["python"] == wanted.python and (folder / "bin" / "python").exists()
    return missing if usable and wanted.files[0] not in missing else wanted.files


@contextlib.contextmanager
def _locked(folder: Path) -> Iterator[None]:
    folder.mkdir(parents=True, exist_ok=True)
    with open(folder / _LOCK, "w") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            _say(f"waiting: another process is installing into {folder}")
            fcntl.flock(file, fcntl.LOCK_EX)
        yield


def _make(folder: Path, wanted: Wanted, missing: tuple[Path, ...]) -> None:
    started = time.monotonic()
    todo = Wanted(wanted.python, missing)
    anew = wanted.files[0] in missing
    names, doing = ", ".join(file.name for file in missing), "making" if anew else "completing"
    _say(f"{doing} {folder} (Python {wanted.python}) from {names}: {todo.describe()}")
    python = folder / "bin" / "python"
    if anew:
        if any(entry.name != _LOCK for entry in folder.iterdir()):
            _say("what is there is out of date or was cut off: starting over")
        (folder / _STAMP).unlink(missing_ok=True)
        for entry in folder.iterdir():
            if entry.is_dir() and not entry.is_symlink():
                shutil.rmtree(entry)
            elif entry.name != _LOCK:
                entry.unlink()
        _run([getattr(sys, "_base_executable", sys.executable), "-m", "venv", str(folder)], "make a venv")
        pip = [str(python), "-m", "pip", "install", "--disable-pip-version-check", "--retries", "1"]
        _run([*pip, wanted.pin("uv")], "install uv")
    command = [str(python), "-m", "pip", "config", "list"]
    config = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    install = [str(folder / "bin" / "uv"), "pip", "install", "--python", str(python), *uv_sources(config)]
    if anew and wanted.files[0].stem == "cpu":
        torch = cpu_torch(install, pin := wanted.pin("torch"))
        if not torch:
            _say(f"{pin} with its CUDA libraries, about 5 GB more: no CPU build is within reach")
        _run([*install, "-c", str(missing[0]), *(torch or [pin])], "install torch")
    requirements = [part for file in missing for part in ("-r", str(file))]
    # Where Python writes no bytecode, each process of each run would compile SGLang and torch anew, for seconds.
    compiled = ["--compile-bytecode"] if sys.dont_write_bytecode else []
    _run([*install, "--no-deps", *compiled, *([] if anew else ["--reinstall"]), *requirements], "install the packages")
    stamp = {"python": wanted.python, "files": wanted.digests()}
    (folder / f"{_STAMP}.new").write_text(json.dumps(stamp, indent=2) + "\n")
    os.replace(folder / f"{_STAMP}.new", folder / _STAMP)
    _say(f"ready in {time.monotonic() - started:.0f} s")


def cpu_torch(install: list[str], pin: str) -> list[str]:
    """Return arguments of the uv command `install` for the CPU build of a pinned torch; none if it is not within reach."""
    environment = {**uv_environment(), "UV_HTTP_TIMEOUT": "15", "UV_HTTP_RETRIES": "0"}
    for extra in ([], ["--torch-backend", "cpu"]):
        arguments = [*extra, "--no-deps", f"{pin}+cpu"]
        if subprocess.run([*install, "--dry-run", *arguments], capture_output=True, env=environment).returncode == 0:
            return arguments
    return []


def uv_environment() -> dict[str, str]:
    """Return this process's environment, with pip's certificates given to uv too."""
    certificates = os.environ.get("PIP_CERT")
    return {**({"SSL_CERT_FILE": certificates} if certificates else {}), **os.environ}


def _run(command: list[str], purpose: str) -> None:
    """Run a command, with a line every 10 s, and its output if it fails. Raises Unusable(125) if it fails."""
    # Not process_tree.run_tree: this script runs before harness can be imported, and pip and uv leave no process behind.
    started = time.monotonic()
    pipe = subprocess.PIPE
    with subprocess.Popen(command, stdout=pipe, stderr=subprocess.STDOUT, text=True, env=uv_environment()) as process:
        output = None
        while output is None:
            try:
                output = process.communicate(timeout=10)[0]
            except subprocess.TimeoutExpired:
                _say(f"{purpose}: {time.monotonic() - started:.0f} s")
            except BaseException:
                process.kill()
                raise
    if process.returncode:
        print(output, end="", file=sys.stderr, flush=True)
        reached = "no package registry could be reached" if NETWORK.search(output) else "the reason stands above"
        failed = f"{Path(command[0]).name} exited with {process.returncode}"
        raise Unusable(125, f"could not {purpose} ({failed}): {reached}")


def _say(sentence: str) -> None:
    print(f"environment: {sentence}", file=sys.stderr, flush=True)


def main(arguments: list[str]) -> int:
    """Print the interpreter's path; return the exit code."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--environment", metavar="NAME", help="a file of configs/environments, without .txt")
    parser.add_argument("--tests", action="store_true", help="add what the tests need")
    options = parser.parse_args(arguments)
    try:
        print(ensure(options.environment, tests=options.tests))
    except Unusable as problem:
        _say(str(problem))
        return problem.exit_code
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
