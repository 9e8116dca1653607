"""Small source trees stand for the oldest and the newest release of sglang that are supported.

RecordingEngine stands for an engine where only the calls made on it matter. test_real_engine.py builds a real engine.
"""

import ast
import importlib.util
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from harness.config.engine_rules import argument_problem
from harness.rollout import sglang_api
from harness.rollout.engine_settings import engine_defaults
from harness.rollout.sglang_api import EngineRefused, SGLangApi, SourceTree, UnknownEngineArgument
from harness.rollout.sglang_api.probe import engine_facts

needs_sglang = pytest.mark.skipif(importlib.util.find_spec("sglang") is None, reason="sglang is not installed")
ROOT = Path(__file__).resolve().parents[2]

OLD = {
    "version.py": '__version__ = "0.5.11.old"\n',
    "srt/entrypoints/engine.py": """
import os
class Engine:
    def update_weights_from_tensor(self, named_tensors, load_format=None, flush_cache=True): ...
def _set_envs_and_config(server_args):
    os.environ["NCCL_CUMEM_ENABLE"] = "0"
    os.environ["NCCL_NVLS_ENABLE"] = str(int(server_args.enable_nccl_nvls))
    def handler(): os.environ["NCCL_INSIDE_A_HANDLER"] = "1"
""",
    "srt/server_args.py": """
class ServerArgs:
    model_path: str
    tp_size: int = 1
    LIMIT: ClassVar[int] = 3
    _own: int = 0
""",
}
NEW = {
    "_version.py": "__version__: str\n__version__ = version = '0.9.9.new'\n",
    "srt/entrypoints/engine.py": """
class Engine(EngineBase):
    def generate(self, prompt=None, input_ids=None, return_routed_experts=False): ...
    def begin_weight_update(self, selector="all"): ...
    def end_weight_update(self): ...
def _set_envs_and_config(server_args):
    cfg = view(server_args)
    if cfg.nnodes > 1 and on_fabric():
        os.environ["NCCL_MNNVL_ENABLE"] = "1"
    if "NCCL_CUMEM_ENABLE" not in os.environ or cfg.enable_symm_mem:
        os.environ["NCCL_CUMEM_ENABLE"] = str(int(cfg.enable_symm_mem))
    if not cfg.enable_symm_mem:
        os.environ["NCCL_NVLS_ENABLE"] = str(int(cfg.enable_nccl_nvls or cfg.enable_symm_mem))
    os.environ["CUDA_DEVICE_MAX_CONNECTIONS"] = "8"
    os.environ["SGLANG_RUN_ID"] = f"run-{time.time()}"
""",
    "srt/constants.py": 'GPU_MEMORY_TYPE_CUDA_GRAPH = "cuda_graph"\n',
    "srt/distributed/device_communicators/custom_all_reduce.py": "tms = envs.SGLANG_MEMORY_SAVER_CUDA_GRAPH.get()\n",
    "srt/utils/numa_utils.py": "def init_threads_binding(*, numa_index, world_size): ...\n",
    "srt/server_args.py": "class ServerArgs:\n    pass\n",
    "srt/arg_groups/fields/model.py": "class M:\n    model_path: A[str]\n    custom_weight_loader: A[str] = None\n",
    "srt/arg_groups/fields/parallel.py": "class P(msgspec.Struct):\n    pp_size: int = 1\n    tp_size: int = 1\n",
}


def probed(folder: Path, files: dict[str, str]) -> SGLangApi:
    for path, text in files.items():
        (folder / path).parent.mkdir(parents=True, exist_ok=True)
        (folder / path).write_text(text)
    return sglang_api.probe(SourceTree(folder))


@pytest.fixture
def old(tmp_path: Path) -> SGLangApi:
    return probed(tmp_path / "old", OLD)


@pytest.fixture
def new(tmp_path: Path) -> SGLangApi:
    return probed(tmp_path / "new", NEW)


@dataclass
class RecordingEngine:
    """Answers every method with `answers[name]`, or None, and keeps the calls."""

    answers: dict[str, Any]
    calls: list[tuple[str, tuple[Any, ...], dict[str, Any]]]

    def __getattr__(self, name: str) -> Any:
        def call(*args: Any, **kwargs: Any) -> Any:
            self.calls.append((name, args, kwargs))
            return self.answers.get(name)

        return call

    def called(self) -> list[str]:
        return [name for name, _, _ in self.calls]


def engine(**answers: Any) -> RecordingEngine:
    return RecordingEngine(answers, [])


def test_probes_of_an_old_and_of_a_new_tree(old: SGLangApi, new: SGLangApi, tmp_path: Path) -> None:
    assert (old.version, old.engine_arguments) == ("0.5.11.old", {"model_path", "tp_size"})
    assert not old.update_session and not old.cores_by_device and not old.graphs_in_memory_saver
    assert not old.routed_experts
    assert new.version == "0.9.9.new"
    assert new.engine_arguments == {"model_path", "custom_weight_loader", "pp_size", "tp_size"}
    assert new.update_session and new.cores_by_device and new.graphs_in_memory_saver and new.routed_experts
    registers_memory = {
        "srt/distributed/device_communicators/custom_all_reduce_v2.py": "class CustomAllReduceV2: ...\n"
    }
    assert not probed(tmp_path / "v2", NEW | registers_memory).graphs_in_memory_saver
    with pytest.raises(ValueError, match="give the folder of an installed sglang"):
        sglang_api.probe(SourceTree(tmp_path))


def test_user_arguments_replace_defaults_and_unknown_ones_are_dropped_or_refused(new: SGLangApi) -> None:
    kept, dropped = sglang_api.check_arguments(new, {"tp_size": 4}, {"tp_size": 1, "pp_size": 2, "gone": True})
    assert (kept, dropped) == ({"tp_size": 4, "pp_size": 2}, ("gone",))
    with pytest.raises(
        UnknownEngineArgument, match=r"engine\.args\.tpsize: sglang 0\.9\.9\.new .* nearest it has is tp_size"
    ):
        sglang_api.check_arguments(new, {"tpsize": 4}, {})


def test_a_call_returns_or_raises_by_what_the_engine_answered() -> None:
    for result in (None, True, (True, "Success"), (True, "ok", 0), SimpleNamespace(success=True, message="")):
        recording = engine(update=result)
        sglang_api.call(recording, "update", 1, a=2)
        assert recording.calls == [("update", (1,), {"a": 2})]
    for refusal in ((False, "why"), (False, "why", None, None), SimpleNamespace(success=False, message="why")):
        with pytest.raises(EngineRefused, match="update: the engine refused: why"):
            sglang_api.call(engine(update=refusal), "update")
    for unreadable in (False, (), 1, "Success", {"success": True}):
        with pytest.raises(EngineRefused, match="update: the engine refused: it returned"):
            sglang_api.call(engine(update=unreadable), "update")


def test_session_opens_and_closes(old: SGLangApi, new: SGLangApi) -> None:
    recording = engine(begin_weight_update=(True, ""), end_weight_update=(True, ""))
    with sglang_api.update_session(new, recording):
        assert recording.calls == [("begin_weight_update", (), {})]
    assert recording.called() == ["begin_weight_update", "end_weight_update"]
    without = engine()
    with sglang_api.update_session(old, without):
        pass
    assert without.calls == []


def test_session_closes_after_a_failure_and_keeps_it_first(new: SGLangApi) -> None:
    recording = engine(begin_weight_update=(True, ""), end_weight_update=(False, "no session"))
    with pytest.raises(KeyError, match="first") as raised, sglang_api.update_session(new, recording):
        raise KeyError("first")
    assert recording.called()[-1] == "end_weight_update"
    assert "no session" in raised.value.__notes__[0]


def test_a_session_that_does_not_open_or_close_is_a_failure(new: SGLangApi) -> None:
    refused = engine(begin_weight_update=(False, "already open"))
    with pytest.raises(EngineRefused, match="already open"), sglang_api.update_session(new, refused):
        pytest.fail("the body must not run")
    assert refused.called() == ["begin_weight_update"]
    stuck = engine(begin_weight_update=(True, ""), end_weight_update=(False, "bad scale"))
    with pytest.raises(EngineRefused, match="end_weight_update: .*bad scale"), sglang_api.update_session(new, stuck):
        pass


def test_environment_of_an_old_engine_is_fixed_and_one_that_cannot_be_read_an_error(
    old: SGLangApi, tmp_path: Path
) -> None:
    user = {"NCCL_CUMEM_ENABLE": "1"}
    assert sglang_api.common_environment(old, {}, user) == {"NCCL_CUMEM_ENABLE": "0", "NCCL_NVLS_ENABLE": "0"}
    assert sglang_api.common_environment(old, {"enable_nccl_nvls": True}, {})["NCCL_NVLS_ENABLE"] == "1"
    api = probed(tmp_path, {"srt/entrypoints/engine.py": "class Engine:\n    def generate(self): ...\n"})
    with pytest.raises(ValueError, match="_set_envs_and_config"):
        sglang_api.common_environment(api, {}, {})


def test_environment_of_a_new_engine_keeps_the_users_value_unless_asked(new: SGLangApi) -> None:
    common = {"NCCL_CUMEM_ENABLE": "0", "NCCL_NVLS_ENABLE": "0", "CUDA_DEVICE_MAX_CONNECTIONS": "8"}
    assert sglang_api.common_environment(new, {}, {}) == common
    user = {"NCCL_CUMEM_ENABLE": "1", "CUDA_DEVICE_MAX_CONNECTIONS": "1"}
    assert sglang_api.common_environment(new, {}, user) == {**common, "NCCL_CUMEM_ENABLE": "1"}
    asked = sglang_api.common_environment(new, {"enable_symm_mem": True}, {"NCCL_CUMEM_ENABLE": "0"})
    assert asked == {"NCCL_CUMEM_ENABLE": "1", "CUDA_DEVICE_MAX_CONNECTIONS": "8"}


def test_defaults_name_their_device_and_no_other() -> None:
    assert engine_defaults("cpu")["device"] == "cpu" and engine_defaults("cuda")["device"] == "cuda"
    assert not engine_defaults("cuda")["trust_remote_code"]
    with pytest.raises(ValueError, match="must be one of cpu, cuda"):
        engine_defaults("tpu")  # type: ignore[arg-type]


def test_the_file_of_the_load_reports_loses_its_name_after_the_reader_has_opened_it(tmp_path: Path) -> None:
    file = tmp_path / "sglang_loads_test"
    file.write_bytes(b"reports")
    opened: list[bytes] = []
    reader = SimpleNamespace(path=str(file), read_all=lambda: opened.append(file.read_bytes()))
    without = [SimpleNamespace(), SimpleNamespace(load_snapshot_reader=SimpleNamespace())]  # of other releases
    for manager in (*without, SimpleNamespace(load_snapshot_reader=reader)):
        sglang_api.unlink_shared_memory(SimpleNamespace(tokenizer_manager=manager))
    assert opened == [b"reports"] and not file.exists()


def test_serialize_is_what_a_process_can_open_once() -> None:
    from multiprocessing.reduction import ForkingPickler

    import torch

    tensor = torch.arange(6.0).reshape(2, 3)
    payload = sglang_api.serialize([("w", tensor)])
    assert isinstance(payload, bytes)
    ((name, received),) = ForkingPickler.loads(payload)
    assert name == "w" and torch.equal(received, tensor)


@needs_sglang
def test_probing_the_installed_sglang_imports_neither_it_nor_torch() -> None:
    code = (
        "import sys; from harness.rollout import sglang_api as s; a = s.probe(); s.common_environment(a, {}, {});"
        "s.memory_imbalance_environment(); print(len(a.engine_arguments), {'sglang', 'torch'} & set(sys.modules))"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, timeout=60, check=True
    )
    count, modules = done.stdout.strip().split(maxsplit=1)
    assert int(count) > 100 and modules == "set()"


@needs_sglang
def test_no_default_of_this_sglang_is_refused() -> None:
    """Types and choices are read rightly, for every argument whose default is a constant."""
    api = sglang_api.probe()
    fields = (api.tree.root / "srt/arg_groups/fields").glob("*.py")
    files = ["srt/server_args.py", *(f"srt/arg_groups/fields/{each.name}" for each in fields)]
    nodes = [node for file in files for node in ast.walk(api.tree.module(file))]
    defaults = {
        node.target.id: node.value.value
        for node in nodes
        if isinstance(node, ast.AnnAssign)
        and isinstance(node.target, ast.Name)
        and isinstance(node.value, ast.Constant)
    }
    assert len(defaults) > 100
    facts = engine_facts(api)
    refused = {name: argument_problem(facts, name, defaults[name]) for name in defaults if name in facts.arguments}
    assert {name: problem for name, problem in refused.items() if problem} == {}


@pytest.mark.parametrize("refusals", [0, 2, 1000])
def test_a_flush_waits_for_the_batch_that_goes_on_after_the_last_answer(
    refusals: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("harness.rollout.sglang_api.engine_calls.IDLE_SECONDS", 0.1 if refusals == 1000 else 60.0)
    answers = iter([False] * refusals + [True] * 1000)
    busy = SimpleNamespace(flush_cache=lambda: SimpleNamespace(success=next(answers), message=""))
    if refusals < 1000:
        sglang_api.flush_cache(busy)
        return
    with pytest.raises(EngineRefused, match=r"flush_cache: the engine refused"):
        sglang_api.flush_cache(busy)
