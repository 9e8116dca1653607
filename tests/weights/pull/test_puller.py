"""The scheduler's end of a pull, with a small model in place of SGLang's and the trainer's shards in the same
process."""

from collections.abc import Callable, Iterable, Iterator
from dataclasses import replace
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from harness.trainer.offload import local
from harness.weights.pull import puller
from harness.weights.regions import Region
from harness.weights.tensor_view import TensorView
from tests.weights.toy_model import (
    OWN,
    SHAPES,
    InProcessEngine,
    Toy,
    layout_of,
    live_name,
    live_of,
    same,
    sent,
    sync_to,
)

pytestmark = pytest.mark.usefixtures("alone")


class Stand:
    """A model, the trainer's tensors for it, and the pulls between them."""

    def __init__(
        self,
        model: Toy,
        layout: tuple[TensorView, ...] | None = None,
        values: dict[str, torch.Tensor] | None = None,
    ) -> None:
        self.model = model
        values = values or sent(0)
        self.live = live_of(values)
        self.sync = sync_to(
            model,
            self.live,
            layout or layout_of(values, {name: tuple(tensor.shape) for name, tensor in values.items()}),
        )

    def pull(self, values: dict[str, torch.Tensor]) -> None:
        """Change the trainer's tensors in place, as an optimizer does, and pull."""
        for name, tensor in values.items():
            local(self.live[live_name(name)]).copy_(tensor)
        self.sync.update_engine()

    def differences(self) -> list[str]:
        """What differs, and what is stale."""
        return self.sync.differences()


@given(st.permutations(list(SHAPES)), st.integers(0, 100))
@settings(max_examples=15, deadline=None)
def test_a_pull_gives_what_the_models_own_loader_gives_and_compares_equal(names: list[str], seed: int) -> None:
    model, expected = Toy(seed), Toy(seed)
    untouched = dict(Toy(seed).state_dict())
    stand = Stand(model, layout_of(names), {name: sent(0)[name] for name in names})
    stand.sync.loader.trace()
    assert all(torch.equal(tensor, untouched[name]) for name, tensor in model.state_dict().items())
    for step in range(2):
        values = sent(seed + step)
        model.calls.clear()
        stand.pull(values)
        assert stand.sync.transport.sent_bytes == 0
        assert {name for call in model.calls for name in call} == OWN
        expected.load_weights(values.items())
        assert same(model, expected)

        assert stand.differences() == []  # of gate, as the model holds it
        assert same(model, expected)


def test_a_trainer_that_holds_wider_is_rounded_to_what_is_sent() -> None:
    model = Toy()
    stand = Stand(model, layout_of(SHAPES, dtype=torch.bfloat16), sent(0))
    stand.sync.update_engine()
    assert torch.equal(model.down, sent(0)["down"].T.bfloat16().float())
    assert torch.equal(model.embed[:5], sent(0)["embed"].bfloat16().float())
    assert stand.differences() == []


def test_padding_is_filled_again_though_its_memory_was_lost_and_a_pull_out_of_turn_says_so() -> None:
    stand = Stand(Toy())
    stand.sync.update_engine()
    assert not stand.model.embed[5:].any() and len(stand.model.embed) > 5
    with pytest.raises(RuntimeError, match="the number of a pull must be 2, as 1 are done, got 3"):
        puller.kept(stand.model).pull(3, 0)
    with pytest.raises(RuntimeError, match="the number of a pull must be 2, as 1 are done, got 1"):
        puller.kept(stand.model).pull(1, 0)
    stand.model.embed.data.fill_(float("nan"))  # as after the engine's memory was released
    stand.sync.update_engine()
    assert not stand.model.embed[5:].any() and stand.differences() == []


def test_a_parameter_that_was_replaced_is_filled_all_the_same_also_if_a_check_noticed_it() -> None:
    """The check traces anew, so the pull finds a trace that holds, but its copies still go to the old tensor."""
    model, expected = Toy(), Toy()
    stand = Stand(model)
    stand.pull(sent(1))
    old = model.down
    model.down = nn.Parameter(torch.zeros(6, 4), requires_grad=False)
    model.qkv.data = torch.zeros(8, 4)
    stand.pull(sent(2))
    expected.load_weights(sent(2).items())
    assert same(model, expected)
    assert not torch.equal(old, model.down)
    model.down.data = torch.zeros(6, 4)
    assert stand.differences() == ["down: 24 of 24 elements on rank 0"]
    stand.pull(sent(3))
    assert stand.differences() == []


def test_two_syncs_of_one_engine_do_not_take_turns() -> None:
    """The second one's plan reads the second trainer's memory, and the first one's next number may fit it by chance."""
    one = Stand(Toy())
    one.pull(sent(1))
    other = Stand(one.model, values=sent(3))
    other.pull(sent(3))
    with pytest.raises(RuntimeError, match="use one WeightSync for each engine"):
        one.pull(sent(1))
    one.sync.transport.close()
    other.pull(sent(4))
    assert other.differences() == []
    other.sync.transport.close()
    one.pull(sent(5))
    assert one.differences() == []


def test_two_pulls_at_once_are_refused() -> None:
    stand = Stand(Toy())
    stand.sync.update_engine()

    class Impatient(InProcessEngine):
        def ask(self, function: object, argument: object = None) -> object:
            stand.sync.update_engine()
            raise AssertionError("the second pull was let in")

    stand.sync.transport.engine = Impatient(stand.model)
    with pytest.raises(RuntimeError, match="a sync must have ended before the next begins"):
        stand.sync.update_engine()


def test_a_plan_with_a_region_shifted_by_a_row_is_caught_by_the_comparison(monkeypatch: pytest.MonkeyPatch) -> None:
    stand = Stand(Toy())
    right = puller.regions

    def shifted(*given: Any) -> Iterator[Region]:
        for number, region in enumerate(right(*given)):
            is_q = given[1] == (4, 4) and number == 0
            yield replace(region, source=region.source + 4, axes=((12, 1, 1),)) if is_q else region

    monkeypatch.setattr(puller, "regions", shifted)
    stand.sync.update_engine()
    monkeypatch.undo()
    assert stand.differences() == ["q: 16 of 16 elements on rank 0"]


def test_memory_that_cannot_be_opened_names_its_rank(monkeypatch: pytest.MonkeyPatch) -> None:
    stand = Stand(Toy())
    export = puller.OpenShards._open
    monkeypatch.setattr(puller.OpenShards, "_open", lambda self, handle, nbytes: export(self, "/proc/0/fd/0", nbytes))
    with pytest.raises(RuntimeError, match="the memory of trainer rank 0 cannot be opened: .*No such file"):
        stand.sync.update_engine()


@pytest.mark.parametrize("function", [puller.plan, puller.prepare, puller.pull])
@pytest.mark.parametrize("answered", [False, True])
def test_after_a_failure_the_next_pull_is_whole(function: Callable[..., object], answered: bool) -> None:
    """Whether the scheduler has done what was asked before it failed, or not; twice, so that nothing is counted
    wrong."""
    model, expected = Toy(), Toy()
    stand = Stand(model)

    class Failing(InProcessEngine):
        def ask(self, asked: object, argument: object = None) -> object:
            if asked is function:
                if answered:
                    super().ask(function, argument)
                raise RuntimeError("out of paper")
            return super().ask(asked, argument)  # type: ignore[arg-type]

    for seed in (1, 2):
        stand.sync.transport.engine = Failing(model)
        stand.sync.transport.close()
        with pytest.raises(RuntimeError, match="out of paper"):
            stand.pull(sent(0))
        stand.sync.transport.engine = InProcessEngine(model)
        for each in (seed, seed + 10):
            stand.pull(sent(each))
            expected.load_weights(sent(each).items())
            assert same(model, expected) and stand.differences() == []


def test_what_is_released_is_opened_again_and_a_loader_that_raises_fails_one_pull() -> None:
    def refuse(weights: object) -> None:
        raise RuntimeError("out of paper")

    model, expected = Toy(), Toy()
    stand = Stand(model)
    stand.pull(sent(1))
    stand.sync.transport.close()
    kept = puller.kept(model)
    assert (kept.copies, kept.shards._maps, kept.staging._maps) == ([], [], []), "nothing is held open"
    stand.sync.transport.close()  # twice does no harm
    stand.pull(sent(2))
    expected.load_weights(sent(2).items())
    assert same(model, expected)
    with pytest.MonkeyPatch.context() as patch, pytest.raises(RuntimeError, match="out of paper"):
        patch.setattr(model, "load_weights", refuse)
        stand.pull(sent(3))
    stand.pull(sent(4))
    expected.load_weights(sent(4).items())
    assert same(model, expected)


class PostLoading(Toy):
    """Derives tensors in a separate step, as SGLang's DeepSeek does."""

    def __init__(self) -> None:
        super().__init__()
        self.derived = 0

    def load_weights(self, weights: Iterable[tuple[str, torch.Tensor]]) -> None:
        pairs = dict(weights)
        held = pairs.pop("kv_b", None)
        super().load_weights(pairs.items())
        if held is not None:
            self.kv_b.data.copy_(held)
            self.post_load_weights()

    def post_load_weights(self) -> None:
        self.derived += 1
        self.w_kc = (self.kv_b.data * 2).T.contiguous()


def test_what_only_the_post_load_step_derives_is_copied_and_derived_once() -> None:
    stand = Stand(PostLoading())
    stand.sync.loader.trace()
    assert stand.model.derived == 0  # type: ignore[attr-defined]
    for seed in (1, 2):  # a derived tensor that is made anew is no reason to trace again
        stand.model.calls.clear()
        stand.pull(sent(seed))
        assert stand.model.calls == [] and stand.model.derived == seed  # type: ignore[attr-defined]
        assert torch.equal(stand.model.w_kc, (sent(seed)["kv_b"] * 2).T)
    stand.model.w_kc = torch.zeros(2, 6)
    assert stand.differences() == ["w_kc, which the engine computes as it loads: 12 of 12 elements on rank 0"]


def test_a_replaced_tensor_that_the_loader_sets_is_loaded_by_the_loader() -> None:
    """A copy into a tensor that the loader then puts in the parameter's place does not last."""

    class Replacing(Toy):
        def load_weights(self, weights: Iterable[tuple[str, torch.Tensor]]) -> None:
            for name, loaded in weights:
                if name == "scale":
                    fresh = torch.empty(4)
                    fresh.copy_(loaded)
                    self.scale = fresh
                else:
                    super().load_weights([(name, loaded)])

    stand = Stand(Replacing(), values={"scale": sent(0)["scale"]})
    stand.pull({"scale": sent(1)["scale"]})
    assert torch.equal(stand.model.scale, sent(1)["scale"])


def test_a_broadcast_scale_is_compared() -> None:
    model = Toy()
    model.load_weights = lambda weights: [model.scale.copy_(loaded) for _, loaded in weights]  # type: ignore
    stand = Stand(model, values={"scale": torch.full((1,), 7.0)})
    stand.sync.update_engine()
    assert model.scale.tolist() == [7.0] * 4
    assert stand.differences() == []
    model.scale[2] = 1.0  # type: ignore[operator, index]
    assert stand.differences() == ["scale: 1 of 4 elements on rank 0"]
