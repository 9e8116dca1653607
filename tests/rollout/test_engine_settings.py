"""The arguments and the environment of an engine. tests/end_to_end/test_gpu_memory.py releases real CUDA graphs."""

import os
from types import SimpleNamespace
from typing import Any

import pytest

from harness.rollout.engine_settings import (
    GRAPHS_IN_MEMORY_SAVER,
    TORCHRUN_VARIABLES,
    captures_graphs,
    child_environment,
    cores_by_tp_rank,
    cpu_environment,
    engine_defaults,
    engine_environment,
    holds_graphs,
    variables_of_graphs,
)


def test_on_a_gpu_the_preset_sglang_leaves_backends_and_graphs_to_it() -> None:
    own, reproducible = engine_defaults("cuda", "sglang"), engine_defaults("cuda")
    assert {"attention_backend", "sampling_backend", "disable_cuda_graph"} <= set(reproducible) - set(own)
    assert not any("graph" in name or "backend" in name for name in own)
    assert own["enable_memory_saver"] and own["mem_fraction_static"] == reproducible["mem_fraction_static"]
    assert own.items() <= reproducible.items()
    assert captures_graphs(own) and not captures_graphs(reproducible)
    assert engine_defaults("cpu", "sglang") == engine_defaults("cpu")
    for device in ("cpu", "cuda"):  # 0.5.13 captures on CPU too where nothing forbids it, and dies
        assert engine_defaults(device)["disable_piecewise_cuda_graph"]


@pytest.mark.parametrize(
    ("cores", "ranks", "bind"),
    [
        ({0, 1}, 1, "0,1"),
        ({0, 1}, 2, "0|1"),
        ({0, 1}, 5, "0|1|0|1|0"),
        ({2, 5, 7, 9, 11}, 2, "2,5|7,9"),
        ({3}, 2, "3|3"),
    ],
)
def test_cores_are_split_among_ranks(monkeypatch: pytest.MonkeyPatch, cores: set[int], ranks: int, bind: str) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: cores)  # this machine's cores are not the test's
    assert cpu_environment(ranks) == {
        "SGLANG_USE_CPU_ENGINE": "1",
        "SGLANG_CPU_OMP_THREADS_BIND": bind,
        "OMP_NUM_THREADS": "1",
        "TORCHDYNAMO_DISABLE": "1",
        "SGLANG_NCCL_SO_PATH": "absent-in-cpu-mode",
    }


@pytest.mark.parametrize(
    ("entries", "tp_ranks", "tp", "expected"),
    [
        (["0", "1"], [0, 1], 2, ["0", "1"]),
        (["0", "1"], [0, 0], 1, ["0,1"]),
        (["0", "1"], [2, 3], 4, ["0", "0", "0", "1"]),
        (["0,1", "2,3", "4,5", "6,7"], [0, 1, 0, 1], 2, ["0,1,4,5", "2,3,6,7"]),
        (["3", "3"], [0, 0], 1, ["3"]),
    ],
)
def test_older_releases_have_an_entry_for_each_tp_rank(
    entries: list[str], tp_ranks: list[int], tp: int, expected: list[str]
) -> None:
    assert cores_by_tp_rank(entries, tp_ranks, tp) == expected


CAN: Any = SimpleNamespace(graphs_in_memory_saver=True, breakable_graphs=False)
BREAKABLE: Any = SimpleNamespace(graphs_in_memory_saver=True, breakable_graphs=True)
CANNOT: Any = SimpleNamespace(graphs_in_memory_saver=False, breakable_graphs=False)
SGLANG = engine_defaults("cuda", "sglang")


@pytest.mark.parametrize(
    "arguments",
    [
        {"disable_cuda_graph": True},
        {"disable_decode_cuda_graph": True},
        {"cuda_graph_backend_decode": "disabled"},
        {"cuda_graph_config": {"decode": {"backend": "disabled"}}},
        {"attention_backend": "torch_native"},
    ],
)
def test_each_way_to_turn_the_graphs_off_is_known(arguments: dict[str, Any]) -> None:
    assert captures_graphs(SGLANG) and not captures_graphs(SGLANG | arguments)
    assert not holds_graphs(CAN, SGLANG | arguments, {GRAPHS_IN_MEMORY_SAVER: "1"})


def test_the_variable_is_set_unless_the_user_has_set_it() -> None:
    assert variables_of_graphs(CAN, SGLANG, {}) == {GRAPHS_IN_MEMORY_SAVER: "1"} and holds_graphs(CAN, SGLANG, {})
    for value, holds in (("0", False), ("1", True), ("true", True)):
        assert variables_of_graphs(CAN, SGLANG, {GRAPHS_IN_MEMORY_SAVER: value}) == {}
        assert holds_graphs(CAN, SGLANG, {GRAPHS_IN_MEMORY_SAVER: value}) is holds


@pytest.mark.parametrize(("api", "arguments"), [(CANNOT, SGLANG), (CAN, SGLANG | {"enable_memory_saver": False})])
def test_nothing_is_set_where_it_would_not_work(api: Any, arguments: dict[str, Any]) -> None:
    assert variables_of_graphs(api, arguments, {}) == {} and not holds_graphs(api, arguments, {})


@pytest.mark.parametrize(
    "without_prefill",
    [
        {"disable_prefill_cuda_graph": True},
        {"cuda_graph_backend_prefill": "disabled"},
        {"cuda_graph_config": {"prefill": {"backend": "disabled"}}},
    ],
)
def test_graphs_of_prefill_with_breaks_stay_out_of_the_saver(without_prefill: dict[str, Any]) -> None:
    assert variables_of_graphs(BREAKABLE, SGLANG, {}) == {} and not holds_graphs(
        BREAKABLE, SGLANG, {GRAPHS_IN_MEMORY_SAVER: "1"}
    )
    assert holds_graphs(BREAKABLE, SGLANG | without_prefill, {})
    assert holds_graphs(BREAKABLE, engine_defaults("cuda") | {"disable_cuda_graph": False}, {})


def environment() -> dict[str, str]:
    """os.environ, but for what pytest changes between a fixture and its test."""
    return {name: value for name, value in os.environ.items() if name != "PYTEST_CURRENT_TEST"}


@pytest.fixture
def torchrun_environment(monkeypatch: pytest.MonkeyPatch) -> dict[str, str]:
    """os.environ as torchrun makes it, whole."""
    for name in (*TORCHRUN_VARIABLES, "TORCHELASTIC_RUN_ID", "TORCHELASTIC_USE_AGENT_STORE", "KEPT", "CHANGED"):
        monkeypatch.setenv(name, "1")
    monkeypatch.delenv("ADDED", raising=False)
    return environment()


def test_a_child_sees_no_torchrun_and_the_changes_and_all_is_undone(torchrun_environment: dict[str, str]) -> None:
    with child_environment({"ADDED": "2", "CHANGED": "2", "KEPT": None, "NEVER_SET": None, "RANK": "7"}):
        assert not [name for name in os.environ if name.startswith("TORCHELASTIC_")]
        assert [name for name in TORCHRUN_VARIABLES if name in os.environ] == ["RANK"]
        assert (os.environ["ADDED"], os.environ["CHANGED"], os.environ["RANK"]) == ("2", "2", "7")
        assert "KEPT" not in os.environ
        os.environ |= {"OF_THE_BODY": "3", "CHANGED": "3", "WORLD_SIZE": "3"}
        del os.environ["ADDED"]
    assert environment() == torchrun_environment
    assert os.popen("echo $CHANGED$OF_THE_BODY$WORLD_SIZE").read() == "11\n"  # children see it too


def test_the_environment_is_restored_after_a_failure_and_a_made_one_changes_nothing(
    torchrun_environment: dict[str, str],
) -> None:
    with pytest.raises(RuntimeError), child_environment({"ADDED": "2"}):
        raise RuntimeError
    with pytest.raises(ValueError, match="null byte"), child_environment({"ADDED": "2", "CHANGED": "a\0b"}):
        pass
    made = engine_environment(torchrun_environment, {"ADDED": "2", "KEPT": None, "RANK": "7"})
    assert {"ADDED": "2", "CHANGED": "1", "RANK": "7"}.items() <= made.items()
    assert not {"KEPT", "WORLD_SIZE", "TORCHELASTIC_RUN_ID"} & made.keys()
    assert environment() == torchrun_environment
