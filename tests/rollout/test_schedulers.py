"""What run_in_scheduler and a stage do in a scheduler: a small model stands in for SGLang's, and get_rank is set. Real
engines run them in tests/weights.
"""

import json
import pickle
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

from harness.rollout.schedulers import LOADER, answer, answer_file, load_own, run_in_scheduler


class Stage(nn.Module):
    """Loads by name, as SGLang's models do, and refuses a shape that does not fit."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(4), requires_grad=False)

    def load_weights(self, named: Sequence[tuple[str, torch.Tensor]]) -> None:
        for name, tensor in named:
            self.get_parameter(name).copy_(tensor)


def at_rank(monkeypatch: pytest.MonkeyPatch, folder: Path, rank: int) -> None:
    monkeypatch.setattr(dist, "get_rank", lambda: rank)
    monkeypatch.setattr(tempfile, "tempdir", str(folder))


def carried(values: Sequence[torch.Tensor], tp: int) -> list[tuple[str, torch.Tensor]]:
    """What one tp rank's schedulers of all stages are given: each stage's own payload by value, padded to one size."""
    payloads = [pickle.dumps([("weight", value)]) for value in values]
    size = max(map(len, payloads))
    whole = b"".join(payload.ljust(size, b"\0") for payload in payloads)
    message = json.dumps({"name": "harness-test", "tp": tp, "flattened": False, "size": size})
    return [(message, torch.frombuffer(bytearray(whole), dtype=torch.uint8))]


@pytest.mark.parametrize(("rank", "tp", "stage"), [(0, 1, 0), (1, 1, 1), (1, 2, 0), (2, 2, 1), (5, 2, 2)])
def test_each_stage_loads_its_own(
    rank: int, tp: int, stage: int, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    at_rank(monkeypatch, tmp_path, rank)
    model = Stage()
    load_own(model, carried([torch.full((4,), float(index)) for index in range(1, 4)], tp))
    assert torch.equal(model.weight, torch.full((4,), stage + 1.0))
    assert answer_file("harness-test", rank).read_text() == ""


def test_a_stage_that_cannot_load_says_why(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    at_rank(monkeypatch, tmp_path, 1)
    load_own(Stage(), carried([torch.zeros(4), torch.zeros(3)], 1))
    assert answer_file("harness-test", 1).read_text().startswith("RuntimeError: The size of tensor a (4) must match")


def test_a_scheduler_says_that_it_has_come_so_far(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    at_rank(monkeypatch, tmp_path, 3)
    answer(Stage(), [("harness-test", torch.zeros(1))])
    assert [file.name for file in tmp_path.iterdir()] == ["harness-test-3.answer"]


def test_the_name_says_which_function_runs_and_its_message(monkeypatch: pytest.MonkeyPatch) -> None:
    called: list[Any] = []
    monkeypatch.setattr("harness.rollout.schedulers.answer", lambda *given: called.append(given))
    tensor = torch.zeros(1)
    run_in_scheduler("model", [("harness.rollout.schedulers.answer a message", tensor)])
    assert called == [("model", [("a message", tensor)])]


@pytest.mark.parametrize("path", ["os.system", "harnesses.x"])
def test_no_function_from_elsewhere_runs(path: str) -> None:
    with pytest.raises(ValueError, match="must be one of harness"):
        run_in_scheduler("model", [(f"{path} true", torch.zeros(1))])


def test_sglang_finds_it_by_its_path() -> None:
    assert f"{run_in_scheduler.__module__}.{run_in_scheduler.__name__}" == LOADER
