"""The scheduler's end of a link, with a small model in place of SGLang's and the trainer's end in the same process."""

import json
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from harness.rollout.engine_errors import PeerGone
from harness.weights.stream.slots import SLOTS, Layout, SlotConnection, StreamListener, slot_bytes, stamp
from harness.weights.worker.reader import CLOSE, COMPARE, LOAD, OPEN, STREAM, LoadCoverage, SlotReader, stream
from tests.weights.toy_model import CPU, OWN, SHAPES, Toy, ends, layout_of, same, sent


def reader_of(model: Toy, layout: Layout, folder: Path) -> tuple[SlotReader, SlotConnection]:
    writer, link = ends(folder, layout)
    reader = SlotReader(model, link, layout, CPU)
    reader.make_plans()
    return reader, writer


def beside(work: Callable[[], Any], trainer: Callable[[], None]) -> Any:
    """work() in this thread while trainer() runs in another; its value, and no failure of the other is lost."""
    failed: list[BaseException] = []

    def run() -> None:
        try:
            trainer()
        except BaseException as error:
            failed.append(error)

    thread = threading.Thread(target=run)
    thread.start()
    try:
        value = work()
    finally:
        thread.join(20)
    assert not thread.is_alive() and not failed, failed
    return value


def feed(link: SlotConnection, layout: Layout, values: Mapping[str, torch.Tensor], first: int = 0) -> None:
    """As WeightLink.load does."""
    for index, bucket in enumerate(layout):
        if index >= SLOTS:
            assert link.receive() == index - SLOTS
        slot = link.slots[index % SLOTS]
        stamp(slot).fill_(first + index)
        for entry in bucket:
            entry.view(slot).copy_(values[entry.name])
        link.send(index)
    for index in range(max(0, len(layout) - SLOTS), len(layout)):
        assert link.receive() == index


def compared(reader: SlotReader, link: SlotConnection, layout: Layout, values: Mapping[str, torch.Tensor]) -> Any:
    """(what differs, what is stale) of a model against these values."""
    return beside(lambda: reader.compare(0), lambda: feed(link, layout, values))


@given(st.permutations(list(SHAPES)), st.integers(1, 4), st.integers(0, 100))
@settings(max_examples=15, deadline=None)
def test_a_load_gives_what_the_models_own_loader_gives_and_compares_equal(
    tmp_path_factory: pytest.TempPathFactory, names: list[str], per_bucket: int, seed: int
) -> None:
    layout = layout_of(names, per_bucket)
    model, expected = Toy(seed), Toy(seed)
    untouched = dict(Toy(seed).state_dict())
    reader, writer = reader_of(model, layout, tmp_path_factory.mktemp("door"))
    assert all(torch.equal(tensor, untouched[name]) for name, tensor in model.state_dict().items())
    for step in range(2):
        values = sent(seed + step)
        model.calls.clear()
        seconds = beside(lambda: reader.load(0), lambda values=values: feed(writer, layout, values))  # type: ignore[misc]
        assert seconds.keys() == {"wait", "load"}
        assert step or {name for call in model.calls for name in call} == OWN
        expected.load_weights(values.items())
        assert same(model, expected)

        assert compared(reader, writer, layout, values) == ({}, [])  # of gate, as the model holds it
        assert same(model, expected)


def test_one_changed_element_is_found_alone(tmp_path: Path) -> None:
    layout = layout_of(SHAPES, 2)
    model = Toy()
    reader, writer = reader_of(model, layout, tmp_path / "door")
    values = sent(0)
    beside(lambda: reader.load(0), lambda: feed(writer, layout, values))
    model.qkv.data[5, 1] += 1  # the second row of k
    assert compared(reader, writer, layout, values) == ({"k": (1, 8)}, [])


def test_what_the_engine_does_not_hold_is_not_compared(tmp_path: Path) -> None:
    layout = layout_of(["q", "k", "v", "unheard_of"], 9)
    reader, writer = reader_of(Toy(), layout, tmp_path / "door")
    assert compared(reader, writer, layout, sent(0) | {"unheard_of": torch.ones(2)})[0].keys() == {"q", "k", "v"}


def test_a_parameter_that_was_replaced_is_filled_all_the_same(tmp_path: Path) -> None:
    layout = layout_of(SHAPES, 1)
    model, expected = Toy(), Toy()
    reader, writer = reader_of(model, layout, tmp_path / "door")
    beside(lambda: reader.load(0), lambda: feed(writer, layout, sent(1)))
    old = model.down
    model.down = nn.Parameter(torch.zeros(6, 4), requires_grad=False)
    model.qkv.data = torch.zeros(8, 4)
    beside(lambda: reader.load(0), lambda: feed(writer, layout, sent(2)))
    expected.load_weights(sent(2).items())
    assert same(model, expected)
    assert not torch.equal(old, model.down)


def test_a_derived_tensor_that_is_made_anew_is_no_reason_to_plan_again(tmp_path: Path) -> None:
    layout = layout_of(SHAPES, 3)
    model = Toy()
    reader, writer = reader_of(model, layout, tmp_path / "door")
    for seed in range(2):
        model.calls.clear()
        beside(lambda: reader.load(0), lambda seed=seed: feed(writer, layout, sent(seed)))  # type: ignore[misc]
    assert {name for call in model.calls for name in call} == OWN


def test_a_derived_tensor_that_is_stale_is_found_and_derived_anew(tmp_path: Path) -> None:
    layout = layout_of(SHAPES, 3)
    model = Toy()
    reader, writer = reader_of(model, layout, tmp_path / "door")
    beside(lambda: reader.load(0), lambda: feed(writer, layout, sent(1)))
    right = model.w_kc.clone()
    model.w_kc = torch.randn(2, 6)
    for stale in (["w_kc"], []):
        assert compared(reader, writer, layout, sent(1)) == ({}, stale)
        assert torch.equal(model.w_kc, right)


def arrival(layout: Layout, folder: Path, model: Toy | None = None) -> LoadCoverage:
    reader, _ = reader_of(model or Toy(), layout, folder)
    found = reader.coverage(1)
    assert found.rank == 1 and len(found.regions) == len(layout)
    return found


def test_an_arrival_of_all_that_the_model_wants(tmp_path: Path) -> None:
    found = arrival(layout_of(SHAPES, 2), tmp_path / "door")
    assert found.filled == {
        **{name: [name] for name in ("embed", "kv_b", "down", "gate", "scale")},
        "qkv": ["q", "k", "v"],
        "q_and_kv_a": ["q_a", "kv_a"],
    }
    assert (found.unknown, found.errors, found.opaque, found.unfilled) == ([], {}, [], [])
    regions = {region.name: region for bucket in found.regions for region in bucket}
    assert regions.keys() == SHAPES.keys()
    assert (regions["gate"].dtype, regions["gate"].target_dtype) == (torch.float32, torch.bfloat16)
    assert (regions["down"].shape, regions["down"].stride) == ((6, 4), (1, 6))


def test_an_arrival_names_what_is_unknown_unfilled_and_refused(tmp_path: Path) -> None:
    names = [name for name in SHAPES if name not in ("down", "embed")]
    found = arrival(layout_of([*names, "unheard_of"], 2), tmp_path / "one")
    assert (found.unknown, found.unfilled, found.errors) == (["unheard_of"], ["embed", "down"], {})
    assert found.filled.keys() == {"qkv", "q_and_kv_a", "kv_b", "gate", "scale"}

    found = arrival(layout_of(SHAPES, 9, SHAPES | {"gate": (4, 4), "k": (2, 3)}), tmp_path / "other")
    assert found.errors.keys() == {"gate", "k"}
    assert found.errors["gate"] == "AssertionError: shapes differ" and "size" in found.errors["k"]
    assert found.unknown == []


def test_half_of_what_fuses_arrives_nowhere(tmp_path: Path) -> None:
    found = arrival(layout_of([name for name in SHAPES if name != "kv_a"], 9), tmp_path / "door")
    assert (found.unknown, found.unfilled) == (["q_a"], ["q_and_kv_a"])


def test_an_error_that_only_a_whole_group_raises_blames_the_group(tmp_path: Path) -> None:
    class Picky(Toy):
        def load_weights(self, weights: Iterable[tuple[str, torch.Tensor]]) -> None:
            pairs = list(weights)
            if {name for name, _ in pairs} >= {"q", "k"}:
                raise ValueError("too many")
            super().load_weights(pairs)

    found = arrival(layout_of(SHAPES, 9), tmp_path / "door", Picky())
    assert found.errors == {"q, k, v": "ValueError: too many"}


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
    turned: bool, tmp_path: Path
) -> None:
    """It passes no dispatch, so trace_loader() does not see it; left so, the parameter would be the slot itself."""
    model = PuttingInPlace(turned)
    before = model.down.data
    found = arrival(layout_of(SHAPES, 9), tmp_path / "door", model)
    said = "it puts the tensor it is given in the place of its down instead of copying it"
    assert found.errors == {"down": said}
    assert model.down.data_ptr() == before.data_ptr()
    assert all(torch.equal(tensor, Toy().state_dict()[name]) for name, tensor in model.state_dict().items())
    assert "down" not in found.filled and found.unfilled == []  # not all can be told


def test_what_is_computed_with_is_opaque_and_loaded_by_the_models_own_loader(tmp_path: Path) -> None:
    class Doubling(Toy):
        def load_weights(self, weights: Iterable[tuple[str, torch.Tensor]]) -> None:
            super().load_weights((name, loaded * 2 if name == "scale" else loaded) for name, loaded in weights)

    layout = layout_of(SHAPES, 2)
    model = Doubling()
    assert arrival(layout, tmp_path / "one", model).opaque == ["scale"]
    reader, writer = reader_of(model, layout, tmp_path / "other")
    beside(lambda: reader.load(0), lambda: feed(writer, layout, sent(1)))
    assert torch.equal(model.scale, sent(1)["scale"] * 2)  # type: ignore[arg-type]


def test_comparing_does_not_change_what_is_computed_with(tmp_path: Path) -> None:
    class Converting(Toy):
        def load_weights(self, weights: Iterable[tuple[str, torch.Tensor]]) -> None:
            super().load_weights((name, loaded.double() if name == "scale" else loaded) for name, loaded in weights)

    layout = layout_of(SHAPES, 2)
    model = Converting()
    reader, writer = reader_of(model, layout, tmp_path / "door")
    beside(lambda: reader.load(0), lambda: feed(writer, layout, sent(1)))
    assert torch.equal(model.scale, sent(1)["scale"])  # type: ignore[arg-type]
    compared(reader, writer, layout, sent(2))
    assert torch.equal(model.scale, sent(1)["scale"])  # type: ignore[arg-type]


def test_a_replaced_tensor_that_the_loader_sets_is_loaded_by_the_loader(tmp_path: Path) -> None:
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

    layout = layout_of(["scale"], 1)
    model = Replacing()
    reader, writer = reader_of(model, layout, tmp_path / "door")
    beside(lambda: reader.load(0), lambda: feed(writer, layout, sent(1)))
    assert torch.equal(model.scale, sent(1)["scale"])


def test_a_broadcast_scale_is_compared(tmp_path: Path) -> None:
    layout = layout_of(["scale"], 1, {"scale": (1,)})
    reader, writer = reader_of(Toy(), layout, tmp_path / "door")
    reader.model.load_weights = lambda weights: [reader.model.scale.copy_(loaded) for _, loaded in weights]
    reader.make_plans()
    values = {"scale": torch.full((1,), 7.0)}
    beside(lambda: reader.load(0), lambda: feed(writer, layout, values))
    assert reader.model.scale.tolist() == [7.0] * 4
    assert compared(reader, writer, layout, values) == ({}, [])
    reader.model.scale[2] = 1.0
    assert compared(reader, writer, layout, values) == ({"scale": (1, 4)}, [])


def test_a_slot_that_was_written_too_early_is_caught(tmp_path: Path) -> None:
    layout = layout_of(SHAPES, 1)
    reader, writer = reader_of(Toy(), layout, tmp_path / "door")

    def careless() -> None:
        for index in range(len(layout)):
            stamp(writer.slots[index % SLOTS]).fill_(index)
            writer.send(index)

    careless()  # all of them before the reader has begun
    with pytest.raises(
        RuntimeError, match=rf"bucket 0 was not in its slot .* overwritten \(\+{len(layout) - 1} buckets away\)"
    ):
        reader.load(0)


def test_buckets_out_of_order_are_not_loaded(tmp_path: Path) -> None:
    reader, writer = reader_of(Toy(), layout_of(SHAPES, 2), tmp_path / "door")
    writer.send(1)
    with pytest.raises(PeerGone, match="sent 1 where bucket 0 was due"):
        reader.load(0)


@pytest.fixture
def alone(tmp_path: Path) -> Iterator[None]:
    """This process is the only rank."""
    dist.init_process_group("gloo", init_method=f"file://{tmp_path}/store", rank=0, world_size=1)
    yield
    dist.destroy_process_group()


def ask(model: Toy, what: str, folder: Path, **details: int) -> None:
    """As SGLang calls a custom weight loader."""
    stream(model, [(json.dumps({"do": what, "folder": str(folder)} | details), torch.zeros(1))])


def opened(model: Toy, layout: Layout, folder: Path) -> tuple[StreamListener, SlotConnection]:
    """The writer's end of a link that the loader was asked to open."""
    door = StreamListener(folder, 0)
    links: list[SlotConnection] = []
    beside(
        lambda: ask(model, OPEN, folder), lambda: links.append(door.offer(slot_bytes(4096), CPU, layout, lambda: False))
    )
    return door, links[0]


def test_the_loader_opens_loads_compares_and_closes(alone: None, tmp_path: Path) -> None:
    layout, model, expected = layout_of(SHAPES, 2), Toy(), Toy()
    door, link = opened(model, layout, tmp_path / "door")
    kind, found = link.receive()
    assert kind == "coverage" and found.unfilled == []
    beside(lambda: ask(model, LOAD, tmp_path, first=7), lambda: feed(link, layout, sent(5), first=7))
    assert link.receive()[0] == "done"
    expected.load_weights(sent(5).items())
    assert same(model, expected)
    beside(lambda: ask(model, COMPARE, tmp_path, first=9), lambda: feed(link, layout, sent(5), first=9))
    assert link.receive() == ("done", ({}, []))
    ask(model, CLOSE, tmp_path)
    with pytest.raises(PeerGone):
        link.receive()
    # What fingerprints need stays: they are asked for after syncs by every transport.
    assert [name for name in vars(model) if "harness" in name] == ["_harness_fingerprints"]
    door.close()


def test_a_failure_is_answered_not_raised(alone: None, tmp_path: Path) -> None:
    layout, model = layout_of(SHAPES, 2), Toy()
    door, link = opened(model, layout, tmp_path / "door")
    link.receive()
    for index in range(len(layout)):
        stamp(link.slots[index % SLOTS]).fill_(index)
        link.send(index)
    ask(model, LOAD, tmp_path, first=0)
    answers = [link.receive() for _ in range(len(layout) + 1)]
    assert answers[-1][0] == "failed" and "was not in its slot" in answers[-1][1]
    door.close()


def test_a_scheduler_outlives_a_trainer_that_never_opened_its_door(alone: None, tmp_path: Path) -> None:
    ask(Toy(), OPEN, tmp_path / "nowhere")


def test_a_scheduler_outlives_a_trainer_that_died(alone: None, tmp_path: Path) -> None:
    model = Toy()
    reader, writer = reader_of(model, layout_of(SHAPES, 2), tmp_path / "door")
    model._harness_weight_stream = reader  # type: ignore[assignment]
    writer.close()
    ask(model, LOAD, tmp_path, first=0)
    ask(model, COMPARE, tmp_path, first=0)


def test_the_name_that_sglang_imports_it_by() -> None:
    module, _, name = STREAM.rpartition(".")
    assert (module, name) == (stream.__module__, stream.__name__)
