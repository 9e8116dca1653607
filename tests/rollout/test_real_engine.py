"""sglang_api and VerlEngine on one real engine of tp 2 in SGLang's CPU mode, started once for all tests of this
file."""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from harness.rollout import sglang_api

pytestmark = pytest.mark.slow

REPOSITORY = Path(__file__).resolve().parents[2]
SCRIPT = Path(__file__).with_name("engine_on_two_ranks.py")

Seen = list[dict[str, Any]]


@pytest.fixture(scope="session")
def seen(tmp_path_factory: pytest.TempPathFactory) -> Seen:
    """What each of the two ranks saw."""
    folder = tmp_path_factory.mktemp("engine")
    command = [sys.executable, "launch/torchrun.py", "--standalone", "--nproc-per-node=2", str(SCRIPT)]
    environment = os.environ | {"OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": "", "HF_HUB_OFFLINE": "1"}
    done = subprocess.run(
        [*command, str(folder)], cwd=REPOSITORY, env=environment, capture_output=True, text=True, timeout=400
    )
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-6000:]
    ranks: Seen = json.loads((folder / "seen.json").read_text())
    return ranks


def test_its_processes_are_forked_from_the_imports_of_the_ranks(seen: Seen) -> None:
    assert [rank["forked"] for rank in seen] == [3, 0]


def test_the_source_tells_the_truth_about_the_imported_package(seen: Seen) -> None:
    api, head = sglang_api.probe(), seen[0]
    assert sorted(api.engine_arguments) == head["arguments"]
    assert head["foretold"] and head["foretold"].items() <= head["environment"].items()


def test_every_rank_gets_the_same_answers(seen: Seen) -> None:
    names = set(seen[0]) - {"no_folder", "unknown", "forked"}  # failures say on which rank they were
    assert {name: seen[0][name] for name in names} == {name: seen[1][name] for name in names}


def test_text_and_tokens_serve_alike(seen: Seen) -> None:
    assert [len(tokens) for tokens in seen[0]["before"]] == [6, 6, 6]
    assert isinstance(seen[0]["text"], str) and seen[0]["text"]


def test_a_stop_keeps_what_ended_the_response_and_its_log_probs(seen: Seen) -> None:
    tokens, log_probs, truncated = seen[0]["whole"]
    assert len(tokens) == 6 and truncated
    for stop, last in (("stop_token_ids", "third at"), ("stop", "text at")):
        kept = seen[0][last] + 1
        assert kept < 6 and seen[0][stop] == [tokens[:kept], log_probs[:kept], False], stop


def test_each_way_of_updating_brings_every_tensor_and_changes_what_is_generated(seen: Seen) -> None:
    found = seen[0]
    start, other = found["held at start"], found["held after bucket"]
    assert start and [name for name in start if other[name] == start[name]] == []
    assert found["held after tensors"] == start and found["held after disk"] == other
    assert found["bucket"] != found["before"]
    assert found["tensor"] == found["before"]
    assert found["disk"] == found["bucket"]


def test_mistakes_are_said_before_an_engine_starts(seen: Seen) -> None:
    for rank in seen:
        assert "engine.args.mem_fraction" in rank["unknown"] and "no such engine argument" in rank["unknown"]
        assert rank["nnodes"].startswith("ValueError: nnodes = 2, but the 2 ranks of this engine are on 1 hosts")


def test_a_refused_call_raises_on_every_rank_and_the_engine_serves_on(seen: Seen) -> None:
    assert seen[0]["no_folder"].startswith("EngineRefused: update_weights_from_disk: the engine refused")
    assert seen[1]["no_folder"].startswith("EngineFailed: on rank 0: EngineRefused: update_weights_from_disk")
    assert seen[0]["still_serving"] == seen[0]["disk"]
