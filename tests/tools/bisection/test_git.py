"""Commits of a local checkout, from the command line."""

import shutil
from pathlib import Path

import pytest

from harness.tools.bisection import bisection
from harness.tools.environments import has_gpu
from tests.tools.bisection.bisecting import Bench, git, repository

pytestmark = pytest.mark.skipif(shutil.which("git") is None, reason="there is no git")


def test_from_the_release_to_the_commit_between_its_tags(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    """Two releases, the older one on a branch; the commits follow when a checkout is given.

    An sglang is held, so that commits are run in the CPU mode in which the releases were.
    """
    bench, folder = Bench(tmp_path), tmp_path / "checkout"
    codes = [f"def work():\n    return {number}\n" for number in range(5)]
    codes += [f"def work():\n    raise ValueError('broken in {number}')\n" for number in range(5, 9)]
    repository(folder, [{"python/moving/__init__.py": code} for code in codes])
    git(folder, "checkout", "-q", "-b", "release", "main~7")
    git(folder, "commit", "-q", "--allow-empty", "-m", "the release alone")
    git(folder, "tag", "v1.1")
    git(folder, "tag", "v1.2", "main")
    script = "import moving, os\nmoving.work()\n"
    if not has_gpu():
        script += "assert os.environ.get('SGLANG_USE_CPU_ENGINE') == '1'\n"
    held = ["--hold", "sglang==0.5.23"]
    run = bench.over_sites([codes[0], codes[1], codes[8], codes[8]], script, *held)
    assert run.returncode == 0 and "first bad release is 1.2;" in run.stdout, run.stdout + run.stderr
    assert "to find the commit: python3 launch/bisect_versions.py --resume" in run.stdout
    run = bench.bisect("--resume", "found", "--then-git", "checkout")
    assert run.returncode == 0 and "The first bad commit is " in run.stdout, run.stdout + run.stderr
    assert "commit 5; the last good one is" in run.stdout
    asked = bench.state("found/commits")["question"]["options"]
    assert asked["bad"] == git(folder, "rev-parse", "main") and asked["package"] == "moving"

    copy = tmp_path / "copy"
    git(tmp_path, "clone", "-q", str(folder), str(copy))
    monkeypatch.chdir(tmp_path)
    for words, sentence in (
        (("found", "--then-git", "copy"), f"found/commits holds a bisect of {folder}, got --then-git {copy};"),
        (("found/commits", "--then-git", "checkout"), "the bisect in found/commits is one of commits"),
        (("found", "--then-git", "/nonexistent"), "--then-git must be an existing folder, got /nonexistent."),
        (("found", "--then-git", "sites"), "--then-git must be a git checkout, got "),
    ):
        assert bisection.main(["--resume", *words], "") == 2
        said = capfd.readouterr()
        assert sentence in said.err and said.err.count("\n") == 1 and not said.out
