"""launch/verify.py and a plain server that nothing of this project updates.

run_senders.py has more models and senders than a test could wait for.
"""

import json
import subprocess
import sys
from pathlib import Path

import pytest

REPOSITORY = Path(__file__).resolve().parents[3]
DIFFER = {"in_one_call": False, "each_rank_in_its_own_way": True, "gate_up_swapped": True}
"""Sender -> whether it leaves anything wrong."""


@pytest.mark.parametrize("count", [2, pytest.param(3, marks=pytest.mark.long)])
def test_it_is_silent_after_a_right_update_and_names_what_broken_ones_left(count: int, tmp_path: Path) -> None:
    rows, senders = tmp_path / "rows.json", list(DIFFER)[:count]
    command = [sys.executable, "-m", "tests.tools.verify.run_senders", "qwen3_moe", "2", "1"]
    done = subprocess.run(
        [*command, "--senders", f"^({'|'.join(senders)})$", "--json", str(rows)],
        cwd=REPOSITORY,
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-2000:]
    found = {row["sender"]: row for row in json.loads(rows.read_text())}
    assert {name: bool(found[name]["differing"]) for name in senders} == {name: DIFFER[name] for name in senders}
    why = {name: " ".join(row["verdict"]["why"].values()) for name, row in found.items()}
    stale, no_numbers = why["each_rank_in_its_own_way"].split("; ")
    assert stale == "on rank 0, model.layers.1.self_attn.k_proj.weight kept the values of --was"
    assert no_numbers == "on rank 1, model.layers.1.self_attn.k_proj.weight arrived as NaN"
    assert "gate_up_swapped" not in found or "are in each other's place, in every expert" in why["gate_up_swapped"]
