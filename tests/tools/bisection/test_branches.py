"""Ends on side branches, and packages in folders of a repository: real histories, and git's own bisect to compare
with."""

import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tests.tools.bisection.bisecting import Bench, bare_python
from tests.tools.bisection.test_git import git

pytestmark = pytest.mark.skipif(shutil.which("git") is None, reason="there is no git")

USE = "import moving, sys\nfrom moving import side\nsys.exit(moving.code or side.code)"


def commit(checkout: Path, message: str, **modules: int) -> str:
    """Set `code` of the package's modules, and commit; return the hash."""
    for name, code in modules.items():
        file = checkout / "moving" / ("__init__.py" if name == "main" else f"{name}.py")
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(f"code = {code}\n")
    git(checkout, "add", "--all")
    git(checkout, "commit", "-q", "--allow-empty", "-m", message)
    return git(checkout, "rev-parse", "HEAD")


def merged(checkout: Path, *, main: int = 0, side: int = 0) -> str:
    """Make a history with a side branch that is merged; return its commit before the last, which passes.

    begin - main 1 - main 2 ------ merge - later
        `-- side 1 - side 2 ------'
    main 2 sets the code of main, side 2 that of the side branch.
    """
    git(checkout.parent, "init", "-q", "-b", "main", str(checkout))
    commit(checkout, "begin", main=0, side=0)
    git(checkout, "branch", "side")
    commit(checkout, "main 1")
    commit(checkout, "main 2", main=main)
    git(checkout, "checkout", "-q", "side")
    passes = commit(checkout, "side 1")
    commit(checkout, "side 2", side=side)
    git(checkout, "checkout", "-q", "main")
    git(checkout, "merge", "-q", "--no-ff", "-m", "merge side", "side")
    commit(checkout, "later")
    return passes


def ask(tmp_path: Path, good: str, *words: str, bad: str = "main") -> tuple[Bench, subprocess.CompletedProcess[str]]:
    bench = Bench(tmp_path)
    asked = ["--git", "checkout", "--package", "moving", "--good", good, "--bad", bad, "--dir", "found", *words]
    return bench, bench.bisect(*asked, "--python", bare_python(), "--", bench.script(USE))


def found_by_git(tmp_path: Path, good: str) -> str:
    """Return the subject of the commit that git's own bisect names."""
    copy = tmp_path / "copy"
    git(tmp_path, "clone", "-q", "checkout", str(copy))
    git(copy, "bisect", "start", "main", good)
    script = f"import sys; sys.path.insert(0, '.'); sys.dont_write_bytecode = True; {USE.replace(chr(10), ';')}"
    git(copy, "bisect", "run", sys.executable, "-c", script)
    return git(copy, "log", "-1", "--format=%s", "refs/bisect/bad")


def test_a_good_end_on_a_merged_branch_and_the_cause_on_main(tmp_path: Path) -> None:
    """Main broke before the merge: the good end never saw that, and the merge itself changed nothing."""
    good = merged(tmp_path / "checkout", main=1)
    assert found_by_git(tmp_path, good) == "main 2"
    _, run = ask(tmp_path, good)
    assert run.returncode == 0 and "main 2; the last good one is" in run.stdout, run.stdout + run.stderr
    assert f"{good} is on a side branch; the bisect starts where that branch began, at " in run.stdout
    assert "Confirmed: with " in run.stdout, run.stdout


@pytest.mark.long
def test_a_good_end_on_a_merged_branch_and_the_cause_on_that_branch(tmp_path: Path) -> None:
    """git names the commit on the branch; the first-parent history has its merge."""
    good = merged(tmp_path / "checkout", side=1)
    assert found_by_git(tmp_path, good) == "side 2"
    _, run = ask(tmp_path, good)
    assert run.returncode == 0 and "merge side; the last good one is" in run.stdout, run.stdout + run.stderr
    assert " log --oneline " in (tmp_path / "found" / "report.md").read_text(), "which lists the merge's commits"


def test_a_good_end_without_a_shared_commit(tmp_path: Path) -> None:
    """A history of its own, even after it was merged: nothing on main is known to be older."""
    checkout = tmp_path / "checkout"
    merged(checkout, main=1)
    git(checkout, "checkout", "-q", "--orphan", "other")
    commit(checkout, "other", main=0, side=0)
    for _ in range(2):
        _, run = ask(tmp_path, "other")
        assert run.returncode == 2 and run.stderr.count("\n") == 1, run.stdout + run.stderr
        assert "other shares no commit with the first-parent history of main, which is what is searched" in run.stderr
        git(checkout, "checkout", "-q", "-f", "main")
        git(checkout, "merge", "-q", "--allow-unrelated-histories", "-s", "ours", "-m", "merge other", "other")


@pytest.mark.parametrize("inside", ["python", "libs/files/moving/src"])
@pytest.mark.parametrize("given", ["", "folder"])
def test_a_package_in_a_folder_of_the_repository(tmp_path: Path, inside: str, given: str) -> None:
    """--git names the folder with the package or its pyproject.toml; python/ and src/ are found without that."""
    bench, checkout = Bench(tmp_path), tmp_path / "checkout"
    project = checkout / inside.removesuffix("/src")
    git(tmp_path, "init", "-q", "-b", "main", str(checkout))
    for number, code in enumerate((0, 0, 1, 1)):
        (checkout / inside / "moving").mkdir(parents=True, exist_ok=True)
        (project / "pyproject.toml").write_text("[project]\nname = 'moving'\n")
        (checkout / inside / "moving" / "__init__.py").write_text(f"code = {code}\n")
        (checkout / f"number-{number}").touch()
        git(checkout, "add", "--all")
        git(checkout, "commit", "-q", "-m", f"commit {number}")
    is_known = inside == "python" or bool(given)
    asked = ["--git", str(project if given else checkout), "--good", "main~3", "--bad", "main", "--dir", "found"]
    run = bench.bisect(
        *asked, "--python", bare_python(), "--", bench.script("import moving, sys; sys.exit(moving.code)")
    )
    if not is_known:
        assert run.returncode == 2 and "names no package; give --package" in run.stderr, run.stdout + run.stderr
        return
    assert run.returncode == 0 and "commit 2; the last good one is" in run.stdout, run.stdout + run.stderr
    assert "Confirmed: with " in run.stdout, run.stdout
    place = f"/tmp/moving-{git(checkout, 'rev-parse', 'main~1')[:12]}"
    assert f" PYTHONPATH={place}/{inside} " in bench.report()


def test_a_folder_that_older_commits_lack(tmp_path: Path) -> None:
    checkout = tmp_path / "checkout"
    git(tmp_path, "init", "-q", "-b", "main", str(checkout))
    git(checkout, "commit", "-q", "--allow-empty", "-m", "empty")
    commit(checkout, "begin", main=1, side=1)
    bench = Bench(tmp_path)
    asked = ["--git", "checkout/moving", "--package", "moving", "--good", "main~1", "--bad", "main"]
    run = bench.bisect(*asked, "--python", bare_python(), "--", bench.script(""))
    assert run.returncode == 2 and "cannot be installed: it has no folder moving/" in run.stderr, (
        run.stdout + run.stderr
    )
