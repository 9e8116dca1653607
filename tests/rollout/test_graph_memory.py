"""When the memory saver holds the CUDA graphs. tests/end_to_end/test_gpu_memory.py releases real ones."""

from types import SimpleNamespace
from typing import Any

import pytest

from harness.rollout.engine_settings import (
    GRAPHS_IN_MEMORY_SAVER,
    Preset,
    captures_graphs,
    engine_defaults,
    holds_graphs,
    variables_of_graphs,
)

CAN: Any = SimpleNamespace(graphs_in_memory_saver=True, breakable_graphs=False)
BREAKABLE: Any = SimpleNamespace(graphs_in_memory_saver=True, breakable_graphs=True)
CANNOT: Any = SimpleNamespace(graphs_in_memory_saver=False, breakable_graphs=False)
SGLANG = engine_defaults("cuda", "sglang")


@pytest.mark.parametrize(("preset", "captures"), [("sglang", True), ("reproducible", False)])
def test_the_preset_decides_whether_graphs_are_captured(preset: Preset, captures: bool) -> None:
    assert captures_graphs(engine_defaults("cuda", preset)) is captures


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
