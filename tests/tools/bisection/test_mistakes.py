"""What is asked wrongly ends in one sentence and exit code 2; what is missing for a while, in a pause."""

import http.server
import json
import os
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from harness.tools.bisection import candidates, verbs
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
        ("--resume sites", "there is no bisect in sites"),
    ],
)
def test_one_sentence_and_exit_code_2(
    bench: Bench, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str], words: str, sentence: str
) -> None:
    """In this process, for nothing is run or installed."""
    monkeypatch.chdir(bench.folder)
    monkeypatch.setenv("XDG_CACHE_HOME", str(bench.folder / "cache"))
    assert verbs.main(words.split(), "") == 2
    said = capfd.readouterr()
    assert sentence in said.err and said.err.startswith("error: ") and said.err.count("\n") == 1


def test_a_bad_end_that_passes_ends_the_bisect(bench: Bench) -> None:
    run = bench.bisect("--python", bare_python(), *SITES.split(), "--good", "1.0", "--bad", "1.1", "--", "script.py")
    assert run.returncode == 2, run.stdout + run.stderr
    assert run.stderr.startswith("error: the bad end 1.1 is not bad: it passed") and run.stderr.count("\n") == 1


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
