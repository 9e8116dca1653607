"""Properties of place, for random shapes, hosts and visible lists (10 and more GPUs a host among them):

- every rank is on exactly one node of exactly one engine, and nodes follow each other in engine order;
- visible_devices[i] is gpu_of(the location of ranks[i]), so engine rank i shares its GPU with the trainer's (tp, pp);
- behind them come the other GPUs that the builder sees, in its order, each once;
- where SGLang's own arithmetic, restated here, puts (tp, pp) is the node and the index in visible_devices that it has;
- no GPU of a host belongs to two engines, nor twice to one;
- permuting the visible lists permutes the GPUs alike, and leaves ranks and nodes as they are;
- the form of the lists (one for the host, one GPU for each rank) and the order of the locations do not matter, except
  that an engine sees no GPU beside its own where its builder sees one alone;
- of contiguous equal host shares, exactly the shapes that SGLang's arithmetic covers are accepted.
"""

import random
from dataclasses import replace
from typing import Literal

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from harness.cluster.mesh import ParallelDims
from harness.cluster.placement import (
    EngineNode,
    EnginePlacement,
    RankLocation,
    all_gpus_of,
    gpu_of,
    parse_visible,
    place,
)

UUIDS = tuple(f"GPU-{index:08x}-1111-2222-3333-444444444444" for index in range(80))


def locations_of(per_host: int, visible: list[tuple[str, ...] | None]) -> list[RankLocation]:
    """Ranks numbered host by host, as torchrun does."""
    return [
        RankLocation(host * per_host + local_rank, f"h{host}", local_rank, shown)
        for host, shown in enumerate(visible)
        for local_rank in range(per_host)
    ]


def sglang_locations(nnodes: int, tp: int, pp: int) -> dict[tuple[int, int], list[tuple[int, int]]]:
    """(tp, pp) -> the (node_rank, gpu_id) at which SGLang starts that scheduler, each node counted by itself.

    Restated from sglang 0.5.20, entrypoints/engine.py, _calculate_rank_ranges and the loop that starts schedulers.
    """
    locations: dict[tuple[int, int], list[tuple[int, int]]] = {(t, p): [] for t in range(tp) for p in range(pp)}
    pp_per_node, nnodes_per_pp = max(pp // nnodes, 1), max(nnodes // pp, 1)
    tp_per_node = tp // nnodes_per_pp
    for node in range(nnodes):
        stage, part = divmod(node, nnodes_per_pp)
        for pp_rank in range(pp_per_node * stage, pp_per_node * (stage + 1)):
            for tp_rank in range(tp_per_node * part, tp_per_node * (part + 1)):
                gpu_id = (pp_rank % pp_per_node) * tp_per_node + tp_rank % tp_per_node
                locations.setdefault((tp_rank, pp_rank), []).append((node, gpu_id))
    return locations


def sglang_covers(nnodes: int, tp: int, pp: int) -> bool:
    """Whether SGLang's arithmetic starts every scheduler exactly once, and no other."""
    locations = sglang_locations(nnodes, tp, pp)
    return len(locations) == tp * pp and all(len(found) == 1 for found in locations.values())


@st.composite
def worlds(draw: st.DrawFn) -> tuple[ParallelDims, list[RankLocation]]:
    """Shapes that must be placed: one or several engines a host, or one engine over several hosts."""
    tp, pp = draw(st.integers(1, 6)), draw(st.integers(1, 4))
    nnodes = draw(st.sampled_from([n for n in range(1, tp * pp + 1) if sglang_covers(n, tp, pp)]))
    engines_per_host = draw(st.integers(1, 3)) if nnodes == 1 else 1
    groups = draw(st.integers(1, 3))
    per_host = tp * pp // nnodes * engines_per_host
    order = draw(st.sampled_from(["dp,tp,pp", "dp,pp,tp"])) if nnodes == 1 or tp == 1 or pp == 1 else "dp,pp,tp"
    dims = ParallelDims(dp=groups * engines_per_host, tp=tp, pp=pp, rank_order=order)
    visible: list[tuple[str, ...] | None] = []
    for _ in range(groups * nnodes):
        names = draw(st.sampled_from([tuple(map(str, range(80))), UUIDS]))
        shown = tuple(draw(st.permutations(names[: per_host + 2])))
        # A list of one GPU would give every rank of the host that GPU, so it must be the only rank.
        visible.append(draw(st.sampled_from([None, shown, shown[:per_host]])))
    return dims, locations_of(per_host, visible)


@settings(deadline=None, max_examples=25)
@given(worlds())
def test_every_rank_is_on_one_node_in_engine_order(world: tuple[ParallelDims, list[RankLocation]]) -> None:
    dims, locations = world
    placements = place(dims, locations, "cuda")
    assert [placement.dp for placement in placements] == list(range(dims.dp))
    for placement in placements:
        assert tuple(rank for node in placement.nodes for rank in node.ranks) == dims.engine_ranks(placement.dp)
        assert [node.node_rank for node in placement.nodes] == list(range(placement.nnodes))
        assert len({node.host for node in placement.nodes}) == placement.nnodes
        for node in placement.nodes:
            assert {locations[rank].host for rank in node.ranks} == {node.host}
            assert node.builder == node.ranks[0]
            assert node.base_gpu_id == 0


@settings(deadline=None, max_examples=25)
@given(worlds())
def test_visible_devices_are_the_trainers_gpus(world: tuple[ParallelDims, list[RankLocation]]) -> None:
    dims, locations = world
    used = []
    for placement in place(dims, locations, "cuda"):
        for node in placement.nodes:
            assert node.visible_devices == tuple(gpu_of(locations[rank]) for rank in node.ranks)
            used += [(node.host, gpu) for gpu in node.visible_devices]
    assert len(used) == len(set(used)) == dims.world_size


@settings(deadline=None, max_examples=25)
@given(worlds())
def test_others_are_what_the_builder_sees_beside(world: tuple[ParallelDims, list[RankLocation]]) -> None:
    dims, locations = world
    for node in _nodes(place(dims, locations, "cuda")):
        assert node.visible_devices is not None
        seen = all_gpus_of(locations[node.builder])
        assert node.other_devices == tuple(gpu for gpu in seen if gpu not in node.visible_devices)
        assert parse_visible(node.cuda_visible_devices) == node.visible_devices + node.other_devices


@settings(deadline=None, max_examples=25)
@given(worlds())
def test_sglang_agrees_on_the_gpu_of_every_tp_and_pp(world: tuple[ParallelDims, list[RankLocation]]) -> None:
    dims, locations = world
    for placement in place(dims, locations, "cuda"):
        theirs = sglang_locations(placement.nnodes, dims.tp, dims.pp)
        for rank in dims.engine_ranks(placement.dp):
            at = dims.coordinates(rank)
            [(node_rank, gpu_id)] = theirs[at.tp, at.pp]
            node = placement.nodes[node_rank]
            assert node.host == locations[rank].host
            assert node.visible_devices is not None
            assert node.visible_devices[node.base_gpu_id + gpu_id] == gpu_of(locations[rank])


@settings(deadline=None, max_examples=25)
@given(worlds(), st.randoms(use_true_random=False))
def test_permuting_visible_permutes_gpus(world: tuple[ParallelDims, list[RankLocation]], rng: random.Random) -> None:
    dims, locations = world
    renaming: dict[tuple[str, str], str] = {}
    for location in {location.host: location for location in locations}.values():
        names = _names(location, locations)
        renaming |= {(location.host, name): new for name, new in zip(names, rng.sample(names, len(names)), strict=True)}
    permuted = [
        replace(location, visible=tuple(renaming[location.host, name] for name in _names(location, locations)))
        for location in locations
    ]
    for before, after in zip(
        _nodes(place(dims, locations, "cuda")), _nodes(place(dims, permuted, "cuda")), strict=True
    ):
        assert before.visible_devices is not None
        renamed = tuple(renaming[before.host, gpu] for gpu in before.visible_devices)
        assert replace(after, other_devices=()) == replace(before, visible_devices=renamed, other_devices=())


@settings(deadline=None, max_examples=25)
@given(worlds(), st.randoms(use_true_random=False))
def test_form_of_lists_and_order_of_locations_do_not_matter(
    world: tuple[ParallelDims, list[RankLocation]], rng: random.Random
) -> None:
    dims, locations = world
    each_its_own = [replace(location, visible=(gpu_of(location),)) for location in locations]
    expected = [replace(node, other_devices=()) for node in _nodes(place(dims, locations, "cuda"))]
    assert _nodes(place(dims, rng.sample(each_its_own, len(locations)), "cuda")) == expected


@settings(deadline=None, max_examples=25)
@given(worlds())
def test_cpu_is_placed_alike_but_without_gpus(world: tuple[ParallelDims, list[RankLocation]]) -> None:
    dims, locations = world
    hidden = [replace(location, visible=()) for location in locations]
    expected = [
        replace(node, visible_devices=None, other_devices=()) for node in _nodes(place(dims, locations, "cuda"))
    ]
    assert _nodes(place(dims, hidden, "cpu")) == expected
    assert {node.cuda_visible_devices for node in expected} == {None}


def test_exactly_the_shapes_that_sglang_covers_are_accepted() -> None:
    verdicts = set()
    for tp in range(1, 9):
        for pp in range(1, 9):
            dims = ParallelDims(dp=1, tp=tp, pp=pp, rank_order="dp,pp,tp")
            for nnodes in (n for n in range(1, tp * pp + 1) if tp * pp % n == 0):
                locations = locations_of(tp * pp // nnodes, [None] * nnodes)
                covered = sglang_covers(nnodes, tp, pp)
                verdicts.add(covered)
                if covered:
                    assert place(dims, locations, "cuda")[0].nnodes == nnodes
                else:
                    with pytest.raises(ValueError, match=rf"engine 0 .* {pp} stages over {nnodes} hosts: choose"):
                        place(dims, locations, "cuda")
    assert verdicts == {True, False}


@pytest.mark.parametrize(
    ("value", "tokens"),
    [
        (None, None),
        ("", ()),
        ("  ", ()),
        ("0", ("0",)),
        (" 3 , 1,02", ("3", "1", "2")),
        ("10,9,2", ("10", "9", "2")),
        ("0,1,-1,2", ("0", "1")),
        ("-1", ()),
        ("0,-1,nonsense", ("0",)),
        (f"{UUIDS[1]}, {UUIDS[0]}", (UUIDS[1], UUIDS[0])),
    ],
)
def test_parse_visible(value: str | None, tokens: tuple[str, ...] | None) -> None:
    assert parse_visible(value) == tokens


@pytest.mark.parametrize(
    ("value", "message"),
    [
        ("0,1,0,1", r"'0,1,0,1' lists GPU 0 twice: list each GPU once"),
        ("0,00", "lists GPU 0 twice"),
        (f"{UUIDS[0]},{UUIDS[0]}", f"lists GPU {UUIDS[0]} twice"),
        ("0,,1", "has the entry ''"),
        ("0,1,", "has the entry ''"),
        ("all", "has the entry 'all': each must be an index"),
        ("0 1", "has the entry '0 1'"),
        ("-2", "has the entry '-2'"),
        ("cuda:0", "has the entry 'cuda:0'"),
        ("GPU-00000000", "has the entry 'GPU-00000000': .* full UUID"),
        (f"0,{UUIDS[1]}", "mixes index and GPU UUID entries"),
        ("MIG-12345678-1111-2222-3333-444444444444", "has the entry 'MIG-"),
    ],
)
def test_parse_visible_refuses(value: str, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        parse_visible(value)


@pytest.mark.parametrize(
    ("location", "gpu"),
    [
        (RankLocation(5, "h", 1, None), "1"),
        (RankLocation(5, "h", 1, None, gpu_count=2), "1"),
        (RankLocation(5, "h", 3, ("7",)), "7"),
        (RankLocation(5, "h", 3, ("7",), gpu_count=1), "7"),
        (RankLocation(5, "h", 2, ("7", "10", "2")), "2"),
        (RankLocation(5, "h", 1, UUIDS[:4]), UUIDS[1]),
    ],
)
def test_gpu_of(location: RankLocation, gpu: str) -> None:
    assert gpu_of(location) == gpu


@pytest.mark.parametrize(
    ("location", "gpus"),
    [
        (RankLocation(5, "h", 1, None), ()),
        (RankLocation(5, "h", 1, None, gpu_count=4), ("0", "1", "2", "3")),
        (RankLocation(5, "h", 1, ("7", "10", "2")), ("7", "10", "2")),
        (RankLocation(5, "h", 1, ("7", "2", "99", "4"), gpu_count=2), ("7", "2")),  # CUDA's list ends at a wrong index
    ],
)
def test_all_gpus_of(location: RankLocation, gpus: tuple[str, ...]) -> None:
    assert all_gpus_of(location) == gpus


@pytest.mark.parametrize(
    ("location", "message"),
    [
        (RankLocation(5, "h", 1, ()), "rank 5 on host h has CUDA_VISIBLE_DEVICES='', which hides every GPU: unset it"),
        (
            RankLocation(5, "h", 2, ("4", "6")),
            r"rank 5 on host h has local rank 2 but sees 2 GPUs \(CUDA_VISIBLE_DEVICES '4,6'\): make one GPU visible",
        ),
        (RankLocation(5, "h", 4, None, gpu_count=4), r"sees 4 GPUs \(CUDA_VISIBLE_DEVICES unset\)"),
        (RankLocation(5, "h", 1, ("0", "9"), gpu_count=1), r"sees 1 GPUs \(CUDA_VISIBLE_DEVICES '0,9'\)"),
    ],
)
def test_gpu_of_refuses(location: RankLocation, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        gpu_of(location)


@pytest.mark.parametrize(
    ("lists", "message"),
    [
        (
            ["0", "1", "0", "1"],
            r"rank 0 \(local rank 0\) and rank 2 \(local rank 2\) both use GPU 0 of host h0: set CUDA_VISIBLE",
        ),
        (["0,1,2,3", "0", "2", "3"], "rank 0 .* and rank 1 .* both use GPU 0 of host h0:"),
        (
            ["0", "1", "2", UUIDS[3]],
            f"rank 0 uses GPU 0 and rank 3 uses GPU {UUIDS[3]} of host h0, which may be the same",
        ),
        ([None, UUIDS[3], None, None], f"rank 0 uses GPU 0 and rank 1 uses GPU {UUIDS[3]} of host h0"),
        (["0", "1", "", "3"], "rank 2 on host h0 has CUDA_VISIBLE_DEVICES=''"),
    ],
)
def test_undecidable_or_shared_gpus_are_refused(lists: list[str | None], message: str) -> None:
    locations = [RankLocation(rank, "h0/boot/net:[1]", rank, parse_visible(value)) for rank, value in enumerate(lists)]
    with pytest.raises(ValueError, match=message):
        place(ParallelDims(dp=2, tp=2, pp=1), locations, "cuda")


def test_unequal_shares_are_refused() -> None:
    message = (
        r"engine 0 \(ranks 0 to 3, .* has 3 ranks on host h0 but 1 on host h1 \(rank 3\): SGLang needs equal shares"
    )
    with pytest.raises(ValueError, match=message):
        place(ParallelDims(dp=3, tp=4, pp=1), locations_of(3, [None] * 4), "cuda")


@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_a_rank_order_that_interleaves_hosts_is_refused_with_the_one_that_works(
    device: Literal["cpu", "cuda"],
) -> None:
    locations = locations_of(2, [None, None])
    message = r'is not contiguous by host .*, which is on hosts h0, h1, h0, h1: set parallel.rank_order = "dp,pp,tp"$'
    with pytest.raises(ValueError, match=message):
        place(ParallelDims(dp=1, tp=2, pp=2), locations, device)
    assert place(ParallelDims(dp=1, tp=2, pp=2, rank_order="dp,pp,tp"), locations, device)[0].nnodes == 2


def test_hosts_that_are_not_adjacent_are_refused() -> None:
    locations = [RankLocation(rank, f"h{rank % 2}", rank // 2, None) for rank in range(4)]
    with pytest.raises(
        ValueError, match="is not contiguous by host .*, which is on hosts h0, h1, h0, h1: its hosts are not adjacent"
    ):
        place(ParallelDims(dp=1, tp=4, pp=1), locations, "cuda")


def test_engines_may_alternate_between_hosts() -> None:
    hosts = ["h0", "h0", "h1", "h1", "h0", "h0"]
    locations = [RankLocation(rank, host, rank % 2 + 2 * (rank >= 4), None) for rank, host in enumerate(hosts)]
    placements = place(ParallelDims(dp=3, tp=2, pp=1), locations, "cuda")
    found = [(node.host, node.visible_devices) for node in _nodes(placements)]
    assert found == [("h0", ("0", "1")), ("h1", ("0", "1")), ("h0", ("2", "3"))]


@pytest.mark.parametrize(
    ("ranks", "message"),
    [
        ([0, 1, 2, 2], "ranks must be 0 to 3, each once, got .*, rank 2 on host h, rank 2 on host h"),
        ([0, 1, 2, 4], "ranks must be 0 to 3, each once, got .*, rank 4 on host h"),
        ([0, 1, 2], "= 4, but the world size is 3"),
        ([0, 1, 2, 3, 4], "= 4, but the world size is 5"),
        ([], "= 4, but the world size is 0"),
    ],
)
def test_missing_and_repeated_ranks_are_refused(ranks: list[int], message: str) -> None:
    locations = [RankLocation(rank, "h", rank, None) for rank in ranks]
    with pytest.raises(ValueError, match=message):
        place(ParallelDims(dp=2, tp=2, pp=1), locations, "cuda")


def _names(location: RankLocation, locations: list[RankLocation]) -> tuple[str, ...]:
    """The visible list of a location; where it is unset, the indices that the host's ranks use."""
    return location.visible or tuple(str(other.local_rank) for other in locations if other.host == location.host)


def _nodes(placements: tuple[EnginePlacement, ...]) -> list[EngineNode]:
    return [node for placement in placements for node in placement.nodes]
