"""The layout: which room may import which, what must start without torch, and text that any machine can read."""

import ast
import subprocess
import sys
import tomllib
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import pytest

REPOSITORY = Path(__file__).resolve().parents[1]
IMPORTS = {
    "runtime": set(),
    "task": set(),
    "config": {"runtime", "task"},
    "cluster": {"config", "runtime"},
    "rollout": {"cluster", "config", "runtime"},
    "trainer": {"cluster", "config"},
    "weights": {"cluster", "config", "rollout", "runtime", "seeds", "trainer"},
    "metrics": {"cluster", "rollout", "task", "trainer"},
    "weight_changes": {"config", "metrics", "trainer", "weights"},
    "seeds": set(),
    "rollouts": {"cluster", "config", "metrics", "rollout", "runtime", "seeds", "task", "trainer"},
    "learning": {"cluster", "config", "metrics", "weight_changes", "runtime", "seeds", "trainer", "weights"},
    "ppo": {"config", "learning", "metrics", "rollout", "rollouts", "runtime", "trainer", "weights"},
    "half_runs": {"config", "learning", "metrics", "rollout", "rollouts", "runtime", "trainer"},
    "checkpoint": {"cluster", "config", "runtime", "trainer", "weights"},
    "observer": set(),
    "inputs": {"cluster", "config", "observer", "rollout", "runtime", "task", "trainer", "weights"},
    "build": {
        "cluster", "half_runs", "inputs", "learning", "weight_changes", "observer", "ppo", "rollout", "rollouts", "runtime", "seeds",
        "trainer", "weights",
    },
    "train": {
        "build", "checkpoint", "cluster", "config", "inputs", "metrics", "weight_changes", "observer", "ppo", "rollouts", "runtime",
        "weights",
    },
    "run": {"cluster", "config", "observer", "rollout", "runtime", "task"},
}  # fmt: skip
"""Rooms of the reference -> what each may import besides itself. The tools are in none of them."""
TOOLS = {
    "agreement": set(),
    "bisection": {"command_line", "diagnose", "environments", "run_tree", "trial"},
    "command_line": {"environments", "fault_spec"},
    "commands": {"environments", "interrupts"},
    "diagnose": set(),
    "doctor": {"environment_file"},
    "engine_class": {"models_code"},
    "environment_file": set(),
    "environments": {"interrupts"},
    "export": {"bisection", "command_line", "diagnose", "environment_file", "environments", "models_code"},
    "fault_spec": set(),
    "folded_torchrun": {"interrupts"},
    "forked_ranks": {"folded_torchrun", "kernel_caches"},
    "full_size": {"command_line", "engine_class", "environments", "page_template", "trial", "user_sender"},
    "hosts": {"fault_spec", "interrupts", "run_tree"},
    "inject": {"fault_spec"},
    "interrupts": set(),
    "kernel_caches": set(),
    "mismatch": {"export"},
    "models_code": set(),
    "observers": {"agreement", "environment_file", "hosts", "inject", "picture", "trackers", "watchdog"},
    "page_template": set(),
    "picture": set(),
    "plan": {"command_line", "picture"},
    "preflight": {"command_line", "environments", "models_code", "rewards", "trackers"},
    "prepare_data": set(),
    "report": {"diagnose", "export", "page_template"},
    "repro": {"diagnose", "engine_class", "environments", "full_size", "hosts", "run_tree", "trial"},
    "rewards": set(),
    "run_tree": set(),
    "start_job": {"command_line", "kernel_caches", "observers", "preflight", "rewards"},
    "step_bench": {"sync"},
    "sync": set(),
    "trackers": set(),
    "user_sender": set(),
    "trial": {"diagnose", "environments", "run_tree"},
    "verify": {"engine_class", "environments", "full_size", "preflight", "trial", "user_sender"},
    "verl": {"environments"},
    "watchdog": {"diagnose", "environments", "hosts", "run_tree"},
}
"""Tools -> the other tools that each may import; the reference is open to all."""
ONLY_THESE_IMPORT_SGLANG = (
    "harness/rollout/sglang_api",
    "harness/runtime/standins/harness_sglang_cpu.py",
    "harness/runtime/standins/harness_sglang_draft.py",
    "harness/runtime/standins/harness_sglang_fp8.py",
)
LIGHT = (
    "harness.cluster.placement",
    "harness.rollout.early_start",
    "harness.tools.command_line",
    "harness.tools.commands",
    "harness.tools.diagnose.diagnose",
    "harness.tools.watchdog.watchdog",
    "harness.tools.plan.dry_run",
    "harness.tools.preflight",
    "harness.tools.start_job",
    "harness.tools.verl.translate",
)
"""What must start at once, so without torch."""


def python_files(folder: str) -> list[Path]:
    return sorted((REPOSITORY / folder).rglob("*.py"))


def harness_imports(file: Path) -> Iterator[str]:
    """Yield dotted names of harness that a file imports, types apart: `from a import b` as a.b."""
    tree = ast.parse(file.read_text())
    for_types = {
        id(node)
        for branch in ast.walk(tree)
        if isinstance(branch, ast.If) and "TYPE_CHECKING" in ast.unparse(branch.test)
        for node in ast.walk(branch)
    }
    for node in ast.walk(tree):
        if id(node) in for_types:
            continue
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names if alias.name.startswith("harness."))
        elif isinstance(node, ast.ImportFrom) and (node.module or "").split(".")[0] == "harness":
            yield from (f"{node.module}.{alias.name}" for alias in node.names)


def room_of(parts: list[str]) -> str:
    """Return the room of a dotted or slashed name below harness: "weights", or "tools/doctor"."""
    parts = [part.removesuffix(".py") for part in parts]
    return "/".join(parts[1:3] if parts[1] == "tools" else parts[1:2])


def test_every_room_imports_what_the_table_says_and_nothing_else() -> None:
    allowed = IMPORTS | {f"tools/{tool}": {f"tools/{each}" for each in others} for tool, others in TOOLS.items()}
    used: dict[str, set[str]] = {room: set() for room in allowed}
    wrong = []
    for file in python_files("harness"):
        path = file.relative_to(REPOSITORY)
        if path.name == "__init__.py" and len(path.parts) <= 3 - (path.parts[1] != "tools"):
            continue
        room = room_of(list(path.parts))
        for name in sorted(set(harness_imports(file))):
            target = room_of(name.split("."))
            if target == room or (room.startswith("tools/") and not target.startswith("tools/")):
                continue
            used[room].add(target)
            if target not in allowed[room]:
                wrong.append(f"{path}: {name}")
    assert not wrong, "\n".join(wrong)
    assert {room: left for room in allowed if (left := allowed[room] - used[room])} == {}, "arrows that no import draws"


def test_the_tables_are_of_this_tree_and_have_no_circles() -> None:
    rooms = {room_of(list(file.relative_to(REPOSITORY).parts)) for file in python_files("harness")} - {
        "__init__",
        "tools/__init__",
    }
    assert rooms == {*IMPORTS, *(f"tools/{tool}" for tool in TOOLS)}
    for table in (IMPORTS, TOOLS):
        left = {room: set(allowed) for room, allowed in table.items()}
        while free := [room for room, allowed in left.items() if not allowed]:
            left = {room: allowed - set(free) for room, allowed in left.items() if room not in free}
        assert not left, "rooms that import each other in a circle"


def test_only_one_package_imports_sglang() -> None:
    wrong = [
        path
        for folder in ("harness", "launch")
        for file in python_files(folder)
        if (path := str(file.relative_to(REPOSITORY))) != "launch/minimal.py"
        and "repro/cases" not in path
        and any(
            (isinstance(node, ast.Import) and any(alias.name.split(".")[0] == "sglang" for alias in node.names))
            or (isinstance(node, ast.ImportFrom) and (node.module or "").split(".")[0] == "sglang")
            for node in ast.walk(ast.parse(file.read_text()))
        )
        and not path.startswith(ONLY_THESE_IMPORT_SGLANG)
    ]
    assert not wrong


@pytest.mark.parametrize("module", LIGHT)
def test_what_must_start_at_once_imports_no_torch(module: str) -> None:
    code = f"import sys, {module}; sys.exit('torch' in sys.modules or 'transformers' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], cwd=REPOSITORY, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr or f"importing {module} imports torch"


def statements(file: Path) -> int:
    """Count a file's statements; docstrings are none."""
    nodes = [node for node in ast.walk(ast.parse(file.read_text())) if isinstance(node, ast.stmt)]
    texts = [node for node in nodes if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant)]
    return len(nodes) - sum(isinstance(text.value.value, str) for text in texts)  # type: ignore[attr-defined]


def test_no_room_is_larger_than_its_budget() -> None:
    """A commit that needs more raises the number in size.toml, and its body names the user's report that asks for it."""
    used = Counter[str]()
    for folder in ("harness", "launch", "tests"):
        for file in python_files(folder):
            parts = file.relative_to(REPOSITORY).parent.parts
            used["/".join(parts[: 3 if "tools" in parts[:2] else 2])] += statements(file)
    budget = tomllib.loads(Path(__file__).with_name("size.toml").read_text())
    assert used.keys() == budget.keys()
    assert {room: count for room, count in used.items() if count > budget[room]} == {}


def test_text_is_ascii_and_names_no_path_of_a_machine() -> None:
    machine = tuple(f"/{folder}/" for folder in ("work", "root", "home"))
    listed = subprocess.run(["git", "ls-files"], cwd=REPOSITORY, capture_output=True, text=True, check=True).stdout
    wrong = []
    for file in map(REPOSITORY.joinpath, listed.splitlines()):
        if file.suffix in (".parquet", ".png", ".gif") or not file.is_file():
            continue
        for number, line in enumerate(file.read_text().splitlines(), 1):
            if any(word in line for word in machine) or (file.suffix == ".py" and not line.isascii()):
                wrong.append(f"{file.relative_to(REPOSITORY)}:{number}: {line.strip()}")
    assert not wrong, "\n".join(wrong)
