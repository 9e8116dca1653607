"""Every transport into real engines in SGLang's CPU mode: one engine of tp 2, then two of tp 1."""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

pytestmark = pytest.mark.long

SCRIPT = Path(__file__).with_name("transports_on_two_ranks.py")
TRANSPORTS = ("tensor", "bucket", "distributed", "disk", "pull")
SAME = 0.2
"""Log-probs of equal weights in bfloat16 differ by less, those of changed ones by more than 1."""

Seen = list[dict[str, Any]]


def run(folder: Path, dp: int, tp: int, *transports: str) -> Seen:
    """What each of the two ranks saw."""
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2", str(SCRIPT)]
    environment = os.environ | {"OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}
    words = [*command, str(folder), str(dp), str(tp), *transports]
    done = subprocess.run(words, env=environment, capture_output=True, text=True, timeout=500)
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-6000:]
    return [json.loads((folder / f"rank{rank}.json").read_text()) for rank in range(2)]


@pytest.fixture(scope="module")
def one_engine(tmp_path_factory: pytest.TempPathFactory) -> Seen:
    return run(tmp_path_factory.mktemp("one"), 1, 2, *TRANSPORTS)


@pytest.fixture(scope="module")
def two_engines(tmp_path_factory: pytest.TempPathFactory) -> Seen:
    return run(tmp_path_factory.mktemp("two"), 2, 1, "distributed", "disk", "pull")


def test_the_plan_has_several_buckets(one_engine: Seen) -> None:
    assert one_engine[0]["buckets"] >= 3


@pytest.mark.parametrize("name", TRANSPORTS)
def test_each_sync_brings_every_tensor_and_forgets_the_prefix_cache(name: str, one_engine: Seen) -> None:
    for seen in one_engine:
        assert seen[f"{name} stale"] > 1
        assert max(seen[name], seen[f"{name} again"], seen[f"{name} reopened"]) < SAME


@pytest.mark.parametrize("name", TRANSPORTS)
def test_each_engine_holds_the_bfloat16_cast_of_float32_weights_bit_for_bit(name: str, one_engine: Seen) -> None:
    assert [seen[f"{name} wrong"] for seen in one_engine] == [[], []]


@pytest.mark.parametrize("name", ["distributed", "disk", "pull"])
def test_two_engines_get_the_same_weights(name: str, two_engines: Seen) -> None:
    """By pull the scheduler of either engine reads the memory of both trainer ranks."""
    for seen in two_engines:
        assert seen[f"{name} wrong"] == []
        assert seen[f"{name} stale"] > 1
        assert max(seen[name], seen[f"{name} again"], seen[f"{name} reopened"]) < SAME


def test_a_broadcast_that_fails_frees_the_waiting_engine_and_raises_on_every_rank(one_engine: Seen) -> None:
    kind, message = one_engine[0]["trainer failed"]
    assert kind != "EngineFailed"
    assert one_engine[1]["trainer failed"] == ["EngineFailed", f"on rank 0: {kind}: {message}"]


def test_an_engine_that_refuses_raises_on_every_rank(one_engine: Seen) -> None:
    assert one_engine[0]["engine failed"][0] == "EngineRefused"
    assert "torch.Size([3])" in one_engine[0]["engine failed"][1]
    assert one_engine[1]["engine failed"][0] == "EngineFailed"


def test_after_failures_the_next_sync_opens_a_new_group_and_is_whole(one_engine: Seen) -> None:
    for seen in one_engine:
        assert seen["distributed after failures"] < SAME


def test_nothing_is_left_on_disk(one_engine: Seen) -> None:
    assert all(seen["left on disk"] == [] for seen in one_engine)
