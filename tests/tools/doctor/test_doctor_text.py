"""The picture and the problems of jobs, without any process."""

import json

from harness.tools.doctor.checks import missing, problems_of
from harness.tools.doctor.doctor_text import as_json, as_text
from tests.tools.doctor.examples import healthy, with_facts, with_variable


def test_a_healthy_job_is_drawn_with_hosts_ranks_and_speeds() -> None:
    lines = as_text(healthy(), [], 4.2).splitlines()
    assert lines[0] == "4 ranks on 2 hosts, mesh dp=1 tp=4 pp=1, dp,tp,pp (GPU)"
    assert "torch 2.9.1" in lines[1] and "transformers 4.57.1" in lines[1]
    assert any(
        line.startswith("host1") and "10.0.0.2 (eth0)" in line and "2 x NVIDIA H200, NVLink" in line for line in lines
    )
    assert sum("GPU-" in line for line in lines) == 4
    assert "nccl all-reduce, engine 1 group (ranks 0-3): 20.00 GB/s, 100 us" in lines
    assert lines[-1] == "OK (4.2 s)"


def test_a_large_job_has_a_line_for_each_host_only() -> None:
    text = as_text(healthy(dp=8, tp=16, per_host=8), [], 1)
    assert "dp tp pp" not in text and text.count("8 x NVIDIA H200") == 16
    assert "8 groups of 16, the slowest (ranks 0-15)" in text


def test_problems_are_numbered_placed_and_remedied() -> None:
    view = with_variable(with_facts(healthy(), 3, config="f" * 16), 2, "NCCL_DEBUG", "INFO")
    text = as_text(view, problems_of(view), 1)
    assert "1. FAULT configs on host1 (rank 3): the resolved config differs" in text
    assert "2. warning environment on host1 (rank 2): " in text and text.count("\n   -> ") == 2
    assert text.endswith("1 fault, 1 warning (1.0 s)")


def test_without_a_picture_the_missing_ranks_are_said() -> None:
    problem = missing((1,), 2, 11)
    assert as_text(None, [problem], 11).startswith("1. FAULT missing: rank 1 of 2")
    assert set(json.loads(as_json(None, [problem], 11))) == {"verdict", "seconds", "findings"}


def test_json_has_everything_under_its_published_names() -> None:
    view = healthy()
    view = with_variable(view, 2, "NCCL_DEBUG", "INFO")
    found = json.loads(as_json(view, problems_of(view), 1.26))
    assert list(found) == ["verdict", "seconds", "findings", "mesh", "hosts", "ranks", "links"]
    assert (found["verdict"], found["seconds"], found["hosts"]) == ("OK", 1.3, {"host0": [0, 1], "host1": [2, 3]})
    assert set(found["findings"][0]) == {"check", "fault", "ranks", "what", "remedy"}
    assert found["ranks"][3]["gpu"]["uuid"] == "GPU-11" and found["links"][2]["address"]["interface"] == "eth0"


def test_the_verdict_counts() -> None:
    assert as_text(None, [missing((1,), 2, 11)] * 2, 0).endswith("\n2 faults (0.0 s)")
    warnings = problems_of(with_variable(healthy(), 2, "NCCL_DEBUG", "INFO")) * 2
    assert as_text(None, warnings, 0).endswith("\nOK, 2 warnings (0.0 s)")
