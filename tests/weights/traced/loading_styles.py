"""Loaders in the styles that SGLang has, each with a model of random shapes and what it is sent."""

import concurrent.futures
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass

import torch
from hypothesis import strategies as st
from torch import nn

from harness.weights.tensor_view import TensorView
from tests.weights.toy_model import view_of

Weights = Iterable[tuple[str, torch.Tensor]]
Loader = Callable[["Model", Weights], None]


class Model(nn.Module):
    """Named tensors and a loader that fills them."""

    def __init__(self, held: dict[str, torch.Tensor], loader: Loader, rank: int = 0) -> None:
        super().__init__()
        self.held, self.loader, self.rank = held, loader, rank

    def load_weights(self, weights: Weights) -> None:
        self.loader(self, weights)

    def fresh(self) -> "Model":
        return Model({name: tensor.clone() for name, tensor in self.held.items()}, self.loader, self.rank)


@dataclass
class Case:
    """A model, and what it is sent."""

    model: Model
    sent: dict[str, torch.Tensor]
    only_copies: bool = True
    followed: bool = True
    """False: a part of what was joined or turned is taken."""


@dataclass
class Sizes:
    rows: int
    columns: int
    tp: int
    rank: int
    seed: int

    def random(self, *shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
        self.seed += 1
        return torch.randn(shape, generator=torch.Generator().manual_seed(self.seed)).to(dtype)

    def model(self, loader: Loader, **shapes: tuple[int, ...]) -> Model:
        return Model({name: self.random(*shape) for name, shape in shapes.items()}, loader, self.rank)


def memory_of(sent: Mapping[str, torch.Tensor]) -> tuple[dict[str, torch.Tensor], list[TensorView]]:
    """Return the memory that each tensor lies in, and its view of it."""
    views = [view_of(name, tuple(tensor.shape), dtype=tensor.dtype) for name, tensor in sent.items()]
    return {name: tensor.clone().contiguous() for name, tensor in sent.items()}, views


# Loaders, as SGLang writes them.


def each(copy: Callable[[torch.Tensor, torch.Tensor], object]) -> Loader:
    """A loader that does this with the model's tensor and what was sent under its name."""

    def load(model: Model, weights: Weights) -> None:
        for name, loaded in weights:
            copy(model.held[name], loaded)

    return load


whole = each(lambda held, loaded: held.data.copy_(loaded))


def plain(s: Sizes) -> Case:
    model = s.model(whole, a=(s.rows, s.columns), b=(s.rows,))
    return Case(model, {"a": s.random(s.rows, s.columns), "b": s.random(s.rows)})


def narrow(axis: int) -> Callable[[Sizes], Case]:
    def case(s: Sizes) -> Case:
        def load(model: Model, weights: Weights) -> None:
            for name, loaded in weights:
                size = model.held[name].shape[axis]
                shard = loaded.narrow(axis, model.rank * size, size)
                assert model.held[name].shape == shard.shape
                model.held[name].data.copy_(shard)

        shape = (s.rows * s.tp, s.columns) if axis == 0 else (s.rows, s.columns * s.tp)
        return Case(s.model(load, a=(s.rows, s.columns)), {"a": s.random(*shape)})

    return case


def qkv(s: Sizes) -> Case:
    """q is cut by rank, k and v are whole on each: replicated heads."""

    def load(model: Model, weights: Weights) -> None:
        qkv = model.held["qkv"]
        for name, loaded in weights:
            start, size = {"q": (0, s.rows), "k": (s.rows, s.columns), "v": (s.rows + s.columns, s.columns)}[name]
            part = loaded.narrow(0, model.rank * size, size) if name == "q" else loaded
            qkv.data.narrow(0, start, size).copy_(part)

    sent = {"q": s.random(s.rows * s.tp, 3), "k": s.random(s.columns, 3), "v": s.random(s.columns, 3)}
    return Case(s.model(load, qkv=(s.rows + 2 * s.columns, 3)), sent)


def halves(axis: int, then_narrow: bool = False) -> Callable[[Sizes], Case]:
    """q_a_proj and kv_a_proj_with_mqa: joined when both have come."""

    def case(s: Sizes) -> Case:
        def load(model: Model, weights: Weights) -> None:
            waiting: dict[str, torch.Tensor] = {}
            for name, loaded in weights:
                waiting[name] = loaded
                if len(waiting) == 2:
                    joined = torch.cat([waiting["one"], waiting["other"]], dim=axis)
                    if then_narrow:
                        joined = joined.narrow(axis, 1, joined.shape[axis] - 1)
                    model.held["both"].data.copy_(joined)

        one, other = (
            s.random(s.rows + 1, s.columns + 1),
            s.random(*((s.tp, s.columns + 1) if axis == 0 else (s.rows + 1, s.tp))),
        )
        shape = list(torch.cat([one, other], axis).shape)
        shape[axis] -= then_narrow
        return Case(s.model(load, both=tuple(shape)), {"one": one, "other": other}, not then_narrow, not then_narrow)

    return case


def transposed(keep: Callable[[torch.Tensor], torch.Tensor]) -> Callable[[Sizes], Case]:
    def case(s: Sizes) -> Case:
        load = each(lambda held, loaded: held.data.copy_(keep(loaded.T)))
        return Case(s.model(load, a=(s.columns, s.rows)), {"a": s.random(s.rows, s.columns)})

    return case


def transposed_then_flat(s: Sizes) -> Case:
    load = each(lambda held, loaded: held.data.copy_(loaded.T.contiguous().view(-1)[1:]))
    rows, columns = s.rows + 1, s.columns + 1
    return Case(s.model(load, a=(rows * columns - 1,)), {"a": s.random(rows, columns)}, False, False)


def other_dtype(s: Sizes) -> Case:
    """copy_ rounds on the way."""
    case = plain(s)
    case.model.held["a"] = case.model.held["a"].bfloat16()
    return case


def stacked(s: Sizes) -> Case:
    def load(model: Model, weights: Weights) -> None:
        model.held["all"].data.copy_(torch.stack([loaded for _, loaded in weights]))

    return Case(
        s.model(load, all=(s.tp, s.rows, s.columns)), {f"e{i}": s.random(s.rows, s.columns) for i in range(s.tp)}
    )


def experts(s: Sizes) -> Case:
    def load(model: Model, weights: Weights) -> None:
        for name, loaded in weights:
            expert, half = name.split(".")
            w13 = model.held["w13"].data[int(expert)]
            part = w13.narrow(0, 0 if half == "gate" else s.rows, s.rows)
            part.copy_(loaded.narrow(0, model.rank * s.rows, s.rows))

    sent = {f"{i}.{half}": s.random(s.rows * s.tp, s.columns) for i in range(s.tp) for half in ("gate", "up")}
    return Case(s.model(load, w13=(s.tp, 2 * s.rows, s.columns)), sent)


def in_threads(s: Sizes) -> Case:
    inner = plain(s)
    one_by_one = inner.model.loader

    def load(model: Model, weights: Weights) -> None:
        with concurrent.futures.ThreadPoolExecutor(max_workers=2) as executor:
            futures = [executor.submit(one_by_one, model, [pair]) for pair in weights]
            for future in concurrent.futures.as_completed(futures):
                future.result()

    return Case(Model(inner.model.held, load), inner.sent)


def padded(s: Sizes) -> Case:
    """The vocabulary is a little larger than the checkpoint's."""

    def load(model: Model, weights: Weights) -> None:
        for name, loaded in weights:
            model.held[name][: loaded.shape[0]].data.copy_(loaded)
            model.held[name][loaded.shape[0] :].data.fill_(0)

    model = s.model(load, a=(s.rows + s.tp, s.columns))
    return Case(model, {"a": s.random(s.rows, s.columns)})


def filled_first(s: Sizes) -> Case:
    """All of a parameter is set before a part of it is loaded."""
    load = each(lambda held, loaded: held.zero_()[1:].copy_(loaded))
    return Case(s.model(load, a=(s.rows + 1, s.columns)), {"a": s.random(s.rows, s.columns)})


def set_items(s: Sizes) -> Case:
    def load(model: Model, weights: Weights) -> None:
        for name, loaded in weights:
            model.held[name][:, 1:] = loaded

    return Case(s.model(load, a=(s.rows, s.columns + 1)), {"a": s.random(s.rows, s.columns)})


def one_scale_for_all(s: Sizes) -> Case:
    return Case(s.model(whole, a=(s.rows + 1,)), {"a": s.random(1)})


STYLES = {
    "plain": plain, "rows of a rank": narrow(0), "columns of a rank": narrow(1), "qkv": qkv,
    "halves above each other": halves(0), "halves side by side": halves(1),
    "halves, then a part": halves(0, True), "halves side by side, then a part": halves(1, True),
    "transposed": transposed(lambda view: view), "transposed, contiguous": transposed(torch.Tensor.contiguous),
    "transposed, cloned": transposed(torch.clone), "transposed, then flat": transposed_then_flat, "other dtype": other_dtype,
    "stacked": stacked, "experts": experts, "in threads": in_threads, "padded": padded, "filled first": filled_first, "set items": set_items,
    "one scale for all": one_scale_for_all,
}  # fmt: skip

sizes = st.integers(1, 3).flatmap(
    lambda tp: st.builds(
        Sizes,
        rows=st.integers(1, 5),
        columns=st.integers(1, 5),
        tp=st.just(tp),
        rank=st.integers(0, tp - 1),
        seed=st.integers(0, 1000),
    )
)
