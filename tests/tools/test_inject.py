"""Faults on purpose, on stand-ins of a run's parts; with real runs they are in tests/tools/watchdog/test_matrix.py."""

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from harness.config.schema import Config, Run
from harness.rollout.schedulers import SchedulerChannel
from harness.runtime.errors import UnsupportedEnvironment
from harness.tools import inject
from harness.tools.inject import InjectedFault, Injector, LateRank

NAME = "model.layers.0.mlp.down_proj.weight"


def injector_of(*texts: str, rank: int = 0, **parts: Any) -> tuple[Injector, list[str]]:
    announced: list[str] = []
    injector = Injector(lambda: announced.append("announced"))
    injector.launched(Config(run=Run(inject=texts)), SimpleNamespace(rank=rank))  # type: ignore[arg-type]
    for name, part in parts.items():
        injector.built(name, part)
    return injector, announced


def sync_of(transport: Any = None) -> Any:
    tensors = {"empty": torch.zeros(0), NAME: torch.ones(2, 3)}
    return SimpleNamespace(weights=SimpleNamespace(tensors=tensors), transport=transport)


def test_a_fault_happens_once_at_its_phase_and_step_and_is_announced_first() -> None:
    injector, announced = injector_of("exception@sync:0:1", "exception@generate:1")
    injector.phase_begins("sync", 0)
    injector.phase_begins("generate", 1)  # of rank 1
    with pytest.raises(InjectedFault, match="exception@sync:0:1"):
        injector.phase_begins("sync", 1)
    assert announced == ["announced"]
    injector.phase_begins("sync", 1)


def test_a_late_rank_is_delayed_before_others_know_of_its_phase(monkeypatch: pytest.MonkeyPatch) -> None:
    slept: list[float] = []
    monkeypatch.setattr(inject.time, "sleep", slept.append)
    injector, announced = injector_of("slow@generate")
    for observer in (LateRank(injector), injector):
        observer.phase_begins("generate", 0)
    assert len(slept) == 1 and not announced


def test_a_wrong_shape_is_sent_in_one_phase_only() -> None:
    sync = sync_of()
    injector, _ = injector_of("wrong-shape@sync", sync=sync)
    injector.phase_begins("sync", 0)
    assert sync.weights.tensors[NAME].shape == (3, 3)
    injector.phase_ends("sync", 0)
    assert sync.weights.tensors[NAME].shape == (2, 3)


def test_a_weight_and_a_gradient_become_nan() -> None:
    model = torch.nn.Linear(2, 2)
    actor = SimpleNamespace(model=model, after_backward=[], loss_scale=1.0)
    sync = sync_of()
    injector, _ = injector_of("nan-weight@sync", "nan-gradient@update_actor", sync=sync, actor=actor)
    injector.phase_begins("sync", 0)
    assert sync.weights.tensors[NAME].isnan().sum() == 1
    injector.phase_begins("update_actor", 0)
    model(torch.ones(1, 2)).sum().backward()
    [spoil] = actor.after_backward
    spoil()
    assert model.weight.grad is not None and model.weight.grad.isnan().sum() == 1 and not actor.after_backward


def test_a_dropped_bucket_is_zeros_on_its_way_alone() -> None:
    seen: list[torch.Tensor] = []
    sync = sync_of()
    sync.weights.buckets = [SimpleNamespace(pieces=[SimpleNamespace(of=NAME)])]
    sync.transport = SimpleNamespace(send=lambda weights: seen.append(weights.tensors[NAME]), close=lambda: None)
    injector, _ = injector_of("dropped-bucket@sync", sync=sync)
    injector.phase_begins("sync", 0)
    sync.transport.send(sync.weights)
    sync.transport.close()
    assert not seen[0].any() and sync.weights.tensors[NAME].all()


def test_the_next_request_to_the_scheduler_is_lost() -> None:
    """And its answer is waited for."""
    waited: list[str] = []
    connection = SimpleNamespace(send_bytes=pytest.fail, recv_bytes=lambda: waited.append("for an answer"))
    channel = SchedulerChannel(None, None, Path(), Path())  # type: ignore[arg-type]
    sync = sync_of()
    sync.engine = SimpleNamespace(_channel=channel)
    injector, _ = injector_of("lost-message@sync", sync=sync)
    injector.phase_begins("sync", 0)
    channel._connection = connection  # type: ignore[assignment]
    channel._request(max, None)
    assert waited == ["for an answer"]


@pytest.mark.parametrize(("largest", "refused"), [(1 << 60, False), (0, True)])
def test_a_large_disk_is_not_filled(
    largest: int, refused: bool, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(inject, "LARGEST_DISK", largest)
    injector, _ = injector_of("full-disk@sync")
    run: Any = SimpleNamespace(folder=tmp_path)
    if not refused:
        injector.met(run)
        return
    with pytest.raises(UnsupportedEnvironment, match=r"run\.inject has full-disk"):
        injector.met(run)
