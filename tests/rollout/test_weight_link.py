"""The trainer's end of a link, with the scheduler's on a thread of this process in place of an engine's call."""

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

from harness.rollout.slots import SLOTS, Layout, PeerGone
from harness.rollout.verl_engine import EngineFailed
from harness.rollout.weight_link import WeightLink
from harness.rollout.worker_stream import CLOSE, LOAD, Reader
from tests.rollout.toy_model import CPU, SHAPES, Toy, ends, layout_of, same, sent

ENGINE: Any = SimpleNamespace(group=SimpleNamespace(rank=0, ranks=(0,)))


@dataclass
class InProcess(WeightLink):
    """A link whose calls run on a thread, as the engine's run in its schedulers; answers as worker_stream.stream does."""

    reader: Reader | None = None

    def _call(self, what: str, meanwhile: Callable[[Callable[[], bool]], Any], flush_cache: bool = False) -> Any:
        assert flush_cache == (what == LOAD)
        thread = threading.Thread(target=self._serve, args=(what,), daemon=True)
        thread.start()
        try:
            return meanwhile(lambda: not thread.is_alive())
        finally:
            thread.join(10)

    def _serve(self, what: str) -> None:
        assert self.reader is not None
        if what == CLOSE:
            self.reader.link.close()
            return
        try:
            self.reader.link.send(("done", self.reader.load() if what == LOAD else self.reader.read_back()))
        except OSError:  # PeerGone is one, and so is a connection that the test has closed
            return
        except Exception as error:
            self.reader.link.send(("failed", f"{type(error).__name__}: {error}"))


def link_to(model: Any, layout: Layout, folder: Path) -> InProcess:
    writer, reading = ends(folder, layout)
    reader = Reader(model, reading, layout, CPU)
    reader.make_plans()
    return InProcess(ENGINE, CPU, layout, writer, (reader.arrival(0),), reader=reader)


def filler(layout: Layout, values: dict[str, torch.Tensor]) -> Callable[[int, torch.Tensor], None]:
    def fill(index: int, slot: torch.Tensor) -> None:
        for entry in layout[index]:
            entry.view(slot).copy_(values[entry.name])

    return fill


@given(st.permutations(list(SHAPES)), st.integers(1, 9), st.integers(0, 100))
@settings(max_examples=10, deadline=None)
def test_what_is_filled_is_loaded_and_read_back(
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
        found: dict[str, torch.Tensor] = {}

        def compare(index: int, slot: torch.Tensor, found: dict[str, torch.Tensor] = found) -> None:
            found.update({entry.name: entry.view(slot).clone() for entry in layout[index]})

        assert link.read_back(compare) == []
        values["gate"] = values["gate"].bfloat16().float()
        assert all(torch.equal(found[name], tensor) for name, tensor in values.items())
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

    class Noting(Reader):
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
