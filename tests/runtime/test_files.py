"""The private folder of a run's temporary files: whose it is, how long its paths may be, and its end."""

import os
import shutil
import stat
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from harness.runtime import files

REPOSITORY = Path(__file__).resolve().parents[2]
ENTER = f"""
import socket, sys, tempfile
sys.path.insert(0, {str(REPOSITORY)!r})
from harness.runtime import files
print(files.enter_run_folder("harness-0-12345-6789-0"))
engine = files.engine_folder()
longest = f"{{engine.name}}/torch-shm-dir-123456"
import os
os.mkdir(longest)
socket.socket(socket.AF_UNIX).bind(f"{{longest}}/manager.sock")
print(tempfile.mkstemp()[1])
os._exit(1)
"""
NAME = "harness-0-12345-6789-0"


def entered(base: Path) -> list[str]:
    """What a process prints that entered a folder, left sockets and files there, and ended without a word."""
    command = [sys.executable, "-c", ENTER.replace("os._exit", "sys.stdout.flush(); os._exit")]
    done = subprocess.run(command, env=os.environ | {"TMPDIR": str(base)}, capture_output=True, text=True, check=False)
    assert done.returncode == 1, done.stderr
    return done.stdout.split()


@pytest.fixture
def base(monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    folder = Path(tempfile.mkdtemp(prefix="t", dir="/tmp"))
    monkeypatch.setattr(tempfile, "tempdir", str(folder))
    yield folder
    shutil.rmtree(folder)


def test_files_of_a_killed_process_are_removed(base: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder, file = entered(base)
    assert Path(folder).parent == base
    assert Path(file).parent == Path(folder)
    assert stat.S_IMODE(Path(folder).stat().st_mode) == 0o700
    (tmp_path / "mine").write_text("")
    link = base / f"{NAME}.tmp-12345678"
    link.symlink_to(tmp_path)
    files.remove_run_folders("harness-0-12345-6789-1")
    assert Path(file).exists()
    with monkeypatch.context() as patch:  # as though one had disappeared meanwhile
        patch.setattr(Path, "glob", lambda *_: [base / f"{NAME}.tmp-gone", link, Path(folder)])
        files.remove_run_folders(NAME)
    assert (tmp_path / "mine").exists(), "a link is not followed"
    link.unlink(missing_ok=True)
    assert [each.name for each in base.iterdir()] == [f"torchinductor_{psutil.Process().username()}"], "kept for later"


@pytest.mark.parametrize("harm", ["nothing", "mode", "link", "user"])
def test_compiled_kernels_are_taken_from_a_folder_of_this_user_alone(
    harm: str, base: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """torch imports what it finds in its cache, and anybody can make a folder of that name in /tmp."""
    monkeypatch.delenv("TORCHINDUCTOR_CACHE_DIR", raising=False)
    monkeypatch.delenv(files.SHARED, raising=False)
    cache = base / f"torchinductor_{psutil.Process().username()}"
    if harm == "link":
        cache.symlink_to(base)
    elif harm != "nothing":
        cache.mkdir()
        cache.chmod(0o777 if harm == "mode" else 0o700)
    if harm == "user":
        if os.geteuid():
            pytest.skip("only root can give a folder to another user")
        os.chown(cache, 65534, 65534)
    private = base / "private"
    found = files.variables_of_folder(private)["TORCHINDUCTOR_CACHE_DIR"]
    assert found == str(cache if harm == "nothing" else private / "torchinductor")
    assert harm != "nothing" or stat.S_IMODE(cache.stat().st_mode) == 0o700


def test_a_base_folder_too_long_for_sockets_is_not_used(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    deep = tmp_path / ("x" * 80)
    deep.mkdir()
    folder, _ = entered(deep)
    assert Path(folder).parent == Path("/tmp")
    monkeypatch.setattr(tempfile, "tempdir", str(deep))
    files.remove_run_folders(NAME)
    assert not Path(folder).exists()


MEET = f"""
import os, subprocess, sys
sys.path.insert(0, {str(REPOSITORY)!r})
from harness.runtime import files
if len(sys.argv) > 1:
    files.enter_run_folder({NAME!r})
    engine = files.engine_folder()
    environment = os.environ | files.variables_of_folder(engine.name)
    seen = subprocess.check_output([sys.executable, *sys.orig_argv[1:-1]], env=environment, text=True)
    assert seen.split() == [str(files.shared_folder()), engine.name], seen
    print(files.shared_folder())
else:
    import tempfile
    print(files.shared_folder(), tempfile.gettempdir())
"""


def test_ranks_and_schedulers_of_a_host_still_meet_in_one_folder(base: Path) -> None:
    """A scheduler has the folder of the rank that built its engine, and meets every rank of the host."""
    environment = os.environ | {"TMPDIR": str(base)}
    command = [sys.executable, "-c", MEET, "rank"]
    assert subprocess.check_output(command, env=environment, text=True).strip() == str(base)


def test_a_rank_with_a_folder_of_its_own_removes_those_of_the_others_too() -> None:
    """As it does in the place of a lost watchdog; the folder for temporary files is not /tmp."""
    code = (
        "from harness.runtime import files\n"
        f"made = [files.enter_run_folder({NAME!r})]\n"
        f"files.remove_run_folders({NAME!r})\n"
        "print(made[0], made[0].exists())"
    )
    environment = os.environ | {"TMPDIR": "/var/tmp"}
    environment.pop(files.SHARED, None)
    said = subprocess.check_output([sys.executable, "-c", code], cwd=REPOSITORY, env=environment, text=True)
    assert said.startswith("/var/tmp/") and said.split()[1] == "False"
