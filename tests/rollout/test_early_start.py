"""Which processes a rank starts before it knows the other ranks."""

import os
import subprocess
import sys
from pathlib import Path

import psutil
import pytest

from harness.config.schema import Config
from harness.rollout import early_start
from harness.rollout.early_start import expected_node, preload_of_memory_saver, start_early
from harness.rollout.engine_settings import variables_of_precision


def torchrun(rank: int, world_size: int, here: int | None = None, **variables: str) -> dict[str, str]:
    return {"RANK": str(rank), "WORLD_SIZE": str(world_size), "LOCAL_WORLD_SIZE": str(here or world_size)} | variables


def config_of(dp: int = 1, tp: int = 2, pp: int = 1, order: str = "dp,tp,pp", colocate: bool = True) -> Config:
    config = Config()
    config.parallel.dp, config.parallel.tp, config.parallel.pp = dp, tp, pp
    config.parallel.rank_order, config.parallel.colocate = order, colocate  # type: ignore[assignment]
    return config


def built(config: Config, world_size: int, here: int | None = None) -> dict[int, tuple[int, ...]]:
    """The ranks of the engine's share that each rank builds."""
    nodes = {rank: expected_node(config, "cpu", torchrun(rank, world_size, here)) for rank in range(world_size)}
    return {rank: node.ranks for rank, node in nodes.items() if node}


def test_the_first_rank_of_each_engine_on_each_host_builds_it() -> None:
    assert built(config_of(tp=2), 2) == {0: (0, 1)}
    assert built(config_of(dp=2, tp=1), 2) == {0: (0,), 1: (1,)}
    assert built(config_of(dp=2, tp=2), 4) == {0: (0, 1), 2: (2, 3)}
    assert built(config_of(dp=2, tp=2), 4, here=2) == {0: (0, 1), 2: (2, 3)}
    assert built(config_of(tp=4), 4, here=2) == {0: (0, 1), 2: (2, 3)}
    assert built(config_of(tp=2, pp=2, order="dp,pp,tp"), 4, here=2) == {0: (0, 1), 2: (2, 3)}
    assert built(config_of(tp=1, pp=2), 2) == {0: (0, 1)}
    for not_placed in (built(config_of(tp=4), 2), built(config_of(tp=2), 3), built(config_of(tp=3), 3, here=2)):
        assert not_placed == {}


@pytest.fixture
def on_eight_gpus(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(early_start, "count_gpus", lambda: 8)


@pytest.mark.usefixtures("on_eight_gpus")
def test_the_engines_gpus_are_those_of_its_ranks_first() -> None:
    config, visible = config_of(dp=2, tp=2), {"CUDA_VISIBLE_DEVICES": "3,5,6,7"}
    first = expected_node(config, "cuda", torchrun(0, 4, **visible))
    second = expected_node(config, "cuda", torchrun(2, 4, **visible))
    assert (
        first
        and first.visible_devices == ("3", "5")
        and expected_node(config, "cuda", torchrun(1, 4, **visible)) is None
    )
    assert second and second.visible_devices == ("6", "7")
    apart = expected_node(config_of(colocate=False), "cuda", torchrun(0, 2, **visible))
    assert apart and apart.visible_devices == ("6", "7")
    for wrong in ("3", "3,3", "0,GPU-abc", "MIG-1"):  # the ranks will report it
        assert expected_node(config_of(), "cuda", torchrun(0, 2, CUDA_VISIBLE_DEVICES=wrong)) is None


def test_deepgemm_does_not_compile_for_an_fp8_engine_unless_the_user_says_so() -> None:
    fp8 = Config()
    fp8.model.rollout_precision = "fp8_block"
    assert variables_of_precision(fp8, "cuda", {}) == {"SGLANG_ENABLE_JIT_DEEPGEMM": "0"}
    assert variables_of_precision(fp8, "cuda", {"SGLANG_ENABLE_JIT_DEEPGEMM": "1"}) == {}
    assert variables_of_precision(fp8, "cpu", {}) == variables_of_precision(Config(), "cuda", {}) == {}


# The library that SGLang preloads.


@pytest.fixture
def packages(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder of packages with a torch for CUDA 12 and torch_memory_saver with its libraries for 12 and 13."""
    monkeypatch.setattr(sys, "path", [str(tmp_path)])
    for name in ("torch", "torch_memory_saver"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "__init__.py").touch()
    (tmp_path / "torch" / "version.py").write_text(
        "__version__ = '2.11.0+cu128'\ncuda: Optional[str] = '12.8'\nhip = None\n"
    )
    for cuda in (12, 13):
        (tmp_path / f"torch_memory_saver_hook_mode_preload_cu{cuda}.abi3.so").touch()
    return tmp_path


def test_the_library_for_torchs_cuda_is_preloaded_before_others(packages: Path) -> None:
    library = str(packages / "torch_memory_saver_hook_mode_preload_cu12.abi3.so")
    assert preload_of_memory_saver(Config(), {}) == {"LD_PRELOAD": library}
    assert preload_of_memory_saver(Config(), {"LD_PRELOAD": "own.so"}) == {"LD_PRELOAD": f"{library}:own.so"}
    inside = packages / "torch_memory_saver" / "torch_memory_saver_hook_mode_preload_cu12.abi3.so"
    inside.touch()
    assert preload_of_memory_saver(Config(), {}) == {"LD_PRELOAD": str(inside)}


def test_an_older_release_has_one_library_without_a_version(packages: Path) -> None:
    (packages / "torch" / "version.py").write_text("cuda = None\n")
    for library in packages.glob("*.so"):
        library.unlink()
    library = packages / "torch_memory_saver_hook_mode_preload.abi3.so"
    library.touch()
    assert preload_of_memory_saver(Config(), {}) == {"LD_PRELOAD": str(library)}


def test_nothing_is_preloaded_where_the_library_is_unclear_or_not_wanted(packages: Path) -> None:
    config = Config()
    config.engine.args["enable_memory_saver"] = False
    assert preload_of_memory_saver(config, {}) == {}
    (packages / "torch_memory_saver_hook_mode_preload_cu12.other.so").touch()
    assert preload_of_memory_saver(Config(), {}) == {}
    (packages / "torch_memory_saver" / "__init__.py").unlink()
    (packages / "torch_memory_saver").rmdir()
    assert preload_of_memory_saver(Config(), {}) == {}


# Whether anything is started.


@pytest.fixture
def cheap_modules(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """An engine's processes import a module of one line."""
    (tmp_path / "cheap.py").write_text("import os; os.environ.get('SGLANG_USE_CPU_ENGINE')\n")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path), prepend=":")
    for name in ("ENGINE_MODULES", "CPU_MODULES"):
        monkeypatch.setattr(early_start, name, ("cheap",))
    monkeypatch.setattr(sys, "path", list(sys.path))


ON_CPU = """
import json, os, sys
from harness.config.schema import Config
from harness.rollout import early_start
from harness.runtime.fork_server import ForkServer, Task
early_start.CPU_MODULES = ("cheap",)
config = Config()
config.parallel.tp = 2
ranks = [{"RANK": str(rank), "WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2"} for rank in range(2)]
assert early_start.start_early(config, "cpu", ranks[1]) == []
os.environ.update(ranks[0])
[server] = early_start.start_early(config, "cpu", ranks[0])
assert os.environ["SEEN"] == "1 1 None" and os.environ["RANK"] == "0"
"""


def test_on_the_cpu_a_rank_that_builds_an_engine_imports_in_the_engines_environment(tmp_path: Path) -> None:
    names = ("SGLANG_USE_CPU_ENGINE", "PYTHONSAFEPATH", "RANK")
    (tmp_path / "cheap.py").write_text(
        f"import os; os.environ['SEEN'] = ' '.join(str(os.environ.get(name)) for name in {names})"
    )
    path = f"{tmp_path}:{os.environ['PYTHONPATH']}"
    run = subprocess.run(
        [sys.executable, "-c", ON_CPU], env=os.environ | {"PYTHONPATH": path}, capture_output=True, text=True
    )
    assert run.returncode == 0, run.stderr


@pytest.mark.usefixtures("cheap_modules", "on_eight_gpus")
def test_on_gpus_there_is_a_process_for_each_scheduler_and_one_for_the_detokenizer() -> None:
    servers = start_early(
        config_of(), "cuda", torchrun(0, 2, PYTHONPATH=os.environ["PYTHONPATH"], CUDA_VISIBLE_DEVICES="4,2")
    )
    seen = [psutil.Process(server.pid).environ()["CUDA_VISIBLE_DEVICES"] for server in servers]
    for server in servers:
        server.close()
    assert seen == ["4,2"] * 3


@pytest.mark.usefixtures("cheap_modules")
@pytest.mark.parametrize(("section", "name", "value"), [("rollout", "load", "saved"), ("engine", "start", "spawn")])
def test_where_sglang_is_not_started_or_starts_its_own_nothing_is(
    section: str, name: str, value: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = config_of()
    setattr(getattr(config, section), name, value)
    assert start_early(config, "cpu", torchrun(0, 2)) == []
