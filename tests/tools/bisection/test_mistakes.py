"""What is asked wrongly ends in one sentence and exit code 2."""

from pathlib import Path

import pytest

from harness.tools.bisection import bisection
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
        (f"{SITES} {ENDS} --repeat 0 -- script.py", "--repeat must be 1 or more, got 0"),
        (f"{SITES} {ENDS} --then-git no -- script.py", "--then-git must be an existing folder, got no"),
        (f"--git . --then-git . {ENDS} -- script.py", "--then-git is for releases"),
        (f"--git . {ENDS} -- script.py", "--git must be a git checkout, got "),
        (f"--wheels sites {ENDS} -- script.py", "there is no release of sglang in "),
        (f"{SITES} {ENDS} --then-git sites -- script.py", "--then-git must be a git checkout, got "),
        ("--resume sites", "there is no bisect in sites"),
        ("--resume sites --repeat 12", "--repeat 12 -- cannot go with --resume: a resumed bisect keeps its question"),
        ("--resume sites --find-fix", "--find-fix -- cannot go with --resume"),
        ("--resume sites -- script.py x", "-- script.py x cannot go with --resume"),
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


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="there is no device that is always full")
def test_no_disk_for_the_store_pauses(tmp_path: Path) -> None:
    bench = Bench(tmp_path, {"UV_CACHE_DIR": str(tmp_path / "uv")})
    for version in ("1.0", "1.1"):
        make_wheel(tmp_path / "wheels", "moving", version, "")
    (tmp_path / "cache").symlink_to("/dev/full")  # a file, on which nothing can be made
    words = ["--package", "moving", "--wheels", "wheels", "--dir", "found"]
    run = bench.bisect(*words, "--good", "1.0", "--bad", "1.1", "--", bench.script(""))
    assert run.returncode == 4 and "environments cannot be kept in " in run.stderr, run.stderr
