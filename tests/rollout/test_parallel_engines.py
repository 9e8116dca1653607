"""Engines with DP attention and expert parallelism compute what an engine of one rank computes.

On a CPU tests/end_to_end/test_runs.py compares one with the trainer."""

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from statistics import fmean
from typing import Any

import pytest
import torch

SCRIPT = Path(__file__).with_name("parallel_engine.py")
DP_ATTENTION = {"enable_dp_attention": True, "dp_size": 2}
PARALLEL_ENGINES: dict[str, dict[str, Any]] = {
    "dp": DP_ATTENTION,
    "ep": {"ep_size": 2},
    "dp_and_ep": DP_ATTENTION | {"ep_size": 2},
}
"""Arguments of engines of two ranks."""
WITH_GRAPHS = {"disable_cuda_graph": False}
ENGINES_ON_GPU: dict[str, dict[str, Any]] = {
    **PARALLEL_ENGINES,
    "dp_and_graphs": DP_ATTENTION | WITH_GRAPHS,
    "ep_and_graphs": {"ep_size": 2} | WITH_GRAPHS,
    "dp_ep_and_graphs": DP_ATTENTION | {"ep_size": 2} | WITH_GRAPHS,
    **{
        f"dp_ep_graphs_and_{backend}": DP_ATTENTION | {"ep_size": 2, "attention_backend": backend} | WITH_GRAPHS
        for backend in ("fa3", "flashinfer")
    },
}
# Engines that share a GPU: each takes so many tokens of KV cache, whatever the others leave.
SHARED = {"mem_fraction_static": 0.7, "max_total_tokens": 16384, "max_running_requests": 16}
ROUNDING = 0.05
"""Mean difference of log-probs, in nats, that two bfloat16 engines may have; with other weights it was 0.8 on a CPU."""
Scored = list[list[list[tuple[float, int]]]]


def scored(model: str, arguments: dict[str, Any], folder: Path) -> Scored:
    """What parallel_engine.py found; it is a process of its own, because a dying scheduler kills its parent."""
    file = folder / "scored.json"
    command = [sys.executable, str(SCRIPT), model, json.dumps(arguments), str(file)]
    # SGLang refuses GPUs of unlike free memory, and several engines start on these at a time.
    environment = os.environ | {"SGLANG_ENABLE_TP_MEMORY_INBALANCE_CHECK": "0"}
    done = subprocess.run(command, capture_output=True, text=True, timeout=400, env=environment)
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-4000:]
    found: Scored = json.loads(file.read_text())
    return found


@pytest.fixture(scope="module")
def on_gpus(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[tuple[str, str], Future[Scored]]]:
    """What each engine computes, by model and name of the engine; "one" has one rank. Six run at a time."""
    if torch.cuda.device_count() < 2:
        pytest.skip(f"needs 2 GPUs, has {torch.cuda.device_count()}")
    engines = {"one": {}} | {name: {"tp_size": 2, **given} for name, given in ENGINES_ON_GPU.items()}
    with ThreadPoolExecutor(6) as pool:
        yield {
            (model, name): pool.submit(scored, model, SHARED | given, tmp_path_factory.mktemp(name))
            for model in ("deepseek_v3", "qwen3_moe")
            for name, given in engines.items()
        }


def prompts_apart(one: list[list[tuple[float, int]]], other: list[list[tuple[float, int]]]) -> float:
    """The mean difference of the prompts' log-probs: greedy answers in bfloat16 part at near ties."""
    lengths = [len(answer) - 8 for answer in one]
    pairs = [(a[at][0], b[at][0]) for a, b, length in zip(one, other, lengths, strict=True) for at in range(length)]
    return fmean(abs(a - b) for a, b in pairs)


@pytest.mark.gpu
@pytest.mark.parametrize("name", ENGINES_ON_GPU)
@pytest.mark.parametrize("model", ["deepseek_v3", "qwen3_moe"])
def test_two_gpus_compute_what_one_does(model: str, name: str, on_gpus: dict[tuple[str, str], Future[Scored]]) -> None:
    expected, found = on_gpus[model, "one"].result(), on_gpus[model, name].result()
    assert prompts_apart(*expected) > 0.3, "the update changes the answers"
    apart = [prompts_apart(theirs, ours) for theirs, ours in zip(found, expected, strict=True)]
    print(f"\n| {model} | {name} | {apart[0]:.1e} | {apart[1]:.1e} |")
    assert max(apart) < ROUNDING
