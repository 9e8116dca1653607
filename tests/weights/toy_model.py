"""A small model that loads as SGLang's do, a layout of what it is sent, and both ends of a link in one process."""

import threading
from collections.abc import Iterable, Mapping
from pathlib import Path

import torch
from torch import nn

from harness.weights.stream.slots import Layout, SlotConnection, SlotEntry, StreamListener, connect_slots, slot_bytes

CPU = torch.device("cpu")
SHAPES = {
    "embed": (5, 4), "q": (4, 4), "k": (2, 4), "v": (2, 4), "q_a": (3, 4), "kv_a": (2, 4), "kv_b": (6, 2),
    "down": (4, 6), "gate": (3, 4), "scale": (4,),
}  # fmt: skip
GROUPS = {"embed": 0, "q": 1, "k": 1, "v": 1, "q_a": 2, "kv_a": 2, "kv_b": 3, "down": 4, "gate": 5, "scale": 6}
OWN = {"embed", "kv_b"}
"""What the model's own loader loads at each sync: it pads one and derives from the other."""


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


def layout_of(names: Iterable[str], per_bucket: int, shapes: Mapping[str, tuple[int, ...]] = SHAPES) -> Layout:
    """float32 tensors, per_bucket groups in a bucket."""
    groups: dict[int, list[str]] = {}
    for name in names:
        groups.setdefault(GROUPS.get(name, 99), []).append(name)
    buckets: list[tuple[SlotEntry, ...]] = []
    numbers = list(groups)
    for first in range(0, len(numbers), per_bucket):
        entries, at = [], 0
        for number in numbers[first : first + per_bucket]:
            for name in groups[number]:
                shape = shapes.get(name, (2,))
                stride = tuple(torch.empty(shape, device="meta").stride())
                entry = SlotEntry(name=name, dtype=torch.float32, shape=shape, stride=stride, offset=at, group=number)
                entries.append(entry)
                at += -(-entry.numel * 4 // 256) * 256
        buckets.append(tuple(entries))
    return tuple(buckets)


def sent(seed: int) -> dict[str, torch.Tensor]:
    draw = torch.Generator().manual_seed(seed + 1000)
    return {name: torch.randn(shape, generator=draw) for name, shape in SHAPES.items()}


def ends(folder: Path, layout: Layout) -> tuple[SlotConnection, SlotConnection]:
    """(trainer's, scheduler's)."""
    door = StreamListener(folder, 0)
    links: list[SlotConnection] = []
    nbytes = slot_bytes(4096)
    offering = threading.Thread(target=lambda: links.append(door.offer(nbytes, CPU, layout, lambda: False)))
    offering.start()
    reader, _ = connect_slots(folder, 0, CPU)
    offering.join()
    door.close()
    return links[0], reader
