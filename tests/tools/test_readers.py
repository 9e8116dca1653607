"""Whatever somebody else may have put there, each reader returns or says in one sentence what is wrong.

The tables of who may write what, and what it can become, are in the READMEs (cluster, config, tools).
"""

import ast
import json
import re
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from harness.config.layers import ConfigError, build_config, read_layer, to_toml
from harness.config.model_fields import model_fields
from harness.runtime.events import PHASES
from harness.task.data import load_rows
from harness.tools.bisection.state import load_state
from harness.tools.diagnose.diagnose import diagnose
from harness.tools.diagnose.diagnosis_text import as_json, as_text
from harness.tools.export.program import render
from harness.tools.export.subject import read_subject
from harness.tools.fault_spec import KINDS, Fault, parse_fault
from harness.tools.preflight import check_index, check_safetensors
from harness.tools.report.write_reports import write_reports
from harness.tools.verl.plain_script import words_of_script
from harness.tools.verl.translate import translate
from tests.tools.report.fake_run import fake_run

CALL = 'x"; __import__("os").system("touch pwned")'
"""A text that would call something if it became a part of a program."""
ENDS = ('"', "'", '"""', "\\", "\n", "\r", "\v", "\f", "\x1c", "\x85", "\u2028", "\x00", "\x1a", "{{", "{%")
"""What may end a string, a comment or a template's text."""
LEAVES = st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=12) | st.just(CALL)
JSON = st.recursive(
    LEAVES,
    lambda each: st.lists(each, max_size=3) | st.dictionaries(st.text(max_size=6), each, max_size=3),
    max_leaves=6,
)
QUICK = settings(
    deadline=None, max_examples=30, suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow]
)


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    """The directories of a run of four ranks that passed, and of one that failed."""
    folder = tmp_path_factory.mktemp("runs")
    return [fake_run(folder / str(passed), ranks=4, passed=passed) for passed in (True, False)]


def places_in(value: Any, at: tuple[Any, ...] = ()) -> list[tuple[Any, ...]]:
    """The paths of all values in parsed JSON."""
    items = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    return [at, *(place for key, each in items for place in places_in(each, (*at, key)))]


def replaced(value: Any, place: tuple[Any, ...], new: Any) -> Any:
    """The same, with another value in that place."""
    if not place:
        return new
    copy = dict(value) if isinstance(value, dict) else list(value)
    copy[place[0]] = replaced(value[place[0]], place[1:], new)
    return copy


def damaged(data: st.DataObject, content: bytes) -> bytes:
    """The file with one value of its JSON replaced, with bytes replaced, or cut."""
    how = data.draw(st.sampled_from(["value", "bytes", "cut", "other"]))
    if how == "other":
        return data.draw(st.binary(max_size=200) | JSON.map(lambda each: json.dumps(each).encode()))
    if how == "cut":
        return content[: data.draw(st.integers(0, len(content)))]
    lines = content.splitlines(keepends=True) or [b""]
    number = data.draw(st.integers(0, len(lines) - 1))
    try:
        parsed = json.loads(lines[number])
    except ValueError:
        how = "bytes"
    if how == "value":
        place = data.draw(st.sampled_from(places_in(parsed)))
        lines[number] = json.dumps(replaced(parsed, place, data.draw(JSON))).encode() + b"\n"
    else:
        at = data.draw(st.integers(0, len(lines[number])))
        lines[number] = lines[number][:at] + data.draw(st.binary(max_size=8)) + lines[number][at + 1 :]
    return b"".join(lines)


def copy_of(run: Path, folder: Path) -> Path:
    shutil.rmtree(folder, ignore_errors=True)
    return shutil.copytree(run, folder)


def check_calls(program: str) -> None:
    """No text of a run is code of the exported program."""
    calls = [ast.unparse(each.func) for each in ast.walk(ast.parse(program)) if isinstance(each, ast.Call)]
    assert "__import__('os').system" not in calls


@pytest.mark.slow
@QUICK
@given(data=st.data())
def test_a_run_directory_of_somebody_else(data: st.DataObject, runs: list[Path], tmp_path: Path) -> None:
    folder = copy_of(data.draw(st.sampled_from(runs)), tmp_path / "copy")
    names = sorted(str(each.relative_to(folder)) for each in folder.rglob("*") if each.is_file())
    chosen = data.draw(st.lists(st.sampled_from(names), min_size=1, max_size=3, unique=True))
    for name in chosen:
        (folder / name).write_bytes(damaged(data, (folder / name).read_bytes()))
    try:
        write_reports(folder)
        program = render(read_subject([str(folder)]))
    except ConfigError as error:
        said = str(error)
        names_key = re.match(r"[a-z_]+\.[a-z_.]+ must ", said)  # as it may, of a config that says something else now
        assert names_key or str(folder) in said or any(Path(name).name in said for name in chosen), said
        assert len(said.splitlines()) == 1, said
        return
    check_calls(program)
    assert "<script" not in (folder / "report.html").read_text()
    assert json.loads((folder / "trace.json").read_text())


@pytest.mark.slow
@QUICK
@given(text=st.text(max_size=30), in_name=st.booleans(), is_failed=st.booleans())
def test_a_text_of_a_run_stays_a_text(
    text: str, in_name: bool, is_failed: bool, runs: list[Path], tmp_path: Path
) -> None:
    """The exported program is the only file of ours that somebody runs."""
    folder = copy_of(runs[is_failed], tmp_path / "copy")
    text = "".join(f"{text}{end}{CALL[4:]}" for end in ENDS)
    if in_name:
        config = folder / "config.toml"
        config.write_text(config.read_text().replace('"qwen3_moe"', json.dumps(text)))
    else:
        file = next(
            each for each in (folder / "failure-host0.json", folder / "events" / "rank1.jsonl") if each.exists()
        )
        content = file.read_text()
        for name in ("qwen3_moe", "sync", "host0", "deadline"):
            content = content.replace(json.dumps(name), json.dumps(text))
        file.write_text(content)
    try:
        program = render(read_subject([str(folder)]))
    except ConfigError:
        return
    compile(program, "repro.py", "exec")
    check_calls(program)


@QUICK
@given(content=st.binary(max_size=2000) | st.lists(st.sampled_from(
    ["Traceback (most recent call last):", '  File "a.py", line 1, in f', "RuntimeError: x", "\x1b[31m", "\x00", "\r", "(" * 50,
     "[rank0]: ", "sglang", "torch.distributed", "{" * 50, "'" * 50]
), max_size=40).map(lambda lines: "\n".join(lines).encode()))  # fmt: skip
@pytest.mark.parametrize("suffix", [".log", ".gz", ".jsonl", ".zst"])
def test_a_log_of_arbitrary_bytes(content: bytes, suffix: str, tmp_path: Path) -> None:
    file = tmp_path / f"run{suffix}"
    file.write_bytes(content)
    try:
        found = diagnose([str(file)])
    except ValueError as error:
        assert len(str(error).splitlines()) == 1
        return
    assert isinstance(as_text(found), str) and json.loads(as_json(found))


@QUICK
@given(
    st.text()
    | st.lists(st.sampled_from([*KINDS, *PHASES, "@", ":", "0", "1", "-1", "\u0663", " ", "9" * 5000])).map("".join)
)
def test_a_fault(text: str) -> None:
    try:
        fault = parse_fault(text)
    except ValueError as error:
        assert len(str(error)) < 20_000
    else:
        assert isinstance(fault, Fault) and fault.rank >= 0


@QUICK
@given(data=st.data())
def test_a_config(data: st.DataObject, tmp_path: Path) -> None:
    file = tmp_path / "config.toml"
    whole = to_toml(build_config([])).encode()
    content = data.draw(st.sampled_from([b"", whole]))
    at = data.draw(st.integers(0, len(content)))
    content = (
        content[:at] + data.draw(st.binary(max_size=20) | st.text(max_size=20).map(str.encode)) + content[at + 1 :]
    )
    file.write_bytes(content)
    try:
        build_config([read_layer(str(file))])
    except ConfigError as error:
        assert str(error)


READERS: dict[str, tuple[str, Callable[[Path], Any]]] = {
    "model": ("config.json", lambda file: model_fields(str(file.parent), {}, "cpu")),
    "safetensors": ("model.safetensors", check_safetensors),
    "index": ("model.safetensors.index.json", lambda file: check_index(file.parent)),
    "rows": ("rows.jsonl", lambda file: load_rows([str(file)], "train")),
    "bisect": ("state.json", lambda file: load_state(file.parent)),
}


@QUICK
@given(content=st.binary(max_size=100) | JSON.map(lambda each: json.dumps(each).encode()))
@pytest.mark.parametrize("reader", READERS)
def test_a_file_that_a_script_is_given(content: bytes, reader: str, tmp_path: Path) -> None:
    name, read = READERS[reader]
    (tmp_path / name).write_bytes(content)
    try:
        read(tmp_path / name)
    except (ValueError, ConfigError) as error:
        assert name in str(error)


SCRIPT_PARTS = (
    "python3 -m verl.trainer.main_ppo", "data.train_batch_size=8", "a.b=$(id)", "$@", "\\\n", "\n", ";", "'", '"', "A=x", "$A", "#",
    "trainer.nnodes=1", "+actor_rollout_ref.x=[1,{a:2}]", "> file", "\u00e9",
)  # fmt: skip


@QUICK
@given(st.lists(st.sampled_from(SCRIPT_PARTS), max_size=12))
def test_a_script_of_verl(parts: list[str]) -> None:
    try:
        translate(words_of_script(" ".join(parts)), "auto", "auto")
    except ConfigError as error:
        assert str(error)


@QUICK
@given(
    st.lists(
        st.text(max_size=20) | st.sampled_from(["data.train_batch_size=", "a=", "+", "~", "{", "[", "'", "${a}"]),
        max_size=4,
    )
)
def test_words_of_verl(words: list[str]) -> None:
    try:
        translate(words, "auto", "")
    except ConfigError as error:
        assert str(error)
