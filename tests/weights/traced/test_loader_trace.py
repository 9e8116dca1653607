"""Loaders in the styles that SGLang has, each traced: nothing changes, and the copies that were noted are the load."""

import concurrent.futures
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from harness.weights.tensor_view import TensorView
from harness.weights.traced.loader_trace import GroupTrace, overlap, trace_loader
from harness.weights.traced.undo import UndoneWrites, storage
from tests.weights.traced.loading_styles import STYLES, Loader, Model, Sizes, Weights, memory_of, sizes


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
    def load(model: Model, weights: Weights) -> None:
        for name, loaded in weights:
            model.held[name].T.copy_(loaded)

    _, traced = only("a", load)
    assert "RuntimeError" in traced.error and "size" in traced.error


def test_a_value_that_is_read_is_opaque() -> None:
    seen: list[float] = []
    _, traced = only("a", lambda model, weights: seen.extend(float(loaded[0, 0].item()) for _, loaded in weights))
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
    def load(model: Model, weights: Weights) -> None:
        for name, loaded in weights:
            model.held[name].copy_(loaded)
            model.held[name][part].fill_(0)

    model, traced = only("a", load)
    assert (traced.zeros, traced.does_more) == ([], True)
    assert torch.equal(model.held["a"], torch.ones(3, 2))


def test_zeros_under_a_copy_are_no_padding() -> None:
    def load(model: Model, weights: Weights) -> None:
        for name, loaded in weights:
            model.held[name].zero_()
            model.held[name][1:].copy_(loaded[1:])

    _, traced = only("a", load)
    assert len(traced.zeros) == 1 and traced.find_padding() == []
    assert traced.computed_with == {"a"}, "so that the row that stays zero is compared by loading again"


@pytest.mark.parametrize("rows", [2, 0])
def test_zeros_that_are_joined_to_what_is_too_short_are_padding(rows: int) -> None:
    """As SGLang pads on a GPU: a rank behind the end of a tensor gets zeros alone."""

    def load(model: Model, weights: Weights) -> None:
        for name, loaded in weights:
            zeros = torch.zeros(3 - rows, 2)
            model.held[name].copy_(torch.cat([loaded[:rows], zeros]) if rows else zeros)

    _, traced = only("a", load)
    (zeros,) = traced.find_padding()
    assert zeros.shape == (3 - rows, 2) and traced.opaque == set()
    assert sum(copy.source.numel for copy in traced.copies) == 2 * rows


def converted(model: Model, weights: Weights) -> None:
    for name, loaded in weights:
        model.held[name].copy_(loaded.to(torch.bfloat16))


def computed(model: Model, weights: Weights) -> None:
    for name, loaded in weights:
        model.held[name].copy_(loaded + 1)


def by_way_of_a_temporary(model: Model, weights: Weights) -> None:
    for name, loaded in weights:
        temporary = torch.zeros(3, 2)
        temporary.copy_(loaded)
        model.held[name].copy_(temporary)


def reshaped(model: Model, weights: Weights) -> None:
    for name, loaded in weights:
        model.held[name].view(-1).copy_(loaded.T.reshape(-1))


def by_value(model: Model, weights: Weights) -> None:
    for name, loaded in weights:
        model.held[name].fill_(loaded[0, 0].item() * 2)


def in_what_is_sent(model: Model, weights: Weights) -> None:
    """Gemma's norms, in SGLang."""
    for name, loaded in weights:
        loaded += 1.0
        model.held[name].copy_(loaded)


def in_the_parameter(model: Model, weights: Weights) -> None:
    """Mamba2's A_log: SGLang's composed_weight_loader."""
    for name, loaded in weights:
        model.held[name].copy_(loaded)
        model.held[name].copy_(-torch.exp(model.held[name]))


def scaled_in_place(model: Model, weights: Weights) -> None:
    for name, loaded in weights:
        model.held[name].copy_(loaded)
        model.held[name].mul_(3)


CHANGING = (
    converted, computed, reshaped, by_way_of_a_temporary, by_value, in_what_is_sent, in_the_parameter, scaled_in_place,
)  # fmt: skip


@pytest.mark.parametrize("load", CHANGING, ids=lambda load: load.__name__)
def test_a_load_that_cannot_be_followed_changes_nothing_either(load: Loader) -> None:
    model, traced = only("a", load)
    assert not traced.only_copies and traced.opaque == {"a"}
    held = storage(model.held["a"])
    assert all(storage(copy.target) != held for copy in traced.copies)
    assert any(storage(target) == held and target.numel() == 6 for target in traced.computed)
    assert torch.equal(model.held["a"], torch.ones(3, 2))


def test_one_element_by_its_value_is_followed() -> None:
    """As SGLang's default_weight_loader fills a parameter of one element."""

    def load(model: Model, weights: Weights) -> None:
        for name, loaded in weights:
            model.held[name].fill_(loaded.item())

    memory, views = memory_of({"a": torch.tensor([3.0]), "b": torch.tensor([4.0])})
    model = Model({"a": torch.ones(1), "b": torch.ones(1)}, load)
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
