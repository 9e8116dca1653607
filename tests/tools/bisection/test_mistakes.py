"""What is asked wrongly ends in one sentence and exit code 2; what is missing for a while, in a pause."""

import base64
import http.server
import json
import os
import threading
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import ClassVar

import pytest

from harness.tools.bisection import bisection, candidates
from harness.tools.bisection.question import Pause
from tests.tools.bisection.bisecting import Bench, bare_python
from tests.tools.bisection.wheels import make_wheel


@pytest.fixture(scope="module")
def bench(tmp_path_factory: pytest.TempPathFactory) -> Bench:
    made = Bench(tmp_path_factory.mktemp("mistakes"))
    made.sites(["code = 0", "code = 0", "code = 1", "code = 1"])
    made.script("import moving, sys; sys.exit(moving.code)")
    (made.folder / "plain.sh").write_text("exit 0")
    return made


SITES = "--package moving --environments sites"
ENDS = "--good 1.0 --bad 1.3"


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        (f"{SITES} --good 1.0 --bad 1.9 -- script.py", "there is no version 1.9 of moving in "),
        (f"{SITES} --good 1.3 --bad 1.0 -- script.py", "good = 1.3 is newer than bad = 1.0"),
        (f"{SITES} --good 1.0 --bad 1.0 -- script.py", "good and bad are both 1.0"),
        (f"{SITES} --good one --bad 1.0 -- script.py", "must be a version such as 0.5.9 or 0.5.5.post3, got 'one'"),
        (f"{SITES} --bad 1.3 -- script.py", "--good is missing"),
        (f"{SITES} {ENDS} -- nowhere.py", "there is no script nowhere.py."),
        (f"{SITES} {ENDS} -- no-such-program", "there is no command no-such-program."),
        (f"{SITES} {ENDS} -- ./plain.sh", "./plain.sh is not executable; make it so with"),
        (f"{SITES} {ENDS} -- ./sites", "./sites is a folder; give a script."),
        (f"{SITES} {ENDS} script.py", "put -- before script.py: launch/bisect_versions.py"),
        (f"{SITES} {ENDS}", "there is nothing to run"),
        (f"{SITES} {ENDS} -- launch/ppo.py --parallel.tp 0", "own arguments are wrong"),
        (f"{SITES} {ENDS} --match ( -- script.py", "must be a name of launch/diagnose.py or a regular"),
        (f"{SITES} {ENDS} --hang -- script.py", "--hang needs --timeout"),
        (f"{SITES} {ENDS} --hang --match x -- script.py", "--match and --hang cannot both decide"),
        (f"{SITES} {ENDS} --timeout soon -- script.py", "a time must be seconds, 90s, 10m or 2h, got 'soon'"),
        (f"{SITES} {ENDS} --git . -- script.py", "--git and --environments cannot go together"),
        (f"{SITES} {ENDS} --only-package --hold x==1 -- script.py", "--only-package keeps all other packages"),
        (f"{SITES} {ENDS} --repeat 0 -- script.py", "--repeat must be 1 or more, got 0"),
        (f"{SITES} {ENDS} --then-git no -- script.py", "--then-git must be an existing folder, got no"),
        (f"--git . --then-git . {ENDS} -- script.py", "--then-git is for releases"),
        (f"--git . {ENDS} -- script.py", "--git must be a git checkout, got "),
        (f"--wheels sites {ENDS} -- script.py", "there is no release of sglang in "),
        (f"{SITES} {ENDS} --then-git sites -- script.py", "--then-git must be a git checkout, got "),
        ("--resume sites", "there is no bisect in sites"),
        ("--resume sites --repeat 12", "--repeat cannot go with --resume: a resumed bisect keeps its question"),
        ("--confirm=400 --resume sites --then-git .", "--confirm cannot go with --resume"),
        ("--resume sites --find-fix", "--find-fix cannot go with --resume"),
        ("--resume sites -- script.py x", "the command script.py x cannot go with --resume"),
        ("--resume sites --repat 12", "is not an option"),
        ("--then-git . --resume sites", "there is no bisect in sites"),
    ],
)
def test_one_sentence_and_exit_code_2(
    bench: Bench, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str], words: str, sentence: str
) -> None:
    """In this process, for nothing is run or installed."""
    monkeypatch.chdir(bench.folder)
    monkeypatch.setenv("XDG_CACHE_HOME", str(bench.folder / "cache"))
    assert bisection.main(words.split(), "") == 2
    said = capfd.readouterr()
    assert sentence in said.err and said.err.startswith("error: ") and said.err.count("\n") == 1


def test_a_checkout_without_git(
    bench: Bench, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(bench.folder)
    monkeypatch.setenv("PATH", str(bench.folder))
    assert bisection.main(f"--git . {ENDS} -- script.py".split(), "") == 2
    assert "git, which is not on PATH; install it." in capfd.readouterr().err


def test_a_bad_end_that_passes_ends_the_bisect(bench: Bench) -> None:
    run = bench.bisect("--python", bare_python(), *SITES.split(), "--good", "1.0", "--bad", "1.1", "--", "script.py")
    assert run.returncode == 2, run.stdout + run.stderr
    assert run.stderr.startswith("error: the bad end 1.1 is not bad: it passed") and run.stderr.count("\n") == 1


LOGIN = f"Basic {base64.b64encode(b'user:s3cr@t').decode()}"
LISTED = "application/vnd.pypi.simple.v1+json"
PAGES: dict[str, tuple[str, bytes]] = {
    "plain": (LISTED, b'{"files": [{"filename": "plain-1.0.tar.gz"}, {"filename": "plain-1.1.tar.gz"}]}'),
    "no-json": (LISTED, b"<html>"),
    "no-files": (LISTED, b'{"message": "moved"}'),
    "no-names": (LISTED, b'{"files": [{"url": "x"}]}'),
    "no-table": (LISTED, b"[]"),
    "no-utf8": ("text/html", b"\xff\xfe"),
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
    assert list(map(str, candidates.releases("plain"))) == ["1.0", "1.1"] and not candidates.releases("absent")
    ClosedIndex.told.clear()
    assert list(map(str, candidates.releases("elsewhere"))) == []  # the files there are of another package
    assert ClosedIndex.told == [None], "the login is for its own host alone"


@pytest.mark.parametrize("package", ["no-json", "no-files", "no-names", "no-table", "no-utf8", "garbled"])
def test_an_index_that_answers_wrongly_pauses(closed_index: str, package: str) -> None:
    with pytest.raises(Pause, match=f"the index http://{closed_index}/simple/{package}/ could not be read"):
        candidates.releases(package)


@pytest.mark.parametrize("address", ["simple", "http://[::1", "http://127.0.0.1:port"])
def test_an_address_that_is_none_pauses(monkeypatch: pytest.MonkeyPatch, address: str) -> None:
    monkeypatch.setattr(candidates, "index_arguments", lambda: ["--index-url", address])
    with pytest.raises(Pause, match="could not be read"):
        candidates.releases("moving")


@pytest.mark.long
def test_a_wrong_login_is_not_shown_and_neither_is_a_right_one(tmp_path: Path, closed_index: str) -> None:
    bench = Bench(tmp_path)
    asked = ["--package", "plain", "--good", "1.0", "--bad", "1.1", "--hold", "plain==1.*", "--dir", "found"]
    run = bench.bisect(*asked, "--", bench.script(""))
    assert run.returncode == 2 and "--hold needs NAME==VERSION, such as sglang==0.5.23, got plain==1.*." in run.stderr
    assert run.stderr.count("\n") == 1, run.stderr
    bench.environment["PIP_INDEX_URL"] = f"http://user:another-s3cret@{closed_index}/simple"
    run = bench.bisect(*asked, "--", "script.py")
    assert run.returncode == 4 and f"the index http://{closed_index}/simple/plain/ could not be read (Una" in run.stderr
    assert "s3cret" not in run.stdout + run.stderr and run.stderr.count("\n") == 1


def test_certificates_that_are_missing_pause(closed_index: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PIP_CERT", "/nowhere.pem")
    with pytest.raises(Pause, match="could not be read"):
        candidates.releases("plain")


class SlowIndex(http.server.BaseHTTPRequestHandler):
    """Has two releases of `moving`, whose files cannot be had while `broken` is set."""

    broken = True
    wheels: Path

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


def test_the_releases_of_an_index(monkeypatch: pytest.MonkeyPatch, index: str) -> None:
    monkeypatch.setenv("NO_PROXY", "127.0.0.1")
    monkeypatch.setattr(candidates, "index_arguments", lambda: ["--index-url", index])
    assert [str(version) for version in sorted(candidates.releases("Moving"))] == ["1.0", "1.1", "1.2", "1.3"]


def test_an_index_in_folders(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    (tmp_path / "moving").mkdir()
    (tmp_path / "moving" / "index.html").write_text('<a href="moving-1.0-py3-none-any.whl">x</a>')
    monkeypatch.setattr(candidates, "index_arguments", lambda: ["--index-url", tmp_path.as_uri()])
    assert list(map(str, candidates.releases("moving"))) == ["1.0"] and not candidates.releases("absent")


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
    words = ["--package", "moving", "--only-package", "--python", bare_python(), "--dir", "found"]
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


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="there is no device that is always full")
def test_no_disk_for_the_store_pauses(tmp_path: Path) -> None:
    bench = Bench(tmp_path)
    make_wheel(tmp_path / "wheels", "moving", "1.0", "")
    make_wheel(tmp_path / "wheels", "moving", "1.1", "")
    (tmp_path / "cache").symlink_to("/dev/full")  # a file, on which nothing can be made
    words = ["--package", "moving", "--only-package", "--wheels", "wheels", "--dir", "found"]
    run = bench.bisect(*words, "--good", "1.0", "--bad", "1.1", "--", bench.script(""))
    assert run.returncode == 4 and "environments cannot be kept in " in run.stderr, run.stderr
