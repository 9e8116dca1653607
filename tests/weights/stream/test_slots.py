"""Two processes, one map: who may write when. What the reader sees is what was meant, or the stamp says that it is not."""

import contextlib
import json
import multiprocessing
import os
import random
import signal
import threading
import time
from collections.abc import Callable
from dataclasses import replace
from multiprocessing.process import BaseProcess
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from harness.rollout.engine_errors import PeerGone
from harness.weights.stream.slots import (
    SLOTS,
    SlotConnection,
    SlotEntry,
    StreamListener,
    connect_slots,
    slot_bytes,
    stamp,
)

CPU = torch.device("cpu")
LAYOUT = tuple(
    (SlotEntry(name=f"tensor{index}", dtype=torch.int64, shape=(500,), stride=(1,), offset=0, group=0),)
    for index in range(60)
)
NBYTES = slot_bytes(500 * 8)
FORK = multiprocessing.get_context("fork")
"""Enough for a peer that only holds a connection; a spawned one imports torch first."""


@contextlib.contextmanager
def peer(target: Callable[..., None], folder: Path):  # type: ignore[no-untyped-def]
    """A process that plays the scheduler; killed at the end."""
    process = FORK.Process(target=target, args=(folder,), daemon=True)
    process.start()
    try:
        yield process
    finally:
        process.kill()
        process.join()


def nobody_comes_until(process: BaseProcess) -> Callable[[], bool]:
    return lambda: not process.is_alive()


def read_all(link: SlotConnection, pause: Callable[[], None]) -> list[tuple[int, bool]]:
    """(stamp afterwards, whether every element was the bucket's own) for each bucket, as worker.stream's SlotReader does."""
    seen = []
    for index, (entry,) in enumerate(LAYOUT):
        assert link.receive() == index
        slot = link.slots[index % SLOTS]
        half = entry.view(slot)[:250].clone()
        pause()
        rest = entry.view(slot)[250:].clone()
        seen.append((int(stamp(slot)), bool((torch.cat((half, rest)) == index).all())))
        link.send(index)
    return seen


def write_all(link: SlotConnection, pause: Callable[[], None], waits: bool = True) -> None:
    """As weight_link's load does; the broken control does not wait for the reader."""
    for index, (entry,) in enumerate(LAYOUT):
        if index >= SLOTS and waits:
            assert link.receive() == index - SLOTS
        slot = link.slots[index % SLOTS]
        stamp(slot).fill_(index)
        pause()
        entry.view(slot).fill_(index)
        link.send(index)
    for index in range(len(LAYOUT) - SLOTS if waits else 0, len(LAYOUT)):
        assert link.receive() == index


def pauses(seed: int, share: float) -> Callable[[], None]:
    """Now and then a millisecond."""
    draw = random.Random(seed)

    def pause() -> None:
        if draw.random() < share:
            time.sleep(0.001)

    return pause


def two_ends(folder: Path) -> tuple[SlotConnection, SlotConnection]:
    """(writer's, reader's), both in this process."""
    door = StreamListener(folder, 0)
    writers: list[SlotConnection] = []
    offering = threading.Thread(target=lambda: writers.append(door.offer(NBYTES, CPU, LAYOUT, lambda: False)))
    offering.start()
    reader, layout = connect_slots(folder, 0, CPU)
    offering.join()
    door.close()
    assert layout == LAYOUT
    return writers[0], reader


@given(st.integers(0, 1000), st.sampled_from([0, 0.2, 1]), st.sampled_from([0, 0.2, 1]))
@settings(max_examples=12, deadline=None)
def test_the_reader_sees_every_bucket_as_it_was_meant(
    tmp_path_factory: pytest.TempPathFactory, seed: int, writer_pauses: float, reader_pauses: float
) -> None:
    writer, reader = two_ends(tmp_path_factory.mktemp("door"))
    writing = threading.Thread(target=write_all, args=(writer, pauses(seed, writer_pauses)))
    writing.start()
    seen = read_all(reader, pauses(seed + 1, reader_pauses))
    writing.join()
    assert seen == [(index, True) for index in range(len(LAYOUT))]


def _read_slowly(folder: Path) -> None:
    link, _ = connect_slots(folder, 0, CPU)
    seen = read_all(link, pauses(3, 0.3))
    (folder.parent / "seen").write_text(json.dumps(seen))


def test_in_two_processes_too_and_the_folder_is_gone_while_both_still_use_the_slots(tmp_path: Path) -> None:
    door = StreamListener(tmp_path / "door", 0)
    with peer(_read_slowly, tmp_path / "door") as process:
        link = door.offer(NBYTES, CPU, LAYOUT, nobody_comes_until(process))
        door.close()
        assert not (tmp_path / "door").exists()
        write_all(link, pauses(4, 0.3))
        process.join(10)
    assert json.loads((tmp_path / "seen").read_text()) == [[index, True] for index in range(len(LAYOUT))]


def test_a_writer_that_does_not_wait_is_caught_by_the_stamps(tmp_path: Path) -> None:
    writer, reader = two_ends(tmp_path / "door")
    writing = threading.Thread(target=write_all, args=(writer, lambda: None, False))
    writing.start()
    seen = read_all(reader, lambda: time.sleep(0.002))
    writing.join()
    wrong = [index for index, (_, whole) in enumerate(seen) if not whole]
    assert wrong, "nothing was overwritten, so the stamps had nothing to catch"
    assert all(seen[index][0] != index for index in wrong)


def _hold(folder: Path) -> None:
    link, _ = connect_slots(folder, 0, CPU)
    assert link.receive() == 0
    time.sleep(60)


def _connect_and_wait(folder: Path) -> None:
    from multiprocessing.connection import Client

    connection = Client(str(folder / "0.socket"), family="AF_UNIX")
    assert connection.recv()
    (folder.parent / "came").touch()
    time.sleep(60)


def test_the_writer_learns_within_two_seconds_that_its_reader_was_killed(tmp_path: Path) -> None:
    door = StreamListener(tmp_path / "door", 0)
    with peer(_hold, tmp_path / "door") as process:
        link = door.offer(NBYTES, CPU, LAYOUT, nobody_comes_until(process))
        door.close()
        link.send(0)
        started = time.monotonic()
        threading.Timer(0.3, os.kill, (process.pid, signal.SIGKILL)).start()
        with pytest.raises(PeerGone, match="the other end of the weight stream is gone"):
            link.receive()
        with pytest.raises(PeerGone):
            for _ in range(3):
                link.send(1)
        assert 0.2 < time.monotonic() - started < 2.3


def _offer_and_hold(folder: Path) -> None:
    door = StreamListener(folder, 0)
    link = door.offer(NBYTES, CPU, LAYOUT, lambda: False)
    door.close()
    link.send(0)
    time.sleep(60)


def test_the_reader_learns_within_two_seconds_that_its_writer_was_killed(tmp_path: Path) -> None:
    with peer(_offer_and_hold, tmp_path / "door") as process:
        while not (tmp_path / "door" / "0.socket").exists():
            assert process.is_alive()
            time.sleep(0.01)
        link, _ = connect_slots(tmp_path / "door", 0, CPU)
        assert link.receive() == 0
        started = time.monotonic()
        threading.Timer(0.3, os.kill, (process.pid, signal.SIGKILL)).start()
        with pytest.raises(PeerGone):
            link.receive()
        with pytest.raises(PeerGone):
            link.send(0)
        assert time.monotonic() - started < 2.3


def _offer_and_never_answer(folder: Path) -> None:
    from multiprocessing.connection import Listener

    folder.mkdir(mode=0o700)
    with Listener(str(folder / "0.socket"), family="AF_UNIX") as listener:
        connection = listener.accept()
        time.sleep(60)
        connection.close()


def test_a_reader_whose_writer_dies_before_the_slots_came_learns_it_as_peer_gone(tmp_path: Path) -> None:
    with peer(_offer_and_never_answer, tmp_path / "door") as process:
        while not (tmp_path / "door" / "0.socket").exists():
            time.sleep(0.01)
        threading.Timer(0.3, os.kill, (process.pid, signal.SIGKILL)).start()
        with pytest.raises(PeerGone):
            connect_slots(tmp_path / "door", 0, CPU)


def test_nobody_waits_for_a_scheduler_that_will_not_come(tmp_path: Path) -> None:
    door = StreamListener(tmp_path / "door", 0)
    started = time.monotonic()
    with pytest.raises(PeerGone, match="ended before its scheduler had come"):
        door.offer(NBYTES, CPU, LAYOUT, lambda: time.monotonic() - started > 0.3)
    assert time.monotonic() - started < 2
    door.close()
    assert not (tmp_path / "door").exists()


def test_nobody_waits_for_an_answer_that_will_not_come_but_one_that_came_is_taken(tmp_path: Path) -> None:
    writer, reader = two_ends(tmp_path / "door")
    with pytest.raises(PeerGone, match="ended before its scheduler had answered"):
        writer.receive(lambda: True)
    reader.send("done")
    assert writer.receive(lambda: True) == "done"


def test_what_came_before_the_peer_died_is_still_taken(tmp_path: Path) -> None:
    writer, reader = two_ends(tmp_path / "door")
    reader.send("done")
    reader.close()
    assert writer.receive() == "done"
    with pytest.raises(PeerGone):
        writer.receive()


def test_a_scheduler_that_dies_before_it_has_opened_the_slots_is_gone(tmp_path: Path) -> None:
    door = StreamListener(tmp_path / "door", 0)
    with peer(_connect_and_wait, tmp_path / "door") as process:

        def kill_when_it_came() -> bool:
            if (tmp_path / "came").exists():
                process.kill()
            return not process.is_alive()

        with pytest.raises(PeerGone):
            door.offer(NBYTES, CPU, LAYOUT, kill_when_it_came)
        door.close()
    assert not (tmp_path / "door").exists()


def _half_a_message(folder: Path) -> None:
    link, _ = connect_slots(folder, 0, CPU)
    os.write(link.connection.fileno(), (100).to_bytes(4, "big") + b"half")


def test_a_peer_that_dies_in_mid_message_is_gone_too(tmp_path: Path) -> None:
    door = StreamListener(tmp_path / "door", 0)
    with peer(_half_a_message, tmp_path / "door") as process:
        link = door.offer(NBYTES, CPU, LAYOUT, nobody_comes_until(process))
        door.close()
        with pytest.raises(PeerGone):
            link.receive()


def test_two_ranks_share_the_folder_and_the_last_removes_it(tmp_path: Path) -> None:
    doors = [StreamListener(tmp_path / "door", rank) for rank in range(2)]
    assert (tmp_path / "door").stat().st_mode & 0o777 == 0o700
    doors[1].close()
    assert [file.name for file in (tmp_path / "door").iterdir()] == ["0.socket"]
    doors[0].close()
    assert not (tmp_path / "door").exists()


@given(st.integers(0, 10_000_000))
def test_the_stamp_lies_behind_the_payload_and_is_aligned(payload: int) -> None:
    nbytes = slot_bytes(payload)
    assert nbytes % 256 == 0 and payload + 8 <= nbytes <= payload + 511
    slot = torch.zeros(min(nbytes, 4096), dtype=torch.uint8)
    stamp(slot).fill_(-1)
    assert int((slot != 0).sum()) == 8 and int(slot[:-8].sum()) == 0


@given(
    st.lists(st.integers(0, 5), max_size=3),
    st.permutations(range(3)),
    st.integers(0, 7),
    st.sampled_from([torch.float32, torch.bfloat16, torch.int64, torch.uint8]),
)
def test_an_entry_is_the_strided_view_that_torch_would_give(
    shape: list[int], order: list[int], start: int, dtype: torch.dtype
) -> None:
    slot = (
        torch.arange(4096, dtype=torch.int64).view(torch.uint8).clone()[: 4096 * 8 - 3]
    )  # no whole number of elements
    whole = slot[: slot.numel() // dtype.itemsize * dtype.itemsize].view(dtype)
    count = torch.Size(shape).numel()
    dense = whole[start : start + count].view(shape)
    view = dense.permute([axis for axis in order if axis < len(shape)])
    entry = SlotEntry(
        name="any",
        dtype=dtype,
        shape=tuple(view.shape),
        stride=tuple(view.stride()),
        offset=start * dtype.itemsize,
        group=0,
    )
    assert entry.numel == count
    assert torch.equal(entry.view(slot), view)
    assert entry.view(slot).untyped_storage().data_ptr() == slot.untyped_storage().data_ptr()
    assert replace(entry, offset=0).view(slot).shape == view.shape


@pytest.mark.parametrize("made", ["open to its group", "a link"])
def test_a_folder_that_another_user_could_have_made_is_refused(tmp_path: Path, made: str) -> None:
    folder = tmp_path / "door"
    if made == "a link":
        (tmp_path / "elsewhere").mkdir(mode=0o700)
        folder.symlink_to(tmp_path / "elsewhere")
    else:
        folder.mkdir()
        folder.chmod(0o770)
    with pytest.raises(PermissionError, match="must be a folder of user"):
        StreamListener(folder, 0)
    with pytest.raises(PermissionError, match="must be a folder of user"):
        connect_slots(folder, 0, CPU)


@pytest.mark.skipif(os.geteuid() != 0, reason="only root gives a folder away")
def test_a_folder_of_another_user_is_refused(tmp_path: Path) -> None:
    folder = tmp_path / "door"
    folder.mkdir(mode=0o700)
    os.chown(folder, 65534, 65534)
    with pytest.raises(PermissionError, match="must be a folder of user"):
        StreamListener(folder, 0)
