"""launch/repro.py as people call it, with a case that needs no torch."""

import subprocess
import sys
from pathlib import Path

import pytest
import repro as script

from harness.tools.repro.case import all_cases

REPOSITORY = Path(__file__).resolve().parents[3]
QUICK = "illegal-cuda-visible-devices"


def repro(*arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, str(REPOSITORY / "launch" / "repro.py"), *arguments]
    return subprocess.run(command, capture_output=True, text=True, timeout=120)


def test_list(capsys: pytest.CaptureFixture[str]) -> None:
    def listed(*options: str) -> list[str]:
        assert script.main(["list", *options]) == 0
        return [line.split()[0] for line in capsys.readouterr().out.splitlines()]

    assert listed() == list(all_cases())
    gpus = listed("--needs", "one_gpu", "several_gpus")
    assert "nccl-cumem-skew" in gpus and "release-twice" in gpus and "ipv6-dist-init-addr" not in gpus
    assert listed("--no-engine") == [slug for slug, case in all_cases().items() if not case.engine]


def test_show_has_cause_fix_difference_and_where_it_was_seen() -> None:
    ended = repro("show", "torchelastic-agent-store-hang")
    assert ended.returncode == 0, ended.stderr
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
        assert f"\n{begins}" in ended.stdout


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["show", "quantization-scales"], "without a case: It needs"),
        (["show", "99999"], "the catalogue links no issue 99999"),
        (["run", "torchelastic-hang"], "did you mean torchelastic-agent-store-hang?"),
        ([QUICK], f"to reproduce a failure: launch/repro.py run {QUICK}"),
        (["run"], "either names of cases or --all"),
        (["run", QUICK, "--all"], "either names of cases or --all"),
    ],
)
def test_a_mistake_is_one_sentence_and_exit_code_2(
    arguments: list[str], words: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert script.main(arguments) == 2
    error = capsys.readouterr().err
    assert words in error and error.count("\n") == 1


@pytest.mark.parametrize("name", ["14178", "#14178", "https://github.com/sgl-project/sglang/issues/14178"])
def test_a_case_is_found_by_the_number_of_an_issue(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert script.main(["show", name]) == 0
    assert "dsv3-qkv-a-split: " in capsys.readouterr().out


def test_several_cases_are_shown_and_counted_and_one_that_needs_gpus_does_not_start(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    ended = repro("run", QUICK, "missing-main-guard", "nccl-cumem-skew")
    assert ended.returncode == 1 and ended.stdout.endswith("\n2 reproduced, 1 cannot run here\n")
    assert "differs in: " in ended.stdout and '\nreproduced: "WRONG repeated: ' in ended.stdout
    assert "cannot run here: it needs 2 GPU(s), and this process can use 0." in ended.stdout
    assert repro("run", "nccl-cumem-skew").returncode == 125
