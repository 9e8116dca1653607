"""The candidates: versions or commits between two ends, in order, read from package indexes, folders or git.

uv and pip do not say when a release was published, so this module reads the indexes itself.
"""

import base64
import json
import os
import re
import ssl
import subprocess
import sys
import tempfile
import tomllib
import urllib.error
import urllib.request
from collections.abc import Iterable, Mapping
from contextlib import suppress
from dataclasses import dataclass, replace
from html import unescape
from http.client import HTTPException
from itertools import pairwise
from pathlib import Path
from typing import Any
from urllib.parse import unquote, urlsplit, urlunsplit

from packaging.utils import canonicalize_name, parse_sdist_filename, parse_wheel_filename
from packaging.version import InvalidVersion, Version

from harness.runtime import redact
from harness.tools.bisection.question import Options, Pause, Question, WrongQuestion
from harness.tools.environments import uv_sources

INDEX_SECONDS = 20.0
DEFAULT_INDEX = "https://pypi.org/simple"
_ACCEPT = "application/vnd.pypi.simple.v1+json, application/vnd.pypi.simple.v1+html;q=0.2, text/html;q=0.1"


@dataclass(frozen=True, kw_only=True, slots=True)
class Candidate:
    """One version, or one commit (name: its full hash, title: its subject)."""

    name: str
    title: str = ""
    time: str = ""
    """When it was published, in ISO 8601; "" if that is not known."""
    requires_python: str = ""
    folder: str = ""
    """Of --environments: where its environment is."""
    yanked: bool = False
    """Its publisher withdrew it. It is a candidate only if it is an end."""

    @property
    def label(self) -> str:
        return f"{self.name[:12]} {self.title}" if self.title else self.name


def labels(candidates: Iterable[Candidate]) -> str:
    listed = [each.label for each in candidates]
    return ", ".join(listed[:12]) + (f" and {len(listed) - 12} more" if len(listed) > 12 else "")


def settle(question: Question) -> Question:
    """Name the package; with --git, also replace the ends by hashes, as a branch moves. Raises WrongQuestion.

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
        raise WrongQuestion(f"good and bad are the same commit, {older[:12]}; give two that differ.")
    start = _start_of_search(checkout, older, newer)
    if not start:
        searched = f"the first-parent history of {asked[1]}, which is what is searched"
        remedy = f"give a commit of `git log --first-parent {asked[1]}`; a shallow clone needs git fetch --unshallow"
        raise WrongQuestion(f"{asked[0]} shares no commit with {searched}; {remedy}.")
    if start == newer:
        raise WrongQuestion(_exchanged(options, *asked))
    if start != older:
        began = git(checkout, "log", "-1", "--format=%h %s", start)
        print(f"{asked[0]} is on a side branch; the bisect starts where that branch began, at {began}", flush=True)
    good, bad = (newer, start) if options.find_fix else (start, newer)
    package = options.package or _package_of(checkout, newer)
    if not package:
        raise WrongQuestion(f"the pyproject.toml of {options.git} names no package; give --package.")
    return replace(question, options=replace(options, good=good, bad=bad, package=package))


def find_candidates(question: Question) -> list[Candidate]:
    """Return them oldest first, both ends included. Raises WrongQuestion, Pause."""
    options = question.options
    older, newer = (options.bad, options.good) if options.find_fix else (options.good, options.bad)
    if options.git:
        return _commits_between(Path(options.git), older, newer)
    low, high = _version(older), _version(newer)
    if low == high:
        raise WrongQuestion(f"good and bad are both {older}; give two ends that differ.")
    if low > high:
        raise WrongQuestion(_exchanged(options, older, newer))
    if options.environments:
        found, source = _in_environments(Path(options.environments)), f"{options.package} in {options.environments}"
    elif options.wheels:
        files = ({"filename": file.name} for file in Path(options.wheels).glob("*.whl"))
        found, source = releases_of(options.package, files), f"{options.package} in {options.wheels}"
    else:
        found, source = releases(options.package), options.package
        if not found:
            raise WrongQuestion(f"there is no package {options.package}.")
    return between(found, older, newer, source)


def between(found: Mapping[Version, Candidate], older: str, newer: str, source: str) -> list[Candidate]:
    """Return the versions from `older` to `newer`, both included. Raises WrongQuestion.

    Between the ends, yanked releases are left out, and between two final releases also release candidates and nightly
    builds.
    """
    low, high = ends = _version(older), _version(newer)
    final = not any(end.is_prerelease for end in ends)
    for version in ends:
        if version not in found:
            kept = sorted(each for each in found if not found[each].yanked)
            if not kept:
                raise WrongQuestion(f"there is no release of {source}.")
            near = [each for each in kept if each < version][-2:] + [each for each in kept if each > version][:2]
            raise WrongQuestion(
                f"there is no version {version} of {source}; the nearest are {', '.join(map(str, near))}."
            )
    return [
        found[version]
        for version in sorted(found)
        if version in ends
        or (low < version < high and not found[version].yanked and not (final and version.is_prerelease))
    ]


def _version(text: str) -> Version:
    try:
        return Version(text)
    except InvalidVersion as error:
        raise WrongQuestion(f"an end must be a version such as 0.5.9 or 0.5.5.post3, got {text!r}.") from error


def is_build_of(found: Version, wanted: Version) -> bool:
    """Return whether `found` is the version wanted. 2.9.0+cpu is a build of 2.9.0, as for pip; 2.9.0 is none of
    2.9.0+cpu.
    """
    return found == wanted or (not wanted.local and Version(found.public) == wanted)


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


# Package indexes.


def index_arguments() -> list[str]:
    """Return uv's arguments for the indexes that pip is configured to use."""
    run = subprocess.run([sys.executable, "-P", "-m", "pip", "config", "list"], capture_output=True, text=True)
    return uv_sources(run.stdout if run.returncode == 0 else "")


def releases(package: str) -> dict[Version, Candidate]:
    """Return all releases of a package by version; yanked ones are marked. Raises Pause."""
    words = index_arguments()
    indexes = [value for word, value in pairwise(words) if word in ("--index-url", "--extra-index-url")]
    indexes += [] if {"--index-url", "--no-index"} & {*words} else [DEFAULT_INDEX]
    return releases_of(package, (file for index in indexes for file in _files_of_index(index, package)))


def releases_of(package: str, files: Iterable[Mapping[str, Any]]) -> dict[Version, Candidate]:
    """Group files by version. A release is yanked when all its files are, and was published when its last file was."""
    by_version: dict[Version, list[Mapping[str, Any]]] = {}
    for file in files:
        name, version = parse_filename(file["filename"])
        if version and name == canonicalize_name(package):
            by_version.setdefault(version, []).append(file)
    found = {}
    for version, every in by_version.items():
        kept = [file for file in every if not file.get("yanked")] or every
        found[version] = Candidate(
            name=str(version),
            time=max(file.get("upload-time") or "" for file in kept),
            requires_python=next((value for file in kept if (value := file.get("requires-python"))), ""),
            yanked=bool(kept[0].get("yanked")),
        )
    return found


def parse_filename(filename: str) -> tuple[str, Version | None]:
    """Return the normalized package name and the version of a wheel or sdist; ("", None) if the file is neither."""
    with suppress(ValueError):
        return (parse_wheel_filename if filename.endswith(".whl") else parse_sdist_filename)(filename)[:2]
    return "", None


def files_of_page(text: str, is_json: bool) -> list[Mapping[str, Any]]:
    """Return the files of a project's page, in either form of the simple repository API. Raises ValueError."""
    if is_json:
        try:
            return [file for file in json.loads(text)["files"] if file["filename"]]
        except (KeyError, TypeError) as error:
            raise ValueError("its JSON lists no files") from error
    files: list[Mapping[str, Any]] = []
    for tag in re.findall(r"<a\s([^>]*)>", text):
        given = {name: unescape(value) for name, value in re.findall(r'([\w-]+)="([^"]*)"', tag)}
        file = {name: given.get(f"data-{name}", "") for name in ("upload-time", "requires-python")}
        filename = unquote(urlsplit(given.get("href", "")).path).rpartition("/")[2]
        files.append({**file, "filename": filename, "yanked": "data-yanked" in tag})
    return files


def _files_of_index(index: str, package: str) -> list[Mapping[str, Any]]:
    """Return a package's files; none if the index does not have it.

    Raises Pause, which does not show the index's login.
    """
    address = f"{index.rstrip('/')}/{canonicalize_name(package)}/"
    try:
        address, authorization = _without_login(address)
        return _files_at(address, authorization)
    except (OSError, HTTPException, ValueError) as error:  # URLError is an OSError; a bad address, encoding or JSON
        if isinstance(error, urllib.error.HTTPError) and error.code == 404:
            return []
        reason = " ".join(str(getattr(error, "reason", error)).split())
        raise Pause(redact.text(f"the index {address} could not be read ({reason}).")) from error


def _without_login(address: str) -> tuple[str, str]:
    """Return the address without its USER:PASSWORD@, and the value of the header that gives them; "" without a
    login.
    """
    parts = urlsplit(address)
    login, _, host = parts.netloc.rpartition("@")
    user, _, password = login.partition(":")
    given = base64.b64encode(f"{unquote(user)}:{unquote(password)}".encode()).decode()
    return urlunsplit(parts._replace(netloc=host)), f"Basic {given}" if login else ""


def _files_at(address: str, authorization: str) -> list[Mapping[str, Any]]:
    """Return the files that a project's page lists. Raises OSError, HTTPException, ValueError."""
    if urlsplit(address).scheme == "file":  # a mirror in folders, which pip and uv read too
        page = Path(unquote(urlsplit(address).path)) / "index.html"
        return files_of_page(page.read_text(), is_json=False) if page.is_file() else []
    request = urllib.request.Request(address, headers={"Accept": _ACCEPT})
    if authorization:  # not for another host, to which the index may redirect
        request.add_unredirected_header("Authorization", authorization)
    certificates = ssl.create_default_context(cafile=os.environ.get("PIP_CERT"))
    with urllib.request.urlopen(request, timeout=INDEX_SECONDS, context=certificates) as answer:
        return files_of_page(answer.read().decode(), answer.headers.get_content_type().endswith("json"))


# Commits of a local checkout, which is only read.


def commit_of(checkout: Path, name: str) -> str:
    """Return the full hash of the tag `v` + name, else of the tag, branch or commit `name`. Raises WrongQuestion."""
    for each in (f"v{name}", name):
        if found := git(checkout, "rev-parse", "--verify", "--quiet", "--end-of-options", f"{each}^{{commit}}"):
            return found
    check_checkout("--git", checkout)
    raise WrongQuestion(f"{checkout} has no commit or tag {name}; fetch its tags.")


def check_checkout(option: str, folder: Path) -> None:
    """Raise WrongQuestion unless the folder that an option names is a git checkout."""
    if not git(folder, "rev-parse", "--git-dir"):
        raise WrongQuestion(f"{option} must be a git checkout, got {folder}.")


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


def export_commit(checkout: Path, commit: str, folder: Path) -> None:
    """Unpack a commit into a new folder. Raises Pause."""
    folder.mkdir(parents=True)
    words, untar = ["git", "-C", str(checkout), "archive", commit], ["tar", "-x", "-C", str(folder)]
    # At its end `with` closes this process's end of the pipe, and then waits: git would write for ever to a tar that is
    # gone.
    with subprocess.Popen(words, stdout=subprocess.PIPE) as archive:
        try:
            unpack = subprocess.run(untar, stdin=archive.stdout, capture_output=True, text=True)
        except FileNotFoundError as error:
            raise Pause("commits are unpacked by tar, which is not on PATH; install it.") from error
    if archive.returncode or unpack.returncode:
        raise Pause(f"git archive of {commit[:12]} could not be unpacked: {unpack.stderr.strip()}.")


class CannotRevert(Exception):
    """A commit cannot be reverted; a clause says why, without the commit's name."""


def export_reverted(checkout: Path, commit: str, tip: str, folder: Path) -> None:
    """Unpack `tip` without the changes of `commit`, as git revert makes it. Raises CannotRevert, Pause."""
    with tempfile.TemporaryDirectory() as clone:  # it shares the checkout's objects: the checkout is only read
        _git_or_refuse(Path.cwd(), "clone", "--quiet", "--shared", "--no-checkout", str(checkout), clone)
        _git_or_refuse(Path(clone), "checkout", "--quiet", "--detach", tip)
        is_merge = git(Path(clone), "rev-parse", "--verify", "--quiet", f"{commit}^2")
        words = ["revert", "--no-commit", *(["--mainline", "1"] if is_merge else []), commit]
        run = _run_git(Path(clone), *words)
        if conflicts := git_lines(Path(clone), "diff", "--name-only", "--diff-filter=U"):
            raise CannotRevert(f"it conflicts with later commits in {', '.join(conflicts)}")
        if run.returncode:
            raise CannotRevert(run.stderr.strip().rpartition("\n")[2])
        export_commit(Path(clone), git(Path(clone), "write-tree"), folder)


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


def _run_git(checkout: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    command = ["git", "-C", str(checkout), "-c", "core.hooksPath=/dev/null", *arguments]
    try:  # not text=True, which would end a line at a carriage return in a subject
        run = subprocess.run(command, capture_output=True)
    except FileNotFoundError as error:
        raise WrongQuestion("commits are read by git, which is not on PATH; install it.") from error
    said, problem = (each.decode(errors="replace") for each in (run.stdout, run.stderr))
    return subprocess.CompletedProcess(command, run.returncode, said, problem)


def _git_or_refuse(checkout: Path, *arguments: str) -> None:
    run = _run_git(checkout, *arguments)
    if run.returncode:
        raise CannotRevert(f"git {arguments[0]} failed: {run.stderr.strip().rpartition(chr(10))[2]}")
