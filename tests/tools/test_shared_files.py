"""Files in /dev/shm: those of our processes go, and no others."""

import subprocess
import sys
import uuid
from collections.abc import Iterator
from pathlib import Path

import pytest

from harness.tools.run_tree import SharedFiles

SCRIPT = """
import mmap, os, sys
file = os.open("/dev/shm/" + sys.argv[1], os.O_CREAT | os.O_RDWR)
os.ftruncate(file, 4096)
if sys.argv[2] == "mapped":
    memory = mmap.mmap(file, 4096)
    os.close(file)
print("there", flush=True)
sys.stdin.read()
"""


@pytest.fixture
def name() -> Iterator[str]:
    made = f"harness-test-{uuid.uuid4().hex}"
    yield made
    Path("/dev/shm", made).unlink(missing_ok=True)


def owner(name: str, how: str) -> subprocess.Popen[str]:
    words = [sys.executable, "-c", SCRIPT, name, how]
    process = subprocess.Popen(words, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    assert process.stdout and process.stdout.readline() == "there\n"
    return process


def end(process: subprocess.Popen[str]) -> None:
    process.kill()
    process.wait()


@pytest.mark.parametrize("uses", [["mapped"], ["open"], ["mapped", "mapped"]], ids="-".join)
def test_killed_processes_leave_no_file(name: str, uses: list[str]) -> None:
    memory = SharedFiles()
    processes = [owner(name, how) for how in uses]
    memory.look([process.pid for process in processes])
    for process in processes:
        end(process)
    memory.remove()
    assert not Path("/dev/shm", name).exists()


def test_a_file_is_new_until_its_user_was_found(name: str) -> None:
    memory = SharedFiles()
    process = owner(name, "mapped")
    assert memory.sees_new()
    memory.look([])
    assert memory.sees_new()
    memory.look([process.pid])
    assert name in {file for file, _ in memory.ours}
    end(process)


def test_files_that_are_gone_are_forgotten(name: str) -> None:
    """A run of thousands of steps makes a few at each sync."""
    memory = SharedFiles()
    process = owner(name, "mapped")
    memory.look([process.pid])
    (file,) = [each for each in memory.ours if each[0] == name]
    Path("/dev/shm", name).unlink()
    memory.look([process.pid])
    assert file not in memory.ours
    end(process)


def test_files_that_others_made_or_still_use_stay(name: str) -> None:
    memory = SharedFiles()
    theirs = owner(name, "mapped")
    memory.look([])
    memory.look([])
    memory.remove()
    assert Path("/dev/shm", name).exists()
    mine = owner(name, "mapped")  # the same file, which is theirs
    memory.look([mine.pid])
    end(mine)
    memory.remove()
    assert Path("/dev/shm", name).exists()
    end(theirs)


def test_files_from_before_stay_even_if_we_use_them(name: str) -> None:
    end(owner(name, "mapped"))
    memory = SharedFiles()
    mine = owner(name, "mapped")
    memory.look([mine.pid])
    end(mine)
    memory.remove()
    assert Path("/dev/shm", name).exists()


def test_torchs_files_are_known_by_the_pid_in_their_names(name: str) -> None:
    memory = SharedFiles()
    process = owner(name, "mapped")
    memory.look([process.pid])
    file, other = Path(f"/dev/shm/torch_{process.pid}_{name}_0"), Path(f"/dev/shm/torch_1_{name}_0")
    file.touch()
    other.touch()
    try:
        end(process)
        memory.remove()
        assert not file.exists() and other.exists()
    finally:
        file.unlink(missing_ok=True)
        other.unlink()
