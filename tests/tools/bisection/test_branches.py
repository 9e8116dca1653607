"""Ends on side branches, and packages in folders of a repository: real histories, and git's own bisect to compare
with."""

import shutil
import sys
from pathlib import Path

import pytest

from harness.config.mistakes import ConfigError
from harness.runtime.errors import UnsupportedEnvironment
from harness.tools.bisection.candidates import find_candidates
from tests.tools.bisection.bisecting import commit, git, repository
from tests.tools.bisection.planned import bisect_commits, provider_of, question_of, ran

pytestmark = pytest.mark.skipif(shutil.which("git") is None, reason="there is no git")

USE = "import moving, sys\nfrom moving import side\nsys.exit(moving.code or side.code)"
MAIN, SIDE = "moving/__init__.py", "moving/side.py"


def merged(checkout: Path, breaks: str) -> str:
    """Make a history with a side branch that is merged; return its commit before the last, which passes.

    begin - main 1 - main 2 ------ merge - later
        `-- side 1 - side 2 ------'
    main 2 or side 2 breaks its own file.
    """
    repository(checkout, [])
    commit(checkout, "begin", {MAIN: "code = 0\n", SIDE: "code = 0\n"})
    git(checkout, "branch", "side")
    commit(checkout, "main 1")
    commit(checkout, "main 2", {MAIN: "code = 1\n"} if breaks == MAIN else {})
    git(checkout, "checkout", "-q", "side")
    passes = commit(checkout, "side 1")
    commit(checkout, "side 2", {SIDE: "code = 1\n"} if breaks == SIDE else {})
    git(checkout, "checkout", "-q", "main")
    git(checkout, "merge", "-q", "--no-ff", "-m", "merge side", "side")
    commit(checkout, "later")
    return passes


def found_by_git(tmp_path: Path, good: str) -> str:
    """Return the subject of the commit that git's own bisect names."""
    copy = tmp_path / "copy"
    git(tmp_path, "clone", "-q", "checkout", str(copy))
    git(copy, "bisect", "start", "main", good)
    script = f"import sys; sys.path.insert(0, '.'); sys.dont_write_bytecode = True; {USE.replace(chr(10), ';')}"
    git(copy, "bisect", "run", sys.executable, "-c", script)
    return git(copy, "log", "-1", "--format=%s", "refs/bisect/bad")


@pytest.mark.parametrize(("breaks", "of_git", "of_main"), [(MAIN, "main 2", "main 2"), (SIDE, "side 2", "merge side")])
def test_a_good_end_on_a_merged_branch(
    breaks: str,
    of_git: str,
    of_main: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """A cause on main before the merge was never in the good end; one on the branch came to main with its merge."""
    good = merged(tmp_path / "checkout", breaks)
    assert found_by_git(tmp_path, good) == of_git
    question = question_of(tmp_path / "checkout", good, "main", package="moving")
    assert f"{good} is on a side branch; the bisect starts where that branch began, at " in capsys.readouterr().out
    _, found, said, report = bisect_commits(question, tmp_path, lambda trial: ran(trial, USE), monkeypatch)
    assert found.kind == "found" and f"{of_main}; the last good one is" in said and "Confirmed: with " in said, said
    assert " log --oneline " in report, "which lists a merge's commits"


def test_a_good_end_without_a_shared_commit(tmp_path: Path) -> None:
    """A history of its own, even after it was merged: nothing on main is known to be older."""
    checkout = tmp_path / "checkout"
    merged(checkout, MAIN)
    git(checkout, "checkout", "-q", "--orphan", "other")
    commit(checkout, "other")
    for _ in range(2):
        with pytest.raises(ConfigError, match="other shares no commit with the first-parent history of main"):
            question_of(checkout, "other", "main", package="moving")
        git(checkout, "checkout", "-q", "-f", "main")
        git(checkout, "merge", "-q", "--allow-unrelated-histories", "-s", "ours", "-m", "merge other", "other")


PROJECT = "[project]\nname = 'moving'\n"
PLACES = [
    ({"python/pyproject.toml": PROJECT, "python/moving/__init__.py": ""}, "", "", "python"),
    ({"python/pyproject.toml": PROJECT, "python/moving/__init__.py": ""}, "python", "", "python"),
    ({"libs/pyproject.toml": PROJECT, "libs/src/moving/__init__.py": ""}, "libs", "", "libs/src"),
    # Beside a python/ or src/ with something else in it.
    ({"src/engine.cpp": "", "moving/__init__.py": ""}, "", "moving", ""),
    ({"python/setup.cfg": "", "src/moving.py": ""}, "", "moving", "src"),
    ({"src/engine.cpp": "", "moving/__init__.py": ""}, "", "python-moving", ""),
]


@pytest.mark.parametrize(("files", "given", "package", "place"), PLACES)
def test_the_package_is_found_where_it_is(
    files: dict[str, str], given: str, package: str, place: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """--git names the repository, or the folder with the package or its pyproject.toml."""
    repository(tmp_path / "checkout", [files, {}])
    question = question_of(tmp_path / "checkout" / given, "main~1", "main", package=package)
    assert question.options.package == (package or "moving")
    made = provider_of(question, tmp_path, monkeypatch).make(find_candidates(question)[0])
    [path] = made.paths
    assert path.endswith(f"/files/{place}".rstrip("/")), path


def test_a_checkout_that_does_not_say_what_is_bisected(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    checkout = tmp_path / "checkout"
    hashes = repository(checkout, [{}, {"libs/pyproject.toml": PROJECT, "libs/src/moving/__init__.py": ""}])
    with pytest.raises(ConfigError, match="names no package; give --package"):
        question_of(checkout, "main~1", "main")
    with pytest.raises(ConfigError, match="good = main is newer than bad = main~1"):
        question_of(checkout, "main", "main~1", package="moving")
    question = question_of(checkout / "libs", "main~1", "main")
    assert [question.options.good, question.options.bad] == hashes, "a branch moves"
    with pytest.raises(UnsupportedEnvironment, match="it has no folder libs/"):
        provider_of(question, tmp_path, monkeypatch).make(find_candidates(question)[0])
