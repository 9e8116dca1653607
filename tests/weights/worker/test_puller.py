"""The scheduler's end of a pull, with a small model in place of SGLang's and the trainer's shards in the same process."""

from collections.abc import Callable, Iterable, Iterator

import pytest
import torch
import torch.distributed as dist
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from harness.tools.verification.readback import compare
from harness.trainer.offload import local
from harness.weights.groups import fusing_groups
from harness.weights.names import CheckpointTensor
from harness.weights.worker import puller
from harness.weights.worker.puller import LoadCoverage
from tests.weights.toy_model import (
    OWN,
    SHAPES,
    InProcessEngine,
    Toy,
    layout_of,
    link_to,
    live_name,
    live_of,
    move,
    same,
    sent,
)


@pytest.fixture(autouse=True, scope="module")
def alone(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """This process is the only rank."""
    store = tmp_path_factory.mktemp("store")
    dist.init_process_group("gloo", init_method=f"file://{store}/store", rank=0, world_size=1)
    yield
    dist.destroy_process_group()


class Stand:
    """A model, the trainer's tensors for it, and the pulls between them."""

    def __init__(
        self,
        model: Toy,
        layout: tuple[CheckpointTensor, ...] | None = None,
        values: dict[str, torch.Tensor] | None = None,
    ) -> None:
        self.model = model
        values = values or sent(0)
        self.live = live_of(values)
        self.link = link_to(
            model,
            self.live,
            layout or layout_of(values, {name: tuple(tensor.shape) for name, tensor in values.items()}),
        )

    def pull(self, values: dict[str, torch.Tensor]) -> None:
        """Change the trainer's tensors in place, as an optimizer does, and pull."""
        for name, tensor in values.items():
            local(self.live[live_name(name)]).copy_(tensor)
        self.link.pull()

    def compare(self) -> object:
        """What differs, and what is stale."""
        return compare(self.link)


@given(st.permutations(list(SHAPES)), st.integers(0, 100))
@settings(max_examples=15, deadline=None)
def test_a_pull_gives_what_the_models_own_loader_gives_and_compares_equal(names: list[str], seed: int) -> None:
    model, expected = Toy(seed), Toy(seed)
    untouched = dict(Toy(seed).state_dict())
    stand = Stand(model, layout_of(names), {name: sent(0)[name] for name in names})
    stand.link.trace()
    assert all(torch.equal(tensor, untouched[name]) for name, tensor in model.state_dict().items())
    for step in range(2):
        values = sent(seed + step)
        model.calls.clear()
        stand.pull(values)
        assert stand.link.seconds > 0 and stand.link.sent_bytes == 0
        assert {name for call in model.calls for name in call} == OWN
        expected.load_weights(values.items())
        assert same(model, expected)

        assert stand.compare() == ({}, [])  # of gate, as the model holds it
        assert same(model, expected)


def test_a_trainer_that_holds_wider_is_rounded_to_what_is_sent() -> None:
    model = Toy()
    stand = Stand(model, layout_of(SHAPES, dtype=torch.bfloat16), sent(0))
    stand.link.pull()
    assert torch.equal(model.down, sent(0)["down"].T.bfloat16().float())
    assert torch.equal(model.embed[:5], sent(0)["embed"].bfloat16().float())
    assert stand.compare() == ({}, [])


def test_padding_is_filled_again_though_its_memory_was_lost() -> None:
    stand = Stand(Toy())
    stand.link.pull()
    assert not stand.model.embed[5:].any() and len(stand.model.embed) > 5
    stand.model.embed.data.fill_(float("nan"))  # as after the engine's memory was released
    stand.link.pull()
    assert not stand.model.embed[5:].any() and stand.compare() == ({}, [])


def test_one_changed_element_is_found_alone() -> None:
    stand = Stand(Toy())
    stand.link.pull()
    stand.model.qkv.data[5, 1] += 1  # the second row of k
    assert stand.compare() == ({"k": (1, 8)}, [])


def test_what_the_engine_does_not_hold_is_not_compared() -> None:
    values = {name: tensor for name, tensor in sent(0).items() if name in "qkv"} | {"unheard_of": torch.ones(2)}
    wrong, _ = compare(Stand(Toy(), values=values).link)
    assert wrong.keys() == {"q", "k", "v"}


def test_a_parameter_that_was_replaced_is_filled_all_the_same() -> None:
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


def test_a_shard_that_has_moved_is_pulled_from_where_it_is() -> None:
    model, expected = Toy(), Toy()
    stand = Stand(model)
    stand.pull(sent(1))
    for name in ("q", "k"):  # one is a shard, one is whole
        move(stand.live[live_name(name)])
    stand.pull(sent(2))
    expected.load_weights(sent(2).items())
    assert same(model, expected)


def test_a_pull_out_of_turn_says_so() -> None:
    stand = Stand(Toy())
    stand.link.pull()
    with pytest.raises(RuntimeError, match="the number of a pull must be 2, as 1 are done, got 3"):
        puller.pull(stand.model, (3, 0))
    with pytest.raises(RuntimeError, match="the number of a pull must be 2, as 1 are done, got 1"):
        puller.pull(stand.model, (1, 0))
    stand.link.pull()


def test_two_pulls_at_once_are_refused() -> None:
    stand = Stand(Toy())
    stand.link.pull()

    class Impatient(InProcessEngine):
        def ask(self, function: object, argument: object = None) -> object:
            stand.link.pull()
            raise AssertionError("the second pull was let in")

    stand.link.engine = Impatient(stand.model)  # type: ignore[assignment]
    with pytest.raises(RuntimeError, match="a sync must have ended before the next begins"):
        stand.link.pull()


def test_a_plan_with_a_region_shifted_by_a_row_is_caught_by_the_comparison(monkeypatch: pytest.MonkeyPatch) -> None:
    stand = Stand(Toy())
    stand.link.trace()
    right = puller.regions

    def shifted(*given: object) -> Iterator[object]:
        for number, region in enumerate(right(*given)):  # type: ignore[arg-type]
            is_q = given[1] == (4, 4) and number == 0
            yield puller.replace(region, source=region.source + 4, axes=((12, 1, 1),)) if is_q else region

    monkeypatch.setattr(puller, "regions", shifted)
    stand.link.pull()
    monkeypatch.undo()
    assert stand.compare() == ({"q": (16, 16)}, [])


def test_memory_that_cannot_be_opened_names_its_rank(monkeypatch: pytest.MonkeyPatch) -> None:
    stand = Stand(Toy())
    export = puller.OpenShards._open
    monkeypatch.setattr(puller.OpenShards, "_open", lambda self, handle, nbytes: export(self, "/proc/0/fd/0", nbytes))
    with pytest.raises(RuntimeError, match="the memory of trainer rank 0 cannot be opened: .*No such file"):
        stand.link.pull()


@pytest.mark.parametrize("function", [puller.trace, puller.plan, puller.prepare, puller.pull])
@pytest.mark.parametrize("answered", [False, True])
def test_after_a_failure_the_next_pull_is_whole(function: Callable[..., object], answered: bool) -> None:
    """Whether the scheduler has done what was asked before it failed, or not; twice, so that nothing is counted wrong."""
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
        stand.link.engine = Failing(model)  # type: ignore[assignment]
        stand.link.release()
        stand.link.coverage = () if function is puller.trace else stand.link.coverage
        with pytest.raises(RuntimeError, match="out of paper"):
            stand.pull(sent(0))
        stand.link.engine = InProcessEngine(model)  # type: ignore[assignment]
        for each in (seed, seed + 10):
            stand.pull(sent(each))
            expected.load_weights(sent(each).items())
            assert same(model, expected) and stand.compare() == ({}, [])


def test_a_loader_that_raises_in_the_middle_fails_the_pull_and_the_next_one_is_whole() -> None:
    def refuse(weights: object) -> None:
        raise RuntimeError("out of paper")

    model, expected = Toy(), Toy()
    stand = Stand(model)
    stand.pull(sent(1))
    with pytest.MonkeyPatch.context() as patch, pytest.raises(RuntimeError, match="out of paper"):
        patch.setattr(model, "load_weights", refuse)
        stand.pull(sent(2))
    stand.pull(sent(3))
    expected.load_weights(sent(3).items())
    assert same(model, expected)


def test_what_is_released_is_opened_again() -> None:
    model, expected = Toy(), Toy()
    stand = Stand(model)
    stand.pull(sent(1))
    stand.link.release()
    kept = puller.kept(model)
    assert (kept.copies, kept.shards._maps, kept.staging._maps) == ([], [], []), "nothing is held open"
    stand.link.release()  # twice does no harm
    stand.pull(sent(2))
    expected.load_weights(sent(2).items())
    assert same(model, expected)


def test_a_derived_tensor_that_is_stale_is_found_and_derived_anew() -> None:
    stand = Stand(Toy())
    stand.pull(sent(1))
    right = stand.model.w_kc.clone()
    stand.model.w_kc = torch.randn(2, 6)
    for stale in (["w_kc"], []):
        assert stand.compare() == ({}, stale)
        assert torch.equal(stand.model.w_kc, right)


class PostLoading(Toy):
    """Derives in a step of its own, as SGLang's DeepSeek does."""

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
    stand.link.trace()
    assert stand.model.derived == 0  # type: ignore[attr-defined]
    for seed in (1, 2):  # a derived tensor that is made anew is no reason to trace again
        stand.model.calls.clear()
        stand.pull(sent(seed))
        assert stand.model.calls == [] and stand.model.derived == seed  # type: ignore[attr-defined]
        assert torch.equal(stand.model.w_kc, (sent(seed)["kv_b"] * 2).T)
    stand.model.w_kc = torch.zeros(2, 6)
    assert stand.compare() == ({}, ["w_kc"])


def arrival(layout: tuple[CheckpointTensor, ...], model: Toy | None = None) -> LoadCoverage:
    live = {each.live_name: torch.empty(each.shape) for each in layout}
    found = puller.trace(model or Toy(), fusing_groups(layout, live))
    assert found.rank == 0 and len(found.sources) == len(fusing_groups(layout, live))
    return found


def test_an_arrival_of_all_that_the_model_wants() -> None:
    found = arrival(layout_of(SHAPES))
    assert found.filled == {
        **{name: [name] for name in ("embed", "kv_b", "down", "gate", "scale")},
        "qkv": ["k", "q", "v"],
        "q_and_kv_a": ["q_a", "kv_a"],
    }
    assert (found.unknown, found.errors, found.opaque, found.unfilled) == ([], {}, [], [])
    sources = {source.name: source for sources in found.sources for source in sources}
    assert sources.keys() == SHAPES.keys()
    assert (sources["gate"].dtype, sources["gate"].target_dtype) == (torch.float32, torch.bfloat16)
    assert (sources["down"].shape, sources["down"].stride) == ((6, 4), (1, 6))


def test_an_arrival_names_what_is_unknown_unfilled_and_refused() -> None:
    names = [name for name in SHAPES if name not in ("down", "embed")]
    found = arrival(layout_of([*names, "unheard_of"]))
    assert (found.unknown, found.unfilled, found.errors) == (["unheard_of"], ["embed", "down"], {})
    assert found.filled.keys() == {"qkv", "q_and_kv_a", "kv_b", "gate", "scale"}

    found = arrival(layout_of(SHAPES, SHAPES | {"gate": (4, 4), "k": (2, 3)}))
    assert found.errors.keys() == {"gate", "k"}
    assert found.errors["gate"] == "AssertionError: shapes differ" and "size" in found.errors["k"]
    assert found.unknown == []


def test_half_of_what_fuses_arrives_nowhere() -> None:
    found = arrival(layout_of([name for name in SHAPES if name != "kv_a"]))
    assert (found.unknown, found.unfilled) == (["q_a"], ["q_and_kv_a"])


def test_an_error_that_only_a_whole_group_raises_blames_the_group() -> None:
    class Picky(Toy):
        def load_weights(self, weights: Iterable[tuple[str, torch.Tensor]]) -> None:
            pairs = list(weights)
            if {name for name, _ in pairs} >= {"q", "k"}:
                raise ValueError("too many")
            super().load_weights(pairs)

    found = arrival(layout_of(SHAPES), Picky())
    assert found.errors == {"k, q, v": "ValueError: too many"}


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
def test_a_tensor_put_in_a_parameters_place_is_an_error_and_the_parameter_is_put_back(
    turned: bool,
) -> None:
    """It passes no dispatch, so trace_loader() does not see it; left so, the parameter would be the group's memory itself."""
    model = PuttingInPlace(turned)
    before = model.down.data
    found = arrival(layout_of(SHAPES), model)
    said = "it puts the tensor it is given in the place of its down instead of copying it"
    assert found.errors == {"down": said}
    assert model.down.data_ptr() == before.data_ptr()
    assert all(torch.equal(tensor, Toy().state_dict()[name]) for name, tensor in model.state_dict().items())
    assert "down" not in found.filled and found.unfilled == []  # not all can be told


def test_what_is_computed_with_is_opaque_and_loaded_by_the_models_own_loader() -> None:
    class Doubling(Toy):
        def load_weights(self, weights: Iterable[tuple[str, torch.Tensor]]) -> None:
            super().load_weights((name, loaded * 2 if name == "scale" else loaded) for name, loaded in weights)

    assert arrival(layout_of(SHAPES), Doubling()).opaque == ["scale"]
    stand = Stand(Doubling())
    stand.pull(sent(1))
    assert torch.equal(stand.model.scale, sent(1)["scale"] * 2)  # type: ignore[arg-type]


def test_comparing_does_not_change_what_is_computed_with() -> None:
    class Converting(Toy):
        def load_weights(self, weights: Iterable[tuple[str, torch.Tensor]]) -> None:
            super().load_weights((name, loaded.double() if name == "scale" else loaded) for name, loaded in weights)

    stand = Stand(Converting())
    stand.pull(sent(1))
    assert torch.equal(stand.model.scale, sent(1)["scale"])  # type: ignore[arg-type]
    local(stand.live[live_name("scale")]).copy_(sent(2)["scale"])
    stand.compare()
    assert torch.equal(stand.model.scale, sent(1)["scale"])  # type: ignore[arg-type]


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
    stand.link.pull()
    assert model.scale.tolist() == [7.0] * 4
    assert stand.compare() == ({}, [])
    model.scale[2] = 1.0  # type: ignore[operator, index]
    assert stand.compare() == ({"scale": (1, 4)}, [])
