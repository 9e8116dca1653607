"""Weight versions, and updates while a real engine of tp 2 in SGLang's CPU mode answers."""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from harness.rollout import sglang_api
from tests.end_to_end.launching import QUICKSTART, run

REPOSITORY = Path(__file__).resolve().parents[2]
SCRIPT = Path(__file__).with_name("in_flight_on_two_ranks.py")

pytestmark = pytest.mark.long


@pytest.fixture(scope="module")
def seen(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """What the head saw; the other rank must have seen the same, except for who failed."""
    folder = tmp_path_factory.mktemp("in_flight")
    command = [sys.executable, "launch/torchrun.py", "--standalone", "--nproc-per-node=2", str(SCRIPT)]
    environment = os.environ | {"OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": "", "HF_HUB_OFFLINE": "1"}
    done = subprocess.run(
        [*command, str(folder)], cwd=REPOSITORY, env=environment, capture_output=True, text=True, timeout=400
    )
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-6000:]
    head, other = json.loads((folder / "seen.json").read_text())
    assert all(head[name] == other[name] for name in ("at rest", "in_place", "retract"))
    found: dict[str, Any] = head
    return found


def test_an_answer_tells_the_version_of_its_weights(seen: dict[str, Any]) -> None:
    (old_tokens, old_versions), (new_tokens, new_versions) = seen["at rest"]["before"], seen["at rest"]["after"]
    assert old_versions == ["default"] and new_versions == ["7"] and old_tokens != new_tokens


@pytest.mark.parametrize("mode", ["in_place", "retract"])
def test_a_paused_request_goes_on_with_the_new_weights_and_tells_both_versions(seen: dict[str, Any], mode: str) -> None:
    found = seen[mode]
    assert len(found["tokens"]) == len(found["alone"]) == 200 and found["version"] == "1"
    if found["versions"] is None:
        pytest.skip(f"sglang {sglang_api.probe().version} has no version spans")
    old, new = found["versions"]
    assert (old["version"], old["start"], new["version"], new["end"]) == ("0", 0, "1", 200)
    assert 0 < old["end"] == new["start"] < 200
    assert found["tokens"][: old["end"]] == found["alone"][: old["end"]], "with the old weights, as without an update"
    assert found["tokens"] != found["alone"]


def test_a_pause_in_place_leaves_stale_keys_in_the_prefix_cache_and_they_are_found(seen: dict[str, Any]) -> None:
    found = seen["in_place"]["prefix"]
    assert found["cached_tokens"] == 40 and found["difference"] > 0.1, "sglang#27886"
    after = seen["in_place"]["prefix after the flush"]
    assert after["cached_tokens"] == 40 and after["difference"] < 1e-4


@pytest.mark.parametrize("kind", ["at rest", "retract"])
def test_keys_of_the_new_weights_are_not_taken_for_stale(seen: dict[str, Any], kind: str) -> None:
    assert seen[kind]["prefix"]["cached_tokens"] == 40 and seen[kind]["prefix"]["difference"] < 1e-4


def test_what_cannot_be_is_one_sentence(seen: dict[str, Any]) -> None:
    assert seen["no begin"] == "end_generate needs a begin_generate before it."
    assert 'pause mode "later"' in seen["unknown mode"] and "in_place" in seen["unknown mode"]


def test_a_run_whose_responses_come_from_old_weights_fails_in_one_sentence(tmp_path: Path) -> None:
    words = ["tests.rollout.engine_of_old_weights:EngineOfOldWeights", QUICKSTART]
    job = run(tmp_path / "run", 2, *words, script="tests/rollout/ppo_with.py", launcher="plain")
    assert job.process.returncode != 0
    [first, *_] = [line for line in job.output().splitlines() if "StaleWeights" in line]
    assert "of version 0, but this step's sync brought version 1: the weights are stale" in first
    assert len(job.metrics()) == 1 and job.left_behind() == []
