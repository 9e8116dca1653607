"""The releases that an index lists: pages in either form, and real servers of one."""

import base64
import http.server
import json
import os
import threading
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import ClassVar

import pytest
from packaging.version import Version

from harness.tools.trial import indexes
from harness.tools.trial.indexes import Candidate, Pause, between, files_of_page, releases, releases_of
from tests.tools.bisection.bisecting import Bench
from tests.tools.bisection.wheels import make_wheel

PAGE = """<!DOCTYPE html><html><body>
<a href="https://files/sglang-0.5.9-py3-none-any.whl#sha256=aa" data-requires-python="&gt;=3.10" data-upload-time="2026-02-23T10:00:00Z">x</a>
<a href="sglang-0.5.9.tar.gz#sha256=bb" data-upload-time="2026-02-23T10:05:00Z">x</a>
<a href="sglang-0.5.10rc0-py3-none-any.whl">x</a>
<a href="sglang-0.5.10-py3-none-any.whl" data-yanked="broken">x</a>
<a href="sglang-0.5.10.post1-cp311-cp311-manylinux_2_34_x86_64.whl">x</a>
<a href="sglang-0.5.11-py3-none-any.whl">x</a> <a href="sglang_router-0.9-py3-none-any.whl">x</a> <a href="README">x</a>
</body></html>"""


def found() -> dict[Version, Candidate]:
    return releases_of("sglang", files_of_page(PAGE))


def test_a_page_in_html() -> None:
    releases = found()
    kept = [str(version) for version in sorted(releases) if not releases[version].yanked]
    assert kept == ["0.5.9", "0.5.10rc0", "0.5.10.post1", "0.5.11"] and releases[Version("0.5.10")].yanked
    assert releases[Version("0.5.9")].time == "2026-02-23T10:05:00Z"
    assert releases[Version("0.5.9")].requires_python == ">=3.10"


def test_files_in_json() -> None:
    file = {
        "filename": "a_b-1.0-py3-none-any.whl",
        "upload-time": "2026-01-01T00:00:00Z",
        "yanked": "bad",
        "url": "",
        "hashes": {},
    }
    [found] = releases_of("A.b", [file]).values()
    assert (found.name, found.time, found.requires_python, found.yanked) == ("1.0", "2026-01-01T00:00:00Z", "", True)
    whole = [{"filename": "a_b-1.0-py3-none-any.whl", "yanked": True}, {"filename": "a_b-1.0.tar.gz"}]
    assert not releases_of("A.b", whole)[Version("1.0")].yanked  # yanked only when all its files are
    assert releases_of("A.b", whole[:1])[Version("1.0")].yanked


@pytest.mark.parametrize(
    ("older", "newer", "names"),
    [
        ("0.5.9", "0.5.11", ["0.5.9", "0.5.10.post1", "0.5.11"]),
        ("0.5.10", "0.5.11", ["0.5.10", "0.5.10.post1", "0.5.11"]),
        ("0.5.10rc0", "0.5.11", ["0.5.10rc0", "0.5.10.post1", "0.5.11"]),
    ],
    ids=["plain", "a yanked end", "a release candidate as an end"],
)
def test_what_is_between_two_ends(older: str, newer: str, names: list[str]) -> None:
    assert [each.name for each in between(found(), older, newer, "sglang")] == names


@pytest.mark.parametrize(
    ("older", "newer", "count"), [("2.9.0.dev1", "2.9.0.dev3", 3), ("2.8", "2.9.0.dev3", 4), ("2.8", "2.9", 2)]
)
def test_nightly_builds_are_tried_between_nightly_builds(older: str, newer: str, count: int) -> None:
    names = ["2.8", "2.9.0.dev1", "2.9.0.dev2", "2.9.0.dev3", "2.9"]
    assert len(between({Version(name): Candidate(name=name) for name in names}, older, newer, "torch")) == count


LOGIN = f"Basic {base64.b64encode(b'user:s3cr@t').decode()}"
LISTED = "application/vnd.pypi.simple.v1+json"
PAGES: dict[str, tuple[str, bytes]] = {
    "plain": (LISTED, b'{"files": [{"filename": "plain-1.0.tar.gz"}, {"filename": "plain-1.1.tar.gz"}]}'),
    "no-json": (LISTED, b"<html>"),
    "no-files": (LISTED, b'{"message": "moved"}'),
}


class ClosedIndex(http.server.BaseHTTPRequestHandler):
    """Has PAGES for who gives LOGIN; `elsewhere` redirects to another name of this host, and notes what it is told."""

    told: ClassVar[list[str | None]] = []

    def do_GET(self) -> None:
        package = self.path.strip("/").rpartition("/")[2]
        host = self.headers["Host"]
        if host.startswith("localhost"):
            self.told.append(self.headers["Authorization"])
        if self.headers["Authorization"] != LOGIN and not host.startswith("localhost"):
            self._answer(401, {"WWW-Authenticate": 'Basic realm="index"'})
        elif package == "elsewhere":
            self._answer(302, {"Location": f"http://{host.replace('127.0.0.1', 'localhost')}/plain/"})
        elif package == "garbled":
            self.wfile.write(b"no status line\r\n\r\n")
        elif package in PAGES:
            kind, body = PAGES[package]
            self._answer(200, {"Content-Type": kind}, body)
        else:
            self._answer(404, {})

    def _answer(self, code: int, headers: Mapping[str, str], body: bytes = b"") -> None:
        self.send_response(code)
        for name, value in {**headers, "Content-Length": str(len(body))}.items():
            self.send_header(name, value)
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *words: object) -> None:
        """Nothing is said."""


@pytest.fixture
def closed_index(monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """HOST:PORT of an index that asks for a login; pip is configured with the right one."""
    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), ClosedIndex)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    host = f"127.0.0.1:{server.server_port}"
    for name, value in {
        "PIP_INDEX_URL": f"http://user:s3cr%40t@{host}/simple",
        "PIP_CONFIG_FILE": os.devnull,
        "PIP_EXTRA_INDEX_URL": "",
        "NO_PROXY": "127.0.0.1,localhost",
    }.items():
        monkeypatch.setenv(name, value)
    yield host
    server.shutdown()
    server.server_close()


def test_an_index_with_a_login(closed_index: str) -> None:
    assert list(map(str, releases("plain"))) == ["1.0", "1.1"] and not releases("absent")
    ClosedIndex.told.clear()
    assert list(map(str, releases("elsewhere"))) == []  # the files there are of another package
    assert ClosedIndex.told == [None], "the login is for its own host alone"


@pytest.mark.parametrize("package", ["no-json", "no-files", "garbled"])
def test_an_index_that_answers_wrongly_pauses(closed_index: str, package: str) -> None:
    with pytest.raises(Pause, match=rf"the index http://.*{closed_index}/simple/{package}/ could not be read"):
        releases(package)


def test_an_address_that_is_none_pauses(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(indexes, "index_arguments", lambda: ["--index-url", "http://127.0.0.1:port"])
    with pytest.raises(Pause, match="could not be read"):
        releases("moving")


def test_a_wrong_login_is_not_shown(closed_index: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PIP_INDEX_URL", f"http://user:another-s3cret@{closed_index}/simple")
    with pytest.raises(Pause, match="could not be read .*401") as caught:
        releases("plain")
    assert "s3cret" not in str(caught.value) and "\n" not in str(caught.value)


class SlowIndex(http.server.BaseHTTPRequestHandler):
    """Has two releases of `moving`, whose files cannot be had while `broken` is set."""

    broken = True
    wheels: Path

    def do_HEAD(self) -> None:
        if SlowIndex.broken:
            self.close_connection = True
            return self.connection.close()
        return self.send_error(405)

    def do_GET(self) -> None:
        name = self.path.rsplit("/", 1)[-1]
        if name.endswith(".whl"):
            if SlowIndex.broken:
                self.close_connection = True
                return self.connection.close()
            body, kind = (self.wheels / name).read_bytes(), "application/octet-stream"
        else:
            files = [
                {"filename": file.name, "url": f"/{file.name}", "hashes": {}, "upload-time": "2026-01-01T00:00:00Z"}
                for file in sorted(self.wheels.glob("*.whl"))
            ]
            body = json.dumps({"meta": {"api-version": "1.1"}, "name": "moving", "files": files}).encode()
            kind = "application/vnd.pypi.simple.v1+json"
        self.send_response(200)
        self.send_header("Content-Type", kind)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)
        return None

    def log_message(self, *words: object) -> None:
        """Nothing is said."""


@pytest.fixture
def index(tmp_path: Path) -> Iterator[str]:
    SlowIndex.wheels, SlowIndex.broken = tmp_path / "wheels", True
    for minor in range(4):
        make_wheel(SlowIndex.wheels, "moving", f"1.{minor}", f"code = {int(minor > 1)}")
    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), SlowIndex)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    yield f"http://127.0.0.1:{server.server_port}"
    server.shutdown()


def test_an_index_in_folders(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    (tmp_path / "moving").mkdir()
    (tmp_path / "moving" / "index.html").write_text('<a href="moving-1.0-py3-none-any.whl">x</a>')
    monkeypatch.setattr(indexes, "index_arguments", lambda: ["--index-url", tmp_path.as_uri()])
    assert list(map(str, releases("moving"))) == ["1.0"] and not releases("absent")


@pytest.mark.long
def test_an_index_that_is_lost_pauses_and_is_gone_on_from(tmp_path: Path, index: str) -> None:
    bench = Bench(tmp_path)
    bench.environment |= {
        "PIP_INDEX_URL": index,
        "PIP_CONFIG_FILE": os.devnull,
        "PIP_EXTRA_INDEX_URL": "",
        "PIP_FIND_LINKS": "",
        "UV_HTTP_RETRIES": "0",
        "UV_CACHE_DIR": str(tmp_path / "uv"),
        "NO_PROXY": "127.0.0.1",
    }
    words = ["--package", "moving", "--dir", "found"]
    script = bench.script("import moving, sys; sys.exit(moving.code)")
    run = bench.bisect(*words, "--good", "1.0", "--bad", "1.3", "--", script)
    assert run.returncode == 4 and "paused: a package index could not be reached" in run.stderr, run.stdout + run.stderr
    SlowIndex.broken = False
    run = bench.bisect("--resume", "found")
    assert run.returncode == 0 and "The first bad release is 1.2" in run.stdout, run.stdout + run.stderr


def test_no_index_at_all(tmp_path: Path) -> None:
    bench = Bench(tmp_path)
    bench.environment |= {
        "PIP_INDEX_URL": "http://127.0.0.1:9",
        "PIP_CONFIG_FILE": os.devnull,
        "PIP_EXTRA_INDEX_URL": "",
    }
    run = bench.bisect("--good", "1.0", "--bad", "1.1", "--", bench.script(""))
    assert run.returncode == 4 and "the index http://127.0.0.1:9/sglang/ could not be read" in run.stderr
    assert run.stderr.count("\n") == 1
