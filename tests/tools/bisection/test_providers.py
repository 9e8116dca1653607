"""Which environments are asked of uv, without asking it."""

import sys
from pathlib import Path

import pytest
from packaging.version import Version

from harness.tools.bisection import installation
from harness.tools.bisection.candidates import Candidate
from harness.tools.bisection.installation import Overlay, Pinned, Prepared, Unavailable, provider_of
from harness.tools.bisection.question import Options, Question, WrongQuestion
from harness.tools.bisection.state import STATE, load_state
from harness.tools.bisection.store import Store

TIMES = {"0.5.20": "2026-09-18T00:00:00Z"}


@pytest.fixture(autouse=True)
def no_index(monkeypatch: pytest.MonkeyPatch) -> None:
    found = {Version(name): Candidate(name=name, time=time) for name, time in TIMES.items()}
    monkeypatch.setattr(installation, "releases", lambda package: found)
    monkeypatch.setattr(installation, "index_arguments", list)
    monkeypatch.setattr(installation, "_has_python", lambda version: version == "3.12")


def provider(folder: Path, **options: object) -> installation.Provider:
    asked = Options(store=str(folder), **options)  # type: ignore[arg-type]
    return provider_of(Question(options=asked, command=("true",), folder="/"), folder, True)


def test_sglang_is_held_where_another_package_moves(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("importlib.metadata.version", lambda name: "0.5.20")
    made = provider(tmp_path, package="transformers")
    assert isinstance(made, Pinned) and made.requirements == ("sglang==0.5.20",)
    assert made.held_since == TIMES["0.5.20"] and made.dated and "3.12" in made.pythons
    made = provider(tmp_path, package="transformers", hold=("none",), today=True, python="3.12")
    assert isinstance(made, Pinned) and not made.requirements and not made.dated and made.pythons == ("3.12",)


def test_each_source_has_its_provider(tmp_path: Path) -> None:
    assert isinstance(provider(tmp_path, package="moving", only_package=True), Overlay)
    made = provider(tmp_path, package="moving", environments=str(tmp_path))
    assert isinstance(made, Prepared)
    (tmp_path / "1.0").mkdir()
    with pytest.raises(Unavailable, match="neither an environment"):
        made.make(Candidate(name="1.0", folder=str(tmp_path / "1.0")))


@pytest.mark.parametrize(
    ("options", "sentence"),
    [
        ({"hold": ("sglang==9.9",)}, "there is no such release"),
        ({"hold": ("==",)}, "--hold must be requirements"),
        ({"python": "3.99"}, "--python must be an interpreter or a version"),
        ({"python": "/no/python"}, "--python must be an interpreter or a version"),
    ],
)
def test_what_cannot_be_provided(tmp_path: Path, options: dict[str, object], sentence: str) -> None:
    with pytest.raises(WrongQuestion, match=sentence):
        provider(tmp_path, package="transformers", **options)


def test_pins_as_of_the_release_without_what_needs_a_gpu(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    asked = []

    def uv(words: list[str], stdin: str = "") -> str:
        asked.append((words, stdin))
        return "nvidia-cublas==13.0\nsglang==0.5.2\ntorch==2.8.0\n"

    monkeypatch.setattr(installation, "_ask_uv", uv)
    monkeypatch.setattr(installation, "_cpu_torch", lambda pin, *sources: [f"{pin}+cpu"])
    made = Pinned(
        store=Store(tmp_path, 0),
        package="sglang",
        requirements=("accelerate",),
        held_since="",
        dated=True,
        no_gpu=True,
        pythons=("3.12", "3.11"),
        sources=[],
        locks=tmp_path / "resolutions",
    )
    candidate = Candidate(name="0.5.2", time="2025-09-12T00:00:00Z", requires_python="<3.12")
    made.resolve(candidate)
    made.resolve(candidate)
    [(words, stdin)] = asked
    assert words[words.index("--exclude-newer") + 1] == "2025-09-17T00:00:00Z"
    assert stdin == "sglang[srt,torch_memory_saver]==0.5.2\naccelerate"
    assert "sgl-kernel" in Path(words[words.index("--excludes") + 1]).read_text().split()
    lock = (tmp_path / "resolutions" / "0.5.2.txt").read_text().splitlines()
    assert lock == ["# python 3.11", "# packages published until 2025-09-17T00:00:00Z", "sglang==0.5.2", "torch==2.8.0"]
    with pytest.raises(Unavailable, match="it wants Python <3.9"):
        made.resolve(Candidate(name="0.5.3", requires_python="<3.9"))


def test_a_python_that_does_not_start_is_said(tmp_path: Path) -> None:
    python = tmp_path / "python"
    python.write_text(f"#!{sys.executable}\nimport nothing_of_this_name\n")
    python.chmod(0o755)
    with pytest.raises(Unavailable, match="does not start: ModuleNotFoundError"):
        installation.Environment(python=str(python)).with_freeze()


@pytest.mark.parametrize("text", ["{", '{"records": []}'])
def test_a_state_of_another_program_is_refused(tmp_path: Path, text: str) -> None:
    (tmp_path / STATE).write_text(text)
    with pytest.raises(WrongQuestion, match="of another version of this program, or cut"):
        load_state(tmp_path)
