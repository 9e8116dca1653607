"""What two torchrun ranks measured of sharded models and of offloading, once for all tests."""

from typing import Any

import pytest

from tests.trainer.torchrun import torchrun


@pytest.fixture(scope="session")
def measurements(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    """The measurements of tests/trainer/worker_models.py, one dict for each rank."""
    folder = tmp_path_factory.mktemp("trainer")
    ranks: Any = torchrun("worker_models.py", 2, folder / "measurements.json", str(folder))
    return ranks


@pytest.fixture(scope="session")
def offloads(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    """The results of tests/trainer/worker_offload.py, one dict for each rank."""
    folder = tmp_path_factory.mktemp("offload")
    ranks: Any = torchrun("worker_offload.py", 2, folder / "results.json", str(folder))
    return ranks
