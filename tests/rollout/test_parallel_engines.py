"""Engines with DP attention and expert parallelism compute what an engine of one rank computes."""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

SCRIPT = Path(__file__).with_name("parallel_engine.py")
DP_ATTENTION = {"enable_dp_attention": True, "dp_size": 2}
PARALLEL_ENGINES: dict[str, dict[str, Any]] = {
    "dp": DP_ATTENTION,
    "ep": {"ep_size": 2},
    "dp_and_ep": DP_ATTENTION | {"ep_size": 2},
}
"""Arguments of engines of two ranks."""
Scored = list[list[list[tuple[float, int]]]]


def scored(model: str, arguments: dict[str, Any], folder: Path) -> Scored:
    """What parallel_engine.py found; it is a process of its own, because a dying scheduler kills its parent."""
    file = folder / "scored.json"
    command = [sys.executable, str(SCRIPT), model, json.dumps(arguments), str(file)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=400)
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-4000:]
    found: Scored = json.loads(file.read_text())
    return found


@pytest.fixture(scope="module", params=["deepseek_v3", "qwen3_moe"])
def one_rank(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[str, Scored]:
    """The model's name, and what an engine of one rank computes."""
    return request.param, scored(request.param, {}, tmp_path_factory.mktemp("one_rank"))


@pytest.mark.long
@pytest.mark.parametrize("arguments", PARALLEL_ENGINES.values(), ids=PARALLEL_ENGINES)
def test_two_ranks_compute_what_one_does_before_and_after_an_update(
    one_rank: tuple[str, Scored], arguments: dict[str, Any], tmp_path: Path
) -> None:
    model, expected = one_rank
    found = scored(model, {"tp_size": 2, **arguments}, tmp_path)
    assert expected[0] != expected[1], "the update changes the answers"
    for theirs, ours in zip(found, expected, strict=True):
        for prompt, single in zip(theirs, ours, strict=True):
            assert [token for _, token in prompt] == [token for _, token in single]
            assert [value for value, _ in prompt] == pytest.approx([value for value, _ in single], abs=1e-5, rel=0)
