"""Running cases: variants in time and without a launcher's variables, cases on GPUs that no two have at once.

The variants are stand-ins, a few lines of shell.
"""

import threading
import time
from concurrent.futures import CancelledError
from pathlib import Path

import psutil
import pytest

from harness.tools.repro import run_cases
from harness.tools.repro.case import Case
from harness.tools.repro.case_result import CaseResult, read_result
from harness.tools.repro.case_verdict import VariantOutcome, VerdictKind

CASE = Case(needs="cpu", broken="b", healthy="h", signature=("it broke",))


def case(needs: str = "cpu", engine: bool = False, seconds: float = 30.0) -> Case:
    return Case(needs=needs, broken="b", healthy="h", signature=("it broke",), engine=engine, timeout_seconds=seconds)  # type: ignore[arg-type]


def stand_in(monkeypatch: pytest.MonkeyPatch, broken: str, healthy: str = "true") -> None:
    shell = {"broken": broken, "healthy": healthy}
    monkeypatch.setattr(run_cases, "program_command", lambda slug, variant: ["bash", "-c", shell[variant]])
    monkeypatch.setattr(run_cases, "check_requirements", lambda case, gpus: None)


def ran(monkeypatch: pytest.MonkeyPatch, shell: str, seconds: float = 30.0) -> VariantOutcome:
    stand_in(monkeypatch, shell)
    return run_cases.run_variant("stand-in", case(seconds=seconds), "broken", [], threading.Event())


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


def test_both_variants_are_judged_and_shown(monkeypatch: pytest.MonkeyPatch) -> None:
    shown: list[str] = []
    stand_in(monkeypatch, "seq 50; echo it broke; exit 3")
    result = run_cases.run_case("stand-in", CASE, [], show=shown.append)
    assert (result.verdict, result.exit_code) == ("reproduced", 1)
    assert "differs in: b (broken) | h (healthy)" in shown[0] and "broken: exit code 3" in shown[1]
    assert len(result.variants["broken"].output.splitlines()) <= 10 and set(result.variants) == {"broken", "healthy"}


@pytest.mark.parametrize("code", [125, 0])
def test_a_variant_that_cannot_run_is_the_last(code: int, monkeypatch: pytest.MonkeyPatch) -> None:
    stand_in(monkeypatch, f"echo cannot run here: no GPU.; exit {code}")
    result = run_cases.run_case("stand-in", CASE, [], show=lambda _: None)
    assert (result.verdict, "healthy" in result.variants) == (
        ("cannot run here", False) if code else ("not reproduced", True)
    )


def test_a_stop_ends_what_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    stop = threading.Event()
    stop.set()
    stand_in(monkeypatch, "sleep 1000")
    with pytest.raises(CancelledError):
        run_cases.run_case("stand-in", CASE, [], show=lambda _: None, stop=stop)


def test_cases_get_as_many_gpus_as_they_need_and_share_none(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    in_use: list[str] = []

    def run_case(slug: str, case: Case, gpus: list[str], **options: object) -> CaseResult:
        assert not set(gpus) & set(in_use)
        in_use.extend(gpus)
        time.sleep(0.02)
        for gpu in gpus:
            in_use.remove(gpu)
        return a_result(slug, "reproduced", ",".join(gpus))

    monkeypatch.setattr(run_cases, "run_case", run_case)
    cases = {f"one-{n}": case("one_gpu") for n in range(4)} | {"two": case("several_gpus"), "engine": case("cpu", True)}
    results = run_cases.run_cases(cases, tmp_path, ["4", "7"])
    assert list(results) == sorted(cases)
    assert set(results.pop("two").sentence.split(",")) == {"4", "7"}
    assert {result.sentence for result in results.values()} <= {"4", "7"}
    assert read_result(tmp_path / "one-0.json") == results["one-0"]
    assert {each.sentence for each in run_cases.run_cases({"a": case(), "b": case()}, tmp_path, []).values()} == {""}


def test_a_failure_of_the_harness_ends_all_cases(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    def run_case(slug: str, case: Case, gpus: list[str], *, stop: threading.Event, **options: object) -> CaseResult:
        if slug == "crashes":
            raise OSError("no such thing")
        assert stop.wait(60)
        raise CancelledError

    monkeypatch.setattr(run_cases, "run_case", run_case)
    with pytest.raises(OSError, match="no such thing"):
        run_cases.run_cases({"crashes": case("several_gpus"), "waits": case("one_gpu")}, tmp_path, ["0", "1", "2"])


def test_exit_code_and_count_of_several() -> None:
    good, bad, no = a_result("a", "reproduced"), a_result("b", "not reproduced"), a_result("c", "cannot run here")
    assert run_cases.exit_code_of({"a": good, "b": no}) == 1
    assert run_cases.exit_code_of({"a": bad, "b": no}) == 125
    assert run_cases.exit_code_of({"a": bad}) == 0
    assert run_cases.count_verdicts({"a": good, "b": no, "c": good}) == "2 reproduced, 1 cannot run here"


def a_result(slug: str, verdict: VerdictKind, sentence: str = "s") -> CaseResult:
    code = run_cases.EXIT_CODES[verdict]
    facts = {"device": "", "versions": {}, "variants": {}}
    return CaseResult(slug=slug, verdict=verdict, exit_code=code, sentence=sentence, **facts)  # type: ignore[arg-type]
