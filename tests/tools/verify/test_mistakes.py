"""What explanations of a wrong hash try: each mistake gives what a sender would have left by it."""

import pickle
import re
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from harness.tools.engine_class.checkpoint_headers import Stored, read_headers
from harness.tools.engine_class.held_tensors import HeldTensor, Place
from harness.tools.verify.comparison import Compared, Made, Tensor, compare
from harness.tools.verify.explanations import Explainer
from harness.tools.verify.hashes import DIGITS, hash_of
from harness.tools.verify.mistakes import changed, exchanged, runs_of
from harness.tools.verify.rank_predictions import RankPrediction
from harness.tools.verify.server import ServerRank
from harness.tools.verify.values import bytes_of
from harness.tools.verify.verdict import Different
from harness.weights.findings import grouped
from harness.weights.tensor_view import TensorView

NAMES = [f"model.layers.1.mlp.experts.{number}.down_proj.weight" for number in range(12)]


@dataclass(frozen=True)
class Memory:
    """A source of tensors in memory."""

    tensors: dict[str, torch.Tensor]

    def elements(self, name: str, start: int, stop: int) -> torch.Tensor:
        return self.tensors[name].reshape(-1)[start:stop]


@pytest.mark.parametrize("ranks", [2, 3, 4])
def test_experts_of_ranks_that_are_numbered_backwards(ranks: int) -> None:
    tried = [dict(pairs) for _, pairs in exchanged(NAMES, dict.fromkeys(NAMES, (4, 4)))]
    size = len(NAMES) // ranks
    sent = {name: NAMES[(ranks - 1 - place // size) * size + place % size] for place, name in enumerate(NAMES)}
    assert sent in tried


def test_two_layers_in_each_others_place_with_their_scales_and_without() -> None:
    gate, up = (f"model.layers.1.mlp.{each}_proj.weight" for each in ("gate", "up"))
    scales = [f"{name}_scale_inv" for name in (gate, up)]
    shapes = dict.fromkeys((gate, up), (256, 256)) | dict.fromkeys(scales, (2, 2))
    tried = [dict(pairs) for _, pairs in exchanged([gate, up, *scales], shapes)]
    assert {gate: up, up: gate} in tried
    assert {gate: up, up: gate, scales[0]: scales[1], scales[1]: scales[0]} in tried


def test_an_update_that_ended_in_the_middle_in_either_order_of_names() -> None:
    names = [f"model.layers.{layer}.mlp.up_proj.weight" for layer in (0, 1, 2, 10)]
    left_out = [members for members, _ in runs_of(names)]
    by_text, by_number = ({names[1], names[3], names[2]}, {names[2], names[3]})
    assert by_text in left_out and by_number in left_out
    assert {names[0], names[2]} not in left_out


def test_what_may_become_of_a_tensor_on_its_way_whole_and_in_parts() -> None:
    sent = torch.tensor([[0.5, -2.0], [1.25, 3.0]], dtype=torch.bfloat16)
    source, shapes = Memory({"w": sent, "norm": sent[0], "e": torch.arange(3)}), {"w": (2, 2), "norm": (2,), "e": (3,)}
    for name, said, left in (
        ("w", "transposed", [0.5, 1.25, -2.0, 3.0]),
        ("w", "as float8 without its scale", [72.0, -288.0, 192.0, 448.0]),
        ("w", "in half: its second half is zero", [0.5, -2.0, 0.0, 0.0]),
        ("norm", "less by 1, as norms around zero are by those around one", [-0.5, -3.0]),
        ("w", "less by 1, as norms around zero are by those around one", [0.5, -2.0, 1.25, 3.0]),  # it is no norm
        ("e", "as NaN", [0, 1, 2]),  # whole numbers have none
    ):
        read = dict(changed([name], shapes, source))[f"arrived {said}"][name]
        assert read(0, len(left)).tolist() == left and read(1, 2).tolist() == left[1:2]


def of_layer(layer: int, expert: int) -> Different:
    rank = ServerRank(role="target", rank=0, tp_rank=0, dp_rank=0, pp_rank=0, checksums={})
    name = f"model.layers.{layer}.mlp.experts.w2_weight"
    tensor = Tensor(role="target", name=name, told=((rank, "b"),), made={})
    source = f"model.layers.{layer}.mlp.experts.{expert}.down_proj.weight"
    return Different(compared=Compared(tensor=tensor, digests={0: "a"}), sources=(), why=f"{source} is old")


def test_only_what_differs_in_its_layer_alone_is_one_sentence() -> None:
    different = [of_layer(1, 3), of_layer(2, 2), of_layer(4, 3), of_layer(5, 3)]
    first, second = map(str, grouped(each.finding for each in different))
    assert first.endswith("; and 2 like it (layers 1, 4, 5)") and "experts.2.down_proj" in second


def test_the_engine_that_differs_is_named_where_data_parallelism_has_several() -> None:
    told = []
    for replica in range(2):
        for rank in range(2):
            place = ServerRank(role="target", rank=rank, tp_rank=rank, dp_rank=replica, pp_rank=0, checksums={})
            told.append((place, "b" if (replica, rank) == (1, 0) else "a"))
    tensor = Tensor(role="target", name="norm", told=tuple(told), made=dict.fromkeys(range(2)))  # type: ignore[arg-type]
    different = Different(compared=Compared(tensor=tensor, digests={0: "a", 1: "a"}), sources=(), why="")
    assert str(different.finding) == "norm: differs on rank 0 of DP replica 1: cause unknown"


BLOCK, ROWS, COLUMNS = 4, 16, 8
"""Of float8; rows and columns of a projection."""
Weights = dict[str, torch.Tensor]


def float8_experts(seed: int) -> Weights:
    """Return gate_proj and up_proj of experts in blocks of float8, the shared one among them, as SGLang fuses it."""
    random, found = torch.Generator().manual_seed(seed), {}
    for expert in ("experts.0", "experts.1", "experts.2", "shared_experts"):
        for part in ("gate_proj", "up_proj"):
            name = f"model.layers.1.mlp.{expert}.{part}.weight"
            found[name] = torch.randn(ROWS, COLUMNS, generator=random).to(torch.float8_e4m3fn)
            found[f"{name}_scale_inv"] = torch.rand(ROWS // BLOCK, COLUMNS // BLOCK, generator=random) + 0.5
    return found


def stored_in(folder: Path, weights: Weights) -> dict[str, Stored]:
    folder.mkdir()
    save_file(weights, folder / "model.safetensors")
    return read_headers(folder)


def fused(weights: Weights, names: Sequence[str], rank: int, tp: int) -> HeldTensor:
    """Return the engine's tensor that holds these, two for each expert, and of each the rows of a rank."""
    views, copies = [TensorView.whole(name, weights[name].dtype, tuple(weights[name].shape)) for name in names], []
    rows, columns = weights[names[0]].shape[0] // tp, weights[names[0]].shape[1]
    for number, view in enumerate(views):
        shard = replace(view, shape=(rows, columns), offset=rank * rows * columns)
        copies.append((Place((rows, columns), (columns, 1), number * rows * columns), shard))
    shape, size = (len(names) // 2, 2 * rows, columns), len(names) * rows * columns
    place = Place(shape, (2 * rows * columns, columns, 1), 0)
    return HeldTensor(dtype=views[0].dtype, place=place, memory=size, copies=tuple(copies), zeros=(), missing=0)


def prediction_of(weights: Weights, rank: int, tp: int) -> RankPrediction:
    parts = [name for name in weights if name.endswith(".weight")]
    held = {W13: fused(weights, parts, rank, tp), SCALE: fused(weights, [f"{n}_scale_inv" for n in parts], rank, tp)}
    return RankPrediction(
        packed={name: pickle.dumps(each) for name, each in held.items()}, nbytes={name: each.memory for name, each in held.items()},
        dequantized={W13: SCALE}, doubts={}, like={}, embedding_and_head={}, unfilled=(), ignored=(), refused={}, derived=(),
    )  # fmt: skip


W13 = "model.layers.1.mlp.experts.w13_weight"
SCALE = f"{W13}_scale_inv"


def told_of(weights: Weights, rank: int, tp: int, on_gpu: bool) -> str:
    """Return the hash that SGLang's checker would tell of what the rank holds."""
    parts = [name for name in weights if name.endswith(".weight")]
    own = {name: each.chunk(tp)[rank] for name, each in weights.items()}
    held, scales = (
        torch.stack([own[f"{name}{end}"].float() for name in parts]).view(len(parts) // 2, -1, own[f"{parts[0]}{end}"].shape[1])
        for end in ("", "_scale_inv")
    )  # fmt: skip
    product = (held * scales.repeat_interleave(BLOCK, 1).repeat_interleave(BLOCK, 2)).bfloat16()
    taken = hash_of(on_gpu, product.nbytes)
    taken.update(bytes_of(product))
    return taken.hexdigest()[:DIGITS]


def explained(folder: Path, was: Weights, new: Weights, held: Sequence[Weights], on_gpu: bool) -> str:
    """Return why an engine differs that must hold `new`, and on each rank holds its shard of `held`."""
    stored, tp = stored_in(folder / "new", new), len(held)
    ranks = [ServerRank(role="target", rank=n, tp_rank=n, dp_rank=0, pp_rank=0, checksums={}) for n in range(tp)]
    told = tuple((rank, told_of(each, rank.rank, tp, on_gpu)) for rank, each in zip(ranks, held, strict=True))
    made = {n: Made(prediction_of(new, n, tp), W13) for n in range(tp)}
    tensor = Tensor(role="target", name=W13, told=told, made=made)
    (compared,), _ = compare([tensor], stored, on_gpu, threads=1)
    explainer = Explainer(stored=stored, was=stored_in(folder / "was", was), on_gpu=on_gpu, elsewhere={})
    return explainer.explain(compared)


@pytest.mark.parametrize("on_gpu", [False, True])
@pytest.mark.parametrize(
    ("stale", "subject"),
    [
        (r"experts\.1\.gate_proj", "model.layers.1.mlp.experts.1.gate_proj.weight and model.layers.1.mlp.experts.1.gate_proj.weight_scale_inv"),
        (r"\.experts\.1\.", "model.layers.1.mlp.experts.1.gate_proj.weight and 3 more like it"),
        (r"\.experts\.\d\.up_proj", "model.layers.1.mlp.experts.0.up_proj.weight and 5 more like it"),
        (r"shared_experts\.up_proj\.weight$", "model.layers.1.mlp.shared_experts.up_proj.weight"),
        ("", "it"),
    ],
)  # fmt: skip
def test_what_was_left_out_of_experts_in_blocks_of_float8(
    tmp_path: Path, stale: str, subject: str, on_gpu: bool
) -> None:
    was, new = float8_experts(1), float8_experts(2)
    held = new | {name: each for name, each in was.items() if re.search(stale, name)}
    assert explained(tmp_path, was, new, [held], on_gpu) == f"{subject} kept the values of --was"


def test_an_expert_of_which_only_some_tensors_have_moved_is_still_one(tmp_path: Path) -> None:
    was, new = float8_experts(1), float8_experts(2)
    scale = "model.layers.1.mlp.experts.1.up_proj.weight_scale_inv"
    new[scale] = was[scale]
    held = new | {name: each for name, each in was.items() if ".experts.1." in name}
    why = explained(tmp_path, was, new, [held], on_gpu=True)
    assert why == "model.layers.1.mlp.experts.1.gate_proj.weight and 2 more like it kept the values of --was"


def test_a_shard_of_another_rank_comes_with_its_scale(tmp_path: Path) -> None:
    was, new = float8_experts(1), float8_experts(2)
    swapped = {
        n: torch.cat(e.view(torch.uint8).chunk(2)[::-1]).view(e.dtype) for n, e in new.items() if "experts.2.up" in n
    }
    why = explained(tmp_path, was, new, [new | swapped, new], on_gpu=True)
    name = "model.layers.1.mlp.experts.2.up_proj.weight"
    assert why == f"{name} and {name}_scale_inv arrived as the shard of rank 1"
