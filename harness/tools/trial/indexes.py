"""The releases of a package, as pip's indexes or a folder of wheels list them.

uv and pip do not say when a release was published, so the indexes are read here.
"""

import os
import re
import ssl
import subprocess
import sys
from collections.abc import Iterable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from html import unescape
from itertools import pairwise
from pathlib import Path
from typing import Any
from urllib.parse import unquote, urlsplit

from packaging.utils import canonicalize_name, parse_sdist_filename, parse_wheel_filename
from packaging.version import InvalidVersion, Version

from harness.config.mistakes import ConfigError
from harness.runtime import redact
from harness.tools.environments import uv_sources

INDEX_SECONDS = 20.0
DEFAULT_INDEX = "https://pypi.org/simple"
_ACCEPT = "application/vnd.pypi.simple.v1+json, application/vnd.pypi.simple.v1+html;q=0.2, text/html;q=0.1"


class Pause(Exception):
    """Network or disk is lacking, which may pass: no candidate is to blame. One sentence."""


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


def version_of(text: str) -> Version:
    """Return the version. Raises ConfigError."""
    try:
        return Version(text)
    except InvalidVersion as error:
        raise ConfigError(f"an end must be a version such as 0.5.9 or 0.5.5.post3, got {text!r}.") from error


def between(found: Mapping[Version, Candidate], older: str, newer: str, source: str) -> list[Candidate]:
    """Return the versions from `older` to `newer`, both included. Raises ConfigError.

    Between the ends, yanked releases are left out, and between two final releases also release candidates and nightly
    builds.
    """
    low, high = ends = version_of(older), version_of(newer)
    final = not any(end.is_prerelease for end in ends)
    for version in ends:
        if version not in found:
            kept = sorted(each for each in found if not found[each].yanked)
            if not kept:
                raise ConfigError(f"there is no release of {source}.")
            near = [each for each in kept if each < version][-2:] + [each for each in kept if each > version][:2]
            raise ConfigError(
                f"there is no version {version} of {source}; the nearest are {', '.join(map(str, near))}."
            )
    return [
        found[version]
        for version in sorted(found)
        if version in ends
        or (low < version < high and not found[version].yanked and not (final and version.is_prerelease))
    ]


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
        with suppress(ValueError):  # it is neither a wheel nor a source distribution
            parse = parse_wheel_filename if file["filename"].endswith(".whl") else parse_sdist_filename
            name, version = parse(file["filename"])[:2]
            if name == canonicalize_name(package):
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


def _files_of_index(index: str, package: str) -> list[Mapping[str, Any]]:
    """Return a package's files; none if the index does not have it.

    Raises Pause, which does not show the index's login.
    """
    import httpx

    address = f"{index.rstrip('/')}/{canonicalize_name(package)}/"
    try:
        if urlsplit(address).scheme == "file":  # a mirror in folders, which pip and uv read too
            page = Path(unquote(urlsplit(address).path)) / "index.html"
            return files_of_page(page.read_text()) if page.is_file() else []
        trusted = ssl.create_default_context(cafile=os.environ.get("PIP_CERT"))
        accept = {"Accept": _ACCEPT}
        answer = httpx.get(address, headers=accept, timeout=INDEX_SECONDS, verify=trusted, follow_redirects=True)
        if answer.status_code == httpx.codes.NOT_FOUND:
            return []
        is_json = "json" in answer.raise_for_status().headers.get("content-type", "")
        return list(answer.json()["files"]) if is_json else files_of_page(answer.text)
    except (OSError, httpx.HTTPError, httpx.InvalidURL, ValueError, LookupError, TypeError) as error:
        reason = str(error).partition("\n")[0] or type(error).__name__
        raise Pause(redact.text(f"the index {address} could not be read ({reason}).")) from error


def files_of_page(text: str) -> list[Mapping[str, Any]]:
    """Return the files that a project's page in HTML links, as the simple repository API has them in JSON."""
    files: list[Mapping[str, Any]] = []
    for tag in re.findall(r"<a\s([^>]*)>", text):
        given = {name: unescape(value) for name, value in re.findall(r'([\w-]+)="([^"]*)"', tag)}
        file = {name: given.get(f"data-{name}", "") for name in ("upload-time", "requires-python")}
        filename = unquote(urlsplit(given.get("href", "")).path).rpartition("/")[2]
        files.append({**file, "filename": filename, "yanked": "data-yanked" in tag})
    return files
