"""What the pages promise: links lead somewhere, commands can work, and the program of docs/library.md runs as
pasted."""

import os
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

from harness.config.layers import ConfigError
from harness.tools import environments, preflight
from harness.tools.command_line import parse
from tests.tools.test_preflight import PREPARED

REPOSITORY = environments.REPOSITORY
README = REPOSITORY / "README.md"
DOCS = sorted((REPOSITORY / "docs").glob("*.md"))
PAGES = [README, *(REPOSITORY / f"{name}.md" for name in ("CONTRIBUTING", "CHANGELOG")), *DOCS]
ROOMS = [
    *(each for each in (REPOSITORY / "harness").iterdir() if (each / "__init__.py").is_file()),
    *(each for each in (REPOSITORY / "harness" / "tools").iterdir() if (each / "__init__.py").is_file()),
]
OF_ROOMS = [REPOSITORY / "harness" / "README.md", *(room / "README.md" for room in ROOMS)]
ALL = [
    page
    for page in (
        *PAGES,
        *OF_ROOMS,
        REPOSITORY / "launch" / "README.md",
        REPOSITORY / "configs" / "environments" / "README.md",
        REPOSITORY / "tests" / "end_to_end" / "README.md",
    )
    if page.exists()
]
SYNC_OPTIONS = {"--syncs": 1, "--transports": 5, "--bench": 0, "--repeats": 1}


def name_of(page: Path) -> str:
    return str(page.relative_to(REPOSITORY))


def prose(page: Path) -> list[str]:
    """Return the lines outside of code blocks."""
    kept, inside = [], False
    for line in page.read_text(encoding="utf-8").splitlines():
        if line.startswith("```"):
            inside = not inside
        elif not inside:
            kept.append(line)
    return kept


def commands(page: Path) -> list[str]:
    """Return what can be pasted: indented lines, continued ones joined, and spans of code that call a script."""
    text = page.read_text(encoding="utf-8").replace("\\\n", " ")
    found = re.findall(r"^    (\S.*)$", text, re.MULTILINE)
    for line in prose(page):
        found += re.findall(r"`([^`]*(?:python3?|torchrun) [^`]*)`", line)
    return [each.partition(" # ")[0].strip() for each in found if re.search(r"(python3?|torchrun)\b.* \S", each)]


def test_each_room_has_a_page() -> None:
    assert [name_of(page) for page in OF_ROOMS if not page.exists()] == []


@pytest.mark.parametrize("page", ALL, ids=name_of)
def test_links_lead_somewhere(page: Path) -> None:
    links = re.findall(r"\]\(([^)#]+)[^)]*\)", "\n".join(prose(page)))
    assert [link for link in links if "://" not in link and not (page.parent / link).exists()] == []


def test_the_first_page_starts_from_a_fresh_checkout() -> None:
    assert len(commands(README)) > 10
    assert [line for line in commands(README) if not re.match(r"python3 launch/|\.venv/bin/", line)] == []


JOBS = [
    pytest.param(line, id=f"{name_of(page)}: {line}")
    for page in ALL
    for line in commands(page)
    if re.search(r"launch/(ppo|sync|quickstart)\.py", line) and not re.search(r"\.\.\.|CONFIG|judge", line)
]


@pytest.mark.parametrize("line", JOBS)
def test_each_config_that_a_command_gives_can_work(line: str, tmp_path: Path) -> None:
    """Check what comes after the last script."""
    (tmp_path / "train.jsonl").write_text('{"question": "1 + 1?", "answer": "#### 2"}\n' * 32)
    words = shlex.split(re.split(r"launch/(?:ppo|sync|quickstart)\.py", line)[-1])
    words = [str(tmp_path) if word == "FOLDER" else word for word in words]
    for option, values in SYNC_OPTIONS.items():
        if option in words and "launch/sync.py" in line:
            start = words.index(option)
            stop = start + 1
            while stop < min(len(words), start + 1 + values) and not words[stop].startswith("--"):
                stop += 1
            del words[start:stop]
    words += [word for name, more in PREPARED.items() if name in line for word in more]
    preflight.check_plan(parse(words).config)


def test_a_mistake_in_a_command_would_be_seen() -> None:
    with pytest.raises(ConfigError):
        preflight.check_plan(parse(["--model.name", "qwen4"]).config)


def program() -> str:
    """Return the second program of docs/library.md; tests/end_to_end/test_plain_run.py runs the first."""
    return (REPOSITORY / "docs" / "library.md").read_text().split("```python\n")[2].split("```")[0]


def run_elsewhere(folder: Path, *command: str) -> subprocess.CompletedProcess[str]:
    """Run in a folder that is no checkout, with this Python; PYTHONPATH (tests/conftest.py) stands for the editable install."""
    environment = {name: value for name, value in os.environ.items() if name != "OMP_NUM_THREADS"}
    return subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, timeout=500)


@pytest.mark.slow
def test_any_module_can_be_imported_first(tmp_path: Path) -> None:
    code = (
        "from harness.task.tiny_models import save_tiny_model; save_tiny_model('qwen2', 'm', 0, texts=['a b'])\n"
        "from harness.trainer.model import load_causal_lm"
    )
    done = run_elsewhere(tmp_path, sys.executable, "-c", code)
    assert done.returncode == 0, done.stderr
    assert (tmp_path / "m" / "model.safetensors").is_file()


@pytest.mark.long
def test_the_library_program_runs_as_pasted(tmp_path: Path) -> None:
    (tmp_path / "library.py").write_text(program())
    torchrun = environments.torchrun(Path(sys.executable))
    done = run_elsewhere(tmp_path, *torchrun, "--standalone", "--nproc-per-node=2", "library.py")
    assert done.returncode == 0, done.stderr[-3000:]
    before, after = re.findall(r"^(\[.*\])$", done.stdout, re.MULTILINE)
    assert before != after
