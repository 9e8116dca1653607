"""The commit found is reverted on top of the newer end: a real package in a real repository."""

import re
import shutil
from collections.abc import Mapping, Sequence
from pathlib import Path

import pytest

from harness.tools.bisection.bisect_report import EXIT_CODES
from harness.tools.trial.trial import Outcome, Trial
from tests.tools.bisection.bisecting import Bench, bare_python, commit, git, repository
from tests.tools.bisection.planned import bisect_commits, candidate_of, failed, passed, question_of, ran
from tests.tools.bisection.wheels import make_wheel

pytestmark = pytest.mark.skipif(shutil.which("git") is None, reason="there is no git")

Files = Mapping[str, str]
RAISES = "def work():\n    raise ValueError('broken')\n"
WORKS = "def work():\n    return 1\n"
USE = "import moving\nfrom moving import sync\nsync.work()"


def package(*commits: Files) -> list[Files]:
    """The files of each commit, of a package with a project's name."""
    named = [{f"src/moving/{name}": text for name, text in files.items()} for files in commits]
    named[0] |= {"pyproject.toml": "[project]\nname = 'moving'\n"}
    return named


def without_hashes(said: str) -> str:
    return re.sub(r"\b[0-9a-f]{12}\b", "#", said)


def test_a_revert_that_passes_and_a_bad_end_that_fails_again_confirm_the_commit(tmp_path: Path) -> None:
    bench, checkout = Bench(tmp_path), tmp_path / "checkout"
    files = package({"__init__.py": "", "sync.py": WORKS}, {}, {"sync.py": RAISES}, {"other.py": "x = 1\n"}, {})
    hashes = repository(checkout, files)
    asked = ["--git", "checkout", "--good", hashes[0], "--bad", "main", "--dir", "found", "--python", bare_python()]
    run = bench.bisect(*asked, "--", bench.script(USE))
    said = without_hashes(run.stdout)
    assert not git(checkout, "status", "--porcelain"), "the checkout is only read"
    assert git(checkout, "worktree", "list").count("\n") == 0
    assert run.returncode == 0, run.stdout + run.stderr
    assert "The first bad commit is # commit 2; the last good one is # commit 1." in said
    assert "Confirmed: with # reverted on top of the bad end #, it passes; the bad end # itself, run again" in said
    assert bench.ran()[-2:] == [f"{hashes[4][:12]}-without-{hashes[2][:12]}", hashes[4]]
    assert f"revert --no-commit {hashes[2]}" in bench.report() and "## The commit reverted" in bench.report()
    assert bench.report().startswith("# Bisect of moving, ") and hashes[0] in bench.report()
    runs = bench.ran()
    again = bench.bisect("--resume", "found")
    assert again.returncode == 0 and "Confirmed: " in again.stdout and bench.ran() == runs


BOTH = {"__init__.py": "", "sync.py": "from moving.a import a\nfrom moving.b import b\ndef work():\n    a(), b()\n"}
FINE, BROKEN = "def {0}():\n    pass\n", "def {0}():\n    check()\ndef check():\n    raise ValueError('broken')\n"
FIRST = {"__init__.py": "", "sync.py": WORKS}
ENDS: Mapping[str, tuple[Sequence[Files], int, Sequence[str]]] = {
    "a conflict is said with its files": (
        [FIRST, {"sync.py": RAISES}, {"sync.py": RAISES.replace("):", "):  # later")}, {}],
        0,
        [
            "Not confirmed: # cannot be reverted on top of the bad end #: it conflicts with later commits in"
            " src/moving/sync.py; what remains is that # passes and # fails."
        ],
    ),
    "a later commit breaks the same thing elsewhere": (
        [
            BOTH | {"a.py": FINE.format("a"), "b.py": FINE.format("b")},
            {"a.py": BROKEN.format("a")},
            {},
            {"b.py": BROKEN.format("b")},
            {},
        ],
        3,
        [
            "The first bad commit is # commit 1;",
            "Not the only cause: with # reverted on top of the bad end #, it still fails: ValueError: broken. So a later"
            " commit broke it too",
        ],
    ),
    "later commits need it": (
        [
            FIRST,
            {"sync.py": RAISES, "helper.py": "value = 1\n"},
            {"__init__.py": "from moving.helper import value\n"},
        ],
        0,
        [
            "Not confirmed: with # reverted",
            "No module named 'moving.helper'",
            "Either later commits need this one",
        ],
    ),
    "it is the bad end itself": (
        [FIRST, {}, {"sync.py": RAISES}],
        0,
        ["# is the bad end itself: without it the files are those of #, which passes."],
    ),
}


@pytest.mark.parametrize("end", ENDS)
def test_what_a_revert_says(end: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    commits, code, sentences = ENDS[end]
    hashes = repository(tmp_path / "checkout", package(*commits))
    question = question_of(tmp_path / "checkout", hashes[0], "main")
    state, found, said, _ = bisect_commits(question, tmp_path, lambda trial: ran(trial, USE), monkeypatch)
    assert EXIT_CODES[found.kind] == code, said
    assert all(sentence in without_hashes(said) for sentence in sentences), said
    assert (state.reverted is None) == ("itself" in end)


def test_a_fix_reverted_on_top_of_the_good_end_fails_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    files = package({"__init__.py": "", "sync.py": RAISES}, {}, {"sync.py": WORKS}, {"other.py": ""}, {})
    hashes = repository(tmp_path / "checkout", files)
    question = question_of(tmp_path / "checkout", "main", hashes[0], find_fix=True)
    _, found, said, _ = bisect_commits(question, tmp_path, lambda trial: ran(trial, USE), monkeypatch)
    assert found.kind == "found", said
    confirmed = "Confirmed: with # reverted on top of the good end #, it fails; the good end # itself, run again"
    assert f"{confirmed} right after, passes as before." in without_hashes(said), said


def test_a_merge_is_reverted_against_its_first_parent(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    checkout = tmp_path / "checkout"
    hashes = repository(checkout, package(FIRST, {}))
    git(checkout, "checkout", "-q", "-b", "side")
    commit(checkout, "break it", {"src/moving/sync.py": RAISES})
    git(checkout, "checkout", "-q", "main")
    git(checkout, "merge", "-q", "--no-ff", "-m", "merge side", "side")
    commit(checkout, "later")
    question = question_of(checkout, hashes[0], "main")
    _, found, said, report = bisect_commits(question, tmp_path, lambda trial: ran(trial, USE), monkeypatch)
    assert found.kind == "found" and "merge side; the last good one" in said, said
    assert "Confirmed: " in said and "revert --no-commit --mainline 1 " in report


def test_a_bad_end_that_passes_when_run_again_confirms_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each commit fails on its first run only, and passes without the commit."""
    seen: set[str] = set()

    def run(trial: Trial) -> Outcome:
        is_again, breaks = candidate_of(trial) in seen, "True" in Path(trial.own[0], "moving/__init__.py").read_text()
        seen.add(candidate_of(trial))
        return failed("ValueError: broken") if breaks and not is_again else passed()

    files = package({"__init__.py": "breaks = False\n"}, {"__init__.py": "breaks = True\n"}, {"other.py": ""})
    hashes = repository(tmp_path / "checkout", files)
    _, found, said, _ = bisect_commits(
        question_of(tmp_path / "checkout", hashes[0], "main"), tmp_path, run, monkeypatch
    )
    assert EXIT_CODES[found.kind] == 1, said
    assert "did not end as before. The failure comes and goes; give --repeat." in said
    assert "The first bad commit is probably # commit 1" in without_hashes(said)


def test_from_installed_releases_to_a_confirmed_commit(tmp_path: Path) -> None:
    """uv installs each release from a wheel; the commits between the two found are then bisected and confirmed."""
    bench = Bench(tmp_path)
    commits = package(FIRST, {"sync.py": RAISES}, {"other.py": ""})
    hashes = repository(tmp_path / "checkout", commits)
    for version, at, code in (("1.0", 0, WORKS), ("1.1", 2, RAISES)):
        git(tmp_path / "checkout", "tag", f"v{version}", hashes[at])
        files = {"moving/__init__.py": "", "moving/sync.py": code, "moving/other.py": ""}
        make_wheel(tmp_path / "wheels", "moving", version, files)
    asked = ["--package", "moving", "--good", "1.0", "--bad", "1.1", "--wheels", "wheels", "--dir", "found"]
    run = bench.bisect(*asked, "--then-git", "checkout", "--", bench.script(USE))
    assert run.returncode == 0 and "The first bad release is 1.1;" in run.stdout, run.stdout + run.stderr
    assert "commit 1; the last good one is" in run.stdout and "Confirmed: with " in run.stdout, run.stdout
