"""What the disk transport leaves behind, and which rooms a transport needs; test_transports_real.py has real
engines."""

import os
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch

from harness.cluster.placement import RankLocation
from harness.cluster.world import World
from harness.weights import transports
from harness.weights.transports import DiskTransport, check_shared, make_transport
from tests.cluster.gloo import on_ranks


@dataclass
class LoadingEngine:
    """Stands for an engine that loads from disk: it lists what is there, or fails on one rank."""

    rank: int
    failing: int
    found: tuple[str, ...] = ()

    def update_weights_from_disk(self, path: str) -> None:
        if self.rank == self.failing:
            raise RuntimeError("no such weights")
        self.found = tuple(file.name for file in Path(path).iterdir())


def _send(rank: int, parent: str, failing: int) -> tuple[str, tuple[str, ...], bool]:
    engine: Any = LoadingEngine(rank, failing)

    def save(folder: Path) -> None:
        if rank == 0:
            (folder / "model.safetensors").write_bytes(b"weights")

    outcome = "sent"
    weights: Any = type("Weights", (), {"save": staticmethod(save)})
    try:
        DiskTransport(engine, Path(parent) / "new").send(weights)
    except Exception as error:
        outcome = f"{type(error).__name__}: {error}"
    torch.distributed.barrier()
    return outcome, engine.found, any((Path(parent) / "new").iterdir())


def test_every_engine_loads_what_rank_0_wrote_and_nothing_is_left(tmp_path: Path) -> None:
    assert on_ranks(_send, 2, tmp_path, str(tmp_path), -1) == [("sent", ("model.safetensors",), False)] * 2


def test_one_engine_that_cannot_load_fails_every_rank_and_nothing_is_left(tmp_path: Path) -> None:
    told, raised = on_ranks(_send, 2, tmp_path, str(tmp_path), 1)
    assert told[0] == "EngineFailed: loading the checkpoint failed on rank 1: RuntimeError: no such weights"
    assert raised == ("RuntimeError: no such weights", (), False)
    assert told[2] is False


def world_of(rank: int) -> World:
    locations = tuple(RankLocation(rank=each, host=f"host{each}", local_rank=0, visible=None) for each in range(2))
    return World(
        rank=rank, world_size=2, local_rank=0, host=f"host{rank}", device=torch.device("cpu"), locations=locations
    )


def _shared(rank: int, folder: str) -> list[str]:
    transports.SHARED_FOLDER_SECONDS = 0.3
    (own := Path(folder) / f"rank{rank}").mkdir()
    os.chdir(own)  # a relative path is then another folder on each rank
    said = []
    for each in (Path(folder) / "checkpoints", Path("checkpoints"), Path(folder) / "file" / "inner"):
        try:
            check_shared(each, world_of(rank), "weights.folder")
        except ValueError as error:
            said.append(str(error))
    return said


def test_a_folder_that_one_host_does_not_see_or_that_cannot_be_made_is_refused_on_every_rank(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    one, other = on_ranks(_shared, 2, tmp_path, str(tmp_path))
    unseen, not_made = one
    assert one == other and unseen.startswith("weights.folder must be a folder that all hosts share, got checkpoints")
    assert "not there on host1." in unseen and not_made.endswith("/file/inner: Not a directory.")
    assert list((tmp_path / "checkpoints").iterdir()) == []


def test_a_transport_has_a_name_and_auto_is_none() -> None:
    engine: Any = None
    with pytest.raises(ValueError, match='transport must be "bucket", "tensor", .* got "auto"'):
        make_transport("auto", engine, Path())  # type: ignore[arg-type]


def test_only_a_pull_imports_the_room_of_the_pull() -> None:
    code = """
import sys
import harness.weights.verification.proof
from harness.weights.transports import make_transport
for name in ("bucket", "tensor", "disk"):
    make_transport(name, None, None)
assert not [each for each in sys.modules if each.startswith("harness.weights.pull")]
make_transport("pull", None, None)
assert "harness.weights.pull.transport" in sys.modules
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=Path(__file__).parents[2])
    assert done.returncode == 0, done.stderr
