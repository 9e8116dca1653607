"""Commits of a local git checkout as candidates. The checkout itself is only read."""

import configparser
import re
import subprocess
import tomllib
from contextlib import suppress
from pathlib import Path

from harness.tools.bisection.candidates import Candidate
from harness.tools.bisection.question import WrongQuestion

_REMOTE = re.compile(r"(?:https://|git@|ssh://git@)(github\.com)[:/](.+?)(?:\.git)?/?")


def resolved(checkout: Path, name: str) -> str:
    """The full hash of what a name stands for now. Raises WrongQuestion."""
    return _commit(checkout, name)


def of_version(checkout: Path, package: str, version: str) -> str:
    """The commit of a release's tag. Raises WrongQuestion."""
    for tag in (f"v{version}", version, f"{package}-v{version}", f"{package}-{version}"):
        run = _git(checkout, "rev-parse", "--verify", "--quiet", "--end-of-options", f"refs/tags/{tag}^{{commit}}")
        if run.returncode == 0:
            return run.stdout.strip()
    raise WrongQuestion(f"{checkout} has no tag v{version}; fetch its tags.")


def fork_point(checkout: Path, older: str, newer: str) -> str:
    """The older commit, or where its branch left that of the newer one. Raises WrongQuestion."""
    common = _git(checkout, "merge-base", older, newer).stdout.strip()
    if not common:
        raise WrongQuestion(f"{older[:12]} and {newer[:12]} have no common ancestor in {checkout}.")
    return common


def package_of(checkout: Path, commit: str) -> str:
    """The package's name, of pyproject.toml or setup.cfg; "" where they have none."""
    for folder in ("python/", ""):
        with suppress(tomllib.TOMLDecodeError):
            told = tomllib.loads(_git(checkout, "show", f"{commit}:{folder}pyproject.toml").stdout)
            tools = told.get("tool", {})
            if name := told.get("project", {}).get("name") or tools.get("poetry", {}).get("name"):
                return str(name)
        parser = configparser.ConfigParser(interpolation=None)
        with suppress(configparser.Error):
            parser.read_string(_git(checkout, "show", f"{commit}:{folder}setup.cfg").stdout)
            if name := parser.get("metadata", "name", fallback=""):
                return name.strip()
    return ""


def has_module(checkout: Path, commit: str, module: str) -> bool:
    """Whether a commit has the files of a module where import_folder looks."""
    paths = [f"{folder}{name}" for folder in ("python/", "src/", "") for name in (module, f"{module}.py")]
    return bool(_git(checkout, "ls-tree", "--name-only", commit, "--", *paths).stdout.strip())


def commits(checkout: Path, older: str, newer: str, find_fix: bool = False) -> list[Candidate]:
    """First-parent commits from `older` to `newer`, both included. Raises WrongQuestion."""
    first, last = (_commit(checkout, each) for each in (older, newer))
    if first == last:
        raise WrongQuestion(f"good and bad are the same commit, {first[:12]}; give two that differ.")
    if _git(checkout, "merge-base", "--is-ancestor", first, last).returncode:
        if not _git(checkout, "merge-base", "--is-ancestor", last, first).returncode:
            name, other = ("bad", "good") if find_fix else ("good", "bad")
            raise WrongQuestion(
                f"{name} = {older} comes after {other} = {newer}; exchange them, or "
                + ("leave out --find-fix." if find_fix else "ask with --find-fix which commit made it good.")
            )
        common = _git(checkout, "merge-base", first, last).stdout.strip()[:12]
        hint = f"; their nearest common ancestor is {common}" if common else ""
        raise WrongQuestion(f"{older} is not an ancestor of {newer}{hint}.")
    listed = _git(
        checkout,
        "log",
        "--first-parent",
        "--ancestry-path",
        "--reverse",
        "--format=%H%x09%cI%x09%s",
        f"{first}..{last}",
    )
    own = _git(checkout, "log", "-1", "--format=%H%x09%cI%x09%s", first)
    lines = [line.split("\t", 2) for line in (own.stdout + listed.stdout).splitlines()]
    return [Candidate(name=sha, time=time, title=title) for sha, time, title in lines]


def subjects(checkout: Path, before: str, after: str) -> list[str]:
    """Return a line, HASH SUBJECT, for each commit that `after` has and `before` lacks, newest first."""
    return _git(checkout, "log", "--format=%h %s", f"{before}..{after}").stdout.splitlines()


def export(checkout: Path, commit: str, folder: Path) -> None:
    """The files of a commit, without git's own. Raises OSError."""
    folder.mkdir(parents=True)
    archive = subprocess.Popen(["git", "-C", str(checkout), "archive", commit], stdout=subprocess.PIPE)
    unpack = subprocess.run(["tar", "-x", "-C", str(folder)], stdin=archive.stdout, capture_output=True, text=True)
    if archive.wait() or unpack.returncode:
        raise OSError(f"git archive of {commit[:12]} could not be unpacked: {unpack.stderr.strip()}")


def import_folder(folder: Path) -> Path:
    """What goes on PYTHONPATH: python/ or src/ of the checkout, or all of it."""
    return next((folder / name for name in ("python", "src") if (folder / name).is_dir()), folder)


def remote(checkout: Path) -> str:
    """The address of the upstream's pages, where it is on GitHub, else ""."""
    match = _REMOTE.fullmatch(_git(checkout, "remote", "get-url", "origin").stdout.strip())
    return f"https://{match[1]}/{match[2]}" if match else ""


def _commit(checkout: Path, name: str) -> str:
    for each in (name, f"v{name}"):
        run = _git(checkout, "rev-parse", "--verify", "--quiet", "--end-of-options", f"{each}^{{commit}}")
        if run.returncode == 0:
            return run.stdout.strip()
    if _git(checkout, "rev-parse", "--git-dir").returncode:
        raise WrongQuestion(f"--git {checkout} is no git checkout.")
    raise WrongQuestion(f"{checkout} has no commit {name}.")


def _git(checkout: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(["git", "-C", str(checkout), *arguments], capture_output=True, text=True)
