"""One rank with a real engine, without launch/ppo.py and its watchdog: how it ends, and what it leaves."""

import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

pytestmark = [pytest.mark.slow, pytest.mark.long]

SCRIPT = Path(__file__).with_name("engine_that_dies.py")
NO_DUMPS = {"SGLANG_PYSPY_DUMP_BEFORE_CRASH": "0", "SGLANG_CUDA_COREDUMP_BEFORE_CRASH": "0"}
"""SGLang dumps for seconds before its handler kills the rank: without, it would do so at once."""


@pytest.fixture
def folder(tmp_path: Path) -> Iterator[Path]:
    """A folder whose tmp is short enough for the path of a socket."""
    with tempfile.TemporaryDirectory(prefix="t") as short:
        (tmp_path / "tmp").symlink_to(short)
        yield tmp_path


DUMPS = dict.fromkeys(NO_DUMPS, "1")


def ended(folder: Path, *words: str, **variables: str) -> subprocess.CompletedProcess[str]:
    environment = (
        os.environ | NO_DUMPS | variables | {"TMPDIR": os.readlink(folder / "tmp"), "CUDA_VISIBLE_DEVICES": ""}
    )
    environment |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29999", "OMP_NUM_THREADS": "1"}
    command = [sys.executable, str(SCRIPT), str(folder), *words]
    return subprocess.run(command, env=environment, capture_output=True, text=True, timeout=400, check=False)


def left(folder: Path) -> list[str]:
    """Return the temporary files that stay, without torch's cache and the engine's log, which a failure names."""
    return [each.name for each in (folder / "tmp").iterdir() if not each.name.startswith(("torchinductor", "harness-"))]


def test_a_scheduler_that_raises_is_told_with_its_own_exception_by_a_rank_that_lives(folder: Path) -> None:
    done = ended(folder, "--forked")
    assert done.returncode == 1, done.stderr[-3000:]
    assert "died: AssertionError: Attempted to load weight (torch.Size([7]))" in done.stderr
    assert "the scheduler took it" not in done.stdout
    assert left(folder) == []


def test_sglangs_failure_in_the_rank_itself_is_told_at_once_and_does_not_kill_it(folder: Path) -> None:
    """Its processes are spawned, those of the others forked."""
    done = ended(folder, "--garbage", **DUMPS)
    assert done.returncode == 1, done.stderr[-3000:]
    assert "SGLang's TokenizerManager.handle_loop failed in this process: " in done.stderr
    assert "Dumping" not in done.stderr and "coredump" not in done.stderr
    assert left(folder) == []


def test_python_exits_without_a_word_where_the_engine_was_not_shut_down(folder: Path) -> None:
    done = ended(folder, "--pass", "--forked")
    assert done.returncode == 0, done.stderr[-3000:]
    assert "resource_tracker" not in done.stderr and "Traceback" not in done.stderr
    assert left(folder) == []
