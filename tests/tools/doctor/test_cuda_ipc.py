"""The child that opens CUDA memory, as far as a machine without a GPU has it; test_gpu.py has the rest."""

from types import SimpleNamespace

import pytest
import torch

from harness.tools.doctor.cuda_ipc import IpcChild

pytestmark = pytest.mark.skipif(torch.cuda.is_available(), reason="for machines without a GPU")


@pytest.fixture(autouse=True)
def a_handle(monkeypatch: pytest.MonkeyPatch) -> None:
    """Make handles that no process can open."""
    storage = SimpleNamespace(_share_cuda_=lambda: (0, b"handle", 1))
    memory = SimpleNamespace(untyped_storage=lambda: storage)
    monkeypatch.setattr(torch, "full", lambda *arguments, **options: memory)
    monkeypatch.setattr(torch.cuda, "set_device", lambda device: None)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda device: None)


def test_the_error_of_a_child_that_cannot_open_the_memory_is_its_last_line() -> None:
    child = IpcChild(torch.device("cuda", 0), 0)
    try:
        with pytest.raises(RuntimeError, match="CUDA|cuda"):
            child.uuid(60)
    finally:
        child.end()


def test_a_child_that_is_late_is_ended() -> None:
    child = IpcChild(torch.device("cuda", 0), 0)
    with pytest.raises(TimeoutError):
        child.uuid(0.01)
    child.end()
    child.end()  # once more does nothing
