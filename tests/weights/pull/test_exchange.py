"""What other islands own arrives in each island once, where its schedulers find it, in batches of a bounded size."""

from collections import Counter
from dataclasses import dataclass
from functools import cache
from itertools import pairwise

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from harness.trainer.rows import RowShards
from harness.weights.pull.exchange import (
    SEGMENT_ALIGNMENT,
    Need,
    Parcel,
    PullBatch,
    packed,
    plan_exchange,
    staging_bytes,
)
from harness.weights.regions import Region, cut_by_rows, regions
from harness.weights.tensor_view import TensorView

Slice = tuple[str, np.ndarray]
"""Live name, and the view of its whole tensor of element numbers that one copy of a loader reads."""


@dataclass
class Model:
    """The trainer's tensors, sharded over all ranks, and which elements each rank's scheduler copies."""

    islands: dict[int, int]
    shapes: dict[str, tuple[int, ...]]
    dtypes: dict[str, torch.dtype]
    groups: dict[str, int]
    slices: dict[int, list[Slice]]

    def owner(self, name: str, element: int) -> int:
        rows, ranks = self.shapes[name][0], len(self.islands)
        return element // (int(np.prod(self.shapes[name])) // rows) // -(-rows // ranks)

    def foreign(self, island: int, slices: list[Slice]) -> Counter[tuple[str, int]]:
        """How often the slices read each element that no rank of the island owns."""
        elements = ((name, int(each)) for name, view in slices for each in view.flat)
        return Counter(each for each in elements if self.islands[self.owner(*each)] != island)

    def regions(self, rank: int) -> list[tuple[Region, Need]]:
        """Return the regions that the rank's scheduler cannot open."""
        found = []
        for name, view in self.slices[rank]:
            rows, columns = self.shapes[name][0], int(np.prod(self.shapes[name][1:]))
            ranks = len(self.islands)
            cuts = cut_by_rows(RowShards(rows, columns, ranks), range(ranks))
            stride, target_stride = [s // 8 for s in view.strides], [s // 8 for s in np.empty(view.shape).strides]
            for region in regions(int(view.flat[0]), view.shape, stride, target_stride, cuts):
                if self.islands[region.owner] != self.islands[rank]:
                    found.append((region, Need.of(region, name, self.groups[name], self.dtypes[name])))
        return found

    def needs(self) -> dict[int, list[Need]]:
        return {rank: [need for _, need in self.regions(rank)] for rank in self.islands}

    def shard(self, name: str, rank: int) -> torch.Tensor:
        rows, ranks = self.shapes[name][0], len(self.islands)
        chunk = -(-rows // ranks)
        return whole(self.shapes[name])[rank * chunk : (rank + 1) * chunk]


@cache
def whole(shape: tuple[int, ...]) -> torch.Tensor:
    """The number of each element, modulo what every dtype holds exactly."""
    return (torch.arange(int(np.prod(shape))) % 251).reshape(shape)


def numbers(shape: tuple[int, ...]) -> np.ndarray:
    return np.arange(np.prod(shape), dtype=np.int64).reshape(shape)


@st.composite
def models(draw: st.DrawFn) -> Model:
    ranks = draw(st.integers(1, 6))
    islands = {rank: draw(st.integers(0, 2)) for rank in range(ranks)}
    names = [f"live{index}" for index in range(draw(st.integers(1, 5)))]
    shapes = {name: tuple(draw(st.lists(st.integers(1, 9), min_size=1, max_size=3))) for name in names}
    slices: dict[int, list[Slice]] = {rank: [] for rank in range(ranks)}
    for name in names:
        live = numbers(shapes[name])
        tp, axis = draw(st.integers(1, 3)), draw(st.integers(0, live.ndim - 1))
        for rank in slices:
            kind = draw(st.sampled_from(["slice", "slice", "slice", "none", "box"]))
            if kind == "slice":  # of tensor parallelism, by rows or columns, in another order of axes
                part = np.array_split(live, tp, axis)[rank % tp]
                slices[rank].append((name, part.transpose(draw(st.permutations(range(part.ndim))))))
            elif kind == "box":  # which overlaps others' without being equal
                box = [slice(start := draw(st.integers(0, n - 1)), draw(st.integers(start + 1, n))) for n in live.shape]
                slices[rank].append((name, live[tuple(box)]))
        for rank in slices:
            slices[rank] = [(name, view) for name, view in slices[rank] if view.size]
    return Model(
        islands=islands,
        shapes=shapes,
        dtypes={name: draw(st.sampled_from([torch.float32, torch.bfloat16, torch.uint8])) for name in names},
        groups={name: draw(st.integers(0, 3)) for name in names},
        slices=slices,
    )


GROUPS = 5  # one more than models() fills
LIMITS = st.sampled_from([0, 16, 32, 48, 64, 96, 200, 1000, 10**6])


@settings(max_examples=200, deadline=None)
@given(models(), LIMITS)
def test_each_need_arrives_once_in_batches_as_large_as_the_limit_lets_them_whatever_the_order(
    model: Model, limit: int
) -> None:
    needs = model.needs()
    batches = plan_exchange(needs, model.islands, GROUPS, limit)
    arrived = Counter((model.islands[each.receiver], each.need) for batch in batches for each in batch.parcels)
    assert arrived == {(model.islands[rank], need): 1 for rank, each in needs.items() for need in each}
    mixed = {rank: needs[rank][::-1] for rank in reversed(needs)}
    assert batches == plan_exchange(mixed, dict(reversed(model.islands.items())), GROUPS, limit)
    assert batches[0].start == 0 and batches[-1].stop == GROUPS
    assert all(each.stop == after.start for each, after in pairwise(batches))
    for batch in batches:
        assert {each.need.group for each in batch.parcels} <= set(range(batch.start, batch.stop))
        for parcels in by_receiver(batch).values():
            assert bytes_of(parcels) <= limit or len({each.need.group for each in parcels}) == 1
        check_places(batch)
    for batch, after in pairwise(batches):  # the next group does not fit in
        joining = {receiver: [each for each in parcels if each.need.group == after.start]
                   for receiver, parcels in by_receiver(after).items()}  # fmt: skip
        assert any(bytes_of(held + joining.get(receiver, [])) > limit and joining.get(receiver)
                   for receiver, held in by_receiver(batch).items())  # fmt: skip
    assert staging_bytes(batches) <= max(
        (bytes_of(parcels) for batch in batches for parcels in by_receiver(batch).values()), default=0
    )


def by_receiver(batch: PullBatch) -> dict[int, list[Parcel]]:
    return {
        rank: [each for each in batch.parcels if each.receiver == rank]
        for rank in {each.receiver for each in batch.parcels}
    }


def bytes_of(parcels: list[Parcel]) -> int:
    """Bytes of a staging buffer for these, counted apart from their offsets."""
    of_owner: Counter[int] = Counter()
    for each in parcels:
        of_owner[each.need.owner] += each.need.nbytes
    return sum(-(-nbytes // SEGMENT_ALIGNMENT) * SEGMENT_ALIGNMENT for nbytes in of_owner.values())


def check_places(batch: PullBatch) -> None:
    """Parcels do not overlap, and those of one owner are one message."""
    ends: dict[tuple[int, int], int] = {}
    taken: set[tuple[int, int]] = set()
    for each in batch.parcels:
        bytes_of_it = {(each.receiver, each.offset_bytes + byte) for byte in range(each.need.nbytes)}
        assert len(bytes_of_it) == each.need.nbytes > 0 and not bytes_of_it & taken
        taken |= bytes_of_it
        assert each.offset_bytes % each.need.elements.dtype.itemsize == 0
        sender = each.receiver, each.need.owner
        assert each.offset_bytes == ends.get(sender, -(-each.offset_bytes // SEGMENT_ALIGNMENT) * SEGMENT_ALIGNMENT)
        ends[sender] = each.offset_bytes + each.need.nbytes
        if each.need.nbytes % SEGMENT_ALIGNMENT == 0:
            assert each.offset_bytes % SEGMENT_ALIGNMENT == 0


@settings(max_examples=100, deadline=None)
@given(models(), LIMITS)
def test_a_region_reads_in_its_parcel_what_it_would_read_in_the_shard(model: Model, limit: int) -> None:
    batches = plan_exchange(model.needs(), model.islands, GROUPS, limit)
    read: dict[int, int] = dict.fromkeys(model.islands, 0)
    for batch in batches:
        staging = {rank: torch.full((staging_bytes(batches),), 255, dtype=torch.uint8) for rank in model.islands}
        place = {}
        for each in batch.parcels:
            wanted = each.need.elements
            each.view(staging[each.receiver]).copy_(elements_of(model.shard(wanted.of, each.need.owner), wanted))
            place[model.islands[each.receiver], each.need] = each
        for rank, island in model.islands.items():
            for region, need in model.regions(rank):
                if batch.start <= need.group < batch.stop:
                    parcel, inside = place[island, need], packed(region)
                    assert [axis[::2] for axis in inside.axes] == [axis[::2] for axis in region.axes]
                    found = staging[parcel.receiver][parcel.offset_bytes :][: need.nbytes].view(need.elements.dtype)
                    expected = box(model.shard(need.elements.of, region.owner).reshape(-1), region)
                    assert torch.equal(box(found, inside).to(expected.dtype), expected)
                    read[rank] += expected.numel()
    for rank, island in model.islands.items():
        assert read[rank] == model.foreign(island, model.slices[rank]).total()


def elements_of(shard: torch.Tensor, wanted: TensorView) -> torch.Tensor:
    return shard.as_strided(wanted.shape, wanted.stride, shard.storage_offset() + wanted.offset)


def box(flat: torch.Tensor, region: Region) -> torch.Tensor:
    sizes, strides = [axis[0] for axis in region.axes], [axis[1] for axis in region.axes]
    return flat[region.source :].as_strided(sizes, strides, flat.storage_offset() + region.source)


@settings(max_examples=100, deadline=None)
@given(models())
def test_the_ranks_of_an_island_receive_the_same_to_within_one_need(model: Model) -> None:
    (batch,) = plan_exchange(model.needs(), model.islands, GROUPS, 10**9)
    received = dict.fromkeys(model.islands, 0)
    for each in batch.parcels:
        received[each.receiver] += each.need.nbytes
    for island in set(model.islands.values()):
        of_ranks = [received[rank] for rank in model.islands if model.islands[rank] == island]
        parcels = [each.need.nbytes for each in batch.parcels if model.islands[each.receiver] == island]
        assert max(of_ranks) - min(of_ranks) <= max(parcels, default=0)


def need(owner: int, offset: int = 0, size: int = 8) -> Need:
    view = TensorView(name="", of="live", dtype=torch.float32, shape=(size,), stride=(1,), offset=offset)
    return Need(owner, 0, view)


def test_without_needs_one_batch_has_all_groups_and_wrong_islands_are_refused() -> None:
    assert plan_exchange({}, {0: 0, 1: 1}, 7, 0) == (PullBatch(0, 7, ()),)
    assert staging_bytes([PullBatch(0, 7, ())]) == 0
    with pytest.raises(ValueError, match="can open rank 1"):
        plan_exchange({0: [need(1)]}, {0: 0, 1: 0}, 1, 100)
    with pytest.raises(ValueError, match=r"none for \[2\]"):
        plan_exchange({2: [need(0)]}, {0: 0, 1: 1}, 1, 100)


def test_one_box_is_one_need_however_its_axes_were_written() -> None:
    runs = [((6, 8, 8), (8, 1, 1)), ((6, 8, 100), (8, 1, 1)), ((8, 1, 6), (6, 8, 1)), ((48, 1, 1), (5, 0, 48))]
    needs = {Need.of(Region(0, 3, 7, axes), "live", 0, torch.float32) for axes in runs}
    assert needs == {need(0, 3, 48)}
