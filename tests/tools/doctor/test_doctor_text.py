"""The picture and the problems of jobs, without any process."""

from msgspec.structs import replace

from harness.tools.doctor.checks import missing, problems_of
from harness.tools.doctor.doctor_text import as_text
from tests.tools.doctor.examples import healthy, with_facts, with_variable


def test_a_healthy_job_has_a_line_for_each_host_and_backend() -> None:
    lines = as_text(healthy(), [], 4.2).splitlines()
    assert lines[0] == "4 ranks on 2 hosts, mesh dp=1 tp=4 pp=1, dp,tp,pp (GPU)"
    assert "torch 2.9.1" in lines[1] and "transformers 4.57.1" in lines[1]
    assert any(
        line.startswith("host1") and "10.0.0.2 (eth0)" in line and line.endswith("2 x NVIDIA H200, 139.0 GiB free")
        for line in lines
    )
    assert "nccl all-reduce of all ranks: 20.00 GB/s" in lines
    assert lines[-1] == "OK (4.2 s)"


def test_problems_are_numbered_placed_and_remedied() -> None:
    view = with_variable(with_facts(healthy(), 3, config="f" * 16), 2, "NCCL_ALGO", "Ring")
    text = as_text(view, problems_of(view), 1)
    assert "1. FAULT configs on host1 (rank 3): the resolved config differs" in text
    assert "2. FAULT environment on host1 (rank 2): " in text and text.count("\n   -> ") == 2
    assert text.endswith("2 faults (1.0 s)")


def test_without_a_picture_the_missing_ranks_are_said() -> None:
    problem = missing((1,), 2, 11)
    assert as_text(None, [problem], 11).startswith("1. FAULT missing: rank 1 of 2")


def test_the_verdict_counts() -> None:
    fault = missing((1,), 2, 11)
    warning = replace(fault, fault=False)
    assert as_text(None, [fault, fault, warning], 0).endswith("\n2 faults, 1 warning (0.0 s)")
    assert as_text(None, [warning, warning], 0).endswith("\nOK, 2 warnings (0.0 s)")
