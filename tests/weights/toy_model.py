"""A small model that loads as SGLang's do, a trainer's tensors for it, and an engine that answers in this process."""

import pickle
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard, distribute_tensor

from harness.tools.sync.read_back import read_back
from harness.weights.loader import EngineLoader
from harness.weights.pull.transport import PullTransport
from harness.weights.tensor_view import TensorView
from harness.weights.trainer_weights import TrainerWeights
from harness.weights.transports import TensorTransport

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
) -> tuple[TensorView, ...]:
    """One tensor of the trainer for each name; of a name without a shape, two elements."""
    return tuple(view_of(name, shapes.get(name, (2,)), of=live_name(name), dtype=dtype) for name in names)


def view_of(
    name: str, shape: tuple[int, ...], of: str = "", offset: int = 0, dtype: torch.dtype = torch.float32
) -> TensorView:
    """A contiguous view."""
    stride = tuple(torch.empty(shape, device="meta").stride())
    return TensorView(name=name, of=of or name, dtype=dtype, shape=shape, stride=stride, offset=offset)


class Holder(nn.Module):
    """An engine's model that holds each tensor under its checkpoint name, and ignores names that it does not know."""

    def __init__(self, tensors: Mapping[str, torch.Tensor]) -> None:
        super().__init__()
        for name, tensor in tensors.items():
            module: nn.Module = self
            *path, last = name.split(".")
            for step in path:
                if not hasattr(module, step):
                    module.add_module(step, nn.Module())
                module = getattr(module, step)
            module.register_parameter(last, nn.Parameter(torch.zeros_like(tensor), requires_grad=False))

    def load_weights(self, weights: Iterable[tuple[str, torch.Tensor]]) -> None:
        held = dict(self.named_parameters())
        for name, loaded in weights:
            if name in held:
                held[name].data.copy_(loaded)


@dataclass
class Given:
    """A Converter that sends these tensors under this layout."""

    given: dict[str, torch.Tensor]
    views: tuple[TensorView, ...]
    renames_only: bool = True

    def layout(self) -> tuple[TensorView, ...]:
        return self.views

    def tensors(self) -> dict[str, torch.Tensor]:
        return self.given


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
    """A RolloutEngine of one rank, whose scheduler is a model in this process that answers as a real one does."""

    can_ask = True
    host = "here"
    trainer_gpu = None
    visible_gpus = None
    version = "a model in this process"

    def __init__(self, model: Any) -> None:
        self.model = model
        self.group = SimpleNamespace(
            rank=0, ranks=(0,), all_gather=lambda value: {0: value}, broadcast=lambda value: value, process_group=None
        )
        self.asked: list[str] = []
        self.sessions = 0
        self.flushes = 0

    @contextmanager
    def weight_update(self) -> Iterator[None]:
        self.sessions += 1
        yield

    def ask(self, function: Callable[[Any, Any], Any], argument: Any = None) -> Any:
        self.asked.append(function.__name__)
        return pickle.loads(pickle.dumps(function(self.model, pickle.loads(pickle.dumps(argument)))))

    def update_weights_from_tensor(self, named: Any, load_format: str | None = None, flush_cache: bool = True) -> None:
        self.model.load_weights([(name, tensor.clone()) for name, tensor in named])
        if flush_cache:
            self.flush_cache()

    def flush_cache(self) -> None:
        self.flushes += 1


class RankEngine(InProcessEngine):
    """The engine of one of several ranks, on a host with a name."""

    def __init__(self, model: Any, ranks: tuple[int, ...], host: str = "here") -> None:
        super().__init__(model)
        rank = dist.get_rank()
        self.host = host
        self.group.rank, self.group.ranks = rank, ranks
        group = dist.new_group(list(ranks), use_local_synchronization=True)

        def all_gather(value: Any) -> dict[int, Any]:
            found: list[Any] = [None] * len(ranks)
            dist.all_gather_object(found, value, group=group)
            return dict(zip(ranks, found, strict=True))

        self.group.all_gather = all_gather
        self.together = group

    def ask(self, function: Callable[[Any, Any], Any], argument: Any = None) -> Any:
        answer = super().ask(function, argument)
        dist.barrier(self.together)
        return answer


@dataclass
class ToySync:
    """The parts of a WeightSync to a model in this process."""

    model: Any
    engine: Any
    weights: TrainerWeights
    loader: EngineLoader
    transport: Any
    unfilled: tuple[str, ...] = ()
    frozen: Any = field(default_factory=dict)

    @property
    def sent(self) -> Any:
        """The parts of its SentModel."""
        layer = SimpleNamespace(tensors=self.frozen)
        config = SimpleNamespace(model_type="toy", get_text_config=SimpleNamespace)
        model = SimpleNamespace(config=config)
        return SimpleNamespace(dtype=None, held_tensors=self.held_tensors, draft_layer=layer, model=model)

    def held_tensors(self) -> Any:
        return self.weights.tensors

    @property
    def tensors(self) -> Any:
        return self.weights.tensors

    def update_engine(self) -> None:
        self.transport.send(self.weights)

    def differences(self) -> list[str]:
        return read_back(self.weights, self.loader).differences


def sync_to(
    model: Any,
    live: dict[str, torch.Tensor],
    layout: tuple[TensorView, ...],
    engine: Any = None,
    limit_bytes: int = 1 << 20,
    pull: bool = True,
) -> ToySync:
    engine = engine or InProcessEngine(model)
    weights = TrainerWeights(Given(live, layout), limit_bytes)
    transport: Any = PullTransport(engine) if pull else TensorTransport(engine, None)
    return ToySync(model, engine, weights, EngineLoader(engine, weights.groups), transport)
