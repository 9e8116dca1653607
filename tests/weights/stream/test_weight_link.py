"""The trainer's end of a link, with the scheduler's on a thread of this process in place of an engine's call."""

import json
import threading
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from harness.rollout.engine_errors import EngineFailed, PeerGone
from harness.weights.stream.slots import SLOTS, Layout, stamp
from harness.weights.stream.weight_link import WeightLink
from harness.weights.worker.reader import CLOSE, LOAD, SlotReader
from tests.weights.toy_model import CPU, SHAPES, Toy, ends, layout_of, same, sent

ENGINE: Any = SimpleNamespace(group=SimpleNamespace(rank=0, ranks=(0,)))


@dataclass
class InProcess(WeightLink):
    """A link whose calls run on a thread, as the engine's run in its schedulers; answers as worker.stream.stream does."""

    reader: SlotReader | None = None

    def _call(
        self, what: str, meanwhile: Callable[[Callable[[], bool]], Any], flush_cache: bool = False, **details: int
    ) -> Any:
        assert flush_cache == (what == LOAD)
        thread = threading.Thread(target=self._serve, args=(what,), kwargs=details, daemon=True)
        thread.start()
        try:
            return meanwhile(lambda: not thread.is_alive())
        finally:
            thread.join(10)

    def _serve(self, what: str, **details: int) -> None:
        assert self.reader is not None
        if what == CLOSE:
            self.reader.link.close()
            return
        try:
            self.reader.link.send(
                ("done", self.reader.load(**details) if what == LOAD else self.reader.compare(**details))
            )
        except OSError:  # PeerGone is one, and so is a connection that the test has closed
            return
        except Exception as error:
            self.reader.link.send(("failed", f"{type(error).__name__}: {error}"))


def link_to(model: Any, layout: Layout, folder: Path) -> InProcess:
    writer, reading = ends(folder, layout)
    reader = SlotReader(model, reading, layout, CPU)
    reader.make_plans()
    return InProcess(ENGINE, CPU, layout, writer, (reader.coverage(0),), reader=reader)


def filler(layout: Layout, values: dict[str, torch.Tensor]) -> Callable[[int, torch.Tensor], None]:
    def fill(index: int, slot: torch.Tensor) -> None:
        for entry in layout[index]:
            entry.view(slot).copy_(values[entry.name])

    return fill


@given(st.permutations(list(SHAPES)), st.integers(1, 9), st.integers(0, 100))
@settings(max_examples=10, deadline=None)
def test_what_is_filled_is_loaded_and_compared(
    tmp_path_factory: pytest.TempPathFactory, names: list[str], per_bucket: int, seed: int
) -> None:
    layout = layout_of(names, per_bucket)
    model, expected = Toy(), Toy()
    link = link_to(model, layout, tmp_path_factory.mktemp("door"))
    for step in range(2):
        values = sent(seed + step)
        link.load(filler(layout, values))
        expected.load_weights(values.items())
        assert same(model, expected)
        assert link.compare(filler(layout, values)) == ({}, [])
        values["kv_b"] = values["kv_b"] + 1
        assert link.compare(filler(layout, values)) == ({"kv_b": (12, 12)}, [])
    assert link.seconds.keys() == {"wait", "fill", "feed", "scheduler_wait", "scheduler_load"}
    assert link.seconds["feed"] >= link.seconds["wait"] + link.seconds["fill"]
    link.close()
    assert not link.link.slots


def test_a_slot_is_filled_only_when_the_bucket_before_in_it_was_read(tmp_path: Path) -> None:
    """The reader's word is recorded, and each fill looks for it."""
    layout = layout_of(SHAPES, 1)
    link = link_to(Toy(), layout, tmp_path / "door")
    assert link.reader is not None
    read: list[int] = []

    class Noting(SlotReader):
        def _say_read(self, index: int) -> None:
            read.append(index)
            super()._say_read(index)

    link.reader = Noting(link.reader.model, link.reader.link, layout, CPU)
    link.reader.make_plans()
    fill = filler(layout, sent(0))
    early: list[int] = []

    def watch(index: int, slot: torch.Tensor) -> None:
        if index >= SLOTS and index - SLOTS not in read:
            early.append(index)
        fill(index, slot)

    link.load(watch)
    assert read == list(range(len(layout))) and not early


def test_no_two_syncs_share_a_stamp(tmp_path: Path) -> None:
    layout = layout_of(SHAPES, 2)
    link = link_to(Toy(), layout, tmp_path / "door")
    stamps: list[int] = []
    fill = filler(layout, sent(0))

    def watch(index: int, slot: torch.Tensor) -> None:
        stamps.append(int(stamp(slot)))
        fill(index, slot)

    for _ in range(3):
        link.load(watch)
        link.compare(watch)
    assert len(set(stamps)) == len(stamps) == 6 * len(layout)


def test_a_sync_that_is_said_but_not_filled_is_caught_though_its_slots_hold_the_one_before(tmp_path: Path) -> None:
    """Of two buckets each has a slot of its own, which still holds the same bucket of the sync before."""
    layout = layout_of(SHAPES, 4)
    assert len(layout) == SLOTS
    link = link_to(Toy(), layout, tmp_path / "door")
    link.load(filler(layout, sent(0)))
    said: list[int] = []

    class Restamping(InProcess):
        """Says that a slot is filled, but what lies in it, its stamp too, is that of the sync before."""

        def _say_filled(self, index: int) -> None:
            stamp(self.link.slots[index % SLOTS]).fill_(1 + index)
            said.append(index)
            super()._say_filled(index)

    late = Restamping(ENGINE, CPU, layout, link.link, link.coverage, stamped=link.stamped, reader=link.reader)
    with pytest.raises(EngineFailed, match=r"bucket 0 was not in its slot .* read too early.* \(-2 buckets away\)"):
        late.load(lambda index, slot: None)
    assert said == [0, 1]


def test_the_schedulers_are_told_the_first_stamp_and_a_failed_call_breaks_the_link(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    layout = layout_of(SHAPES, 2)
    link = WeightLink(ENGINE, CPU, layout, ends(tmp_path / "door", layout)[0], ())
    told: list[dict[str, Any]] = []

    def call(engine: Any, loader: str, message: str, meanwhile: object, flush_cache: bool) -> dict[str, float]:
        told.append(json.loads(message))
        if len(told) == 3:
            raise EngineFailed("no")
        return {}

    monkeypatch.setattr("harness.weights.stream.weight_link.call_schedulers", call)
    for _ in range(2):
        link.load(filler(layout, {}))
    assert not link.broken
    with pytest.raises(EngineFailed):
        link.load(filler(layout, {}))
    assert told == [{"do": LOAD, "first": 1 + len(layout) * sync} for sync in range(3)]
    assert link.broken


def test_a_failing_scheduler_fails_the_load_by_name(tmp_path: Path) -> None:
    model = Toy()
    layout = layout_of(SHAPES, 1)
    link = link_to(model, layout, tmp_path / "door")

    def refuse(weights: object) -> None:
        raise RuntimeError("out of paper")

    model.load_weights = refuse  # type: ignore[method-assign]
    with pytest.raises(EngineFailed, match="the scheduler beside rank 0: RuntimeError: out of paper"):
        link.load(filler(layout, sent(0)))


def test_a_scheduler_that_is_gone_ends_the_load(tmp_path: Path) -> None:
    layout = layout_of(SHAPES, 1)
    link = link_to(Toy(), layout, tmp_path / "door")
    assert link.reader is not None
    link.reader.link.connection.close()
    with pytest.raises(PeerGone):
        link.load(filler(layout, sent(0)))
