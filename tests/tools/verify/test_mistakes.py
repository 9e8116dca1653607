"""What explanations of a wrong hash try: each mistake gives what a sender would have left by it."""

from collections.abc import Callable

import torch

from harness.tools.verify.comparison import Compared, Tensor
from harness.tools.verify.mistakes import changes, exchanges, expert_pairs, runs_of, swaps_in_an_expert
from harness.tools.verify.server import ServerRank
from harness.tools.verify.verdict import Different, sentences

EXPERTS = 8
NAMES = [f"model.layers.1.mlp.experts.{number}.down_proj.weight" for number in range(EXPERTS)]


def in_the_place_of(numbers: Callable[[int], int]) -> dict[str, str]:
    return {NAMES[place]: NAMES[numbers(place)] for place in range(EXPERTS)}


def test_experts_in_the_orders_that_expert_parallelism_may_give_them() -> None:
    tried = [instead for _, instead in exchanges(NAMES, {name: (4, 4) for name in NAMES})]
    per_rank = EXPERTS // 4
    for numbers in (
        lambda place: (place + 4) % EXPERTS,  # two ranks in reversed order
        lambda place: (place - per_rank) % EXPERTS,  # each of four ranks has the next one's number
        lambda place: place % per_rank,  # each of four ranks numbers its own from 0
        lambda place: place * 2 % EXPERTS + place * 2 // EXPERTS,  # dealt out to two ranks
    ):
        assert in_the_place_of(numbers) in tried
    assert {NAMES[3]: NAMES[2]} in [instead for _, instead in expert_pairs(NAMES)]  # one of them twice


def test_two_tensors_of_one_expert_in_each_others_place() -> None:
    names = [f"mlp.experts.{number}.{part}_proj.weight" for number in range(3) for part in ("gate", "up", "down")]
    shapes = {name: (4, 8) if "down" in name else (8, 4) for name in names}
    tried = [instead for _, instead in swaps_in_an_expert(names, shapes)]
    assert {names[3]: names[4], names[4]: names[3]} in tried and len(tried) == 3


def test_two_layers_in_each_others_place_with_their_scales_and_without() -> None:
    gate, up = (f"model.layers.1.mlp.{each}_proj.weight" for each in ("gate", "up"))
    scales = [f"{name}_scale_inv" for name in (gate, up)]
    shapes = dict.fromkeys((gate, up), (256, 256)) | dict.fromkeys(scales, (2, 2))
    tried = [instead for _, instead in exchanges([gate, up, *scales], shapes)]
    assert {gate: up, up: gate} in tried
    assert {gate: up, up: gate, scales[0]: scales[1], scales[1]: scales[0]} in tried


def test_an_update_that_ended_in_the_middle_in_either_order_of_names() -> None:
    names = [f"model.layers.{layer}.mlp.up_proj.weight" for layer in (0, 1, 2, 10)]
    left_out = [members for members, _ in runs_of(names)]
    by_text, by_number = ({names[1], names[3], names[2]}, {names[2], names[3]})
    assert by_text in left_out and by_number in left_out
    assert {names[0], names[2]} not in left_out


def test_float8_without_its_scale_and_norms_around_zero() -> None:
    tried = [change for _, change in changes()]
    sent = torch.tensor([0.5, -2.0, 1.25], dtype=torch.bfloat16)
    for left in (torch.tensor([112.0, -448.0, 288.0]), sent - 1, sent + 1):
        assert any(torch.equal(change(sent), left.bfloat16()) for change in tried)


def of_layer(layer: int, expert: int) -> Different:
    rank = ServerRank(role="target", rank=0, tp_rank=0, dp_rank=0, pp_rank=0, checksums={})
    name = f"model.layers.{layer}.mlp.experts.w2_weight"
    tensor = Tensor(role="target", name=name, told=((rank, "b"),), made={})
    source = f"model.layers.{layer}.mlp.experts.{expert}.down_proj.weight"
    return Different(compared=Compared(tensor=tensor, digests={0: "a"}), sources=(), why=f"{source} is old")


def test_only_what_differs_in_its_layer_alone_is_one_sentence() -> None:
    found = sentences([of_layer(1, 3), of_layer(2, 2), of_layer(4, 3), of_layer(5, 3)])
    assert len(found) == 2 and found[0].endswith("; also in layers 4-5") and "experts.2.down_proj" in found[1]


def test_the_engine_that_differs_is_named_where_data_parallelism_has_several() -> None:
    told = []
    for replica in range(2):
        for rank in range(2):
            place = ServerRank(role="target", rank=rank, tp_rank=rank, dp_rank=replica, pp_rank=0, checksums={})
            told.append((place, "b" if (replica, rank) == (1, 0) else "a"))
    tensor = Tensor(role="target", name="norm", told=tuple(told), made=dict.fromkeys(range(2)))  # type: ignore[arg-type]
    different = Different(compared=Compared(tensor=tensor, digests={0: "a", 1: "a"}), sources=(), why="")
    assert different.place == "rank 0 of DP replica 1"
