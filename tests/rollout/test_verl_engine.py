"""VerlEngine as a library: the same call on both ranks of one real engine (tp 2, CPU mode)."""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

pytestmark = pytest.mark.slow

SCRIPT = Path(__file__).with_name("verl_engine_on_two_ranks.py")

Seen = list[dict[str, Any]]


@pytest.fixture(scope="module")
def seen(tmp_path_factory: pytest.TempPathFactory) -> Seen:
    folder = tmp_path_factory.mktemp("verl_engine")
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2", str(SCRIPT)]
    environment = os.environ | {"OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}
    done = subprocess.run([*command, str(folder)], env=environment, capture_output=True, text=True, timeout=400)
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-6000:]
    ranks: Seen = json.loads((folder / "seen.json").read_text())
    return ranks


def test_every_rank_gets_the_same_answers(seen: Seen) -> None:
    names = set(seen[0]) - {"no_folder", "unknown_tag"}  # failures say on which rank they were
    assert {name: seen[0][name] for name in names} == {name: seen[1][name] for name in names}


def test_text_tokens_and_async_serve_alike(seen: Seen) -> None:
    assert len(seen[0]["before"]) == 2
    assert all(len(tokens) == 6 for tokens in seen[0]["before"])
    assert seen[0]["async"] == seen[0]["before"]
    assert isinstance(seen[0]["text"], str)
    assert seen[0]["text"]


def test_each_way_of_updating_changes_what_is_generated(seen: Seen) -> None:
    assert seen[0]["bucket"] != seen[0]["before"]
    assert seen[0]["tensor"] == seen[0]["before"]
    assert seen[0]["disk"] == seen[0]["bucket"]


def test_mistakes_are_said_before_an_engine_starts(seen: Seen) -> None:
    assert "engine.args.mem_fraction: sglang 0.5.20 has no such engine argument" in seen[0]["unknown"]
    assert seen[0]["nnodes"] == (
        "ValueError: nnodes = 2, but the 2 ranks of this engine are on 1 hosts; pass nnodes = 1, or leave it out."
    )


def test_a_refused_call_raises_on_every_rank_and_the_engine_serves_on(seen: Seen) -> None:
    assert seen[0]["no_folder"].startswith("EngineRefused: update_weights_from_disk: the engine refused")
    assert seen[1]["no_folder"].startswith("EngineFailed: on rank 0: EngineRefused: update_weights_from_disk")
    assert "sglang 0.5.20 has" in seen[0]["unknown_tag"]
    assert seen[0]["still_serving"] == seen[0]["disk"]
