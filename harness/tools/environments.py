"""The Python environment that a run needs, installed by uv from a file of pins.

    python3 harness/tools/environments.py [--tests]

The file is one of configs/environments: the one that HARNESS_ENVIRONMENT names, else the one that the folder already
holds, else `cuda-torch2.11` on a machine with an NVIDIA GPU and `cpu` on any other. The folder is .venv in the
checkout, or the one that HARNESS_VENV names; HARNESS_VENV=none uses the Python that runs this script.

Only the standard library is imported, so any Python 3.11 or newer can start here: it makes a virtual environment, pip
installs uv there, and uv installs the rest. uv's own lock file is not used, because it fixes one build of torch
together with the address it came from. CPU builds of torch are not on PyPI, so a lock would either bring the CUDA build
with 5 GB of libraries to every machine, or depend on an index that not every machine can reach. A pin file says
torch==2.13.0 and leaves the build to what is within reach.

Exit codes: 0 the environment is ready, 2 the command line or the Python is wrong, 125 it cannot be made on this
machine.
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
from collections.abc import Iterator, Sequence
from pathlib import Path

REPOSITORY = next(each for each in Path(__file__).resolve().parents[1:] if (each / "configs").is_dir())
"""What holds launch/ and configs/: the checkout, or in a wheel the package itself."""
PINS = REPOSITORY / "configs" / "environments"
DEFAULT_WITH_GPU, DEFAULT_WITHOUT_GPU = "cuda-torch2.11", "cpu"
NETWORK = re.compile(r"connection|error sending request|dns error|name resolution|timed out|unreachable", re.IGNORECASE)
ANOTHER_FOLDER = "set the variable HARNESS_VENV to another folder"
_STAMP = "harness.json"
_LOCK = "harness.lock"


class Unusable(Exception):
    """The environment cannot be used; `exit_code` is 2 (the user's mistake) or 125 (not on this machine)."""

    def __init__(self, exit_code: int, sentence: str) -> None:
        super().__init__(sentence)
        self.exit_code = exit_code


# What other scripts ask.


def has_gpu() -> bool:
    """Return whether nvidia-smi is on PATH and succeeds; torch is not imported for it."""
    found = shutil.which("nvidia-smi")
    return found is not None and subprocess.run([found, "-L"], capture_output=True).returncode == 0


def made() -> Path | None:
    """Return the interpreter of the environment, or None if there is no environment or HARNESS_VENV is none."""
    folder = _folder()
    python = folder / "bin" / "python" if folder else None
    # Not Path.exists, which raises OSError for a folder that must not be read, or a name that is too long.
    return python if python and os.path.exists(python) else None


def need(*packages: str) -> None:
    """Restart this script in the environment if this Python lacks one of the packages.

    If there is no environment, or it lacks them too, exit with 2 and one sentence.
    """
    if why := what_lacks(*packages):
        restart_in_environment()
        from harness.runtime.errors import report_user_error  # not above: this file also runs as a script

        sys.exit(report_user_error(ValueError(why), rank=0))


def what_lacks(*packages: str) -> str:
    """Return a sentence on the packages that this Python lacks, and what to do; "" if it has them all."""
    lacking = [package for package in packages if importlib.util.find_spec(package) is None]
    lacks = f"{sys.argv[0]} needs {' and '.join(lacking)}, which {sys.executable} lacks"
    remedy = "use a Python that has them, or, in a checkout, run `python3 launch/quickstart.py` once, which makes .venv"
    return f"{lacks}; {remedy}." if lacking else ""


def restart_in_environment() -> None:
    """Start this process again with the environment's Python; return if there is none, or if it runs already."""
    python = made()
    if python is not None and python != Path(sys.executable):
        from harness.tools.interrupts import become  # not above: this file also runs as a script

        become([str(python), *sys.argv])


def shipped(path: str) -> str:
    """Return the path of a file; of ours in launch/ or configs/ if the user's folder has none of this name."""
    ours = REPOSITORY / path
    return path if Path(path).is_file() or not ours.is_file() else str(ours)


def torchrun(python: Path) -> list[str]:
    """Return the command that starts torchrun in the environment of `python`."""
    script = python.with_name("torchrun")
    return [str(script)] if script.exists() else [str(python), "-P", "-m", "torch.distributed.run"]


# The environment.


def ensure(*, tests: bool = False, run_here: bool = True) -> Path:
    """Return the interpreter of an environment that has what the pin files say, after installing what is missing.

    tests: also install tests.txt. run_here: whether it is for this machine, and not only made here. Nothing in the
    folder is ever deleted: newer pins are installed over older ones, other packages and files stay, and an environment
    of another Python is used as it is. Raises Unusable.
    """
    if sys.version_info < (3, 11):  # noqa: UP036 - whatever python3 is may run this
        found = ".".join(map(str, sys.version_info[:3]))
        raise Unusable(2, f"python = {found} is too old: run this with Python 3.11 or newer, such as python3.11")
    folder = _folder()
    if folder is None:
        return _this_interpreter(("torch", "sglang", "pytest") if tests else ("torch", "sglang"))
    try:
        return _ensure_in(folder, tests, run_here)
    except OSError as error:
        reason = error.strerror or error
        raise Unusable(2, f"{_named(folder)} cannot be written: {reason}; {ANOTHER_FOLDER}") from error


def _ensure_in(folder: Path, tests: bool, run_here: bool) -> Path:
    """Do what ensure() does, in this folder. Raise OSError too, if the folder cannot be read or written."""
    installed = _read_stamp(folder)
    asked = os.environ.get("HARNESS_ENVIRONMENT")
    files = _pin_files(asked or _made_of(installed) or (DEFAULT_WITH_GPU if has_gpu() else DEFAULT_WITHOUT_GPU), tests)
    if run_here and files[0].stem.startswith("cuda") and not has_gpu():
        remedy = (
            "set HARNESS_VENV to a new folder to make one for the CPU" if installed else "leave out HARNESS_ENVIRONMENT"
        )
        raise Unusable(
            2, f"{files[0].stem} is for a machine with an NVIDIA GPU, and nvidia-smi finds none here: {remedy}"
        )
    _check_folder(folder, files[0].stem, installed)
    if _outdated(files, installed):
        with _locked(folder):
            if outdated := _outdated(files, _read_stamp(folder)):  # another process may have been faster
                _install(folder, outdated)
    if files[0].stem == DEFAULT_WITHOUT_GPU:
        start_in_cpu_mode(folder)
    return folder / "bin" / "python"


def _folder() -> Path | None:
    """Return the environment's folder; None for the running interpreter."""
    asked = os.environ.get("HARNESS_VENV", "")
    if asked == "none":
        return None
    return Path(asked).absolute() if asked else REPOSITORY / ".venv"


def _named(folder: Path) -> str:
    """Return the folder in the words of the user, who need not have named it."""
    return f"HARNESS_VENV = {folder}" if os.environ.get("HARNESS_VENV") else f"{folder}, the environment's folder,"


def _pin_files(name: str, tests: bool) -> list[Path]:
    names = sorted(file.stem for file in PINS.glob("*.txt") if file.stem != "tests")
    if name not in names:
        raise Unusable(2, f"environment = {name!r} must be one of {', '.join(names)}")
    return [PINS / f"{each}.txt" for each in (name, *(["tests"] if tests else []))]


def _check_folder(folder: Path, name: str, installed: dict[str, str]) -> None:
    """Raise Unusable for a folder that must not be touched."""
    is_empty = not folder.exists() or not any(folder.iterdir())
    if not is_empty and not (folder / _LOCK).exists():
        remedy = f"{ANOTHER_FOLDER}, or to none to use the Python that you run"
        raise Unusable(2, f"{_named(folder)} was not made by this script: {remedy}")
    if not is_empty and os.path.lexists(folder / "bin" / "python") and not (folder / "bin" / "python").exists():
        gone = os.path.realpath(folder / "bin" / "python")
        raise Unusable(2, f"{folder} was made with {gone}, which is gone: move the folder away, and start again")
    if (held := _made_of(installed)) not in (name, ""):
        remedy = f"set HARNESS_VENV to a new folder for {name}, or leave out HARNESS_ENVIRONMENT to use {held}"
        raise Unusable(2, f"{folder} holds the environment {held}, not {name}: {remedy}")


def _made_of(installed: dict[str, str]) -> str:
    """Return the name of the environment that a folder holds, "" for none."""
    return next((Path(file).stem for file in installed if file != "tests.txt"), "")


def _read_stamp(folder: Path) -> dict[str, str]:
    """Return the pin files that are completely installed, with their digests."""
    try:
        return dict(json.loads((folder / _STAMP).read_text())["files"])
    except (FileNotFoundError, json.JSONDecodeError):
        return {}


def _digest(file: Path) -> str:
    return hashlib.sha256(file.read_bytes()).hexdigest()


def _outdated(files: Sequence[Path], installed: dict[str, str]) -> list[Path]:
    return [file for file in files if installed.get(file.name) != _digest(file)]


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


def _install(folder: Path, files: Sequence[Path]) -> None:
    """Install the pins of these files over what the folder holds."""
    started, python = time.monotonic(), folder / "bin" / "python"
    installed = _read_stamp(folder)
    was_cut_off = python.exists() and not installed
    (folder / _STAMP).unlink(missing_ok=True)  # until all is installed
    _say(f"installing {' and '.join(file.name for file in files)} into {folder}: {describe(files)}")
    base = next((file for file in files if file.stem != "tests"), None)
    if not (folder / "bin" / "uv").exists():
        _run(
            [getattr(sys, "_base_executable", sys.executable), "-P", "-m", "venv", str(folder)],
            "make a virtual environment",
        )
        pip = [str(python), "-P", "-m", "pip", "install", "--disable-pip-version-check", "--retries", "1"]
        _run([*pip, f"uv=={pins_of(PINS / f'{DEFAULT_WITHOUT_GPU}.txt')['uv']}"], "install uv")
    config = subprocess.run(
        [str(python), "-P", "-m", "pip", "config", "list"], capture_output=True, text=True, check=True
    )
    install = [str(folder / "bin" / "uv"), "pip", "install", "--python", str(python), *uv_sources(config.stdout)]
    if base is not None and base.stem == DEFAULT_WITHOUT_GPU:
        _install_cpu_torch(install, base, ["--reinstall-package", "torch"] if was_cut_off else [])
    # A process that was killed may have left half a package. torch itself is done above, as the CPU build.
    doubtful = [package for file in files for package in pins_of(file) if was_cut_off and package != "torch"]
    again = [word for package in doubtful for word in ("--reinstall-package", package)]
    # Where Python writes no bytecode, each process of each run would compile SGLang and torch anew, for seconds.
    compiled = ["--compile-bytecode"] if sys.dont_write_bytecode else []
    requirements = [word for file in files for word in ("-r", str(file))]
    _run([*install, "--no-deps", *compiled, *again, *requirements], "install the packages")
    stamp = {"files": {**installed, **{file.name: _digest(file) for file in files}}}
    (folder / _STAMP).write_text(json.dumps(stamp, indent=2) + "\n")  # half of it counts as none
    _say(f"ready in {time.monotonic() - started:.0f} s")


def start_in_cpu_mode(folder: Path) -> None:
    """Have the environment's Python start in SGLang's CPU mode (harness/runtime/cpu_standins.py), whatever it runs.

    Its site-packages get a file that names this checkout. If the checkout is gone, it does nothing.
    """
    standins, module = str(Path(__file__).resolve().parents[1] / "runtime" / "standins"), "harness_cpu_mode"
    # Before the installed packages, one of which the stand-in for torchvision hides, and after PYTHONPATH, by which
    # scripts of another checkout bring their own. `sitedir` is the variable of Python's site module.
    path = f"{standins!a} in sys.path or sys.path.insert(sys.path.index(sitedir), {standins!a})"
    there = f"os.path.isfile({f'{standins}/{module}.py'!a})"
    line = f"import os, sys; {there} and [{path}, __import__({module!r}).set_variables()]\n"
    for packages in folder.glob("lib/python3*/site-packages"):
        file, new = packages / f"{module}.pth", packages / f"{module}.{os.getpid()}"
        with contextlib.suppress(OSError):  # of somebody else, who shares it
            if not file.is_file() or file.read_text() != line:
                new.write_text(line)
                os.replace(new, file)


def describe(files: Sequence[Path]) -> str:
    """Return how many packages the files pin, and the sizes that their headers state."""
    sizes = [size for file in files for size in re.findall(r"^# About (.+?) on disk", file.read_text(), re.M)]
    return f"{sum(len(pins_of(file)) for file in files)} packages, about {' + '.join(sizes)} on disk"


def pins_of(file: Path) -> dict[str, str]:
    """Return the version of each package that a file pins."""
    return dict(re.findall(r"^([^#\s=]+)==(\S+)", file.read_text(), re.M))


def _install_cpu_torch(install: list[str], base: Path, again: list[str]) -> None:
    """Install the CPU build of torch; if none is within reach, the build of PyPI with its CUDA libraries."""
    pin = f"torch=={pins_of(base)['torch']}"
    arguments = cpu_torch(install, pin)
    if not arguments:
        _say(f"{pin} with its CUDA libraries, about 5 GB more: no CPU build is within reach")
    _run([*install, *again, "-c", str(base), *(arguments or [pin])], "install torch")


def cpu_torch(install: list[str], pin: str) -> list[str]:
    """Return arguments of the uv command `install` for the CPU build of a pinned torch; none if it is not within
    reach.
    """
    environment = {**uv_environment(), "UV_HTTP_TIMEOUT": "15", "UV_HTTP_RETRIES": "0"}
    for extra in ([], ["--torch-backend", "cpu"]):
        arguments = [*extra, "--no-deps", f"{pin}+cpu"]
        if subprocess.run([*install, "--dry-run", *arguments], capture_output=True, env=environment).returncode == 0:
            return arguments
    return []


def uv_sources(pip_config: str) -> list[str]:
    """Return uv's arguments for the package sources that `pip config list` prints; uv does not read pip's
    configuration.

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
            is_missing_folder = option == "find-links" and "://" not in value and not Path(value).exists()
            if not is_missing_folder:  # pip ignores it, uv fails
                arguments += ["--allow-insecure-host" if option == "trusted-host" else f"--{option}", value]
    return [*arguments, "--index-strategy", "unsafe-best-match"] if arguments else []


def uv_environment() -> dict[str, str]:
    """Return this process's environment, with pip's certificates given to uv too."""
    certificates = os.environ.get("PIP_CERT")
    return {**({"SSL_CERT_FILE": certificates} if certificates else {}), **os.environ}


def _this_interpreter(packages: tuple[str, ...]) -> Path:
    lacking = [package for package in packages if importlib.util.find_spec(package) is None]
    if lacking:
        raise Unusable(125, f"HARNESS_VENV = none, but {sys.executable} has no {' and no '.join(lacking)}")
    return Path(sys.executable)


def _run(command: list[str], purpose: str) -> None:
    """Run a command, with a line every 10 s, and its output if it fails. Raises Unusable(125) if it fails."""
    # Not runtime/processes.run_tree: this script runs before harness can be imported, and pip and uv leave no process
    # behind.
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
    parser.add_argument("--tests", action="store_true", help="also install what the tests need")
    options = parser.parse_args(arguments)
    try:
        print(ensure(tests=options.tests, run_here=False))
    except Unusable as problem:
        _say(str(problem))
        return problem.exit_code
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
