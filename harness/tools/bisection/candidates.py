"""The candidates: versions or commits between two ends, in order, and the environment that each is run in."""

import os
import subprocess
import sys
import tempfile
import tomllib
from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from types import MappingProxyType
from typing import Protocol

from packaging.version import InvalidVersion, Version

from harness.config.mistakes import ConfigError
from harness.runtime.errors import UnsupportedEnvironment
from harness.tools.bisection.question import Options, Question, is_of_this_repository
from harness.tools.trial.environment import (
    OWN_NEEDS,
    Environment,
    Pinned,
    digest,
    find_python,
    keep,
    module_of,
    published,
)
from harness.tools.trial.indexes import Candidate, Pause, between, index_arguments, releases, releases_of, version_of


def labels(candidates: Iterable[Candidate]) -> str:
    listed = [each.label for each in candidates]
    return ", ".join(listed[:12]) + (f" and {len(listed) - 12} more" if len(listed) > 12 else "")


def settle(question: Question) -> Question:
    """Name the package; with --git, also replace the ends by hashes, as a branch moves. Raises ConfigError.

    What is searched is the first-parent history of the newer end. If the older end is not part of it, because it is on
    a side branch, merged or not, the search starts where that branch began: what main had by then is all that both
    share.
    """
    options = question.options
    if not options.git:
        return replace(question, options=replace(options, package=options.package or "sglang"))
    checkout = Path(options.git)
    asked = (options.bad, options.good) if options.find_fix else (options.good, options.bad)
    older, newer = (commit_of(checkout, name) for name in asked)
    if older == newer:
        raise ConfigError(f"good and bad are the same commit, {older[:12]}; give two that differ.")
    start = _start_of_search(checkout, older, newer)
    if not start:
        searched = f"the first-parent history of {asked[1]}, which is what is searched"
        remedy = f"give a commit of `git log --first-parent {asked[1]}`; a shallow clone needs git fetch --unshallow"
        raise ConfigError(f"{asked[0]} shares no commit with {searched}; {remedy}.")
    if start == newer:
        raise ConfigError(_exchanged(options, *asked))
    if start != older:
        began = git(checkout, "log", "-1", "--format=%h %s", start)
        print(f"{asked[0]} is on a side branch; the bisect starts where that branch began, at {began}", flush=True)
    good, bad = (newer, start) if options.find_fix else (start, newer)
    package = options.package or _package_of(checkout, newer)
    if not package:
        raise ConfigError(f"the pyproject.toml of {options.git} names no package; give --package.")
    return replace(question, options=replace(options, good=good, bad=bad, package=package))


def find_candidates(question: Question) -> list[Candidate]:
    """Return them oldest first, both ends included. Raises ConfigError, Pause."""
    options = question.options
    older, newer = (options.bad, options.good) if options.find_fix else (options.good, options.bad)
    if options.git:
        return _commits_between(Path(options.git), older, newer)
    low, high = version_of(older), version_of(newer)
    if low == high:
        raise ConfigError(f"good and bad are both {older}; give two ends that differ.")
    if low > high:
        raise ConfigError(_exchanged(options, older, newer))
    if options.environments:
        found, source = _in_environments(Path(options.environments)), f"{options.package} in {options.environments}"
    elif options.wheels:
        files = ({"filename": file.name} for file in Path(options.wheels).glob("*.whl"))
        found, source = releases_of(options.package, files), f"{options.package} in {options.wheels}"
    else:
        found, source = releases(options.package), options.package
        if not found:
            raise ConfigError(f"there is no package {options.package}.")
    return between(found, older, newer, source)


def _exchanged(options: Options, older: str, newer: str) -> str:
    names, remedy = ("bad", "good"), "leave out --find-fix"
    if not options.find_fix:
        names, remedy = ("good", "bad"), "ask with --find-fix which one made it good"
    return f"{names[0]} = {older} is newer than {names[1]} = {newer}; exchange them, or {remedy}."


def _in_environments(folder: Path) -> dict[Version, Candidate]:
    found = {}
    for entry in sorted(folder.iterdir()):
        with suppress(InvalidVersion):  # of another folder or file
            version = Version(entry.name)
            found[version] = Candidate(name=str(version), folder=str(entry))
    return found


# Commits of a local checkout, which is only read.


def commit_of(checkout: Path, name: str) -> str:
    """Return the full hash of the tag `v` + name, else of the tag, branch or commit `name`. Raises ConfigError."""
    for each in (f"v{name}", name):
        if found := git(checkout, "rev-parse", "--verify", "--quiet", "--end-of-options", f"{each}^{{commit}}"):
            return found
    check_checkout("--git", checkout)
    raise ConfigError(f"{checkout} has no commit or tag {name}; fetch its tags.")


def check_checkout(option: str, folder: Path) -> None:
    """Raise ConfigError unless the folder that an option names is a git checkout."""
    if not git(folder, "rev-parse", "--git-dir"):
        raise ConfigError(f"{option} must be a git checkout, got {folder}.")


def repository_of(folder: Path) -> tuple[Path, str]:
    """Return a checkout's own folder, and where in it the given folder is: "" or, for example, "python/"."""
    return Path(git(folder, "rev-parse", "--show-toplevel") or folder), git(folder, "rev-parse", "--show-prefix")


def _start_of_search(checkout: Path, older: str, newer: str) -> str:
    """Return the newest commit of `newer`'s first-parent history that `older` already has, or "" if they share none."""
    later = git_lines(checkout, "rev-list", "--first-parent", newer, f"^{older}")
    return git(checkout, "rev-parse", "--verify", "--quiet", f"{later[-1]}^") if later else newer


def _commits_between(checkout: Path, older: str, newer: str) -> list[Candidate]:
    """Return first-parent commits from `older` to `newer`, both included."""
    form = "--format=%H %s"
    own = git_lines(checkout, "log", "-1", form, older)
    words = ["log", "--first-parent", "--reverse", form, f"{older}..{newer}"]
    parts = [line.partition(" ") for line in (*own, *git_lines(checkout, *words))]
    return [Candidate(name=commit, title=" ".join(subject.split())) for commit, _, subject in parts]


def unpack_commit(repository: Path, commit: str, folder: Path) -> None:
    """Write a commit's files into a new folder. Raises Pause."""
    folder.mkdir()
    index = {"GIT_INDEX_FILE": str(folder.with_name("index"))}  # not the repository's own, which is only read
    run = _run_git(repository, f"--work-tree={folder}", "read-tree", "--reset", "-u", commit, variables=index)
    if run.returncode:
        raise Pause(f"the files of {commit[:12]} could not be written: {run.stderr.strip()}.")


def unpack_reverted(repository: Path, commit: str, tip: str, folder: Path) -> None:
    """Write the files of `tip` without the changes of `commit`, as git revert makes them.

    Raises UnsupportedEnvironment if that cannot be, Pause.
    """
    with tempfile.TemporaryDirectory() as clone:  # it shares the repository's objects
        _git_or_refuse(Path.cwd(), "clone", "--quiet", "--shared", "--no-checkout", str(repository), clone)
        _git_or_refuse(Path(clone), "checkout", "--quiet", "--detach", tip)
        is_merge = git(Path(clone), "rev-parse", "--verify", "--quiet", f"{commit}^2")
        words = ["revert", "--no-commit", *(["--mainline", "1"] if is_merge else []), commit]
        run = _run_git(Path(clone), *words)
        if conflicts := git_lines(Path(clone), "diff", "--name-only", "--diff-filter=U"):
            raise UnsupportedEnvironment(f"it conflicts with later commits in {', '.join(conflicts)}")
        if run.returncode:
            raise UnsupportedEnvironment(run.stderr.strip().rpartition("\n")[2])
        unpack_commit(Path(clone), git(Path(clone), "write-tree"), folder)


def _package_of(checkout: Path, commit: str) -> str:
    repository, inside = repository_of(checkout)
    for folder in ("python/", ""):
        with suppress(tomllib.TOMLDecodeError):
            project = tomllib.loads(git(repository, "show", f"{commit}:{inside}{folder}pyproject.toml"))
            if name := project.get("project", {}).get("name"):
                return str(name)
    return ""


def git(checkout: Path, *arguments: str) -> str:
    """Return what git prints, or nothing if it fails."""
    run = _run_git(checkout, *arguments)
    return run.stdout.strip() if run.returncode == 0 else ""


def git_lines(checkout: Path, *arguments: str) -> list[str]:
    """Return the lines that git prints.

    Not by splitlines, because a subject may hold other separators, such as U+2028.
    """
    return [line for line in git(checkout, *arguments).split("\n") if line]


def _run_git(
    checkout: Path, *arguments: str, variables: Mapping[str, str] = MappingProxyType({})
) -> subprocess.CompletedProcess[str]:
    command = ["git", "-C", str(checkout), "-c", "core.hooksPath=/dev/null", *arguments]
    try:  # not text=True, which would end a line at a carriage return in a subject
        run = subprocess.run(command, capture_output=True, env={**os.environ, **variables})
    except FileNotFoundError as error:
        raise ConfigError("commits are read by git, which is not on PATH; install it.") from error
    said, problem = (each.decode(errors="replace") for each in (run.stdout, run.stderr))
    return subprocess.CompletedProcess(command, run.returncode, said, problem)


def _git_or_refuse(checkout: Path, *arguments: str) -> None:
    run = _run_git(checkout, *arguments)
    if run.returncode:
        raise UnsupportedEnvironment(f"git {arguments[0]} failed: {run.stderr.strip().rpartition(chr(10))[2]}")


# The environment of a candidate.


class Provider(Protocol):
    """Makes the environments of candidates."""

    def make(self, candidate: Candidate) -> Environment:
        """Return its environment, made if there is none yet. Raises UnsupportedEnvironment, Pause."""


@dataclass(kw_only=True)
class Prepared:
    """--environments: a folder for each version, which is an environment with bin/python, or a site-packages folder."""

    python: str

    def make(self, candidate: Candidate) -> Environment:
        folder = Path(candidate.folder)
        if (folder / "bin" / "python").exists():
            return Environment(python=str(folder / "bin" / "python")).with_freeze()
        if not any(folder.glob("*.dist-info")) and not any(folder.glob("*/__init__.py")):
            raise UnsupportedEnvironment(f"{folder} is neither an environment (bin/python) nor a site-packages folder.")
        return Environment(python=self.python, paths=(str(folder),)).with_freeze()


@dataclass(kw_only=True)
class Commits:
    """--git: each commit of a checkout, unpacked, first on the path of one Python. Nothing is built."""

    python: str
    checkout: Path
    """The repository, or the folder in it that holds the package."""
    package: str

    def make(self, candidate: Candidate) -> Environment:
        repository = repository_of(self.checkout)[0]
        return self._unpacked(
            f"commit-{candidate.name[:16]}", lambda files: unpack_commit(repository, candidate.name, files)
        )

    def make_reverted(self, commit: Candidate, tip: Candidate) -> Environment:
        """Return the environment of `tip` without the changes of `commit`.

        Raises UnsupportedEnvironment, also for a commit that cannot be reverted, Pause.
        """
        key, repository = f"commit-{tip.name[:16]}-without-{commit.name[:16]}", repository_of(self.checkout)[0]
        return self._unpacked(key, lambda files: unpack_reverted(repository, commit.name, tip.name, files))

    def _unpacked(self, key: str, unpack: Callable[[Path], None]) -> Environment:
        repository, inside = repository_of(self.checkout)
        folder = keep(f"{key}-{digest(str(repository))}", lambda new: unpack(new / "files")) / "files" / inside
        if not folder.is_dir():
            raise UnsupportedEnvironment(f"it has no folder {inside}.")
        return Environment(python=self.python, paths=(str(_import_root(folder, self.package)),)).with_freeze()


def _import_root(files: Path, package: str) -> Path:
    """Return the folder of a commit's files from which the package is imported: python/, src/, or the files' own.

    python/ and src/ may hold something else, such as C++: on the path they would leave the installed package to be
    tested. If the module of the package's name is nowhere, its name may be another one: return the first folder with
    any package.
    """
    module = module_of(package)
    folders = [folder for folder in (files / "python", files / "src", files) if folder.is_dir()]
    own = [each for each in folders if (each / module / "__init__.py").is_file() or (each / f"{module}.py").is_file()]
    return next(iter([*own, *(folder for folder in folders if any(folder.glob("*/__init__.py"))), *folders]))


def python_of(options: Options) -> str:
    """Return the interpreter that --python names, by default this one. Raises ConfigError, Pause."""
    try:
        return find_python(options.python) if options.python else sys.executable
    except UnsupportedEnvironment as error:
        wrong = f"--python must be an interpreter of this machine or its version, got {options.python}."
        raise ConfigError(wrong) from error


def provider_of(question: Question, folder: Path, no_gpu: bool, python: str) -> Provider:
    """Return the provider that the options ask for. Raises ConfigError, Pause.

    folder: of the bisect. python: the interpreter with which the bisect began.
    """
    options = question.options
    if options.environments:
        return Prepared(python=python)
    if options.git:
        return Commits(checkout=Path(options.git), package=options.package, python=python)
    is_ours = is_of_this_repository(question)
    if is_ours and options.package != "sglang" and not options.hold:
        raise ConfigError("the script needs an sglang; give --hold sglang==VERSION.")
    found = ["--no-index", "--find-links", options.wheels] if options.wheels else index_arguments()
    return Pinned(
        package=options.package,
        requirements=(*options.hold, *(OWN_NEEDS if is_ours else ())),
        held_since="" if options.wheels else max(("", *map(published, options.hold))),
        cpu_mode=no_gpu and question.runs_sglang,
        python=python,
        keeps_python=bool(options.python),
        sources=tuple(found),
        locks=folder / "resolutions",
    )
