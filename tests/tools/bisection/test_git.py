"""Commits of a local checkout."""

import shutil
import subprocess
from pathlib import Path

import pytest

from harness.tools.environments import has_gpu
from tests.tools.bisection.bisecting import Bench, bare_python

COMMITS, FIRST_BAD = 100, 63
CLUSTERED = {*range(20, 28), *range(55, 63), 70, 71, 80, 90}
"""Twenty that do not import, eight of them right before the regression."""
SCRIPT_CODE = "import moving, sys\nsys.exit(moving.difference() > 0.01)\n"


def git(folder: Path, *words: str, stdin: str | None = None) -> str:
    run = subprocess.run(
        ["git", "-c", "user.name=t", "-c", "user.email=t@t", "-C", str(folder), *words],
        capture_output=True,
        text=True,
        input=stdin,
        check=True,
    )
    return run.stdout.strip()


def made(folder: Path, codes: list[str], metadata: str = "") -> Path:
    """A checkout with a commit for each code of `moving`."""
    folder.mkdir()
    git(folder, "init", "-q", "-b", "main")
    stream = []
    for number, code in enumerate(codes):
        files = {"python/moving/__init__.py": code} | ({"python/pyproject.toml": metadata} if metadata else {})
        message = f"commit {number}"
        stream.append(
            f"commit refs/heads/main\ncommitter t <t@t> {1700000000 + number} +0000\ndata {len(message)}\n{message}\n"
        )
        stream += [f"M 644 inline {path}\ndata {len(text)}\n{text}\n" for path, text in files.items()]
    git(folder, "fast-import", "--quiet", stdin="".join(stream))
    git(folder, "reset", "-q", "--hard", "main")
    return folder


@pytest.mark.skipif(shutil.which("git") is None, reason="there is no git")
def test_from_the_release_to_the_commit_between_its_tags(tmp_path: Path) -> None:
    """Two releases, the older one on a branch; the commits follow when a checkout is given."""
    bench = Bench(tmp_path)
    codes = [f"def work():\n    return {number}\n" for number in range(5)]
    codes += [f"def work():\n    raise ValueError('broken in {number}')\n" for number in range(5, 9)]
    folder = made(tmp_path / "checkout", codes, "[project]\nname = 'moving'\n")
    git(folder, "checkout", "-q", "-b", "release", "main~7")
    git(folder, "commit", "-q", "--allow-empty", "-m", "the release alone")
    git(folder, "tag", "v1.1")
    git(folder, "tag", "v1.2", "main")
    run = bench.over_sites([codes[0], codes[1], codes[8], codes[8]], "import moving\nmoving.work()")
    assert run.returncode == 0 and "first bad release is 1.2;" in run.stdout, run.stdout + run.stderr
    assert "to find the commit: python3 launch/bisect_versions.py --resume" in run.stdout
    run = bench.bisect("--resume", "found", "--then-git", "checkout")
    assert run.returncode == 0 and "The first bad commit is " in run.stdout, run.stdout + run.stderr
    assert "commit 5; the last good one is" in run.stdout
    asked = bench.state("found/commits")["question"]["options"]
    assert asked["bad"] == git(folder, "rev-parse", "main") and asked["package"] == "moving"

    copy = tmp_path / "copy"
    git(tmp_path, "clone", "-q", str(folder), str(copy))
    for words, sentence in (
        (("found", "--then-git", "copy"), f"found/commits holds a bisect of {folder}, got --then-git {copy};"),
        (("found/commits", "--then-git", "checkout"), "the bisect in found/commits is one of commits"),
        (("found", "--then-git", "/nonexistent"), "--then-git must be an existing folder, got /nonexistent."),
        (("found", "--then-git", "sites"), "--then-git must be a git checkout, got "),
    ):
        run = bench.bisect("--resume", *words)
        assert run.returncode == 2 and sentence in run.stderr, run.stdout + run.stderr
        assert run.stderr.count("\n") == 1 and not run.stdout


@pytest.mark.skipif(shutil.which("git") is None, reason="there is no git")
@pytest.mark.skipif(has_gpu(), reason="SGLang's CPU mode is for machines without a GPU")
def test_commits_run_in_the_cpu_mode_in_which_the_releases_did(tmp_path: Path) -> None:
    """An sglang is held, and the commits are run with it too."""
    bench, codes = Bench(tmp_path), ["code = 0\n", "code = 0\n", "code = 1\n"]
    folder = made(tmp_path / "checkout", codes)
    git(folder, "tag", "v1.0", "main~2")
    git(folder, "tag", "v1.1", "main")
    script = "import moving, os, sys\nsys.exit(0 if os.environ.get('SGLANG_USE_CPU_ENGINE') == '1' and not moving.code else 1)"
    run = bench.over_sites([codes[0], codes[2]], script, "--hold", "sglang==0.5.23", "--then-git", "checkout")
    assert run.returncode == 0 and "commit 2; the last good one is" in run.stdout, run.stdout + run.stderr


@pytest.mark.skipif(shutil.which("git") is None, reason="there is no git")
@pytest.mark.parametrize(
    ("other", "package", "named"),
    [
        ("src/engine.cpp", "moving/__init__.py", "moving"),
        ("python/setup.cfg", "src/moving.py", "moving"),
        ("src/engine.cpp", "moving/__init__.py", "python-moving"),
    ],
)
def test_the_package_is_found_where_it_is(tmp_path: Path, other: str, package: str, named: str) -> None:
    """Beside a python/ or src/ with something else in it; the installed package is another one."""
    bench, folder = Bench(tmp_path), tmp_path / "checkout"
    for code in range(2):
        for name, text in ((other, ""), (package, f"code = {code}\n")):
            (folder / name).parent.mkdir(parents=True, exist_ok=True)
            (folder / name).write_text(text)
        git(folder, "init", "-q", "-b", "main")
        git(folder, "add", "--all")
        git(folder, "commit", "-q", "-m", f"commit {code}")
    (tmp_path / "installed").mkdir()
    (tmp_path / "installed" / "moving.py").write_text("code = 0\n")
    bench.environment["PYTHONPATH"] = str(tmp_path / "installed")
    asked = ["--git", "checkout", "--package", named, "--good", "main~1", "--bad", "main", "--python", bare_python()]
    script = bench.script("import moving\nif moving.code: raise ValueError('broken')")
    run = bench.bisect(*asked, "--match", "ValueError", "--", script)
    assert run.returncode == 0 and "commit 1; the last good one is" in run.stdout, run.stdout + run.stderr


@pytest.mark.skipif(shutil.which("git") is None, reason="there is no git")
@pytest.mark.parametrize("metadata", ["[project]\nname = 'moving'\n", ""], ids=["named", "unnamed"])
def test_a_checkout_says_what_it_is_and_its_ends_are_hashes(tmp_path: Path, metadata: str) -> None:
    bench = Bench(tmp_path)
    folder = made(tmp_path / "checkout", ["code = 0\n", "code = 1\n"], metadata)
    asked = ["--git", "checkout", "--good", "main~1", "--bad", "main", "--dir", "found", "--python", bare_python()]
    run = bench.bisect(*asked, "--", bench.script("import moving, sys; sys.exit(moving.code)"))
    if not metadata:
        assert run.returncode == 2 and "give --package" in run.stderr, run.stdout + run.stderr
        return
    assert run.returncode == 0, run.stdout + run.stderr
    assert bench.report().startswith("# Bisect of moving, ")
    ends = [git(folder, "rev-parse", name) for name in ("main~1", "main")]
    assert all(end in bench.report() for end in ends)
    run = bench.bisect("--git", "checkout", "--good", "main", "--bad", "main~1", "--", "script.py")
    assert run.returncode == 2 and "good = main is newer than bad = main~1" in run.stderr, run.stderr


@pytest.fixture
def checkout(tmp_path: Path) -> Path:
    """A hundred commits, of which some do not import; a number goes up at FIRST_BAD."""
    codes = [
        f"import {number}\n"
        if number in CLUSTERED
        else f"def difference():\n    return {0.3 if number >= FIRST_BAD else 1e-7}  # {number}\n"
        for number in range(COMMITS)
    ]
    return made(tmp_path / "checkout", codes)


@pytest.mark.long
@pytest.mark.skipif(shutil.which("git") is None, reason="there is no git")
def test_a_planted_regression_among_commits_of_which_a_fifth_does_not_import(tmp_path: Path, checkout: Path) -> None:
    """Where the eight before it do not import, the answer is the nine of which one is the first."""
    bench = Bench(tmp_path)
    first = git(checkout, "rev-list", "--max-parents=0", "main")
    asked = ["--git", str(checkout), "--package", "moving", "--good", first[:12], "--bad", "main", "--dir", "found"]
    decided = ["--python", bare_python()]
    run = bench.bisect(*asked, *decided, "--", bench.script(SCRIPT_CODE))
    assert run.returncode == 1, run.stdout + run.stderr
    assert "one of 9: " in run.stdout and f"commit {FIRST_BAD}" in run.stdout
    assert len(bench.ran()) == len(set(bench.ran()))
    assert sum(record["verdict"] != "skip" for record in bench.state()["records"]) <= 9
    assert git(checkout, "status", "--porcelain") == "" and git(checkout, "worktree", "list").count("\n") == 0
    assert "cannot be imported (--match counts that too): SyntaxError" in bench.report()
    assert "```\n```" not in bench.report(), "nothing is in an empty block"
