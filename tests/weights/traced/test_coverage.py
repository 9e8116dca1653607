"""What a scheduler's trace of its loader means for the trainer; the engine's model is a small one in this process."""

from collections.abc import Iterable

import pytest
import torch

from harness.weights.fusing import fusing_groups
from harness.weights.tensor_view import TensorView
from harness.weights.traced.coverage import LoadCoverage
from harness.weights.worker import kept_trace
from tests.weights.toy_model import SHAPES, Toy, layout_of, view_of

pytestmark = pytest.mark.usefixtures("alone")


def traced(layout: tuple[TensorView, ...], model: Toy | None = None) -> LoadCoverage:
    groups = fusing_groups(layout)
    found = kept_trace.cover(model or Toy(), groups)
    assert found.rank == 0 and len(found.copies) == len(groups)
    return found


def missing(found: LoadCoverage) -> dict[str, tuple[int, int]]:
    return {name: (count, size) for name, (count, size) in found.missing.items() if count}


def test_all_that_the_model_wants_is_covered_and_a_copy_says_what_it_reads_and_where_it_writes() -> None:
    found = traced(layout_of(SHAPES))
    assert found.filled == {
        **{name: [name] for name in ("embed", "kv_b", "down", "gate", "scale")},
        "qkv": ["q", "k", "v"],
        "q_and_kv_a": ["q_a", "kv_a"],
    }
    assert (found.unknown, found.errors, found.opaque, missing(found)) == ([], {}, [], {})
    copies = {copy.source.name: copy for copies in found.copies for copy in copies}
    assert copies.keys() == SHAPES.keys()
    assert (copies["gate"].source.dtype, copies["gate"].held) == (torch.float32, torch.bfloat16)
    assert (copies["down"].source.shape, copies["down"].source.stride) == ((6, 4), (1, 6)), "the model transposes it"
    assert copies["v"].into == "qkv"
    half = traced(layout_of([name for name in SHAPES if name != "kv_a"]))  # of what fuses
    assert (half.unknown, missing(half)) == (["q_a"], {"q_and_kv_a": (20, 20)})


def test_unknown_unfilled_and_refused_tensors_are_named() -> None:
    names = [name for name in SHAPES if name not in ("down", "embed")]
    found = traced(layout_of([*names, "unheard_of"]))
    assert (found.unknown, missing(found), found.errors) == (["unheard_of"], {"embed": (32, 32), "down": (24, 24)}, {})
    assert found.filled.keys() == {"qkv", "q_and_kv_a", "kv_b", "gate", "scale"}

    found = traced(layout_of(SHAPES, SHAPES | {"gate": (4, 4), "k": (2, 3)}))
    assert found.errors.keys() == {("gate",), ("k",)}
    assert found.errors["gate",] == "AssertionError: shapes differ" and "size" in found.errors["k",]
    assert found.unknown == []


def test_an_error_that_tensors_raise_together_blames_these() -> None:
    class Picky(Toy):
        def load_weights(self, weights: Iterable[tuple[str, torch.Tensor]]) -> None:
            pairs = list(weights)
            if {name for name, _ in pairs} >= {"q", "k"}:
                raise ValueError("too many")
            super().load_weights(pairs)

    found = traced(layout_of(SHAPES), Picky())
    assert found.errors == {("q", "k"): "ValueError: too many"}


def test_of_the_parts_of_one_tensor_the_one_that_the_loader_refuses_is_blamed() -> None:
    """Each is tried alone, where what lies before it in the tensor is not sent."""

    class Refusing(Toy):
        def load_weights(self, weights: Iterable[tuple[str, torch.Tensor]]) -> None:
            if "experts.1" in dict(weights):
                raise ValueError("no such expert")

    parts = tuple(view_of(f"experts.{index}", (2, 3), of="experts", offset=6 * index) for index in range(2))
    assert traced(parts, Refusing()).errors == {("experts.1",): "ValueError: no such expert"}


class PuttingInPlace(Toy):
    """Puts what it is given for `down` in the parameter's place, as it is or turned."""

    def __init__(self, turned: bool) -> None:
        super().__init__()
        self.turned = turned

    def load_weights(self, weights: Iterable[tuple[str, torch.Tensor]]) -> None:
        pairs = dict(weights)
        if "down" in pairs:
            given = pairs.pop("down")
            self.down.data = given.T if self.turned else given
        super().load_weights(pairs.items())


@pytest.mark.parametrize("turned", [False, True])
def test_a_tensor_put_in_a_parameters_place_is_an_error_and_the_parameter_is_put_back(turned: bool) -> None:
    """It passes no dispatch, so trace_loader() does not see it; left so, the parameter would be the traced memory
    itself."""
    model = PuttingInPlace(turned)
    before = model.down.data
    found = traced(layout_of(SHAPES), model)
    said = "it puts the tensor it is given in the place of its down instead of copying it"
    assert found.errors == {("down",): said}
    assert model.down.data_ptr() == before.data_ptr()
    assert all(torch.equal(tensor, Toy().state_dict()[name]) for name, tensor in model.state_dict().items())
    assert "down" not in found.filled and missing(found) == {}  # not all can be told


class Removing(Toy):
    """Deletes kv_b when it has derived w_kc, as SGLang's MiniCPM3 does."""

    def __init__(self, needed_again: bool) -> None:
        super().__init__()
        self.needed_again = needed_again

    def load_weights(self, weights: Iterable[tuple[str, torch.Tensor]]) -> None:
        pairs = dict(weights)
        if not (self.needed_again or hasattr(self, "kv_b")):
            pairs.pop("kv_b", None)
        super().load_weights(pairs.items())
        if "kv_b" in pairs:
            del self.kv_b


def test_a_loader_that_removes_what_its_next_load_needs_can_load_once() -> None:
    model = Removing(needed_again=True)
    found = traced(layout_of(SHAPES), model)
    assert found.only_once.startswith("it removes kv_b, and the next load raises AttributeError:")
    assert found.errors == {} and hasattr(model, "kv_b"), "the check put it back"
    assert traced(layout_of(SHAPES), Removing(needed_again=False)).only_once == ""
