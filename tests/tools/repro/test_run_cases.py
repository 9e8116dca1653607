"""Running cases: variants in time and without a launcher's variables; results as files, and in the catalogue.

The variants are stand-ins, a few lines of shell.
"""

import shutil
from pathlib import Path

import psutil
import pytest

from harness.tools.diagnose.entries import FOLDER, read_entry
from harness.tools.repro import run_cases
from harness.tools.repro.case import Case
from harness.tools.repro.run_cases import CaseResult, VariantOutcome, record, write_result

CASE = Case(broken="b", healthy="h", signature=("it broke",), slug="stand-in")
SLUG = "rollout-timeout"
ODD = 'it said "timed out" \\ and\ttab, \u00b5'


def stand_in(monkeypatch: pytest.MonkeyPatch, broken: str, healthy: str = "true") -> None:
    shell = {"broken": broken, "healthy": healthy}
    monkeypatch.setattr(run_cases, "program_command", lambda case, variant: ["bash", "-c", shell[variant]])
    monkeypatch.setattr(run_cases, "check_requirements", lambda case, gpus: None)


def ran(monkeypatch: pytest.MonkeyPatch, shell: str, seconds: float = 30.0) -> VariantOutcome:
    stand_in(monkeypatch, shell)
    return run_cases.run_variant(CASE, "broken", [], seconds)


def test_exit_code_and_output_of_both_streams(monkeypatch: pytest.MonkeyPatch) -> None:
    outcome = ran(monkeypatch, "echo one; echo two >&2; exit 7")
    assert (outcome.exit_code, outcome.output) == (7, "one\ntwo\n")


def test_a_variant_that_does_not_end_is_ended(monkeypatch: pytest.MonkeyPatch) -> None:
    outcome = ran(monkeypatch, "echo up; sleep 1000", seconds=0.6)
    assert (outcome.exit_code, outcome.output) == (None, "up\n") and outcome.seconds < 20


def test_a_variant_that_has_shown_its_signature_is_not_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(run_cases, "LINGER_SECONDS", 0.1)
    outcome = ran(monkeypatch, "echo it broke; sleep 1000", seconds=300.0)
    assert outcome.exit_code is None and outcome.seconds < 100


def test_what_it_left_running_is_ended(monkeypatch: pytest.MonkeyPatch) -> None:
    outcome = ran(monkeypatch, "setsid sleep 977 & echo left $!")
    assert not psutil.pid_exists(int(outcome.output.split()[1]))


def test_a_launchers_variables_do_not_reach_it(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("RANK", "MASTER_ADDR", "TORCHELASTIC_USE_AGENT_STORE", "HARNESS_RUN", "CUDA_VISIBLE_DEVICES"):
        monkeypatch.setenv(name, "1")
    made = run_cases.variant_environment("some", [])
    assert {"RANK", "MASTER_ADDR", "TORCHELASTIC_USE_AGENT_STORE", "HARNESS_RUN"}.isdisjoint(made)
    assert (made["TMPDIR"], made["CUDA_VISIBLE_DEVICES"]) == ("some", "1")
    assert made["PYTHONPATH"].startswith(str(run_cases.REPOSITORY))
    assert run_cases.variant_environment("some", ["4", "7"])["CUDA_VISIBLE_DEVICES"] == "4,7"


def test_both_variants_are_judged_and_shown(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    stand_in(monkeypatch, "seq 50; echo it broke; exit 3")
    result = run_cases.run_case(CASE, [])
    shown = capsys.readouterr().out
    assert (result.verdict, result.exit_code) == ("reproduced", 1)
    assert "differs in: b (broken) | h (healthy)" in shown and "broken: exit code 3" in shown
    assert len(result.variants["broken"].output.splitlines()) <= 10 and set(result.variants) == {"broken", "healthy"}


@pytest.mark.parametrize("code", [125, 0])
def test_a_variant_that_cannot_run_is_the_last(code: int, monkeypatch: pytest.MonkeyPatch) -> None:
    stand_in(monkeypatch, f"echo cannot run here: no GPU.; exit {code}")
    result = run_cases.run_case(CASE, [])
    assert (result.verdict, "healthy" in result.variants) == (
        ("cannot run here", False) if code else ("not reproduced", True)
    )


def test_a_variant_that_kills_its_supervisor_proves_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    stand_in(monkeypatch, "kill -9 $PPID; sleep 5")
    assert run_cases.run_case(CASE, []).verdict == "proves nothing"


def test_a_missing_package_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    result = run_cases.run_case(Case(broken="b", healthy="h", requires=("sglang>=99",), slug="x"), [])
    assert result.verdict == "cannot run here" and result.sentence.startswith("it needs sglang>=99, and ")


def test_gpus_are_those_of_nvidia_smi_that_are_visible(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    command = tmp_path / "nvidia-smi"
    command.write_text("#!/bin/sh\n[ $1 = -L ] && echo 'GPU 0: H200\nGPU 1: H200' || echo NVIDIA H200\n")
    command.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=":")
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    assert run_cases.visible_gpus() == ["0", "1"]
    assert run_cases.device_of(Case(broken="b", healthy="h", engine=True), ["0", "1"]) == "1 x NVIDIA H200"
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "1")
    assert run_cases.visible_gpus() == ["1"]


def test_exit_code_and_count_of_several() -> None:
    good, bad, no = (a_result(kind) for kind in ("reproduced", "not reproduced", "cannot run here"))
    assert run_cases.exit_code_of([good, no]) == 1
    assert run_cases.exit_code_of([bad, no]) == 125
    assert run_cases.exit_code_of([bad]) == 0
    assert run_cases.count_verdicts([good, no, good]) == "2 reproduced, 1 cannot run here"


def a_result(kind: str, sentence: str = "s") -> CaseResult:
    outcome = VariantOutcome(exit_code=1, output="a\nb", seconds=2.5)
    return CaseResult(
        slug=SLUG, verdict=kind, exit_code=run_cases.EXIT_CODES[kind], sentence=sentence, device="2-core CPU",
        versions={"torch": "2.13.0+cpu"}, variants={"broken": outcome},
    )  # fmt: skip


def test_a_result_is_recorded_once_and_the_entry_stays_as_it_was_otherwise(tmp_path: Path) -> None:
    shutil.copy(FOLDER / f"{SLUG}.toml", tmp_path)
    before = read_entry(tmp_path / f"{SLUG}.toml")
    write_result(tmp_path / "new", a_result("reproduced", ODD))
    file = tmp_path / "new" / f"{SLUG}.json"
    assert "recorded" in record(file, "2026-11-21", tmp_path)
    assert "known" in record(file, "2026-11-21", tmp_path)
    after = read_entry(tmp_path / f"{SLUG}.toml")
    assert after.seen[:-1] == before.seen and after.seen[-1].versions == {"torch": "2.13.0+cpu"}
    assert after.seen[-1].result == f"launch/repro.py run {SLUG}: reproduced: {ODD}"
    assert (after.examples, after.repro, after.cause) == (before.examples, before.repro, before.cause)


@pytest.mark.parametrize("kind", ["cannot run here", "proves nothing", "the control passed"])
def test_what_shows_nothing_is_not_recorded(kind: str, tmp_path: Path) -> None:
    write_result(tmp_path, a_result(kind))
    assert "left out" in record(tmp_path / f"{SLUG}.json", "2026-11-21", tmp_path)
