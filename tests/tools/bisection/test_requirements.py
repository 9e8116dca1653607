"""What a candidate asks for against what it is laid over."""

from pathlib import Path

from harness.tools.bisection.answer import describe_unmet
from harness.tools.bisection.bisect_report import requirements_table
from harness.tools.bisection.candidates import Candidate
from harness.tools.bisection.installation import Unmet, unmet_requirements
from harness.tools.bisection.question import Options, Question
from harness.tools.bisection.state import Record, State


def state(package: str = "moving", only_package: bool = True) -> State:
    options = Options(good="1.0", bad="1.1", package=package, only_package=only_package)
    question = Question(options=options, command=("true",), folder="/")
    return State(question=question, candidates=[Candidate(name="1.0"), Candidate(name="1.1")])


def test_requires_dist_of_the_overlay(tmp_path: Path) -> None:
    info = tmp_path / "moving-1.0.dist-info"
    info.mkdir()
    requires = [
        "helper==1.0",
        "Torch.Thing>=2,<3",
        "fine>=1",
        "elsewhere; python_version < '3'",
        "extra-only; extra == 'x'",
    ]
    requires += ["absent"]
    (info / "METADATA").write_text(
        "Metadata-Version: 2.1\nName: moving\nVersion: 1.0\n" + "".join(f"Requires-Dist: {each}\n" for each in requires)
    )
    freeze = {"helper": "2.0", "torch-thing": "3.1+cpu", "fine": "1.5", "moving": "1.0"}
    record = Record(name="1.0", verdict="bad", reason="", paths=(str(tmp_path),), freeze=freeze)
    assert unmet_requirements(record.paths, "moving", record.freeze) == [
        Unmet("helper", "==1.0", "2.0"),
        Unmet("torch-thing", "<3,>=2", "3.1+cpu"),
        Unmet("absent", "any", ""),
    ]
    told = describe_unmet(state(), record)
    assert "1.0 ran with helper 2.0 (it asks for ==1.0)" in told and "without --only-package it gets its own" in told
    assert "| helper | ==1.0 | 2.0 |" in list(requirements_table(state(), record))
    assert unmet_requirements(record.paths, "other", record.freeze) == []


def test_a_checkout_and_what_is_met(tmp_path: Path) -> None:
    (tmp_path / "python").mkdir()
    (tmp_path / "python" / "pyproject.toml").write_text("[project]\nname = 'moving'\ndependencies = ['helper==1.0']\n")
    record = Record(name="abc", verdict="bad", reason="", paths=(str(tmp_path / "python"),), freeze={"helper": "1.0"})
    assert describe_unmet(state(only_package=False), record) == "" and list(requirements_table(state(), record)) == []
    record.freeze = {}
    assert describe_unmet(state(only_package=False), record) == "abc ran without 1 of its requirements."
