"""What can be run: an ordered list of versions or commits between two ends, read from package indexes, folders or git.

Indexes are read with urllib and html.parser. pypi-simple would save some 50 lines, but brings four packages into each of the
pinned environments (of which a candidate's may have none), and does not read file:// indexes, which pip.conf may name.
"""

import configparser
import json
import os
import re
import ssl
import subprocess
import sys
import tomllib
import urllib.error
import urllib.request
from collections.abc import Iterable, Mapping
from contextlib import suppress
from dataclasses import dataclass, replace
from html.parser import HTMLParser
from itertools import pairwise
from pathlib import Path
from urllib.parse import unquote, urlsplit
from zipfile import BadZipFile, ZipFile

from packaging.utils import (
    InvalidSdistFilename,
    InvalidWheelFilename,
    canonicalize_name,
    parse_sdist_filename,
    parse_wheel_filename,
)
from packaging.version import InvalidVersion, Version

from harness.tools.bisection.causes import module_of
from harness.tools.bisection.question import Options, Question, WrongQuestion
from harness.tools.environments import uv_sources

INDEX_SECONDS, INDEX_TRIES = 20.0, 2
DEFAULT_INDEX = "https://pypi.org/simple"
_ACCEPT = "application/vnd.pypi.simple.v1+json, application/vnd.pypi.simple.v1+html;q=0.2, text/html;q=0.1"
_NAMED_VERSION = re.compile(r"(?:.*?[-_])??v?(\d+(?:\.\w+)+(?:[.+-]\w+)*)", re.ASCII)
_GITHUB = re.compile(r"(?:https://|git@|ssh://git@)(github\.com)[:/](.+?)(?:\.git)?/?")


class IndexUnreachable(Exception):
    """An index could not be read, or took too long; one sentence."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Candidate:
    """One version, or one commit (name: its full hash, title: its subject)."""

    name: str
    title: str = ""
    time: str = ""
    """When it was published or committed, in ISO 8601; "" if that is not known."""
    requires_python: str = ""
    folder: str = ""
    """Of an environment that was made before."""
    yanked: bool = False
    """Withdrawn by its publisher: a candidate only as an end."""

    @property
    def label(self) -> str:
        return f"{self.name[:12]} {self.title}" if self.title else self.name


def labels(candidates: Iterable[Candidate], most: int = 8) -> str:
    listed = [each.label for each in candidates]
    return ", ".join(listed[:most]) + (f" and {len(listed) - most} more" if len(listed) > most else "")


def settle(question: Question) -> Question:
    """With --git, replace the ends by hashes, as a branch moves, and find the checkout's package. Raises WrongQuestion."""
    options = question.options
    if not options.git:
        return question
    checkout = Path(options.git)
    good, bad = (commit_of(checkout, name) for name in (options.good, options.bad))
    package = options.package
    if package == Options.package and not _has_module(checkout, bad, module_of(package)):
        package = _package_of(checkout, bad)
        if not package:
            raise WrongQuestion(
                f"neither pyproject.toml nor setup.cfg of {checkout} names its package; give --package."
            )
    return replace(question, options=replace(options, good=good, bad=bad, package=package))


def find_candidates(question: Question) -> list[Candidate]:
    """Return them oldest first, both ends included. Raises WrongQuestion, IndexUnreachable."""
    options, (older, newer) = question.options, question.ends
    if options.git:
        return commits_between(Path(options.git), older, newer, options.find_fix)
    _check_order(older, newer, options.find_fix)
    if options.environments:
        found, source = in_environments(Path(options.environments)), options.environments
    elif options.wheels:
        found, source = in_wheels(Path(options.wheels), options.package), options.wheels
    else:
        found, source = releases(options.package), options.package
    return between(found, older, newer, pre_releases=options.pre_releases, source=source)


def between(
    found: Mapping[Version, Candidate], older: str, newer: str, *, pre_releases: bool, source: str
) -> list[Candidate]:
    """Return the versions from `older` to `newer`, both included. Raises WrongQuestion."""
    low, high = (_end(found, text, source) for text in (older, newer))
    return [
        found[version]
        for version in sorted(found)
        if version in (low, high)
        or (low < version < high and not found[version].yanked and (pre_releases or not version.is_prerelease))
    ]


def _end(found: Mapping[Version, Candidate], text: str, source: str) -> Version:
    version = _version(text)
    if version not in found:
        kept = sorted(each for each in found if not found[each].yanked)
        near = [each for each in kept if each < version][-2:] + [each for each in kept if each > version][:2]
        nearest = ", ".join(map(str, near)) or "none at all"
        raise WrongQuestion(f"{source} has no version {text}; nearest are {nearest}.")
    return version


def _version(text: str) -> Version:
    try:
        return Version(text)
    except InvalidVersion as error:
        raise WrongQuestion(f"an end must be a version such as 0.5.9 or 0.5.5.post3, got {text!r}.") from error


def _check_order(older: str, newer: str, find_fix: bool) -> None:
    low, high = _version(older), _version(newer)
    if low == high:
        raise WrongQuestion(f"good and bad are both {older}; give two ends that differ.")
    if low > high and find_fix:
        raise WrongQuestion(
            f"with --find-fix the bad end is the older one, but bad = {older} is newer than good = {newer}."
        )
    if low > high:
        raise WrongQuestion(
            f"good = {older} is newer than bad = {newer}; exchange them, or ask with --find-fix which release made it good."
        )


def in_wheels(folder: Path, package: str) -> dict[Version, Candidate]:
    """Return the versions of the package whose wheels lie in the folder. Raises WrongQuestion."""
    found = {}
    for file in sorted(folder.glob("*.whl")):
        with suppress(InvalidWheelFilename):
            name, version, _, _ = parse_wheel_filename(file.name)
            if name == canonicalize_name(package):
                found[version] = Candidate(name=str(version), requires_python=_requires_python(file))
    if not found:
        raise WrongQuestion(f"{folder} has no wheel of {package}.")
    return found


def _requires_python(wheel: Path) -> str:
    with suppress(BadZipFile, StopIteration, OSError), ZipFile(wheel) as archive:  # the install will say what is wrong
        name = next(name for name in archive.namelist() if name.endswith(".dist-info/METADATA"))
        header = archive.read(name).decode(errors="replace").replace("\r", "").partition("\n\n")[0]
        match = re.search(r"^requires-python:(.*)$", header, re.IGNORECASE | re.MULTILINE)
        return match[1].strip() if match else ""
    return ""


def in_environments(folder: Path) -> dict[Version, Candidate]:
    """Return one for each subfolder whose name ends in a version: 0.5.12, site-0.5.12. Raises WrongQuestion."""
    found: dict[Version, Candidate] = {}
    for entry in sorted(folder.iterdir()):
        match = _NAMED_VERSION.fullmatch(entry.name)
        if not entry.is_dir() or not match:
            continue
        with suppress(InvalidVersion):
            version = Version(match[1])
            if version in found:
                raise WrongQuestion(
                    f"{folder} has two folders of {version}: {Path(found[version].folder).name} and {entry.name}."
                )
            found[version] = Candidate(name=str(version), folder=str(entry))
    if not found:
        raise WrongQuestion(f"{folder} has no subfolder whose name is a version, such as 0.5.12.")
    return found


# Package indexes.


@dataclass(frozen=True, slots=True)
class PublishedFile:
    """A file of an index. time: ISO 8601, or ""."""

    name: str
    time: str
    requires_python: str
    yanked: bool


def index_arguments() -> list[str]:
    """Return uv's arguments for the indexes that pip is configured to use."""
    run = subprocess.run([sys.executable, "-m", "pip", "config", "list"], capture_output=True, text=True)
    return uv_sources(run.stdout if run.returncode == 0 else "")


def releases(package: str) -> dict[Version, Candidate]:
    """Return all, the yanked ones marked. Raises IndexUnreachable, WrongQuestion."""
    words = index_arguments()
    named = {option: [value for word, value in pairwise(words) if word == option] for option in words}
    indexes = [*(named.get("--index-url") or [DEFAULT_INDEX]), *named.get("--extra-index-url", [])]
    searched = [] if "--no-index" in words else indexes
    files = [file for index in searched for file in _files_of_index(index, canonicalize_name(package))]
    if not files:
        raise WrongQuestion(f"no index has a package {package}; check --package.")
    return releases_of(package, files)


def releases_of(package: str, files: Iterable[PublishedFile]) -> dict[Version, Candidate]:
    """Group files by version. A release is yanked when all its files are, and was published when its last file was."""
    by_version: dict[Version, list[PublishedFile]] = {}
    for file in files:
        with suppress(InvalidWheelFilename, InvalidSdistFilename):
            parse = parse_wheel_filename if file.name.endswith(".whl") else parse_sdist_filename
            name, version = parse(file.name)[:2]
            if name == canonicalize_name(package):
                by_version.setdefault(version, []).append(file)
    found = {}
    for version, every in by_version.items():
        kept = [file for file in every if not file.yanked] or every
        found[version] = Candidate(
            name=str(version),
            time=max(file.time for file in kept),
            requires_python=next((file.requires_python for file in kept if file.requires_python), ""),
            yanked=kept[0].yanked,
        )
    return found


def files_of_page(text: str, is_json: bool) -> list[PublishedFile]:
    """Return the files of a project's page, in either form of the simple repository API."""
    if not is_json:
        parser = _Links()
        parser.feed(text)
        return parser.files
    return [
        PublishedFile(
            each["filename"], each.get("upload-time") or "", each.get("requires-python") or "", bool(each.get("yanked"))
        )
        for each in json.loads(text)["files"]
    ]


class _Links(HTMLParser):
    def __init__(self) -> None:
        super().__init__()
        self.files: list[PublishedFile] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        given = dict(attrs)
        if tag == "a" and given.get("href"):
            name = unquote(urlsplit(str(given["href"])).path).rpartition("/")[2]
            time, requires = given.get("data-upload-time") or "", given.get("data-requires-python") or ""
            self.files.append(PublishedFile(name, time, requires, "data-yanked" in given))


def _files_of_index(index: str, package: str) -> list[PublishedFile]:
    address = f"{index.rstrip('/')}/{package}/"
    if urlsplit(index).scheme == "file":
        page = Path(unquote(urlsplit(address).path)) / "index.html"
        return files_of_page(page.read_text(), is_json=False) if page.is_file() else []
    request = urllib.request.Request(address, headers={"Accept": _ACCEPT})
    certificates = ssl.create_default_context(cafile=os.environ.get("PIP_CERT"))
    reason = ""
    for _ in range(INDEX_TRIES):
        try:
            with urllib.request.urlopen(request, timeout=INDEX_SECONDS, context=certificates) as answer:
                return files_of_page(answer.read().decode(), answer.headers.get_content_type().endswith("json"))
        except urllib.error.HTTPError as error:
            if error.code == 404:
                return []
            reason = f"answered {error.code}"
        except OSError as error:  # URLError is one
            reason = str(getattr(error, "reason", error))
    raise IndexUnreachable(f"the index {address} could not be read ({reason}).")


# Commits of a local checkout, which is only read.


def commit_of(checkout: Path, name: str) -> str:
    """Return the full hash of what a name, or v and the name, stands for now. Raises WrongQuestion."""
    for each in (name, f"v{name}"):
        run = run_git(checkout, "rev-parse", "--verify", "--quiet", "--end-of-options", f"{each}^{{commit}}")
        if run.returncode == 0:
            return run.stdout.strip()
    if run_git(checkout, "rev-parse", "--git-dir").returncode:
        raise WrongQuestion(f"--git must be a git checkout, got {checkout}.")
    raise WrongQuestion(f"{checkout} has no commit {name}.")


def commit_of_release(checkout: Path, package: str, version: str) -> str:
    for tag in (f"v{version}", version, f"{package}-v{version}", f"{package}-{version}"):
        with suppress(WrongQuestion):
            return commit_of(checkout, f"refs/tags/{tag}")
    raise WrongQuestion(f"{checkout} has no tag v{version}; fetch its tags.")


def fork_point(checkout: Path, older: str, newer: str) -> str:
    """Return the older commit, or where its branch left that of the newer one. Raises WrongQuestion."""
    common = run_git(checkout, "merge-base", older, newer).stdout.strip()
    if not common:
        raise WrongQuestion(f"{older[:12]} and {newer[:12]} have no common ancestor in {checkout}.")
    return common


def commits_between(checkout: Path, older: str, newer: str, find_fix: bool = False) -> list[Candidate]:
    """Return first-parent commits from `older` to `newer`, both included. Raises WrongQuestion."""
    first, last = (commit_of(checkout, each) for each in (older, newer))
    if first == last:
        raise WrongQuestion(f"good and bad are the same commit, {first[:12]}; give two that differ.")
    if run_git(checkout, "merge-base", "--is-ancestor", first, last).returncode:
        if not run_git(checkout, "merge-base", "--is-ancestor", last, first).returncode:
            name, other = ("bad", "good") if find_fix else ("good", "bad")
            remedy = "leave out --find-fix" if find_fix else "ask with --find-fix which commit made it good"
            raise WrongQuestion(f"{name} = {older} comes after {other} = {newer}; exchange them, or {remedy}.")
        common = run_git(checkout, "merge-base", first, last).stdout.strip()[:12]
        hint = f"; their nearest common ancestor is {common}" if common else ""
        raise WrongQuestion(f"{older} is not an ancestor of {newer}{hint}.")
    form = "--format=%H%x09%cI%x09%s"
    own = run_git(checkout, "log", "-1", form, first).stdout
    listed = run_git(checkout, "log", "--first-parent", "--ancestry-path", "--reverse", form, f"{first}..{last}").stdout
    lines = [line.split("\t", 2) for line in (own + listed).splitlines()]
    return [Candidate(name=sha, time=time, title=title) for sha, time, title in lines]


def subjects(checkout: Path, before: str, after: str) -> list[str]:
    """Return a line, HASH SUBJECT, for each commit that `after` has and `before` lacks, newest first."""
    return run_git(checkout, "log", "--format=%h %s", f"{before}..{after}").stdout.splitlines()


def export_commit(checkout: Path, commit: str, folder: Path) -> None:
    folder.mkdir(parents=True)
    archive = subprocess.Popen(["git", "-C", str(checkout), "archive", commit], stdout=subprocess.PIPE)
    unpack = subprocess.run(["tar", "-x", "-C", str(folder)], stdin=archive.stdout, capture_output=True, text=True)
    if archive.wait() or unpack.returncode:
        raise OSError(f"git archive of {commit[:12]} could not be unpacked: {unpack.stderr.strip()}")


def github_page(checkout: Path) -> str:
    """Return the address of the upstream's pages if it is on GitHub, else ""."""
    match = _GITHUB.fullmatch(run_git(checkout, "remote", "get-url", "origin").stdout.strip())
    return f"https://{match[1]}/{match[2]}" if match else ""


def _package_of(checkout: Path, commit: str) -> str:
    """Return the package's name by pyproject.toml or setup.cfg; "" if they have none."""
    for folder in ("python/", ""):
        with suppress(tomllib.TOMLDecodeError):
            project = tomllib.loads(run_git(checkout, "show", f"{commit}:{folder}pyproject.toml").stdout)
            poetry = project.get("tool", {}).get("poetry", {})
            if name := project.get("project", {}).get("name") or poetry.get("name"):
                return str(name)
        parser = configparser.ConfigParser(interpolation=None)
        with suppress(configparser.Error):
            parser.read_string(run_git(checkout, "show", f"{commit}:{folder}setup.cfg").stdout)
            if name := parser.get("metadata", "name", fallback=""):
                return name.strip()
    return ""


def _has_module(checkout: Path, commit: str, module: str) -> bool:
    """Return whether a commit has the files of a module in one of the folders that are put on the path."""
    paths = [f"{folder}{name}" for folder in ("python/", "src/", "") for name in (module, f"{module}.py")]
    return bool(run_git(checkout, "ls-tree", "--name-only", commit, "--", *paths).stdout.strip())


def run_git(checkout: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(["git", "-C", str(checkout), *arguments], capture_output=True, text=True)
