"""Running cases: variants end in time, leave nothing, and get no launcher's variables.

They are a few lines of shell.
"""

import os
import signal
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import Mock

import psutil
import pytest

from harness.runtime.events import current_work
from harness.tools.bisection.candidates import Candidate
from harness.tools.bisection.installation import Environment, Unavailable
from harness.tools.bisection.question import WrongQuestion
from harness.tools.full_size import compare
from harness.tools.repro import run_cases
from harness.tools.repro.case import Case, all_cases
from harness.tools.repro.run_cases import VariantOutcome

CASE = Case(broken="b", healthy="h", signature=("it broke",), slug="stand-in")


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
    outcome = ran(monkeypatch, "echo up; sleep 1000", seconds=5)
    assert (outcome.exit_code, outcome.output) == (None, "up\n") and outcome.seconds < 60


def test_a_variant_that_has_shown_its_signature_is_not_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(run_cases, "LINGER_SECONDS", 0.1)
    outcome = ran(monkeypatch, "echo it broke; sleep 1000", seconds=300.0)
    assert outcome.exit_code is None and outcome.seconds < 100


def test_what_it_left_running_is_ended(monkeypatch: pytest.MonkeyPatch) -> None:
    outcome = ran(monkeypatch, "setsid sleep 977 & echo left $!")
    assert not psutil.pid_exists(int(outcome.output.split()[1]))


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
            ways.append(way)
            return real(*words, **options)

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
        assert ways[-3:] == ["run_forked_tree", "run_tree", "run_tree"]


def install(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, make: Callable[[Candidate], Environment]) -> Case:
    """Let make() install SGLang 0.5.16, which needs no index; return a case that wants it."""
    resolved = tmp_path / "harness-bisect" / "against-cpu" / "resolutions"
    resolved.mkdir(parents=True)
    (resolved / "0.5.16.txt").touch()
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr(compare, "has_gpu", lambda: False)
    monkeypatch.setattr(compare, "provider_of", lambda *_: SimpleNamespace(make=make))
    return replace(CASE, releases=("0.5.16",))


def test_a_release_is_installed_before_the_variants_and_that_is_said(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    shown = []

    def make(candidate: Candidate) -> Environment:
        work = current_work()
        assert work
        shown.append((work.what, "broken: " in capsys.readouterr().out))
        return Environment(python="python")

    case = install(monkeypatch, tmp_path, make)
    stand_in(monkeypatch, "echo it broke; exit 3")
    assert run_cases.run_case(case, []) == "reproduced"
    assert shown == [("installing sglang 0.5.16", False)]


@pytest.mark.parametrize("problem", [Unavailable("no index."), WrongQuestion("no such release.")])
def test_a_release_that_cannot_be_installed_is_no_verdict(
    problem: Exception, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    case = install(monkeypatch, tmp_path, Mock(side_effect=problem))
    stand_in(monkeypatch, "echo it broke; exit 3")
    assert run_cases.run_case(case, []) == "cannot run here" and str(problem) in capsys.readouterr().out
