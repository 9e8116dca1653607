"""Weights of many architectures: none is called wrong that is right, no bit is missed, no check changes the engine.

The program is tests/weights/architectures.py. Where SGLang's CPU mode has no kernels for a model, its class and its
loader are still SGLang's own.
"""

import json
import subprocess
import sys
from importlib.metadata import version
from pathlib import Path
from typing import Any

import pytest
from packaging.version import Version

from tests.weights.architectures import FIELDS

pytestmark = [
    pytest.mark.long,
    pytest.mark.skipif(
        Version(version("sglang")) < Version("0.5.21"), reason="its models are built by other functions"
    ),
]

COMPUTING = {
    "apertus", "deepseek_v32", "falcon_h1", "gemma", "glm_moe_dsa", "gpt_oss", "granite_swa", "granitemoe_swa",
    "granitemoehybrid", "mamba2", "persimmon",
}  # fmt: skip
"""Those of which some tensors arrive otherwise than as they were sent."""
LOADED_ONCE = {"minicpm3"}
"""Those whose loader removes parameters that it needs again."""
DERIVING = {"deepseek_v2", "deepseek_v3", "deepseek_v32", "glm4_moe_lite", "glm_moe_dsa"}


@pytest.fixture(scope="module")
def rows() -> dict[str, dict[str, Any]]:
    program = Path(__file__).with_name("architectures.py")
    done = subprocess.run([sys.executable, program], capture_output=True, text=True, timeout=1200, check=False)
    lines = [line for line in done.stdout.splitlines() if line.startswith("{")]
    assert done.returncode == 0 and len(lines) == len(FIELDS), done.stderr[-4000:]
    return {row["name"]: row for row in map(json.loads, lines)}


@pytest.mark.parametrize("name", sorted(FIELDS.keys() - LOADED_ONCE))
def test_what_is_right_passes_and_each_bit_that_is_wrong_is_caught(name: str, rows: dict[str, dict[str, Any]]) -> None:
    row = rows[name]
    assert "raised" not in row, row
    assert (row["false_alarms"], row["missed"], row["changed_by_checks"]) == ([], [], [])
    assert row["bits"] > 5 and row["by_fingerprint"] + row["loaded_again"] == row["sent"] > 10
    assert (row["loaded_again"] > 0) == (name in COMPUTING)
    assert (row["derived"] > 0) == (name in DERIVING)
    assert all("q_norm" in told or "k_norm" in told for told in row["not_covered"])
    assert bool(row["not_covered"]) == (name == "falcon_h1"), "a parameter that SGLang never fills nor uses"


@pytest.mark.parametrize("name", sorted(LOADED_ONCE))
def test_a_model_that_sglang_can_load_only_once_is_refused(name: str, rows: dict[str, dict[str, Any]]) -> None:
    assert "can load weights into this model only once" in rows[name]["raised"], rows[name]
