"""Loaders in the styles that SGLang has, each traced: nothing changes, and the copies that were noted are the load."""

import concurrent.futures
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from harness.weights.tensor_view import TensorView
from harness.weights.traced.loader_trace import GroupTrace, overlap, trace_loader
from harness.weights.traced.undo import UndoneWrites, storage
from tests.weights.traced.loading_styles import STYLES, Loader, Model, Sizes, Weights, each, memory_of, sizes


def same(one: Model, other: Model) -> bool:
    return all(torch.equal(one.held[name], other.held[name]) for name in one.held)


def trace(model: Model, views: Sequence[TensorView], memory: Mapping[str, torch.Tensor]) -> GroupTrace:
    undone = UndoneWrites(model)
    with undone.told():
        return trace_loader(model.load_weights, views, memory, undone)


def replay(traced: GroupTrace, memory: dict[str, torch.Tensor]) -> None:
    """Set to zero and copy what was noted."""
    for zeros in traced.zeros:
        zeros.zero_()
    for copy in traced.copies:
        source = copy.source.in_memory(memory[copy.source.of])
        assert source.shape == copy.target.shape and source.dtype == copy.source.dtype
        copy.target.copy_(source)


@pytest.mark.parametrize("style", STYLES)
@given(sizes)
@settings(max_examples=15, deadline=None)
def test_tracing_changes_nothing_and_the_copies_are_the_load(style: str, s: Sizes) -> None:
    case = STYLES[style](s)
    memory, views = memory_of(case.sent)
    loaded, traced_model = case.model.fresh(), case.model.fresh()
    loaded.load_weights([(view.name, memory[view.of].clone()) for view in views])

    traced = trace(traced_model, views, memory)
    assert not traced.error
    assert same(traced_model, case.model)
    assert traced.used == set(case.sent)
    assert traced.opaque == (set() if case.followed else set(case.sent))
    assert traced.only_copies == case.only_copies
    if not case.followed:
        assert not traced.copies
        return
    assert {copy.source.name for copy in traced.copies} == set(case.sent)
    replay(traced, memory)
    assert same(traced_model, loaded)
    assert not same(loaded, case.model)


def only(name: str, load: Loader) -> tuple[Model, GroupTrace]:
    """A model of one tensor of ones, sent twos under `name`, after the trace."""
    model = Model({"a": torch.ones(3, 2)}, load)
    memory, views = memory_of({name: torch.full((3, 2), 2.0)})
    return model, trace(model, views, memory)


def test_a_name_that_the_loader_ignores_is_not_used() -> None:
    _, traced = only("b", lambda model, weights: None)
    assert (traced.used, traced.copies, traced.error, traced.only_copies) == (set(), [], "", True)


def test_what_the_loader_raises_is_kept() -> None:
    def load(model: Model, weights: Weights) -> None:
        for name, loaded in weights:
            model.held["a"].copy_(loaded)
            raise KeyError(name)

    model, traced = only("b", load)
    assert traced.error == "KeyError: 'b'"
    assert torch.equal(model.held["a"], torch.ones(3, 2))


def test_a_thread_that_raises_raises_where_its_result_is_asked_for() -> None:
    def load(model: Model, weights: Weights) -> None:
        with concurrent.futures.ThreadPoolExecutor() as executor:
            executor.submit(lambda: model.held["b"].zero_()).result()

    assert only("a", load)[1].error.startswith("KeyError")
    assert concurrent.futures.ThreadPoolExecutor is ThreadPoolExecutor  # as it was


def test_a_shape_that_does_not_fit_is_an_error() -> None:
    _, traced = only("a", each(lambda held, loaded: held.T.copy_(loaded)))
    assert "RuntimeError" in traced.error and "size" in traced.error


def test_a_value_that_is_read_is_opaque() -> None:
    seen: list[float] = []
    _, traced = only("a", each(lambda held, loaded: seen.append(float(loaded[0, 0].item()))))
    assert len(seen) == 1
    assert (traced.used, traced.opaque, traced.only_copies) == ({"a"}, {"a"}, False)


def test_what_a_loader_derives_makes_it_run_itself() -> None:
    def load(model: Model, weights: Weights) -> None:
        for name, loaded in weights:
            model.held[name].copy_(loaded)
        model.held["derived"] = model.held["a"] * 3

    model, traced = only("a", load)
    assert (traced.used, traced.opaque, traced.computed_with, traced.does_more) == ({"a"}, set(), {"a"}, True)
    assert torch.equal(model.held["derived"], torch.full((3, 2), 3.0))  # of what the model holds, not of the memory


@pytest.mark.parametrize("part", [slice(-1, None), slice(None)])
def test_zeros_over_what_was_loaded_make_the_loader_run_itself(part: slice) -> None:
    model, traced = only("a", each(lambda held, loaded: held.copy_(loaded)[part].fill_(0)))
    assert (traced.zeros, traced.does_more) == ([], True)
    assert torch.equal(model.held["a"], torch.ones(3, 2))


def test_zeros_under_a_copy_are_no_padding() -> None:
    _, traced = only("a", each(lambda held, loaded: held.zero_()[1:].copy_(loaded[1:])))
    assert len(traced.zeros) == 1 and traced.find_padding() == []
    assert traced.computed_with == {"a"}, "so that the row that stays zero is compared by loading again"


@pytest.mark.parametrize("rows", [2, 0])
def test_zeros_that_are_joined_to_what_is_too_short_are_padding(rows: int) -> None:
    """As SGLang pads on a GPU: a rank behind the end of a tensor gets zeros alone."""

    def padded(held: torch.Tensor, loaded: torch.Tensor) -> None:
        zeros = torch.zeros(3 - rows, 2)
        held.copy_(torch.cat([loaded[:rows], zeros]) if rows else zeros)

    _, traced = only("a", each(padded))
    (zeros,) = traced.find_padding()
    assert zeros.shape == (3 - rows, 2) and traced.opaque == set()
    assert sum(copy.source.numel for copy in traced.copies) == 2 * rows


CHANGING: dict[str, Callable[[torch.Tensor, torch.Tensor], object]] = {
    "converted": lambda held, loaded: held.copy_(loaded.to(torch.bfloat16)),
    "computed": lambda held, loaded: held.copy_(loaded + 1),
    "reshaped": lambda held, loaded: held.view(-1).copy_(loaded.T.reshape(-1)),
    "by way of a temporary": lambda held, loaded: held.copy_(torch.zeros(3, 2).copy_(loaded)),
    "by value": lambda held, loaded: held.fill_(loaded[0, 0].item() * 2),
    "in what is sent, as Gemma's norms": lambda held, loaded: held.copy_(loaded.add_(1.0)),
    "in the parameter, as Mamba2's A_log": lambda held, loaded: held.copy_(-torch.exp(held.copy_(loaded))),
    "scaled in place": lambda held, loaded: held.copy_(loaded).mul_(3),
}


@pytest.mark.parametrize("name", CHANGING)
def test_a_load_that_cannot_be_followed_changes_nothing_either(name: str) -> None:
    model, traced = only("a", each(CHANGING[name]))
    assert not traced.only_copies and traced.opaque == {"a"}
    held = storage(model.held["a"])
    assert all(storage(copy.target) != held for copy in traced.copies)
    assert any(storage(target) == held and target.numel() == 6 for target in traced.computed)
    assert torch.equal(model.held["a"], torch.ones(3, 2))


def test_one_element_by_its_value_is_followed() -> None:
    """As SGLang's default_weight_loader fills a parameter of one element."""
    memory, views = memory_of({"a": torch.tensor([3.0]), "b": torch.tensor([4.0])})
    model = Model({"a": torch.ones(1), "b": torch.ones(1)}, each(lambda held, loaded: held.fill_(loaded.item())))
    traced = trace(model, views, memory)
    assert traced.only_copies and torch.equal(model.held["a"], torch.ones(1))
    replay(traced, memory)
    assert model.held == {"a": torch.tensor([3.0]), "b": torch.tensor([4.0])}


@given(st.lists(st.integers(1, 4), min_size=1, max_size=3), st.data())
def test_parts_of_one_tensor_overlap_if_they_share_an_element(shape: list[int], data: st.DataObject) -> None:
    whole = torch.arange(torch.Size(shape).numel()).view(shape)

    def part() -> torch.Tensor:
        picked = whole
        for axis, size in enumerate(shape):
            start = data.draw(st.integers(0, size - 1))
            picked = picked.narrow(axis, start, data.draw(st.integers(1, size - start)))
        return picked

    one, other = part(), part()
    assert overlap(one, other) == bool(set(one.flatten().tolist()) & set(other.flatten().tolist()))


def test_of_tensors_that_lie_side_by_side_the_right_one_is_named() -> None:
    def load(model: Model, weights: Weights) -> None:
        for _, loaded in weights:
            model.held["a"].copy_(loaded[1:])

    left, right = (
        TensorView(name=name, of="both", dtype=torch.float32, shape=(4, 2), stride=(4, 1), offset=offset)
        for name, offset in (("left", 0), ("right", 2))
    )
    memory = {"both": torch.zeros(16)}
    traced = trace(Model({"a": torch.ones(3, 2)}, load), [left, right], memory)
    assert [copy.source.name for copy in traced.copies] == ["left", "right"]
