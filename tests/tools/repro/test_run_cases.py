"""Running cases: variants end in time, leave nothing, and get no launcher's variables.

They are a few lines of shell.
"""

import os
import signal
from dataclasses import replace
from typing import Any
from unittest.mock import Mock

import psutil
import pytest

from harness.config.mistakes import ConfigError
from harness.runtime.errors import UnsupportedEnvironment
from harness.tools.repro import run_cases
from harness.tools.repro.case import Case, all_cases
from harness.tools.trial import trial
from harness.tools.trial.environment import Environment
from harness.tools.trial.trial import Outcome

CASE = Case(broken="b", healthy="h", signature=("it broke",), slug="stand-in")


def stand_in(monkeypatch: pytest.MonkeyPatch, broken: str, healthy: str = "true") -> None:
    shell = {"broken": broken, "healthy": healthy}
    monkeypatch.setattr(run_cases, "program_command", lambda case, variant, _: ["bash", "-c", shell[variant]])
    monkeypatch.setattr(run_cases, "check_requirements", lambda case, gpus: None)


def ran(monkeypatch: pytest.MonkeyPatch, shell: str, seconds: float = 30.0) -> tuple[Outcome, str]:
    stand_in(monkeypatch, shell)
    return run_cases.run_variant(CASE, "broken", [], seconds)


def test_exit_code_and_output_of_both_streams(monkeypatch: pytest.MonkeyPatch) -> None:
    outcome, output = ran(monkeypatch, "echo one; echo two >&2; exit 7")
    assert (outcome.code, output) == (7, "one\ntwo\n")


def test_a_variant_that_does_not_end_is_ended(monkeypatch: pytest.MonkeyPatch) -> None:
    outcome, output = ran(monkeypatch, "echo up; sleep 1000", seconds=5)
    assert (outcome.timed_out, output) == (True, "up\n") and outcome.seconds < 60


def test_a_variant_that_has_shown_its_signature_is_not_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(trial, "LINGER_SECONDS", 0.1)
    outcome, _ = ran(monkeypatch, "echo it broke; sleep 1000", seconds=300.0)
    assert outcome.timed_out and outcome.seconds < 100


def test_what_it_left_running_is_ended(monkeypatch: pytest.MonkeyPatch) -> None:
    _, output = ran(monkeypatch, "setsid sleep 977 & echo left $!")
    assert not psutil.pid_exists(int(output.split()[1]))


def test_a_launchers_variables_do_not_reach_it(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("RANK", "MASTER_ADDR", "TORCHELASTIC_USE_AGENT_STORE", "HARNESS_TMPDIR", "CUDA_VISIBLE_DEVICES"):
        monkeypatch.setenv(name, "1")
    made = run_cases.variant_environment("some", [])
    assert {"RANK", "MASTER_ADDR", "TORCHELASTIC_USE_AGENT_STORE", "HARNESS_TMPDIR"}.isdisjoint(made)
    assert (made["TMPDIR"], made["CUDA_VISIBLE_DEVICES"]) == ("some", "1")
    assert made["PYTHONPATH"].startswith(str(run_cases.REPOSITORY))
    assert run_cases.variant_environment("some", ["4", "7"])["CUDA_VISIBLE_DEVICES"] == "4,7"


def test_both_variants_are_judged_and_shown(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    stand_in(monkeypatch, "seq 50; echo it broke; exit 3")
    assert run_cases.run_case(CASE, []) == "reproduced"
    shown = capsys.readouterr().out
    assert "differs in: b (broken) | h (healthy)" in shown and "broken: exit code 3" in shown
    assert shown.count("  | ") <= 20 and "healthy: exit code 0" in shown


@pytest.mark.parametrize("code", [125, 0])
def test_a_variant_that_cannot_run_is_the_last(
    code: int, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    stand_in(monkeypatch, f"echo cannot run here: no GPU.; exit {code}")
    assert run_cases.run_case(CASE, []) == ("cannot run here" if code else "not reproduced")
    assert ("healthy: " in capsys.readouterr().out) == (code == 0)


def test_a_variant_that_kills_its_supervisor_proves_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    stand_in(monkeypatch, "kill -9 $PPID; sleep 5")
    assert run_cases.run_case(CASE, []) == "proves nothing"


def test_a_missing_package_is_named(capsys: pytest.CaptureFixture[str]) -> None:
    case = Case(broken="b", healthy="h", signature=("x",), requires=("sglang>=99",), slug="x")
    verdict = run_cases.run_case(case, [])
    assert verdict == "cannot run here" and "cannot run here: it needs sglang>=99, and " in capsys.readouterr().out


def test_exit_code_and_count_of_several() -> None:
    good, bad, no = "reproduced", "not reproduced", "cannot run here"
    assert run_cases.exit_code_of([good, no]) == 1
    assert run_cases.exit_code_of([bad, no]) == 125
    assert run_cases.exit_code_of([bad]) == 0
    assert run_cases.count_verdicts([good, no, good]) == "2 reproduced, 1 cannot run here"


@pytest.mark.parametrize(
    ("slugs", "gpus"),
    [
        (["cpu-payload-authkey"], []),  # one case alone is as fast without
        (["missing-main-guard", "verl-engine-removed", "orphans-of-a-start"], []),
        (["cpu-payload-authkey", "illegal-cuda-visible-devices"], ["0"]),
        (["illegal-cuda-visible-devices", "nccl-cumem-skew"], []),  # the second cannot run here
    ],
)
def test_no_imports_are_done_for_cases_that_would_not_share_them(
    slugs: list[str], gpus: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    with run_cases.sharing_imports([all_cases()[slug] for slug in slugs], gpus) as server:
        assert server is None


def test_variants_share_imports_where_that_changes_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    sharing = [all_cases()[slug] for slug in ("cpu-payload-authkey", "illegal-cuda-visible-devices")]
    alone, ways = all_cases()["missing-main-guard"], []
    for way in ("run_tree", "run_forked_tree"):
        real = getattr(run_cases, way)

        def run(*words: Any, way: str = way, real: Any = real, **options: Any) -> Any:
            ended = real(*words, **options)
            ways.append(way)
            return ended

        monkeypatch.setattr(run_cases, way, run)
    with run_cases.sharing_imports([*sharing, alone], []) as server:
        assert {run_cases.run_case(case, [], server) for case in (*sharing, alone)} == {"reproduced"}
        assert ways == ["run_forked_tree"] * 4 + ["run_tree"] * 2
        monkeypatch.setenv("LD_LIBRARY_PATH", "/another")  # which the imports have not seen
        assert run_cases.run_case(sharing[1], [], server) == "reproduced"
        assert ways[-2:] == ["run_tree"] * 2
        monkeypatch.delenv("LD_LIBRARY_PATH")
        assert server
        os.kill(server.pid, signal.SIGKILL)
        assert run_cases.run_case(sharing[1], [], server) == "reproduced"
        assert ways == ["run_forked_tree"] * 4 + ["run_tree"] * 6


def test_a_release_is_installed_before_the_variants_and_they_run_in_it(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    seen: list[object] = []

    def of_release(release: str) -> Environment:
        seen.append((release, "broken: " in capsys.readouterr().out))
        return Environment(python="python-of-a-release")

    def command(case: Case, variant: str, environment: Environment | None) -> list[str]:
        seen.append(environment and environment.python)
        return ["bash", "-c", "test $SGLANG_USE_CPU_ENGINE = 1 && echo it broke" if variant == "broken" else "true"]

    stand_in(monkeypatch, "")
    monkeypatch.setattr(run_cases, "program_command", command)
    monkeypatch.setattr(run_cases, "of_release", of_release)
    assert run_cases.run_case(replace(CASE, release="0.5.16"), []) == "reproduced"
    assert seen == [("0.5.16", False), "python-of-a-release", "python-of-a-release"]


@pytest.mark.parametrize("problem", [UnsupportedEnvironment("no index."), ConfigError("no such release.")])
def test_a_release_that_cannot_be_installed_is_no_verdict(
    problem: Exception, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(run_cases, "of_release", Mock(side_effect=problem))
    stand_in(monkeypatch, "echo it broke; exit 3")
    assert run_cases.run_case(replace(CASE, release="0.5.16"), []) == "cannot run here"
    assert str(problem) in capsys.readouterr().out
