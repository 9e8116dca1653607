"""What a scheduler does with the payloads of all stages; a small model stands in for SGLang's, and get_rank is set."""

import json
import tempfile
from collections.abc import Sequence
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch import nn

from harness.rollout import sglang_api
from harness.rollout.pipeline_stages import answer, answer_file, load_own


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
    payloads = [sglang_api.serialize_by_value([("weight", value)]) for value in values]
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
