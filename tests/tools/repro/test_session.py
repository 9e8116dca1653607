"""Several cases on the GPUs of one machine: no GPU is two cases' at once. What runs here is a stand-in for launch/repro.py,
on GPUs that are names alone."""

import textwrap
from pathlib import Path

import pytest

from harness.tools.repro import session
from harness.tools.repro.case import Case, Number
from harness.tools.repro.result import Result
from harness.tools.repro.verdict import Kind

STAND_IN = """
import json, os, sys, time
slug, folder = sys.argv[2], sys.argv[4]
if slug == "crashes":
    sys.exit("error: no such thing")
gpus = [each for each in os.environ.get("CUDA_VISIBLE_DEVICES", "").split(",") if each]
began = time.monotonic()
held = [os.path.join(folder, "gpu" + each) for each in gpus or ["none"]]
for each in held:
    os.close(os.open(each, os.O_CREAT | os.O_EXCL))  # fails where another has it
time.sleep(0.2)
for each in held:
    os.unlink(each)
sentence = ",".join(gpus) + " " + " ".join(sys.argv[5:])
result = dict(slug=slug, verdict="reproduced", exit_code=1, sentence=sentence, device="", versions={}, variants={})
with open(os.path.join(folder, slug + ".json"), "w") as file:
    json.dump(result, file)
"""
NUMBER = Number(name="n", broken_above=1, healthy_below=1)


def case(needs: str, engine: bool = False) -> Case:
    return Case(title="t", needs=needs, broken="b", healthy="h", number=NUMBER, engine=engine)  # type: ignore[arg-type]


def a_result(verdict: Kind, exit_code: int) -> Result:
    facts = {"sentence": "s", "device": "", "versions": {}, "variants": {}}
    return Result(slug="a", verdict=verdict, exit_code=exit_code, **facts)  # type: ignore[arg-type]


@pytest.fixture(autouse=True)
def stand_in(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    program = tmp_path / "stand_in.py"
    program.write_text(textwrap.dedent(STAND_IN))
    monkeypatch.setattr(session, "COMMAND", program)
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)


def test_cases_get_as_many_gpus_as_they_need_and_share_none(tmp_path: Path) -> None:
    cases = {f"one-{n}": case("one_gpu") for n in range(4)} | {"two": case("several_gpus"), "engine": case("cpu", True)}
    results = session.run_all(cases, tmp_path, ["4", "7"], [])
    assert list(results) == sorted(cases)
    seen = {slug: result.sentence.split()[0] for slug, result in results.items()}
    assert set(seen.pop("two").split(",")) == {"4", "7"}
    assert set(seen.values()) <= {"4", "7"}
    assert all(result.verdict == "reproduced" for result in results.values())


def test_without_gpus_they_run_one_after_the_other_with_the_options(tmp_path: Path) -> None:
    results = session.run_all({f"c{n}": case("cpu", True) for n in range(3)}, tmp_path, [], ["--seconds", "9"])
    assert [result.sentence.strip() for result in results.values()] == ["--seconds 9"] * 3


def test_a_run_that_fails_itself_proves_nothing_and_no_old_file_stands_for_it(tmp_path: Path) -> None:
    (tmp_path / "crashes.json").write_text("of an earlier run")
    result = session.run_all({"crashes": case("cpu")}, tmp_path, [], [])["crashes"]
    assert (result.verdict, result.exit_code) == ("proves nothing", 125)
    assert result.sentence == "the run ended with exit code 1 and no result: error: no such thing"


def test_exit_code_and_count_of_several() -> None:
    good, bad, no = a_result("reproduced", 1), a_result("not reproduced", 0), a_result("cannot run here", 125)
    assert session.exit_code({"a": good, "b": no}) == 1
    assert session.exit_code({"a": bad, "b": no}) == 125
    assert session.exit_code({"a": bad}) == 0
    assert session.counted({"a": good, "b": no, "c": good}) == "2 reproduced, 1 cannot run here"
