"""A converter that makes two tensors of one, as a quantizing one does, goes through everything that a sync has.

Each matrix is sent as int8 (or 8-bit floats) with one float32 scale for each row, made anew from the trainer's shards
at every sync.
"""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from safetensors.torch import load_file
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard, distribute_tensor

from harness.tools.sync.read_back import read_back
from harness.weights.presync_checks import WeightsRefused
from harness.weights.sent_model import SentModel
from harness.weights.sync import WeightSync
from harness.weights.tensor_view import TensorView
from harness.weights.verification.comparison import compare_fingerprints
from tests.cluster.gloo import on_ranks
from tests.weights.toy_model import RankEngine, view_of

SHAPES = {"attn.q_proj.weight": (6, 4), "attn.k_proj.weight": (3, 4), "mlp.down_proj.weight": (5, 8)}
"""On two ranks: even rows, and rows of which the second rank has fewer."""
LARGEST = {torch.int8: 127.0, torch.float8_e4m3fn: 448.0}


class Quantizing:
    """A Converter: every weight becomes `weight` in 8 bits, and `weight_scale`, one number for each row."""

    def __init__(self, model: nn.Module, dtype: torch.dtype) -> None:
        self.model = model
        self.dtype = dtype

    def layout(self) -> tuple[TensorView, ...]:
        found = []
        for name, tensor in self.model.named_parameters():
            found.append(view_of(name, tuple(tensor.shape), dtype=self.dtype))
            found.append(view_of(f"{name}_scale", (tensor.shape[0], 1)))
        return tuple(found)

    def tensors(self) -> Mapping[str, torch.Tensor]:
        found: dict[str, torch.Tensor] = {}
        for name, tensor in self.model.named_parameters():
            assert isinstance(tensor, DTensor)
            rows = tensor.to_local().detach()
            scale = rows.abs().amax(dim=1, keepdim=True) / LARGEST[self.dtype]
            scaled = rows / scale
            blocks = scaled.round().to(torch.int8) if self.dtype == torch.int8 else scaled.to(self.dtype)
            for each, part, columns in ((name, blocks, tensor.shape[1]), (f"{name}_scale", scale, 1)):
                shape = torch.Size([tensor.shape[0], columns])
                placed = {"run_check": False, "shape": shape, "stride": (columns, 1)}
                found[each] = DTensor.from_local(part, tensor.device_mesh, [Shard(0)], **placed)
        return found


class Held(nn.Module):
    """An engine's model that fuses q and k, keeps 8 bits with scales, and splits nothing."""

    def __init__(self, dtype: torch.dtype, scales_as: torch.dtype = torch.float32) -> None:
        super().__init__()
        self.parts = {
            "attn.q_proj.weight": ("qk", 0),
            "attn.k_proj.weight": ("qk", 6),
            "mlp.down_proj.weight": ("down", 0),
        }
        for name, shape in {"qk": (9, 4), "down": (5, 8)}.items():
            weight, scale = torch.zeros(shape, dtype=dtype), torch.zeros(shape[0], 1, dtype=scales_as)
            self.register_parameter(name, nn.Parameter(weight, requires_grad=False))
            self.register_parameter(f"{name}_scale", nn.Parameter(scale, requires_grad=False))

    def load_weights(self, weights: Any) -> None:
        for name, loaded in weights:
            is_scale = name.endswith("_scale")
            own, first = self.parts[name.removesuffix("_scale")]
            held = self.get_parameter(f"{own}_scale" if is_scale else own)
            held.data[first : first + len(loaded)].copy_(loaded)

    def dequantized(self, name: str) -> torch.Tensor:
        own, first = self.parts[name]
        rows = slice(first, first + SHAPES[name][0])
        return self.get_parameter(own)[rows].float() * self.get_parameter(f"{own}_scale")[rows]


def trainer() -> nn.Module:
    mesh, model = init_device_mesh("cpu", (dist.get_world_size(),)), nn.Module()
    for seed, (name, shape) in enumerate(SHAPES.items()):
        whole = torch.randn(shape, generator=torch.Generator().manual_seed(seed))
        inner = model
        *path, last = name.split(".")
        for step in path:
            if not hasattr(inner, step):
                inner.add_module(step, nn.Module())
            inner = getattr(inner, step)
        inner.register_parameter(last, nn.Parameter(distribute_tensor(whole, mesh, [Shard(0)])))
    return model


def _sync(rank: int, transport: Any, dtype: torch.dtype, folder: Path) -> list[str]:
    """What is wrong after each of two syncs of weights that change in between."""
    model, held = trainer(), Held(dtype)
    engine: Any = RankEngine(held, (0, 1))
    sync = WeightSync(engine, SentModel(model, Quantizing(model, dtype)), transport=transport)
    wrong = []
    for step in range(2):
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.mul_(1 + step)
        sync.update_engine()
        for name, parameter in model.named_parameters():
            assert isinstance(parameter, DTensor)
            whole = parameter.full_tensor().detach()
            if (held.dequantized(name) - whole).abs().max() > 0.07 * whole.abs().max():
                wrong.append(f"{name} is not what the trainer has")
        compared = compare_fingerprints(sync.weights, sync.loader)
        wrong += [*compared.wrong, *read_back(sync.weights, sync.loader).differences]
        if compared.compared != 2 * len(SHAPES):
            wrong.append(f"only {compared.compared} compared")
    sync.save(folder, folder)
    held.get_parameter("qk_scale").data[7] *= 2  # a row of k
    wrong += [f"found: {name}" for name in compare_fingerprints(sync.weights, sync.loader).wrong]
    wrong += [f"found: {text}" for text in read_back(sync.weights, sync.loader).differences]
    sync.close()
    return wrong


@pytest.mark.parametrize("dtype", [torch.int8, torch.float8_e4m3fn], ids=str)
@pytest.mark.parametrize("transport", ["bucket", "pull"])
def test_blocks_and_scales_arrive_are_compared_and_saved(transport: str, dtype: torch.dtype, tmp_path: Path) -> None:
    said = "attn.k_proj.weight_scale: 1 of 3 elements on rank 0, 1 of 3 elements on rank 1"
    found = ["found: attn.k_proj.weight_scale", f"found: {said}"]
    assert on_ranks(_sync, 2, tmp_path, transport, dtype, tmp_path / "saved") == [found, found]
    saved = load_file(tmp_path / "saved" / "model.safetensors")
    assert {name: (tuple(tensor.shape), tensor.dtype) for name, tensor in saved.items()} == {
        **{name: (shape, dtype) for name, shape in SHAPES.items()},
        **{f"{name}_scale": ((shape[0], 1), torch.float32) for name, shape in SHAPES.items()},
    }


def _refused(rank: int) -> str:
    model = trainer()
    engine: Any = RankEngine(Held(torch.int8, scales_as=torch.bfloat16), (0, 1))
    sync = WeightSync(engine, SentModel(model, Quantizing(model, torch.int8)))
    try:
        sync.update_engine()
    except WeightsRefused as refused:
        return str(refused).split(";")[0]
    return ""


def test_scales_that_the_engine_would_round_are_refused(tmp_path: Path) -> None:
    said = "attn.q_proj.weight_scale: sent as float32, but the engine holds bfloat16: it would be rounded"
    assert on_ranks(_refused, 2, tmp_path) == [said, said]
