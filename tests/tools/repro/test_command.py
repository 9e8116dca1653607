"""launch/repro.py, as people call it. One module-level case needs no torch, and stands for the others."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from harness.tools.repro.case import all_cases

REPOSITORY = Path(__file__).resolve().parents[3]
QUICK = "illegal-cuda-visible-devices"


def repro(*arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, str(REPOSITORY / "launch" / "repro.py"), *arguments]
    return subprocess.run(command, capture_output=True, text=True, timeout=120)


def test_list() -> None:
    assert repro("list", "--names").stdout.split() == list(all_cases())
    gpus = repro("list", "--needs", "one_gpu", "several_gpus").stdout
    assert "nccl-cumem-skew" in gpus and "dsv3-qkv-a-split" in gpus and "ipv6-dist-init-addr" not in gpus
    assert "dsv3-qkv-a-split" not in repro("list", "--no-engine").stdout


def test_show_has_cause_fix_difference_and_where_it_was_seen() -> None:
    shown = repro("show", "torchelastic-agent-store-hang").stdout
    for begins in (
        "needs: cpu",
        "differs in: ",
        "signature: ",
        "cause: ",
        "fix: ",
        "https://",
        "seen: ",
        "program: ",
        "by hand: ",
    ):
        assert f"\n{begins}" in shown


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["show", "fp8-reload"], "has no case: It needs"),
        (["run", "torchelastic-hang"], "did you mean torchelastic-agent-store-hang?"),
        (["run"], "either slugs or --all"),
        (["run", QUICK, "--all"], "either slugs or --all"),
    ],
)
def test_a_mistake_is_one_sentence_and_exit_code_2(arguments: list[str], words: str) -> None:
    ended = repro(*arguments)
    assert ended.returncode == 2 and words in ended.stderr and ended.stderr.count("\n") == 1


def test_run_prints_what_showed_and_writes_a_file(tmp_path: Path) -> None:
    ended = repro("run", QUICK, "--json", str(tmp_path))
    assert ended.returncode == 1
    assert "differs in: " in ended.stdout and '\nreproduced: "WRONG repeated: ' in ended.stdout
    result = json.loads((tmp_path / f"{QUICK}.json").read_text())
    assert (result["verdict"], result["exit_code"]) == ("reproduced", 1)
    assert set(result["variants"]) == {"broken", "healthy"}


def test_the_control_alone_passes() -> None:
    ended = repro("run", QUICK, "--control")
    assert ended.returncode == 0 and "\nthe control passed: " in ended.stdout and "broken:" not in ended.stdout


def test_without_gpus_a_case_that_needs_them_does_not_start(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    ended = repro("run", "nccl-cumem-skew")
    assert ended.returncode == 125
    assert "cannot run here: it needs 2 GPU(s), and this process can use 0." in ended.stdout


def test_several_cases_are_counted(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    ended = repro("run", QUICK, "missing-main-guard", "nccl-cumem-skew", "--json", str(tmp_path))
    assert ended.returncode == 1 and ended.stdout.endswith("\n2 reproduced, 1 cannot run here\n")
    assert sorted(file.stem for file in tmp_path.iterdir()) == [QUICK, "missing-main-guard", "nccl-cumem-skew"]
