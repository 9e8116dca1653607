"""Block-FP8: what is quantized and how, by how many ranks, and what is refused."""

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from safetensors.torch import load_file, save_file
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard, distribute_tensor

from harness.tools.sync.read_back import read_back
from harness.trainer.rows import own_rows
from harness.weights.converter import CheckpointConverter
from harness.weights.fp8_blocks import E4M3, Fp8BlockConverter, is_quantized, quantize, scale_name
from harness.weights.fp8_checkpoint import quantized_tensors
from harness.weights.gather import full_tensor
from harness.weights.presync_checks import WeightsRefused, check_complete, check_finite
from harness.weights.sent_model import SentModel
from harness.weights.sync import WeightSync
from harness.weights.tensor_view import TensorView
from harness.weights.trainer_weights import TrainerWeights
from harness.weights.verification.comparison import compare_fingerprints
from tests.cluster.gloo import on_ranks
from tests.weights.fp8_on_two_ranks import WithoutOne
from tests.weights.toy_model import Given, Holder, RankEngine, view_of

ATTENTION, MLP = "model.layers.0.self_attn", "model.layers.0.mlp"
EXPERTS = "model.layers.1.mlp.experts"
MATRICES = {
    f"{ATTENTION}.q_proj.weight": (300, 200),  # on 2 ranks the cut is inside a block, on 3 ranks one cut of two
    f"{ATTENTION}.o_proj.weight": (5, 130),  # a single block down; three ranks have 2, 2 and 1 of its rows
    f"{MLP}.down_proj.weight": (257, 128),
}
PLAIN = {
    "model.embed_tokens.weight": (7, 200),
    f"{ATTENTION}.q_proj.bias": (300,),
    "model.layers.1.mlp.gate.weight": (3, 200),
    "model.layers.0.input_layernorm.weight": (200,),
}
STACKED = {f"{EXPERTS}.gate_up_proj": (3, 2 * 130, 200), f"{EXPERTS}.down_proj": (3, 200, 130)}
SHAPES: dict[str, tuple[int, ...]] = MATRICES | PLAIN | STACKED


def reference(matrix: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Quantize block by block, as the technical report says."""
    values = matrix.to(torch.bfloat16).float()
    rows, columns = values.shape
    weight, scales = torch.empty(rows, columns, dtype=E4M3), torch.empty(-(-rows // 128), -(-columns // 128))
    for down in range(scales.shape[0]):
        for across in range(scales.shape[1]):
            block = values[128 * down : 128 * down + 128, 128 * across : 128 * across + 128]
            scales[down, across] = block.abs().max().clamp(min=1e-12) / 448
            part = (block / scales[down, across]).to(E4M3)
            weight[128 * down : 128 * down + 128, 128 * across : 128 * across + 128] = part
    return weight, scales


def whole_values() -> dict[str, torch.Tensor]:
    found = {}
    for seed, (name, shape) in enumerate(SHAPES.items()):
        drawn = torch.randn(shape, generator=torch.Generator().manual_seed(seed))
        # Each block has another size, so that a scale of the wrong block shows.
        found[name] = drawn * torch.linspace(0.1, 5, shape[0]).view(-1, *[1] * (len(shape) - 1))
    return found


def layout() -> tuple[TensorView, ...]:
    """The layout in which transformers saves these tensors: each expert is a tensor of its own."""
    views = [view_of(name, shape, dtype=torch.bfloat16) for name, shape in (MATRICES | PLAIN).items()]
    for expert in range(3):
        for number, half in enumerate(("gate_proj", "up_proj")):
            name = f"{EXPERTS}.{expert}.{half}.weight"
            at = (2 * expert + number) * 130 * 200
            views.append(view_of(name, (130, 200), f"{EXPERTS}.gate_up_proj", at, torch.bfloat16))
    for expert in range(3):
        name, at = f"{EXPERTS}.{expert}.down_proj.weight", expert * 200 * 130
        views.append(view_of(name, (200, 130), f"{EXPERTS}.down_proj", at, torch.bfloat16))
    return tuple(views)


def expected() -> dict[str, torch.Tensor]:
    """The checkpoint's tensors, quantized in one place."""
    values, found = whole_values(), {}
    for view in layout():
        tensor = view.in_memory(values[view.of].to(torch.bfloat16).reshape(-1))
        found[view.name] = tensor
        if is_quantized(view.name, view.shape):
            found[view.name], found[scale_name(view.name)] = reference(tensor)
    return found


def sharded(values: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    return {name: distribute_tensor(tensor, mesh, [Shard(0)]) for name, tensor in values.items()}


def same_bits(one: torch.Tensor, other: torch.Tensor) -> bool:
    return one.dtype == other.dtype and torch.equal(one.view(torch.uint8), other.contiguous().view(torch.uint8))


@pytest.mark.parametrize(
    ("name", "shape", "quantized"),
    [
        ("model.layers.0.self_attn.q_proj.weight", (2, 2), True),
        ("model.layers.0.self_attn.kv_a_proj_with_mqa.weight", (2, 2), True),
        ("model.layers.0.self_attn.kv_b_proj.weight", (2, 2), True),
        ("model.layers.3.mlp.experts.17.down_proj.weight", (2, 2), True),
        ("model.layers.3.block_sparse_moe.experts.0.w1.weight", (2, 2), True),
        ("model.layers.3.mlp.shared_experts.gate_proj.weight", (2, 2), True),
        ("model.layers.3.self_attn.indexer.wq_b.weight", (2, 2), True),
        ("model.layers.3.self_attn.indexer.weights_proj.weight", (2, 2), False),
        ("model.layers.0.self_attn.q_proj.bias", (2,), False),
        ("model.layers.0.self_attn.q_a_layernorm.weight", (2,), False),
        ("model.layers.3.mlp.gate.weight", (2, 2), False),
        ("model.layers.3.mlp.gate.e_score_correction_bias", (2,), False),
        ("model.layers.3.mlp.shared_expert_gate.weight", (1, 2), False),
        ("model.layers.61.eh_proj.weight", (2, 4), False),
        ("model.layers.61.embed_tokens.weight", (2, 2), False),
        ("model.layers.61.shared_head.head.weight", (2, 2), False),
        ("model.layers.0.linear_attn.conv1d.weight", (2, 1, 4), False),
        ("model.embed_tokens.weight", (2, 2), False),
        ("model.norm.weight", (2,), False),
        ("lm_head.weight", (2, 2), False),
    ],
)
def test_what_published_checkpoints_quantize(name: str, shape: tuple[int, ...], quantized: bool) -> None:
    assert is_quantized(name, shape) == quantized


@pytest.mark.parametrize("shape", [(128, 128), (1, 1), (300, 200), (576, 129), (128, 257)])
def test_a_matrix_is_quantized_block_by_block(shape: tuple[int, int]) -> None:
    matrix = torch.randn(shape, generator=torch.Generator().manual_seed(1))
    matrix[0, 0] = 900.0
    weight, scales = quantize(matrix, torch.bfloat16)
    right_weight, right_scales = reference(matrix)
    assert same_bits(weight, right_weight) and same_bits(scales, right_scales)
    assert weight.float().abs().max() == 448  # the largest value of a block is the largest of e4m3
    weight, scales = quantize(torch.zeros(shape), torch.bfloat16)
    assert not weight.float().any() and (scales > 0).all()


def _converted(rank: int) -> list[str]:
    """What is wrong with what a converter sends, gathered; and which of its tensors do not stay where they were."""
    values = sharded(whole_values())
    converter = Fp8BlockConverter(Given(values, layout()))
    sent = converter.tensors()
    check_complete(converter.layout(), sent)
    check_scales(rank, sent)
    where = [_part(tensor).data_ptr() for tensor in sent.values()]
    for tensor in values.values():
        tensor.mul_(2)
    converter.tensors()
    for tensor in values.values():
        tensor.div_(2)
    again = converter.tensors()
    moved = [name for (name, tensor), at in zip(again.items(), where, strict=True) if _part(tensor).data_ptr() != at]
    weights = TrainerWeights(converter, 100_000)
    named = [pair for bucket in weights.buckets for pair in weights.gather(bucket)]
    right = expected()
    assert sorted(name for name, _ in named) == sorted(right)
    return [*moved, *(name for name, tensor in named if not same_bits(tensor, right[name]))]


def _part(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def check_scales(rank: int, sent: Mapping[str, torch.Tensor]) -> None:
    """Each rank holds the scales of a matrix that is cut by rows whole, and those of its own experts; without
    padding."""
    whole, of_experts = (sent[scale_name(each)] for each in (f"{ATTENTION}.q_proj.weight", f"{EXPERTS}.gate_up_proj"))
    assert tuple(full_tensor(whole).shape) == (6,) and tuple(full_tensor(of_experts).shape) == (3, 8)
    if dist.get_world_size() == 2:
        assert len(own_rows(of_experts)) == (2, 1)[rank]


@pytest.mark.parametrize("ranks", [1, 2, 3])
def test_any_number_of_ranks_makes_the_bytes_of_one_place(ranks: int, tmp_path: Path) -> None:
    assert on_ranks(_converted, ranks, tmp_path) == [[]] * ranks


def test_a_file_is_quantized_as_the_ranks_quantize(tmp_path: Path) -> None:
    values = whole_values()
    wide = {view.name: replace(view, dtype=torch.float32) for view in layout()}
    plain = {name: view.in_memory(values[view.of].reshape(-1)).contiguous() for name, view in wide.items()}
    save_file(plain, tmp_path / "model.safetensors")
    found, right = dict(quantized_tensors(tmp_path / "model.safetensors", torch.bfloat16)), expected()
    assert found.keys() == right.keys()
    quantized = [name for name in right if right[name].dtype == E4M3 or name.endswith("_scale_inv")]
    assert len(quantized) == 2 * (len(MATRICES) + 9)
    assert [name for name in quantized if not same_bits(found[name], right[name])] == []


def _refusals(rank: int) -> dict[str, str]:
    """What a NaN in a block that both ranks hold, an infinity, and a shard that lacks rows lead to."""
    found = {}
    name = f"{ATTENTION}.q_proj.weight"
    for what, value in {"nan": float("nan"), "infinity": float("inf")}.items():
        values = sharded(whole_values())
        if rank == 1:
            values[name].to_local()[0, 0] = value
        try:
            check_finite(Fp8BlockConverter(Given(values, layout())).tensors())
        except WeightsRefused as refused:
            found[what] = str(refused)
    values = sharded(whole_values())
    converter = Fp8BlockConverter(Given(values, layout()))
    if rank == 1:
        short: Any = values[name]
        short._local_tensor = short._local_tensor[1:]
    try:
        converter.tensors()
    except WeightsRefused as refused:
        found["short"] = str(refused)
    return found


def test_what_must_not_be_sent_is_named_on_every_rank(tmp_path: Path) -> None:
    name = f"{ATTENTION}.q_proj.weight"
    for found in on_ranks(_refusals, 2, tmp_path):
        assert f"{name} (rank 1)" in found["nan"]
        assert f"{name} (rank 1)" in found["infinity"]
        assert found["short"] == f"{name}: rank 1 holds 149 of the 150 rows of its shard"


@pytest.mark.usefixtures("alone")
@pytest.mark.parametrize(
    ("views", "said"),
    [
        ((view_of(f"{MLP}.up_proj.weight", (4, 3), "t"),), "must be rows of it"),
        (
            (view_of(f"{MLP}.up_proj.weight", (2, 6), "t"), view_of("model.layers.0.mlp.gate.weight", (2, 6), "t", 12)),
            "some of its checkpoint tensors",
        ),
    ],
)
def test_tensors_that_cannot_be_cut_in_blocks_are_named(views: tuple[TensorView, ...], said: str) -> None:
    with pytest.raises(ValueError, match=f"^t: .*{said}"):
        Fp8BlockConverter(Given({"t": torch.zeros(4, 6)}, views))


def _faults(rank: int, transport: Any, folder: Path) -> dict[str, list[str]]:
    values = sharded({name: tensor for name, tensor in whole_values().items() if name in MATRICES})
    views = tuple(view for view in layout() if view.name in MATRICES)
    quantized = {name: tensor for name, tensor in expected().items() if name.removesuffix("_scale_inv") in MATRICES}
    held, model = Holder(quantized), nn.Module()
    engine: Any = RankEngine(held, (0, 1))
    sync = WeightSync(engine, SentModel(model, Fp8BlockConverter(Given(values, views))), transport=transport)
    found: dict[str, list[str]] = {}

    def look(what: str) -> None:
        compared = compare_fingerprints(sync.weights, sync.loader)
        found[what] = [*compared.wrong, *read_back(sync.weights, sync.loader).differences]
        sync.update_engine()

    sync.update_engine()
    look("nothing")
    name = f"{ATTENTION}.q_proj.weight"
    held.get_parameter(name).data.view(torch.uint8)[130, 7] ^= 1
    look("a byte")
    held.get_parameter(scale_name(name)).data[2, 1] *= 2
    look("a scale")
    sync.save(folder, folder)
    sync.close()
    forgetful = WeightSync(
        engine,
        SentModel(model, WithoutOne(Fp8BlockConverter(Given(values, views)), scale_name(name))),
        transport=transport,
    )
    try:
        forgetful.update_engine()
    except WeightsRefused as refused:
        found["left out"] = [str(refused)]
    forgetful.close()
    return found


@pytest.mark.parametrize("transport", ["bucket", "pull"])
def test_a_byte_a_scale_and_scales_that_are_left_out_are_named(transport: str, tmp_path: Path) -> None:
    name = f"{ATTENTION}.q_proj.weight"
    for found in on_ranks(_faults, 2, tmp_path, transport, tmp_path / "saved"):
        assert found["nothing"] == []
        one = "1 of {} elements on rank 0, 1 of {} elements on rank 1"
        assert found["a byte"] == [name, f"{name}: {one.format(60000, 60000)}"]
        assert found["a scale"] == [scale_name(name), f"{scale_name(name)}: {one.format(6, 6)}"]
        assert found["left out"] == [f"{scale_name(name)}: a parameter of the engine that nothing sent would fill"]
    saved, right = load_file(tmp_path / "saved" / "model.safetensors"), expected()
    assert saved.keys() == {each for name in MATRICES for each in (name, scale_name(name))}
    assert all(same_bits(tensor, right[name]) for name, tensor in saved.items())


@pytest.mark.usefixtures("alone")
def test_the_tiny_models_are_quantized_whole() -> None:
    """The layout of transformers' own models: every matrix of a layer has its scales, and nothing else has."""
    from harness.task.tiny_models import tiny_config, tiny_model

    for kind, plain in {"qwen2": set(), "qwen3_moe": {"mlp.gate"}, "deepseek_v3": {"mlp.gate"}}.items():
        model = tiny_model(tiny_config(kind), 0)
        converter = Fp8BlockConverter(CheckpointConverter(model, torch.bfloat16))
        views = {view.name: view for view in converter.layout()}
        check_complete(converter.layout(), converter.tensors())
        for name, view in views.items():
            in_layer = ".layers." in name and len(view.shape) == 2 and not name.endswith("_scale_inv")
            left = any(name.endswith(f"{each}.weight") for each in plain)
            assert (view.dtype == E4M3) == (scale_name(name) in views) == (in_layer and not left), name
