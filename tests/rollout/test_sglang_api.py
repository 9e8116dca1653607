"""Source trees written here stand for old and new releases of sglang; RecordingEngine stands for an engine where only
the calls made on it matter. test_real_engine.py builds a real engine."""

import ast
import importlib.util
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from harness.rollout import sglang_api
from harness.rollout.defaults import engine_defaults
from harness.rollout.sglang_api import EngineRefused, SGLangApi, SourceTree, UnknownEngineArgument
from harness.tools.plan.engine_values import check_values

needs_sglang = pytest.mark.skipif(importlib.util.find_spec("sglang") is None, reason="sglang is not installed")
ROOT = Path(__file__).resolve().parents[2]

OLD = {
    "version.py": '__version__ = "0.4.7.old"\n',
    "srt/entrypoints/engine.py": """
import os
class Engine:
    def update_weights_from_tensor(self, named_tensors, load_format=None, flush_cache=True): ...
    def update_weights_from_distributed(self, name, dtype, shape): ...
    def release_memory_occupation(self): ...
def _set_envs_and_config(server_args):
    os.environ["NCCL_CUMEM_ENABLE"] = "0"
    os.environ["NCCL_NVLS_ENABLE"] = str(int(server_args.enable_nccl_nvls))
    def handler(): os.environ["NCCL_INSIDE_A_HANDLER"] = "1"
""",
    "srt/entrypoints/verl_engine.py": "class VerlEngine: update = self._engine.tokenizer_manager.flush_cache()\n",
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
    def begin_weight_update(self, selector="all"): ...
    def end_weight_update(self): ...
    def update_weights_from_tensor(self, named_tensors, load_format=None, flush_cache=True): ...
    def update_weights_from_distributed(self, names, dtypes, shapes, group_name="g", flush_cache=1, load_format=0): ...
    def destroy_weights_update_group(self, group_name): ...
    def release_memory_occupation(self, tags=None): ...
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
    "srt/utils/numa_utils.py": "def init_threads_binding(*, numa_index, world_size): ...\n",
    "srt/weight_sync/tensor_bucket.py": "class FlattenedTensorBucket:\n    supports_multi_dtypes = True\n",
    "srt/constants.py": 'GPU_MEMORY_TYPE_KV_CACHE = "kv_cache"\nGPU_MEMORY_TYPE_WEIGHTS = "weights"\nPREFIX = "H"\n',
    "srt/environ.py": "class Envs:\n    SGLANG_ENABLE_TP_MEMORY_INBALANCE_CHECK = EnvBool(True)\n",
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


def test_probe_of_an_old_tree(old: SGLangApi) -> None:
    assert (old.version, old.engine_arguments) == ("0.4.7.old", {"model_path", "tp_size"})
    assert old.own_verl_engine
    assert old.memory_tags is None
    assert old.distributed_update_parameters == ("name", "dtype", "shape")
    for absent in ("update_session", "bucket_mixes_dtypes", "custom_weight_loader", "cores_by_device"):
        assert getattr(old, absent) is False


def test_probe_of_a_new_tree(new: SGLangApi) -> None:
    assert new.version == "0.9.9.new"
    assert new.engine_arguments == {"model_path", "custom_weight_loader", "pp_size", "tp_size"}
    assert new.memory_tags == ("kv_cache", "weights")
    for present in (
        "update_session", "bucket_mixes_dtypes", "custom_weight_loader", "cores_by_device",
    ):  # fmt: skip
        assert getattr(new, present) is True
    assert new.destroys_update_group and not new.own_verl_engine


def test_a_folder_that_is_not_sglang_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="is it the folder of sglang"):
        sglang_api.probe(SourceTree(tmp_path))


def test_user_arguments_replace_defaults_and_unknown_defaults_are_dropped(new: SGLangApi) -> None:
    kept, dropped = sglang_api.check_arguments(new, {"tp_size": 4}, {"tp_size": 1, "pp_size": 2, "gone": True})
    assert kept == {"tp_size": 4, "pp_size": 2}
    assert dropped == ("gone",)


def test_an_unknown_user_argument_names_the_version_and_the_nearest(new: SGLangApi) -> None:
    with pytest.raises(
        UnknownEngineArgument, match=r"engine\.args\.tpsize: sglang 0\.9\.9\.new .* nearest it has is tp_size"
    ):
        sglang_api.check_arguments(new, {"tpsize": 4}, {})


@pytest.mark.parametrize(
    "result", [None, True, (True, "Success"), (True, "ok", 0), SimpleNamespace(success=True, message="")]
)
def test_a_call_that_succeeded_returns(result: object) -> None:
    recording = engine(update=result)
    sglang_api.call(recording, "update", 1, a=2)
    assert recording.calls == [("update", (1,), {"a": 2})]


@pytest.mark.parametrize(
    "result", [(False, "why"), (False, "why", None, None), SimpleNamespace(success=False, message="why")]
)
def test_a_call_that_failed_raises(result: object) -> None:
    with pytest.raises(EngineRefused, match="update: the engine refused: why"):
        sglang_api.call(engine(update=result), "update")


@pytest.mark.parametrize("result", [False, (), 1, "Success", {"success": True}])
def test_a_result_that_cannot_be_read_is_a_failure(result: object) -> None:
    with pytest.raises(EngineRefused, match="update: the engine refused: it returned"):
        sglang_api.call(engine(update=result), "update")


def test_memory_tags(old: SGLangApi, new: SGLangApi) -> None:
    assert sglang_api.memory_arguments(new, ("weights",)) == {"tags": ["weights"]}
    assert sglang_api.memory_arguments(new, None) == sglang_api.memory_arguments(old, None) == {}
    with pytest.raises(ValueError, match=r"\['weight'\].*has kv_cache, weights"):
        sglang_api.memory_arguments(new, ("weight",))
    with pytest.raises(ValueError, match="has kv_cache, weights"):
        sglang_api.memory_arguments(new, ())
    with pytest.raises(ValueError, match="has no tags; or None for all memory at once"):
        sglang_api.memory_arguments(old, ("weights",))


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


def test_buckets_are_refused_where_there_are_none(old: SGLangApi) -> None:
    with pytest.raises(ValueError, match=r"sglang 0\.4\.7\.old has no buckets of any dtypes"):
        sglang_api.flattened_bucket(old, [])


def test_environment_of_an_old_engine_is_fixed(old: SGLangApi) -> None:
    user = {"NCCL_CUMEM_ENABLE": "1"}
    assert sglang_api.common_environment(old, {}, user) == {"NCCL_CUMEM_ENABLE": "0", "NCCL_NVLS_ENABLE": "0"}
    assert sglang_api.common_environment(old, {"enable_nccl_nvls": True}, {})["NCCL_NVLS_ENABLE"] == "1"


def test_environment_of_a_new_engine_keeps_the_users_value_unless_asked(new: SGLangApi) -> None:
    common = {"NCCL_CUMEM_ENABLE": "0", "NCCL_NVLS_ENABLE": "0", "CUDA_DEVICE_MAX_CONNECTIONS": "8"}
    assert sglang_api.common_environment(new, {}, {}) == common
    user = {"NCCL_CUMEM_ENABLE": "1", "CUDA_DEVICE_MAX_CONNECTIONS": "1"}
    assert sglang_api.common_environment(new, {}, user) == {**common, "NCCL_CUMEM_ENABLE": "1"}
    asked = sglang_api.common_environment(new, {"enable_symm_mem": True}, {"NCCL_CUMEM_ENABLE": "0"})
    assert asked == {"NCCL_CUMEM_ENABLE": "1", "CUDA_DEVICE_MAX_CONNECTIONS": "8"}


def test_an_engine_whose_environment_cannot_be_read_is_an_error(tmp_path: Path) -> None:
    api = probed(tmp_path, {"srt/entrypoints/engine.py": "class Engine:\n    def generate(self): ...\n"})
    with pytest.raises(ValueError, match="_set_envs_and_config"):
        sglang_api.common_environment(api, {}, {})


def test_memory_balance_check_is_turned_off_by_the_name_that_is_read(old: SGLangApi, new: SGLangApi) -> None:
    assert sglang_api.memory_imbalance_environment(old) == {"SGL_DISABLE_TP_MEMORY_INBALANCE_CHECK": "true"}
    change = sglang_api.memory_imbalance_environment(new)
    assert change["SGLANG_ENABLE_TP_MEMORY_INBALANCE_CHECK"] == "0"
    assert change["SGL_DISABLE_TP_MEMORY_INBALANCE_CHECK"] is None


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
    sglang_api.unlink_shared_memory(SimpleNamespace(tokenizer_manager=SimpleNamespace(load_snapshot_reader=reader)))
    assert opened == [b"reports"] and not file.exists()


@pytest.mark.parametrize("manager", [SimpleNamespace(), SimpleNamespace(load_snapshot_reader=SimpleNamespace())])
def test_releases_without_a_file_of_load_reports_are_left_alone(manager: SimpleNamespace) -> None:
    sglang_api.unlink_shared_memory(SimpleNamespace(tokenizer_manager=manager))


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
        "s.memory_imbalance_environment(a); print(len(a.engine_arguments), {'sglang', 'torch'} & set(sys.modules))"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, timeout=60, check=True
    )
    count, modules = done.stdout.strip().split(maxsplit=1)
    assert int(count) > 100 and modules == "set()"


@needs_sglang
def test_no_default_of_this_sglang_is_refused() -> None:
    """Of every argument whose default is a constant: types and choices are read rightly."""
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
    check_values(api, {name: defaults[name] for name in defaults if name in api.engine_arguments})
