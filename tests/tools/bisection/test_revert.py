"""The commit found is reverted on top of the newer end: a real package in a real repository, bisected from outside."""

import re
import shutil
from collections.abc import Mapping, Sequence
from pathlib import Path

import pytest

from tests.tools.bisection.bisecting import Bench, bare_python
from tests.tools.bisection.test_git import git
from tests.tools.bisection.wheels import make_wheel

pytestmark = pytest.mark.skipif(shutil.which("git") is None, reason="there is no git")

Files = Mapping[str, str]
RAISES = "def work():\n    raise ValueError('broken')\n"
WORKS = "def work():\n    return 1\n"
USE = "import moving\nfrom moving import sync\nsync.work()"


def repository(folder: Path, commits: Sequence[Files]) -> list[str]:
    """Make a checkout of the package `moving`; each commit writes its files. Return the commits' hashes."""
    (folder / "src" / "moving").mkdir(parents=True)
    git(folder, "init", "-q", "-b", "main")
    (folder / "pyproject.toml").write_text("[project]\nname = 'moving'\n")
    hashes = []
    for number, files in enumerate(commits):
        for name, text in files.items():
            (folder / "src" / "moving" / name).write_text(text)
        git(folder, "add", "--all")
        git(folder, "commit", "-q", "--allow-empty", "-m", f"commit {number}")
        hashes.append(git(folder, "rev-parse", "HEAD"))
    return hashes


def bisect(tmp_path: Path, commits: Sequence[Files], *words: str, script: str = USE) -> tuple[Bench, str, int]:
    bench = Bench(tmp_path)
    hashes = repository(tmp_path / "checkout", commits)
    ends = ("--bad", hashes[0], "--good", "main") if "--find-fix" in words else ("--good", hashes[0], "--bad", "main")
    asked = ["--git", "checkout", *ends, "--dir", "found", "--python", bare_python(), *words]
    run = bench.bisect(*asked, "--", bench.script(script))
    assert not git(tmp_path / "checkout", "status", "--porcelain"), "the checkout is only read"
    assert git(tmp_path / "checkout", "worktree", "list").count("\n") == 0
    return bench, run.stdout + run.stderr, run.returncode


def said_of(said: str) -> str:
    """The answer, without hashes."""
    return re.sub(r"\b[0-9a-f]{12}\b", "#", said.partition("\n\n")[2])


def test_a_revert_that_passes_and_a_bad_end_that_fails_again_confirm_the_commit(tmp_path: Path) -> None:
    commits = [{"__init__.py": "", "sync.py": WORKS}, {}, {"sync.py": RAISES}, {"other.py": "x = 1\n"}, {}]
    bench, said, code = bisect(tmp_path, commits)
    assert code == 0 and "The first bad commit is # commit 2; the last good one is # commit 1." in said_of(said), said
    confirmed = "Confirmed: with # reverted on top of the bad end #, it passes; the bad end # itself, run again right"
    assert f"{confirmed} after, fails as before." in said_of(said), said
    bad = bench.state()["candidates"][-1]["name"]
    commit = bench.state()["candidates"][2]["name"]
    assert bench.ran()[-2:] == [f"{bad[:12]}-without-{commit[:12]}", bad]
    report = bench.report()
    assert f"revert --no-commit {commit}" in report and "## The commit reverted" in report
    ran = bench.ran()
    again = bench.bisect("--resume", "found")
    assert again.returncode == 0 and "Confirmed: " in again.stdout and bench.ran() == ran


def test_a_revert_that_conflicts_is_said_with_its_files(tmp_path: Path) -> None:
    later = RAISES.replace("):", "):  # later")
    commits = [{"__init__.py": "", "sync.py": WORKS}, {"sync.py": RAISES}, {"sync.py": later}, {}]
    _, said, code = bisect(tmp_path, commits)
    assert code == 0, said
    problem = "Not confirmed: # cannot be reverted on top of the bad end #: it conflicts with later commits in"
    assert f"{problem} src/moving/sync.py; what remains is that # passes and # fails." in said_of(said), said


def test_a_bad_end_that_stays_bad_after_the_revert_has_another_cause(tmp_path: Path) -> None:
    """A later commit breaks the same thing elsewhere."""
    package = {
        "__init__.py": "",
        "sync.py": "from moving.a import a\nfrom moving.b import b\ndef work():\n    a(), b()\n",
    }
    fine, broken = ("def {0}():\n    pass\n", "def {0}():\n    check()\ndef check():\n    raise ValueError('broken')\n")
    commits: list[Files] = [package | {"a.py": fine.format("a"), "b.py": fine.format("b")}]
    commits += [{"a.py": broken.format("a")}, {}, {"b.py": broken.format("b")}, {}]
    _, said, code = bisect(tmp_path, commits, "--match", "ValueError: broken")
    assert code == 3, said
    still = (
        "Not the only cause: with # reverted on top of the bad end #, it still fails: ValueError: broken. So a later"
    )
    assert f"{still} commit broke it too" in said_of(said), said
    assert "The first bad commit is # commit 1;" in said_of(said)


def test_a_bad_end_that_needs_the_commit_is_not_confirmed(tmp_path: Path) -> None:
    commits = [
        {"__init__.py": "", "sync.py": WORKS},
        {"sync.py": RAISES, "helper.py": "value = 1\n"},
        {"__init__.py": "from moving.helper import value\n"},
    ]
    _, said, code = bisect(tmp_path, commits, script="from moving.sync import work\nwork()")
    assert code == 0 and "Not confirmed: with # reverted" in said_of(said), said
    assert "No module named 'moving.helper'" in said and "Either later commits need this one" in said


def test_a_commit_that_is_the_bad_end_itself_needs_no_revert(tmp_path: Path) -> None:
    commits = [{"__init__.py": "", "sync.py": WORKS}, {}, {"sync.py": RAISES}]
    bench, said, code = bisect(tmp_path, commits)
    assert code == 0, said
    assert "# is the bad end itself: without it the files are those of #, which passes." in said_of(said), said
    assert len(bench.ran()) == 3


def test_a_fix_reverted_on_top_of_the_good_end_fails_again(tmp_path: Path) -> None:
    commits = [{"__init__.py": "", "sync.py": RAISES}, {}, {"sync.py": WORKS}, {"other.py": ""}, {}]
    _, said, code = bisect(tmp_path, commits, "--find-fix")
    assert code == 0, said
    confirmed = (
        "Confirmed: with # reverted on top of the good end #, it fails; the good end # itself, run again right after"
    )
    assert f"{confirmed}, passes as before." in said_of(said), said


@pytest.mark.long
def test_a_merge_is_reverted_against_its_first_parent(tmp_path: Path) -> None:
    bench = Bench(tmp_path)
    checkout = tmp_path / "checkout"
    hashes = repository(checkout, [{"__init__.py": "", "sync.py": WORKS}, {}])
    git(checkout, "checkout", "-q", "-b", "side")
    (checkout / "src/moving/sync.py").write_text(RAISES)
    git(checkout, "commit", "-q", "-am", "break it")
    git(checkout, "checkout", "-q", "main")
    git(checkout, "merge", "-q", "--no-ff", "-m", "merge side", "side")
    git(checkout, "commit", "-q", "--allow-empty", "-m", "later")
    asked = ["--git", "checkout", "--good", hashes[0], "--bad", "main", "--dir", "found", "--python", bare_python()]
    run = bench.bisect(*asked, "--", bench.script(USE))
    assert run.returncode == 0 and "merge side; the last good one" in run.stdout, run.stdout + run.stderr
    assert "Confirmed: " in run.stdout and "revert --no-commit --mainline 1 " in bench.report(), run.stdout


def test_a_bad_end_that_passes_when_run_again_confirms_nothing(tmp_path: Path) -> None:
    """The script fails on each commit's first run only, and passes without the commit."""
    script = (
        "import moving, pathlib\nseen = pathlib.Path(__file__).with_name('seen-' + os.environ['BISECT_CANDIDATE'])\n"
        "if moving.breaks and not seen.exists():\n    seen.touch()\n    raise ValueError('broken')"
    )
    commits = [{"__init__.py": "breaks = False\n"}, {"__init__.py": "breaks = True\n"}, {"other.py": ""}]
    _, said, code = bisect(tmp_path, commits, script=script)
    assert code == 1, said
    assert "did not end as before. The failure comes and goes; give --repeat." in said_of(said), said
    assert "The first bad commit is probably # commit 1" in said_of(said), said


def test_from_installed_releases_to_a_confirmed_commit(tmp_path: Path) -> None:
    """uv installs each release from a wheel; the commits between the two found are then bisected and confirmed."""
    bench = Bench(tmp_path)
    commits: list[Files] = [{"__init__.py": "", "sync.py": WORKS}, {}, {"sync.py": RAISES}, {"other.py": ""}, {}]
    hashes = repository(tmp_path / "checkout", commits)
    for version, at, code in (("1.0", 0, WORKS), ("1.1", 1, WORKS), ("1.2", 4, RAISES), ("1.3", 4, RAISES)):
        git(tmp_path / "checkout", "tag", f"v{version}", hashes[at])
        make_wheel(
            tmp_path / "wheels",
            "moving",
            version,
            {"moving/__init__.py": "", "moving/sync.py": code, "moving/other.py": ""},
        )
    asked = ["--package", "moving", "--good", "1.0", "--bad", "1.3", "--wheels", "wheels", "--dir", "found"]
    run = bench.bisect(*asked, "--then-git", "checkout", "--", bench.script(USE))
    assert run.returncode == 0 and "The first bad release is 1.2;" in run.stdout, run.stdout + run.stderr
    assert "commit 2; the last good one is" in run.stdout and "Confirmed: with " in run.stdout, run.stdout
