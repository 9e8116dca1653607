"""Loaders that compute: what is stale or wrong is named, what is right is not, and the engine stays as it is."""

from collections.abc import Iterable

import pytest
import torch

from harness.weights.verification.comparison import ReloadFindings, compare_fingerprints, load_again
from tests.weights.toy_model import SHAPES, Toy, ToySync, layout_of, live_name, live_of, sent, sync_to

pytestmark = pytest.mark.usefixtures("alone")

Weights = Iterable[tuple[str, torch.Tensor]]


class Composed(Toy):
    """Computes with what it has just loaded, in place: Mamba2's A_log."""

    def load_weights(self, weights: Weights) -> None:
        pairs = dict(weights)
        super().load_weights(pairs.items())
        if "scale" in pairs:
            self.scale.data.copy_(-torch.exp(self.scale.data))


class InWhatIsSent(Toy):
    """Adds one to what it is given: Gemma's norms."""

    def load_weights(self, weights: Weights) -> None:
        pairs = dict(weights)
        if "scale" in pairs:
            pairs["scale"] += 1.0
        super().load_weights(pairs.items())


class WithBuffer(Toy):
    """Keeps weight + 1 beside the weight, in a buffer that no checkpoint has: GemmaRMSNorm."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("gemma", torch.zeros(4), persistent=False)

    def load_weights(self, weights: Weights) -> None:
        pairs = dict(weights)
        super().load_weights(pairs.items())
        if "scale" in pairs:
            self.gemma.copy_(self.scale + 1)


class ScalingAfterwards(Toy):
    """Scales in place after the load: LongCat's post_load_weights."""

    def load_weights(self, weights: Weights) -> None:
        pairs = dict(weights)
        super().load_weights(pairs.items())
        if "scale" in pairs:
            self.post_load_weights()

    def post_load_weights(self) -> None:
        self.scale.data.mul_(0.5)


class Replacing(Toy):
    """Puts a new tensor in a parameter's place."""

    def load_weights(self, weights: Weights) -> None:
        pairs = dict(weights)
        if "down" in pairs:
            self.down.data = (pairs.pop("down") * 2).T.contiguous()
        super().load_weights(pairs.items())


COMPUTING = {
    Composed: "scale",
    InWhatIsSent: "scale",
    WithBuffer: "gemma",
    ScalingAfterwards: "scale",
    Replacing: "down",
}


def sync_of(model: Toy, pull: bool) -> ToySync:
    return sync_to(model, live_of(sent(3)), layout_of(SHAPES), pull=pull)


def state(model: Toy) -> dict[str, torch.Tensor]:
    return {name: tensor.clone() for name, tensor in (model.values() | dict(model.named_buffers())).items()}


def check(sync: ToySync) -> ReloadFindings:
    compared = compare_fingerprints(sync.weights, sync.loader)
    assert not compared.wrong, "a right copy, or one that cannot be followed"
    return load_again(sync.weights, sync.loader, compared.left)


@pytest.mark.parametrize("pull", [False, True], ids=["by SGLang's call", "pull"])
@pytest.mark.parametrize("kind", COMPUTING, ids=lambda kind: kind.__name__)
def test_what_a_loader_computes_is_compared_and_left_alone_and_a_stale_element_is_named(
    kind: type[Toy], pull: bool
) -> None:
    model, name = kind(), COMPUTING[kind]
    sync = sync_of(model, pull)
    sync.loader.trace()  # it must not change what the engine serves with
    fresh = kind()
    assert all(torch.equal(tensor, state(fresh)[name]) for name, tensor in state(model).items())
    for _ in range(2):
        for tensor in sync.tensors.values():
            tensor.mul_(1.25)
        sync.update_engine()
        before = state(model)
        found = check(sync)
        assert (found.wrong, found.not_covered) == ([], [])
        assert sync.differences() == []
        assert all(torch.equal(tensor, before[name]) for name, tensor in state(model).items())
    held = dict(model.named_parameters()) | dict(model.named_buffers())
    held[name].data.view(-1)[1:2].view(torch.int32).bitwise_xor_(1)
    for _ in range(2):  # a check that made it right would not name it twice
        [sentence] = check(sync).wrong
        assert sentence.startswith(name) and f"1 of {held[name].numel()} elements on rank 0" in sentence


def test_a_loader_that_only_copies_is_not_run_again() -> None:
    class Counting(Toy):
        def load_weights(self, weights: Weights) -> None:
            super().load_weights((name, tensor) for name, tensor in weights if name != "kv_b")

    sync = sync_to(Counting(), live_of({name: each for name, each in sent(3).items() if name != "kv_b"}),
                   layout_of([name for name in SHAPES if name != "kv_b"]), pull=False)  # fmt: skip
    sync.update_engine()
    sync.loader.trace()
    calls = len(sync.model.calls)
    assert load_again(sync.weights, sync.loader, ()) == ReloadFindings()
    assert len(sync.model.calls) == calls


def test_a_loader_that_cannot_load_twice_is_named_as_not_covered() -> None:
    class Once(Composed):
        armed = False

        def load_weights(self, weights: Weights) -> None:
            super().load_weights(weights)
            if self.armed:
                raise RuntimeError("loaded before")

    model = Once()
    sync = sync_of(model, pull=False)
    sync.update_engine()
    sync.loader.trace()
    model.armed = True
    found = check(sync)
    assert found.wrong == []
    assert any("scale" in sentence and "RuntimeError: loaded before" in sentence for sentence in found.not_covered)


@pytest.mark.gpu
@pytest.mark.parametrize("loaded_on", ["cuda", "cpu"])
def test_on_a_gpu_what_was_computed_there_or_on_the_cpu_is_right(loaded_on: str) -> None:
    """A load from disk computes on the CPU, an update call on the GPU: exp() may differ in the last bit."""

    class Before(Toy):
        """Computes with what it is given, wherever that is."""

        def load_weights(self, weights: Weights) -> None:
            super().load_weights((name, -torch.exp(each) if name == "scale" else each) for name, each in weights)

    model = Before().cuda()
    model.w_kc = model.w_kc.cuda()
    values = {live_name(name): tensor.cuda() for name, tensor in sent(3).items()}
    sync = sync_to(model, values, layout_of(SHAPES), pull=False)
    sync.loader.trace()
    model.load_weights([(name, tensor.to(loaded_on)) for name, tensor in sent(3).items()])
    before = state(model)
    assert check(sync).wrong == []
    model.scale.data[1:2].view(torch.int32).bitwise_xor_(1 << 20)
    [sentence] = check(sync).wrong
    assert sentence.startswith("scale") and "1 of 4 elements" in sentence
    model.scale.data[1:2].view(torch.int32).bitwise_xor_(1 << 20)
    assert all(torch.equal(tensor, before[name]) for name, tensor in state(model).items())
