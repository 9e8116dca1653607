"""Which releases a package has, when they were published, and which were yanked: asked of the indexes that pip is told to use."""

import json
import os
import re
import ssl
import subprocess
import sys
import urllib.error
import urllib.request
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from html.parser import HTMLParser
from pathlib import Path
from urllib.parse import unquote, urljoin, urlsplit

from packaging.utils import (
    InvalidSdistFilename,
    InvalidWheelFilename,
    canonicalize_name,
    parse_sdist_filename,
    parse_wheel_filename,
)
from packaging.version import Version

from harness.tools.bisection.candidates import Candidate
from harness.tools.bisection.question import WrongQuestion
from harness.tools.environments import uv_sources

TIMEOUT_SECONDS, TRIES = 20.0, 2
_ACCEPT = "application/vnd.pypi.simple.v1+json, application/vnd.pypi.simple.v1+html;q=0.2, text/html;q=0.1"


class NoNetwork(Exception):
    """An index could not be reached, or took too long; one sentence."""


@dataclass(frozen=True, slots=True)
class File:
    """One published file. time: ISO 8601, or ""."""

    name: str
    time: str
    requires_python: str
    yanked: bool


def pip_settings() -> str:
    """What `pip config list` of this Python prints."""
    run = subprocess.run([sys.executable, "-m", "pip", "config", "list"], capture_output=True, text=True)
    return run.stdout if run.returncode == 0 else ""


def sources() -> list[str]:
    """uv's arguments for pip's indexes."""
    return uv_sources(pip_settings())


def releases(package: str) -> dict[Version, Candidate]:
    """All, the yanked ones marked. Raises NoNetwork, WrongQuestion."""
    files = [file for page in _pages() for file in _files(page, canonicalize_name(package))]
    if not files:
        raise WrongQuestion(f"no index has a package {package}; check --package.")
    return releases_of(package, files)


def releases_of(package: str, files: Iterable[File]) -> dict[Version, Candidate]:
    """A release is yanked when all its files are; it was published when its last file was, within a day of its first."""
    by_version: dict[Version, list[File]] = {}
    for file in files:
        if (version := _version(file.name, package)) is not None:
            by_version.setdefault(version, []).append(file)
    found = {}
    for version, every in by_version.items():
        each = [file for file in every if not file.yanked] or every
        times = sorted(file.time for file in each if file.time)
        requires = next((file.requires_python for file in each if file.requires_python), "")
        found[version] = Candidate(
            name=str(version), time=times[-1] if times else "", requires_python=requires, yanked=each[0].yanked
        )
    return found


def parse_html(text: str) -> list[File]:
    """The files of a simple page."""
    parser = _Links()
    parser.feed(text)
    return parser.files


def parse_json(text: str) -> list[File]:
    """The files of a simple page in its JSON form."""
    return [
        File(
            each["filename"],
            each.get("upload-time") or "",
            each.get("requires-python") or "",
            bool(each.get("yanked", False)),
        )
        for each in json.loads(text)["files"]
    ]


def _version(file: str, package: str) -> Version | None:
    try:
        name, version = parse_wheel_filename(file)[:2] if file.endswith(".whl") else parse_sdist_filename(file)
    except (InvalidWheelFilename, InvalidSdistFilename):
        return None
    return version if name == canonicalize_name(package) else None


def _pages() -> list[str]:
    """Addresses of the indexes, the default one first."""
    words = sources()
    given = {option: [words[i + 1] for i, word in enumerate(words[:-1]) if word == option] for option in words}
    if "--no-index" in words:
        return []
    return [*(given.get("--index-url") or [_default_index()]), *given.get("--extra-index-url", [])]


def _default_index() -> str:
    """pip knows it."""
    code = "from pip._internal.models.index import PyPI; print(PyPI.simple_url)"
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    if run.returncode:
        raise WrongQuestion(f"{sys.executable} has no pip, which knows the default index; set PIP_INDEX_URL.")
    return run.stdout.strip()


def _files(index: str, package: str) -> Iterator[File]:
    address = f"{index.rstrip('/')}/{package}/"
    if urlsplit(index).scheme == "file":
        page = Path(unquote(urlsplit(address).path)) / "index.html"
        yield from parse_html(page.read_text()) if page.is_file() else []
        return
    request = urllib.request.Request(urljoin(address, ""), headers={"Accept": _ACCEPT})
    reason = ""
    for _ in range(TRIES):
        try:
            with urllib.request.urlopen(request, timeout=TIMEOUT_SECONDS, context=_certificates()) as answer:
                text, kind = answer.read().decode(), answer.headers.get_content_type()
            yield from parse_json(text) if kind.endswith("json") else parse_html(text)
            return
        except urllib.error.HTTPError as error:
            if error.code == 404:
                return
            reason = f"answered {error.code}"
        except (OSError, urllib.error.URLError) as error:
            reason = str(getattr(error, "reason", error))
    raise NoNetwork(f"the index {address} could not be read ({reason}).")


def _certificates() -> ssl.SSLContext:
    return ssl.create_default_context(cafile=os.environ.get("PIP_CERT"))


class _Links(HTMLParser):
    def __init__(self) -> None:
        super().__init__()
        self.files: list[File] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        told = dict(attrs)
        if tag == "a" and told.get("href"):
            name = unquote(urlsplit(str(told["href"])).path).rpartition("/")[2]
            name = re.sub(r"#.*", "", name)
            time, requires = told.get("data-upload-time") or "", told.get("data-requires-python") or ""
            self.files.append(File(name, time, requires, "data-yanked" in told))
