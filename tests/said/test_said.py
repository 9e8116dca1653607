"""What programs print: each block of tests/said/*.txt is a command line, its exit code, and its screen.

A block runs in this process, in a folder of broken files (inputs.py); those of programs.txt are started as a user does
it. `| diff FILE -` and `| grep -E PATTERN` show a part of standard output. After a change, `pytest tests/said
--rewrite-said` writes the files from what is printed: read their diff.
"""

import difflib
import importlib
import importlib.metadata
import io
import os
import re
import shlex
import subprocess
import sys
from collections.abc import Iterator
from contextlib import redirect_stderr, redirect_stdout
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import pytest

from harness.rollout import sglang_api
from harness.runtime import cpu_standins
from harness.tools import preflight, start_job
from tests.said.inputs import make_inputs

REPOSITORY = Path(__file__).resolve().parents[2]
FILES = sorted(Path(__file__).parent.glob("*.txt"))
BLOCK = re.compile(r"(?P<notes>(?:# [^\n]*\n)*)\$ (?P<command>[^\n]*)\n?(?P<said>.*)", re.DOTALL)
MASKS = {
    re.escape(str(Path(sys.executable).parent)): "BIN",  # first, as it may be in the checkout
    re.escape(str(REPOSITORY)): "CHECKOUT",
    re.escape(f"sglang {importlib.metadata.version('sglang')}"): "sglang VERSION",
    r"\d+\.\d s\b": "N s",
    r".*\(\d+ s so far\)\n": "",
    r"Error while deserializing[^;]*": "WHY",
    r"\(choose from [^)]*\)": "(choose from CHOICES)",
}
"""What varies -> what is written in its place; the folder of the test is written as FOLDER."""
ENVIRONMENT = {"HOME": "/h", "HF_HUB_OFFLINE": "1", "HARNESS_VENV": "none", "GIT_CONFIG_GLOBAL": "/dev/null"}
UNSET = ("CUDA_VISIBLE_DEVICES", "RANK", "LOCAL_RANK", "WORLD_SIZE", "PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_ALLOC_CONF")


@dataclass
class Block:
    """A command, with the lines above it that start with #."""

    notes: str
    command: str
    said: str

    def __str__(self) -> str:
        return f"{self.notes}$ {self.command}\n{self.said}"


def blocks_of(file: Path) -> list[Block]:
    parts = re.split(r"\n\n+(?=(?:# .*\n)*\$ )", file.read_text(encoding="utf-8").rstrip("\n"))
    found = [BLOCK.fullmatch(part) for part in parts]
    assert all(found), f"{file}: each block is a line of $ and a command, `exit N`, and its screen"
    return [Block(**each.groupdict()) for each in found if each]


BLOCKS = {file.stem: blocks_of(file) for file in FILES}
CASES = [
    pytest.param(name, block, id=f"{name}: {block.command}", marks=[pytest.mark.slow] * ("# Slow" in block.notes))
    for name, blocks in BLOCKS.items()
    for block in blocks
]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory, request: pytest.FixtureRequest) -> Iterator[Path]:
    """The folder of inputs; with --rewrite-said, write the files once all blocks have run."""
    yield make_inputs(tmp_path_factory.mktemp("said"))
    if request.config.getoption("--rewrite-said"):
        for file in FILES:
            file.write_text("\n\n".join(map(str, BLOCKS[file.stem])) + "\n", encoding="utf-8")


@pytest.fixture(scope="module", autouse=True)
def sources_read_once() -> Iterator[None]:
    """Read the sources of SGLang and transformers once, and not for each command."""
    api = sglang_api.probe()
    facts = preflight.engine_facts(api)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sglang_api, "probe", lambda: api)
        patch.setattr(preflight, "engine_facts", lambda _: facts)
        patch.setattr(preflight, "installed", cache(preflight.installed))
        yield


@pytest.mark.parametrize(("name", "block"), CASES)
def test_what_is_said(
    name: str,
    block: Block,
    folder: Path,
    tmp_path: Path,
    request: pytest.FixtureRequest,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    command, _, filter_ = block.command.partition(" | ")
    words = shlex.split(command)
    while "=" in words[0]:
        monkeypatch.setenv(*words.pop(0).split("=", 1))
    for variable in UNSET:
        if f"{variable}=" not in command:
            monkeypatch.delenv(variable, raising=False)
    for variable, value in (ENVIRONMENT | {"XDG_CACHE_HOME": str(tmp_path)}).items():
        monkeypatch.setenv(variable, value)
    before = sorted(folder.rglob("*"))

    code, output, errors = (started if name == "programs" else called)(words, folder, monkeypatch)
    assert sorted(folder.rglob("*")) == before, "a folder of the user has changed"
    assert code != 2 or errors.splitlines()[-1:] == [] or errors.splitlines()[-1].startswith("error: ")
    screen = part_of(output, filter_, folder) if filter_ else output + errors
    for varies, written in ({re.escape(str(folder)): "FOLDER"} | MASKS).items():
        screen = re.sub(varies, written, screen)
    said = f"exit {code}\n{screen}".rstrip("\n")
    if request.config.getoption("--rewrite-said"):
        block.said = said
    assert said == block.said


def part_of(output: str, filter_: str, folder: Path) -> str:
    """Return what `grep -E PATTERN` or `diff FILE -` would print of it."""
    lines, (program, *_, pattern) = output.splitlines(), shlex.split(filter_.removesuffix(" -"))
    if program == "grep":
        return "\n".join(line for line in lines if re.search(pattern, line))
    given = (folder / pattern).read_text(encoding="utf-8").splitlines()
    return "\n".join(f"{line[0]} {line[2:]}" for line in difflib.ndiff(given, lines) if line[0] in "-+")


def called(words: list[str], folder: Path, patch: pytest.MonkeyPatch) -> tuple[int, str, str]:
    """Call main of the program in this process, on a machine without a GPU. Return its exit code and both streams."""
    patch.chdir(folder)
    patch.setattr(cpu_standins, "GPU_FILES", ())
    patch.setattr(start_job, "start_early", None)  # a command that is taken for right fails, and starts no run here
    patch.setattr(sys, "argv", words)
    screens = [io.TextIOWrapper(io.BytesIO(), encoding="utf-8", write_through=True) for _ in range(2)]
    with redirect_stdout(screens[0]), redirect_stderr(screens[1]):
        try:
            code = importlib.import_module(words[0].removesuffix(".py").replace("/", ".")).main(words[1:])
        except SystemExit as ended:
            code = ended.code
    output, errors = (screen.buffer.getvalue().decode() for screen in screens)  # type: ignore[attr-defined]
    return code, output, errors


def started(words: list[str], folder: Path, _: pytest.MonkeyPatch) -> tuple[int, str, str]:
    """Start the program, and wait for it."""
    command = [sys.executable, str(REPOSITORY / words[0]), *words[1:]]
    done = subprocess.run(command, cwd=folder, env=os.environ, capture_output=True, text=True, timeout=300)
    return done.returncode, done.stdout, done.stderr
