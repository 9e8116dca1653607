from pathlib import Path

import torch

from harness.weights.worker.inspection import WorkerReport, inspect_model, read_reports, tensor_digest
from tests.cluster.gloo import on_ranks


def _report(rank: int, folder: str) -> None:
    model = torch.nn.Linear(2, 2, dtype=torch.bfloat16)
    with torch.no_grad():
        model.weight.fill_(rank)
        model.bias.fill_(0)
    model.register_buffer("scale", torch.tensor(3.0))
    inspect_model(model, [(folder, torch.zeros(1))])


def test_schedulers_report_what_they_hold(tmp_path: Path) -> None:
    folder = tmp_path / "reports"
    on_ranks(_report, 2, tmp_path, str(folder))
    first, second = read_reports(folder, 2)
    assert isinstance(first, WorkerReport)
    assert (first.rank, first.device, second.rank) == (0, "cpu", 1)
    assert first.tensors.keys() == {"weight", "bias", "scale"}
    assert {name for name in first.tensors if first.tensors[name] != second.tensors[name]} == {"weight"}


def test_a_digest_is_of_the_values_in_row_major_order() -> None:
    tensor = torch.arange(6, dtype=torch.bfloat16).view(2, 3)
    assert tensor_digest(tensor.T) == tensor_digest(tensor.T.contiguous()) != tensor_digest(tensor)
    assert tensor_digest(tensor[1]) == tensor_digest(tensor[1].clone())
    assert tensor_digest(torch.tensor(0.0)) != tensor_digest(torch.tensor(-0.0))
