"""A small model that loads as SGLang's do, a trainer's tensors for it, and an engine that answers in this process."""

import pickle
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard, distribute_tensor

from harness.weights.groups import fusing_groups
from harness.weights.names import CheckpointTensor
from harness.weights.pull.link import PullLink

SHAPES = {
    "embed": (5, 4), "q": (4, 4), "k": (2, 4), "v": (2, 4), "q_a": (3, 4), "kv_a": (2, 4), "kv_b": (6, 2),
    "down": (4, 6), "gate": (3, 4), "scale": (4,),
}  # fmt: skip
FUSING = {"q": "qkv", "k": "qkv", "v": "qkv", "q_a": "q_and_kv_a", "kv_a": "q_and_kv_a"}
"""The module of what fuses."""
OWN = {"kv_b"}
"""What the model's own loader loads at each sync: it derives from it."""


class Toy(nn.Module):
    """Fuses, pads, converts, transposes and derives on arrival, as SGLang's models do."""

    def __init__(self, seed: int = 0) -> None:
        super().__init__()
        draw = torch.Generator().manual_seed(seed)

        def parameter(*shape: int, dtype: torch.dtype = torch.float32) -> nn.Parameter:
            return nn.Parameter(torch.randn(shape, generator=draw).to(dtype), requires_grad=False)

        self.embed = parameter(8, 4)
        self.embed.data[5:] = 0
        self.qkv = parameter(8, 4)
        self.q_and_kv_a = parameter(5, 4)
        self.kv_b = parameter(6, 2)
        self.down = parameter(6, 4)
        self.gate = parameter(3, 4, dtype=torch.bfloat16)
        self.register_buffer("scale", torch.randn(4, generator=draw))
        self.w_kc = torch.zeros(2, 6)
        self.calls: list[list[str]] = []

    def load_weights(self, weights: Iterable[tuple[str, torch.Tensor]]) -> None:
        names, halves = [], {}
        for name, loaded in weights:
            names.append(name)
            if name == "embed":
                self.embed[:5].data.copy_(loaded)
                self.embed[5:].data.fill_(0)
            elif name in ("q", "k", "v"):
                start = {"q": 0, "k": 4, "v": 6}[name]
                self.qkv.data.narrow(0, start, loaded.shape[0]).copy_(loaded)
            elif name in ("q_a", "kv_a"):
                halves[name] = loaded
                if len(halves) == 2:
                    self.q_and_kv_a.data.copy_(torch.cat([halves["q_a"], halves["kv_a"]], dim=0))
            elif name == "down":
                self.down.data.copy_(loaded.T)
            elif name in ("kv_b", "gate", "scale"):
                held: torch.Tensor = getattr(self, name)
                if held.shape != loaded.shape:
                    raise AssertionError("shapes differ")
                held.data.copy_(loaded)
        if "kv_b" in names:
            self.w_kc = (self.kv_b.data * 2).T.contiguous()
        self.calls.append(names)

    def values(self) -> dict[str, torch.Tensor]:
        return dict(self.state_dict()) | {"w_kc": self.w_kc}


def same(one: Toy, other: Toy) -> bool:
    return all(torch.equal(tensor, other.values()[name]) for name, tensor in one.values().items())


def live_name(name: str) -> str:
    return f"{FUSING.get(name, name)}.{name}.weight"


def layout_of(
    names: Iterable[str], shapes: Mapping[str, tuple[int, ...]] = SHAPES, dtype: torch.dtype = torch.float32
) -> tuple[CheckpointTensor, ...]:
    """One live tensor for each name; of a name without a shape, two elements."""
    return tuple(
        CheckpointTensor(
            name=name,
            live_name=live_name(name),
            shape=shape,
            stride=tuple(torch.empty(shape, device="meta").stride()),
            offset=0,
            dtype=dtype,
        )
        for name, shape in ((name, shapes.get(name, (2,))) for name in names)
    )


def sent(seed: int) -> dict[str, torch.Tensor]:
    draw = torch.Generator().manual_seed(seed + 1000)
    return {name: torch.randn(shape, generator=draw) for name, shape in SHAPES.items()}


def live_of(values: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """The trainer's tensors by live name: every other one is a shard, of one rank. Needs a process group."""
    mesh = init_device_mesh("cpu", (1,))
    return {
        live_name(name): distribute_tensor(tensor, mesh, [Shard(0)]) if index % 2 else tensor.clone()
        for index, (name, tensor) in enumerate(values.items())
    }


def move(tensor: torch.Tensor) -> None:
    """Give this rank's part other memory, with the same values; of a DTensor, `data` is a copy that has no effect."""
    part = tensor._local_tensor if isinstance(tensor, DTensor) else tensor
    before = part.data_ptr()
    part.data = part.data.clone()
    assert part.data_ptr() != before or not part.numel()


class InProcessEngine:
    """In place of a VerlEngine of one rank: its scheduler is a model in this process, which answers as a real one does."""

    device_type = "cpu"
    answer_seconds = 1.0
    trainer_gpu = None
    visible_gpus = None

    def __init__(self, model: Any) -> None:
        self.model = model
        self.api = SimpleNamespace(custom_weight_loader=True, update_session=False)
        self.node = SimpleNamespace(host="here")
        self.group = SimpleNamespace(rank=0, ranks=(0,), all_gather=lambda value: {0: value}, process_group=None)
        self.asked: list[str] = []

    @contextmanager
    def weight_update(self) -> Iterator[None]:
        yield

    def ask(self, function: Callable[[Any, Any], Any], argument: Any = None) -> Any:
        self.asked.append(function.__name__)
        return pickle.loads(pickle.dumps(function(self.model, pickle.loads(pickle.dumps(argument)))))


def link_to(
    model: Any,
    live: Mapping[str, torch.Tensor],
    layout: tuple[CheckpointTensor, ...],
    engine: InProcessEngine | None = None,
) -> PullLink:
    given: Any = engine or InProcessEngine(model)
    return PullLink(engine=given, live=live, groups=fusing_groups(layout, live), staging_limit=1 << 20)
