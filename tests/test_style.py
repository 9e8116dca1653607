"""What the whole tree must keep to: lint, format, types, length of files, ASCII, no paths of a machine, and which way
arrows point."""

import ast
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

REPOSITORY = Path(__file__).resolve().parents[1]
FOLDERS = ("harness", "launch", "tests")
RULES = "E,F,I,B,UP,SIM,RUF"
UPPER_PARTS = {"ppo", "failures", "bisect"}
MAY_NOT_IMPORT = {
    "rollout": {"trainer", "weights", *UPPER_PARTS},
    "trainer": {"rollout", "weights", *UPPER_PARTS},
    "cluster": {"rollout", "trainer", "weights", *UPPER_PARTS},
    "config": {"rollout", "trainer", "weights", "cluster", *UPPER_PARTS},
}
NO_TORCH = (
    "harness/config/",
    "harness/tools/watchdog/",
    "harness/tools/bisection/",
    "harness/tools/plan/",
    "harness/cluster/placement.py",
    "launch/",
)
MAY_IMPORT_SGLANG = ("harness/rollout/sglang_api", "harness/rollout/cpu/standins/harness_sglang_cpu.py")


def text_files() -> Iterator[Path]:
    for folder in (*FOLDERS, "configs", ".ci"):
        for file in sorted((REPOSITORY / folder).rglob("*")):
            if file.is_file() and not any(part.endswith(("__pycache__", "_cache")) for part in file.parts):
                yield file
    yield from (file for file in sorted(REPOSITORY.iterdir()) if file.is_file() and file.name != ".git")


def python_files(*folders: str) -> list[Path]:
    return [file for folder in folders for file in sorted((REPOSITORY / folder).rglob("*.py"))]


def imported(tree: ast.AST) -> set[str]:
    """Absolute names that the nodes import, `from a import b` as a.b."""
    names = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module:
            names |= {f"{node.module}.{alias.name}" for alias in node.names}
    return names


def imported_at_import(tree: ast.Module) -> set[str]:
    """What importing the module itself imports: functions' bodies and `if TYPE_CHECKING` left aside."""
    names: set[str] = set()
    for node in tree.body:
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            continue
        if not (isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test)):
            names |= imported(node)
    return names


def tool(*arguments: str) -> None:
    run = subprocess.run([sys.executable, "-m", *arguments], cwd=REPOSITORY, capture_output=True, text=True)
    assert run.returncode == 0, run.stdout + run.stderr


def test_ruff_check() -> None:
    # E501: the formatter breaks code at 120, and the docstrings of fields, which --help shows, stay on one line.
    # RUF043: a sentence in pytest.raises(match=...) reads better unescaped.
    rules = ("--select", RULES, "--ignore", "E501,RUF043", "--line-length", "120", "--target-version", "py311")
    tool("ruff", "check", "--quiet", "--output-format", "concise", *rules, *FOLDERS)


def test_ruff_format() -> None:
    tool("ruff", "format", "--check", "--line-length", "120", "--target-version", "py311", *FOLDERS)


@pytest.mark.slow
def test_mypy() -> None:
    tool("mypy", "harness", "launch")


def test_no_file_is_longer_than_400_lines() -> None:
    long = {
        str(file.relative_to(REPOSITORY)): count
        for file in text_files()
        if file.suffix not in (".json", ".jsonl", ".parquet")
        and (count := len(file.read_text(errors="replace").splitlines())) > 400
    }
    assert not long


def test_no_path_of_a_machine_and_only_ascii() -> None:
    machine = tuple(f"/{folder}/" for folder in ("work", "root", "home"))
    wrong = []
    for file in text_files():
        if file.suffix in (".parquet", ".png", ".gif"):
            continue
        for number, line in enumerate(file.read_text().splitlines(), 1):
            if any(word in line for word in machine) or (file.suffix == ".py" and not line.isascii()):
                wrong.append(f"{file.relative_to(REPOSITORY)}:{number}: {line.strip()}")
    assert not wrong, "\n".join(wrong)


def test_only_one_module_imports_sglang() -> None:
    wrong = [
        str(path)
        for file in python_files("harness", "launch")
        if any(name.split(".")[0] == "sglang" for name in imported(ast.parse(file.read_text())))
        and not str(path := file.relative_to(REPOSITORY)).startswith(MAY_IMPORT_SGLANG)
    ]
    assert not wrong


def test_what_must_be_instant_imports_no_torch() -> None:
    wrong = [
        str(path)
        for file in python_files("harness", "launch")
        if str(path := file.relative_to(REPOSITORY)).startswith(NO_TORCH)
        and path.stem != "watchdog"
        and any(
            name.split(".")[0] in ("torch", "transformers") for name in imported_at_import(ast.parse(file.read_text()))
        )
    ]
    assert not wrong


@pytest.mark.parametrize("part", MAY_NOT_IMPORT)
def test_arrows_point_one_way(part: str) -> None:
    wrong = [
        f"{file.relative_to(REPOSITORY)}: {name}"
        for file in [*python_files(f"harness/{part}"), *(REPOSITORY / "harness").glob(f"{part}.py")]
        for name in sorted(imported(ast.parse(file.read_text())))
        if name.startswith("harness.") and name.split(".")[1] in MAY_NOT_IMPORT[part]
    ]
    assert not wrong
