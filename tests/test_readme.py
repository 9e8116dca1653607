"""What README.md gives to paste: lines that start from a fresh checkout, and a program that uses the harness from anywhere."""

import os
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

from harness.config.cli import parse
from harness.config.layers import ConfigError
from harness.tools import environments, preflight

README = (environments.REPOSITORY / "README.md").read_text(encoding="utf-8")
LINES = [
    line.partition(" # ")[0].strip()
    for line in README.splitlines()
    if re.match(r"    \S.*(torchrun|python).* \S", line)
]
SYNC_OPTIONS = {"--syncs": 1, "--transports": 5, "--bench": 0, "--repeats": 1}


def test_each_line_starts_with_what_a_fresh_checkout_has() -> None:
    assert len(LINES) > 25
    wrong = [
        line
        for line in LINES
        if not re.match(r"(python3 launch/|\.venv/bin/|kubectl .*\| \.venv/bin/|git bisect run \.venv)", line)
    ]
    assert not wrong


@pytest.mark.parametrize("line", [line for line in LINES if re.search(r"launch/(ppo|sync|quickstart)\.py", line)])
def test_each_config_that_a_line_gives_can_work(line: str, tmp_path: Path) -> None:
    words = shlex.split(line.split("launch/", maxsplit=1)[1])[1:]
    if "--" in words:  # of hosts.py or bisect_versions.py: the job comes after it
        words = words[words.index("--") + 2 :]
    (tmp_path / "train.jsonl").write_text('{"question": "1 + 1?", "answer": "#### 2"}\n' * 32)
    words = [str(tmp_path) if word == "FOLDER" else word for word in words]
    for option, values in SYNC_OPTIONS.items():
        if option in words:
            del words[words.index(option) : words.index(option) + 1 + values]
    preflight.check_plan(parse(words).config)


def test_a_mistake_in_a_line_would_be_seen() -> None:
    with pytest.raises(ConfigError):
        preflight.check_plan(parse(["--model.name", "qwen4"]).config)


def program() -> str:
    return README.split("```python\n")[1].split("```")[0]


def from_anywhere(folder: Path, *command: str) -> subprocess.CompletedProcess[str]:
    """In a folder that is no checkout, with this Python; PYTHONPATH stands for the .pth file, which only .venv has."""
    environment = {name: value for name, value in os.environ.items() if name != "OMP_NUM_THREADS"}
    environment["PYTHONPATH"] = str(environments.REPOSITORY)
    return subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, timeout=500)


@pytest.mark.slow
def test_any_module_can_be_imported_first(tmp_path: Path) -> None:
    code = (
        "from harness.task.tiny_models import save_tiny_model; save_tiny_model('qwen2', 'm', 0, texts=['a b'])\n"
        "from harness.trainer.model import load_causal_lm"
    )
    done = from_anywhere(tmp_path, sys.executable, "-c", code)
    assert done.returncode == 0, done.stderr
    assert (tmp_path / "m" / "model.safetensors").is_file()


@pytest.mark.long
def test_the_library_program_runs_as_pasted(tmp_path: Path) -> None:
    assert len(program().splitlines()) <= 28
    (tmp_path / "library.py").write_text(program())
    torchrun = environments.torchrun(Path(sys.executable))
    done = from_anywhere(tmp_path, *torchrun, "--standalone", "--nproc-per-node=2", "library.py")
    assert done.returncode == 0, done.stderr[-3000:]
    before, after = re.findall(r"^(?:before|after) +(\[.*\])$", done.stdout, re.MULTILINE)
    assert before != after
