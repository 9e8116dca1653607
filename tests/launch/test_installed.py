"""The package as a wheel, where there is no checkout: what is in it, and the commands of sglang-rl-harness."""

import ast
import configparser
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path
from zipfile import ZipFile

import pytest

from harness.runtime import installed
from harness.runtime.installed import COMMANDS, PROGRAM, as_files, as_typed
from harness.tools.command_line import parse
from harness.tools.diagnose.entries import catalogue

REPOSITORY = Path(__file__).parents[2]
OF_A_CHECKOUT = {"quickstart", "run_tests", "torchrun", "minimal"}
"""Scripts that are no commands; harness/runtime/installed.py says why."""
NOT_IN_A_WHEEL = {".md", ".in", ".sh", ".sbatch", ".yaml", ".pyc"}


def sources() -> list[Path]:
    """Return what a wheel is to hold, relative to the checkout."""
    folders = [REPOSITORY / each for each in ("harness", "launch", "configs")]
    files = [file for folder in folders for file in folder.rglob("*") if file.is_file()]
    return [file.relative_to(REPOSITORY) for file in files if file.suffix not in NOT_IN_A_WHEEL]


def test_every_script_is_a_command_or_of_a_checkout() -> None:
    scripts = {file.stem for file in (REPOSITORY / "launch").glob("[!_]*.py")}
    assert {*COMMANDS.values()} | OF_A_CHECKOUT == scripts
    for script in COMMANDS.values():
        tree = ast.parse((REPOSITORY / "launch" / f"{script}.py").read_text())
        assert ast.get_docstring(tree) and any(getattr(each, "name", "") == "main" for each in tree.body)


def test_setup_names_every_package() -> None:
    setup = configparser.ConfigParser()
    setup.read(REPOSITORY / "setup.cfg")
    inits = [each for each in (REPOSITORY / "harness").rglob("__init__.py") if "standins" not in each.parts]
    there = {".".join(each.parent.relative_to(REPOSITORY).parts) for each in inits}
    assert {*setup["options"]["packages"].split()} == there | {"harness.launch", "harness.configs"}


@pytest.mark.parametrize(
    ("text", "typed"),
    [
        ("put -- before x.py: launch/hosts.py OPTIONS -- x.py", "put -- before x.py: sglang-rl-harness hosts OPTIONS -- x.py"),
        ("`python3 launch/full_size.py MODEL --tp 1`.", "`sglang-rl-harness full-size MODEL --tp 1`."),
        ("error: /a/b-1/harness/launch/verify.py needs", "error: sglang-rl-harness verify needs"),
        ("    torchrun --nproc-per-node=2 launch/sync.py A", "    torchrun --no-python --nproc-per-node=2 sglang-rl-harness sync A"),
        ("/v/python -P -m torch.distributed.run --nnodes=1 launch/ppo.py",
         "/v/python -P -m torch.distributed.run --no-python --nnodes=1 sglang-rl-harness ppo"),
        ("launch/bisect_versions.py --bad 2 -- launch/ppo.py A", "sglang-rl-harness bisect --bad 2 -- launch/ppo.py A"),
        ("python3 launch/quickstart.py", "python3 launch/quickstart.py"),
    ],
)  # fmt: skip
def test_a_text_names_what_can_be_typed(text: str, typed: str, monkeypatch: pytest.MonkeyPatch) -> None:
    assert as_typed(text) == text
    monkeypatch.setattr(installed, "INSTALLED", True)
    assert as_typed(text) == typed


def test_a_command_line_is_read_back_as_its_script() -> None:
    words = "torchrun --no-python --nproc-per-node=2 /x/bin/sglang-rl-harness step-bench a.toml"
    assert as_files(words) == "torchrun --no-python --nproc-per-node=2 /x/bin/launch/step_bench.py a.toml"


def test_our_configs_are_found_from_any_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    ours = parse(["configs/cpu/digits.toml"]).config
    (tmp_path / "configs/cpu").mkdir(parents=True)
    (tmp_path / "configs/cpu/digits.toml").write_text("[run]\nsteps = 7\n")
    assert parse(["configs/cpu/digits.toml"]).config.run.steps == 7 != ours.run.steps


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder into which a wheel is installed that was built without a network, from a copy of the checkout."""
    folder = tmp_path_factory.mktemp("wheel")
    for name in ("harness", "launch", "configs"):
        shutil.copytree(REPOSITORY / name, folder / "copy" / name, ignore=shutil.ignore_patterns("__pycache__"))
    for name in ("setup.cfg", "pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(REPOSITORY / name, folder / "copy")
    pip = [sys.executable, "-m", "pip", "--no-input", "--disable-pip-version-check"]
    make = [*pip, "wheel", "--no-index", "--no-build-isolation", "--no-deps", "-w", "made", "./copy"]
    install = [*pip, "install", "--no-index", "--no-deps", "--no-compile", "--target", "site"]
    for command in (make, [*install, "made/sglang_rl_harness-0.1.0-py3-none-any.whl"]):
        done = subprocess.run(command, cwd=folder, capture_output=True, text=True)
        assert done.returncode == 0, done.stdout + done.stderr
    return folder


def run(target: Path, folder: Path, *words: str, python: str = sys.executable) -> subprocess.CompletedProcess[str]:
    """Run the program in a folder where nothing of the checkout is in reach; standard error tells all imports."""
    kept = {name: os.environ[name] for name in ("HOME", "LANG") if name in os.environ}
    path = {"PATH": "/usr/bin:/bin", "PYTHONPATH": str(target / "site"), "XDG_CACHE_HOME": str(folder / "cache")}
    command = [python, "-s", str(target / "site" / "bin" / PROGRAM), *words]
    environment = kept | path | {"PYTHONPROFILEIMPORTTIME": "1"}
    done = subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, timeout=100)
    imported = re.findall(r"^import time:.*\| +(\S+)$", done.stderr, re.MULTILINE)
    assert imported and not {"torch", "sglang", "transformers"} & {*imported}
    done.stderr = re.sub(r"^import time:.*\n", "", done.stderr, flags=re.MULTILINE)
    return done


@pytest.mark.slow
def test_a_wheel_holds_what_a_checkout_has(target: Path) -> None:
    [wheel] = (target / "made").glob("*.whl")
    held = set(ZipFile(wheel).namelist())
    expected = {str(each) if each.parts[0] == "harness" else f"harness/{each}" for each in sources()}
    assert "harness/configs/models/qwen3_30b_a3b/config.json" in expected and expected - held == set()
    assert {each.partition("/")[0] for each in held} == {"harness", "sglang_rl_harness-0.1.0.dist-info"}


@pytest.mark.slow
def test_help_lists_the_commands_and_each_has_its_own(target: Path, tmp_path: Path) -> None:
    bare = getattr(sys, "_base_executable", sys.executable)
    listed = run(target, tmp_path, "--help", python=bare)
    assert listed.returncode == 0 and re.findall(r"^  ([a-z]\S+)  ", listed.stdout, re.MULTILINE) == [*COMMANDS]
    for name in COMMANDS:
        python = sys.executable if name == "bisect" else bare
        done = run(target, tmp_path, name, "--help", python=python)
        assert (done.returncode, done.stderr) == (0, "") and f"{PROGRAM} {name}" in done.stdout
        assert not re.search(rf"(?<!-- )launch/({'|'.join(COMMANDS.values())})\.py", done.stdout)
    unknown = run(target, tmp_path, "verfy")
    assert unknown.returncode == 2 and "'verfy'" in unknown.stderr and "'verify'" in unknown.stderr


@pytest.mark.slow
def test_commands_find_what_they_read(target: Path, tmp_path: Path) -> None:
    (tmp_path / "train.log").write_text(catalogue()["cpu-payload-authkey"].examples[0]["log"])
    for words, code, said in (
        (["diagnose", "train.log"], 0, "cpu-payload-authkey: "),
        (["repro", "show", "cpu-payload-authkey"], 0, "catalogue: cpu-payload-authkey"),
        (["full-size", "no-such-model"], 2, "those are deepseek_v3, "),
        (["verify", "--server", "http://127.0.0.1:9", "--weights", "nowhere"], 2, "--weights nowhere is no folder"),
        (["ppo", "--dry-run", "configs/multinode/deepseek_v3_671b.toml", "--nnodes=32"], 0, f"  {PROGRAM} full-size configs/"),
        (["ppo"], 2, f"torchrun --no-python --nnodes=1 --nproc-per-node=2 {PROGRAM} ppo\n"),
        (["hosts", "--cut", "nobody@sync:1", "--", "launch/doctor.py"], 2, "nobody"),
    ):  # fmt: skip
        done = run(target, tmp_path, *words)
        assert done.returncode == code, done.stderr
        assert said in (done.stderr if code else done.stdout)


@pytest.mark.slow
def test_another_environment_gets_the_package_and_not_its_neighbours(target: Path, tmp_path: Path) -> None:
    code = (
        "from harness.tools.trial.environment import Environment\n"
        "import sys; print(Environment(python=sys.executable).variables(False, imports_harness=True)['PYTHONPATH'])"
    )
    environment = os.environ | {"PYTHONPATH": str(target / "site"), "XDG_CACHE_HOME": str(tmp_path)}
    command = [sys.executable, "-P", "-c", code]
    done = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True)
    alone = Path(done.stdout.strip().split(os.pathsep)[-1])
    assert {each.name for each in alone.iterdir()} == {"harness", "complete"}, done.stderr
    assert (alone / "harness").resolve() == target / "site" / "harness"
