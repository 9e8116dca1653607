import os
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from harness.cluster.placement import RankLocation
from harness.cluster.world import World
from harness.tools.verification import snapshot
from harness.tools.verification.snapshot import changed_tensors, describe_tensor
from harness.weights.transports import check_shared
from harness.weights.worker.puller import LoadCoverage
from tests.cluster.gloo import on_ranks


def world_of(rank: int) -> World:
    locations = tuple(RankLocation(rank=each, host=f"host{each}", local_rank=0, visible=None) for each in range(2))
    return World(
        rank=rank, world_size=2, local_rank=0, host=f"host{rank}", device=torch.device("cpu"), locations=locations
    )


def _shared(rank: int, folder: str) -> str:
    from harness.weights import transports

    transports.SHARED_FOLDER_SECONDS = 0.3
    (own := Path(folder) / f"rank{rank}").mkdir()
    os.chdir(own)  # a relative path is then another folder on each rank
    check_shared(Path(folder) / "checkpoints", world_of(rank), "weights.folder")
    try:
        check_shared(Path("checkpoints"), world_of(rank), "weights.folder")
    except ValueError as error:
        return str(error)
    return ""


def test_a_folder_that_one_host_does_not_see_is_refused_on_every_rank(tmp_path: Path) -> None:
    one, other = on_ranks(_shared, 2, tmp_path, str(tmp_path))
    assert one == other and one.startswith("weights.folder must be a folder that all hosts share, got checkpoints")
    assert "not there on host1." in one
    assert list((tmp_path / "checkpoints").iterdir()) == []


@pytest.mark.parametrize(
    ("after", "changed"),
    [
        ({"a": 1, "b": 2}, []),
        ({"a": 1, "b": 3, "c": 4}, ["b"]),  # c is new, an alias
    ],
)
def test_changed_is_what_differs_on_any_scheduler(
    after: snapshot.Snapshot, changed: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(snapshot, "snapshot_weights", lambda engine: after)
    monkeypatch.setattr(snapshot, "all_gather", lambda mine: [set(), mine])
    sync: Any = SimpleNamespace(engine=None, layout=(), link=SimpleNamespace(coverage=()))
    assert changed_tensors(sync, {"a": 1, "b": 2}) == changed


ATTENTION = [f"l.0.self_attn.{part}.weight" for part in ("q_a_proj", "kv_a_proj_with_mqa", "kv_b_proj", "o_proj")]
EXPERTS = [f"l.0.mlp.experts.{expert}.{part}_proj.weight" for expert in range(3) for part in ("gate", "up")]


@pytest.mark.parametrize(
    ("name", "described"),
    [
        ("l.0.self_attn.o_proj.weight", "l.0.self_attn.o_proj.weight"),
        ("l.0.self_attn.fused_qkv_a.weight", f"l.0.self_attn.fused_qkv_a.weight ({ATTENTION[0]}, {ATTENTION[1]})"),
        ("l.0.mlp.experts.w13_weight", f"l.0.mlp.experts.w13_weight ({', '.join(EXPERTS[:4])}, 2 more)"),
        ("l.0.self_attn.w_kc", f"l.0.self_attn.w_kc ({ATTENTION[2]})"),
        ("rotary.cos_sin_cache", "rotary.cos_sin_cache"),
    ],
)
def test_an_engine_tensor_is_described_by_what_fills_it(name: str, described: str) -> None:
    """Half of the experts is on each rank."""
    first = {"l.0.self_attn.fused_qkv_a.weight": ATTENTION[:2], "l.0.mlp.experts.w13_weight": EXPERTS[:3]}
    coverage = (
        LoadCoverage(rank=0, filled=first),
        LoadCoverage(rank=1, filled={"l.0.mlp.experts.w13_weight": EXPERTS[3:]}),
    )
    layout = [SimpleNamespace(name=each) for each in (*ATTENTION, *EXPERTS)]
    sync: Any = SimpleNamespace(link=SimpleNamespace(coverage=coverage), layout=layout)
    assert describe_tensor(sync, name) == described
