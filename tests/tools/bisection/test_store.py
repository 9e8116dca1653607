import fcntl
import os
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from harness.tools.bisection.store import NoDisk, Pause, Store


def filling(count: int) -> Any:
    def fill(folder: Path, lock: int) -> None:
        (folder / "file").write_bytes(b"x" * count)

    return fill


def test_what_was_cut_off_is_made_anew_and_what_is_whole_is_kept(tmp_path: Path) -> None:
    store = Store(tmp_path, 1 << 20)
    (tmp_path / "a").mkdir()
    (tmp_path / "a" / "half").write_text("left by a killed install")
    folder = store.ensure("a", filling(10))
    assert not (folder / "half").exists() and (folder / "file").exists()
    assert store.facts("a")["bytes"] == 10
    (folder / "mine").touch()
    store.release("a")
    folder = store.ensure("a", filling(20))
    assert (folder / "mine").exists()


def test_an_install_that_fails_leaves_nothing_that_looks_whole(tmp_path: Path) -> None:
    store = Store(tmp_path, 1 << 20)

    def fails(folder: Path, lock: int) -> None:
        (folder / "half").touch()
        raise OSError(28, "No space left on device")

    with pytest.raises(Pause, match="cannot be written: No space left"):
        store.ensure("a", fails)
    assert not store.facts("a")


def test_the_least_recently_used_goes_and_what_is_in_use_stays(tmp_path: Path) -> None:
    store = Store(tmp_path, 250)
    for name in "abc":
        store.ensure(name, filling(100))
        if name != "a":
            store.release(name)  # a stays in use
        time.sleep(0.02)
    assert [bool(store.facts(name)) for name in "abc"] == [True, False, True]
    store.release("a")
    store.ensure("d", filling(100))
    assert [bool(store.facts(name)) for name in "acd"] == [False, True, True]


def test_two_processes_do_not_make_the_same_at_once(tmp_path: Path) -> None:
    store = Store(tmp_path, 1 << 20)
    started = time.monotonic()
    with (tmp_path / "a.lock").open("w") as other:
        fcntl.flock(other, fcntl.LOCK_EX)
        if not (pid := os.fork()):
            time.sleep(0.4)
            os._exit(0)  # the child holds the lock as well, as an installer whose parent was killed does
        other.close()
        store.ensure("a", filling(1))
        assert time.monotonic() - started >= 0.35
        os.waitpid(pid, 0)


def test_a_limit_that_links_count_once(tmp_path: Path) -> None:
    def linked(folder: Path, lock: int) -> None:
        (folder / "one").write_bytes(b"x" * 100)
        os.link(folder / "one", folder / "two")

    store = Store(tmp_path, 1000)
    store.ensure("a", linked)
    assert store.facts("a")["bytes"] == 100


@pytest.mark.parametrize("error", [OSError(28, "No space left on device"), NoDisk("no space is left")])
def test_a_full_disk_takes_what_no_run_needs_before_it_pauses(tmp_path: Path, error: Exception) -> None:
    store = Store(tmp_path, 1 << 20)
    for name in "ab":
        store.ensure(name, filling(10))
    store.release("a")

    def fill(folder: Path, lock: int) -> None:
        (folder / "half").touch()
        if (tmp_path / "a").exists():
            raise error

    folder = store.ensure("c", fill)
    assert [each.name for each in folder.iterdir() if each.suffix != ".json"] == ["half"]
    assert [bool(store.facts(name)) for name in "abc"] == [False, True, True]


def test_room_is_made_on_the_disk_for_as_much_as_the_largest_needs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = Store(tmp_path, 1 << 20)
    for name, count in (("a", 100), ("b", 300), ("c", 50)):
        store.ensure(name, filling(count))
        store.release(name)
        time.sleep(0.02)

    def usage(path: Path) -> Any:
        return SimpleNamespace(free=500 - sum(store._sizes().values()))  # a disk of 500 bytes

    monkeypatch.setattr("shutil.disk_usage", usage)
    store.ensure("d", filling(250))
    assert [bool(store.facts(name)) for name in "abcd"] == [False, False, True, True]
