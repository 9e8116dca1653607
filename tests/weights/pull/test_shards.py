"""Memory that trainer ranks lend to the schedulers of their host, on the CPU."""

from types import SimpleNamespace

import pytest
import torch

from harness.weights.pull import shards
from harness.weights.pull.shards import OpenShards, export_shards, have_moved

MIB = 1 << 20


def test_shards_that_shared_memory_has_no_room_for_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """On that rank alone: the others end with it, by the first failure."""
    monkeypatch.setattr(shards.shutil, "disk_usage", lambda path: SimpleNamespace(free=5 * MIB))
    live = {"one": torch.zeros(2 * MIB, dtype=torch.uint8), "two": torch.zeros(MIB, dtype=torch.uint8)}
    with pytest.raises(MemoryError, match="/dev/shm must have room for the shards of each rank, 3 MiB, got 2 MiB"):
        export_shards(live, 0, "here", None, 2)
    assert not any(tensor.is_shared() for tensor in live.values()), "nothing has been moved"
    export_shards(live, 0, "here", None, 1)
    monkeypatch.setattr(shards.shutil, "disk_usage", lambda path: SimpleNamespace(free=0))
    export_shards(live, 0, "here", None, 1)  # what is shared already needs no room


def test_views_of_one_storage_are_one_memory_and_are_found_in_it() -> None:
    whole = torch.arange(12.0)
    live = {"head": whole[:5], "tail": whole[5:], "none": whole[:0], "other": torch.ones(3).bfloat16()}
    exported = export_shards(live, 3, "here", None, 1)
    assert len(exported.memories) == 2 and exported.places.keys() == {"head", "tail", "other"}
    opened = OpenShards([exported])
    address, dtype = opened.find(3, "tail")
    base, _ = opened.find(3, "head")
    assert (address - base, dtype) == (5 * 4, torch.float32)
    live["tail"].fill_(7)
    shared = next(each for each in opened._maps if each.data_ptr() == base)
    assert shared.view(torch.float32)[:12].tolist() == [0, 1, 2, 3, 4, *[7] * 7], "the same memory"
    opened.close()


def test_a_tensor_that_has_moved_is_seen() -> None:
    live = {"one": torch.zeros(3), "none": torch.zeros(0)}
    exported = export_shards(live, 0, "here", None, 1)
    live["one"].fill_(1)
    assert not have_moved(live, exported)
    live["one"].data = live["one"].data.clone()
    assert have_moved(live, exported)
