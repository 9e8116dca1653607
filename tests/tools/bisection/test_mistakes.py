"""What is asked wrongly ends in one sentence and exit code 2."""

from pathlib import Path

import pytest

from tests.tools.bisection.bisecting import Bench
from tests.tools.bisection.wheels import make_wheel


def test_a_bad_end_that_passes_ends_the_bisect(tmp_path: Path) -> None:
    run = Bench(tmp_path).over_sites(["code = 0", "code = 0"], "import moving, sys; sys.exit(moving.code)")
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
