"""A real engine's pull, beside what was planned for it without the engine: parameters, bytes, and on GPUs seconds."""

import json
import os
import subprocess
import sys
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Any

import pytest
import torch

from harness.runtime import GIB
from harness.tools.full_size.findings import KV_CACHE_SCALES
from harness.tools.full_size.sync_plan import Rates, SyncPlan
from tests.end_to_end.launching import REPOSITORY, Job
from tests.weights.fp8_on_two_ranks import OVERRIDES

PULL = ["--weights.transport", "pull", "--weights.verify", "false", "--model.weights", "random"]
ITEMSIZE = {"float8_e4m3fn": 1, "bfloat16": 2, "float32": 4}
CPU = ["configs/cpu/quickstart.toml", "--engine.device", "cpu", *PULL]


@dataclass(frozen=True)
class Pulled:
    """What one run planned and did."""

    planned: dict[str, Any]
    """The table of launch/full_size.py."""
    done: list[dict[str, Any]]
    """What each rank wrote."""

    def bytes_read(self) -> tuple[int, int]:
        """Of the rank with most: from its own trainer's memory, and from other ranks'."""
        own = max(each["bytes_read"].get(str(each["rank"]), 0) for each in self.done)
        others = (sum(n for owner, n in each["bytes_read"].items() if owner != str(each["rank"])) for each in self.done)
        return own, max(others)


def pull_and_plan(folder: Path, ranks: int, words: list[str]) -> Pulled:
    job = Job(folder=folder / "run", ranks=ranks, arguments=words, script="tests/tools/full_size/real_pull.py").start()
    assert job.wait(500) == 0, job.output()
    done = [json.loads((folder / "run" / f"pull-{rank}.json").read_text()) for rank in range(ranks)]
    table = folder / "planned.json"
    command = [sys.executable, "launch/full_size.py", words[0], "--nproc-per-node", str(ranks), "--json", str(table)]
    plan = subprocess.run(
        [*command, *words[1:]], cwd=REPOSITORY, env=os.environ | {"CUDA_VISIBLE_DEVICES": ""}, capture_output=True,
        text=True, timeout=400,
    )  # fmt: skip
    assert plan.returncode in (0, 1), plan.stderr[-3000:]  # 1 where the run, which has no room to spare, does not fit
    return Pulled(planned=json.loads(table.read_text()), done=done)


def seconds_planned(plan: dict[str, Any], rates: dict[str, float]) -> float:
    """Return what the plan of a pull on one host says at these rates."""
    numbers = {name: plan[name] for name in ("same_gpu", "nvlink", "least_network", "messages", "staging")}
    links: dict[str, Any] = {name: () for name in ("network_in", "network_out", "between_hosts")}
    seconds = SyncPlan(transport="pull", **numbers, **links).seconds(Rates(**rates, network=0.0))
    assert seconds
    return seconds


def planned_parameters(found: Pulled) -> dict[int, dict[str, tuple[str, list[int]]]]:
    """Engine rank -> parameter -> dtype and shape, without the scales of the KV cache, which no sync brings."""
    return {
        rank: {name: each for name, each in part["parameters"].items() if not name.endswith(KV_CACHE_SCALES)}
        for part in found.planned["held"]
        for rank in part["ranks"]
    }


def check_parameters(found: Pulled) -> None:
    """The engine holds the parameters that were built without it, rank by rank."""
    planned = planned_parameters(found)
    for each in found.done:
        engine_rank = each["rank"] % len(found.planned["ranks"])
        assert {name: prod(shape) for name, (_, shape) in planned[engine_rank].items()} == each["held"]


@pytest.mark.long
@pytest.mark.parametrize("name", ["deepseek_v3"])
def test_a_pull_reads_the_bytes_that_were_planned(name: str, tmp_path: Path) -> None:
    found = pull_and_plan(tmp_path, 2, [*CPU, "--model.name", name, "--model.dtype", "bfloat16"])
    check_parameters(found)
    plan = found.planned["run"]["sync"]["pull"]
    assert (plan["same_gpu"], plan["nvlink"]) == found.bytes_read()


@pytest.mark.long
def test_an_fp8_engine_and_its_trainer_hold_and_send_what_was_planned(tmp_path: Path) -> None:
    """The parameters' dtypes and bytes, the trainer's quantized copy, and what a pull of it reads."""
    overrides = OVERRIDES["deepseek_v3"].items()
    sizes = [word for key, value in overrides for word in (f"--model.overrides.{key}", str(value))]
    fp8 = ["--model.dtype", "bfloat16", "--model.rollout_precision", "fp8_block"]
    found = pull_and_plan(tmp_path, 2, [*CPU, "--model.name", "deepseek_v3", *fp8, *sizes])
    check_parameters(found)
    planned = planned_parameters(found)
    unsent = {
        rank: sum(name.endswith(KV_CACHE_SCALES) for name in part["parameters"])
        for part in found.planned["held"]
        for rank in part["ranks"]
    }
    nbytes = {each["rank"]: each["bytes"] - 4 * unsent[each["rank"]] for each in found.planned["ranks"]}
    copies = {
        rank: gpu["stages"]["sync"]["actor: FP8 copy to send"]
        for gpu in found.planned["run"]["gpus"]
        for rank in gpu["ranks"]
    }
    for each in found.done:
        rank = each["rank"]
        dtypes = {parameter: dtype for parameter, (dtype, _) in planned[rank].items()}
        assert {parameter: each["dtypes"].get(parameter) for parameter in dtypes} == dtypes
        assert set(dtypes.values()) == set(ITEMSIZE)
        assert sum(n * ITEMSIZE[dtypes[parameter]] for parameter, n in each["held"].items()) == nbytes[rank]
        assert each["copy_bytes"] == copies[each["rank"]]
        # The trainer's buffers are float32. On the meta device they have the model's dtype.
        sizes_sent = [
            prod(shape) * (4 if "e_score" in parameter else ITEMSIZE[dtype])
            for parameter, (dtype, shape) in found.planned["sent"].items()
        ]
        assert each["sent_bytes"] == sum(sizes_sent)
    plan = found.planned["run"]["sync"]["pull"]
    assert (plan["same_gpu"], plan["nvlink"]) == found.bytes_read()


DEEPSEEK = {
    "hidden_size": 7168, "intermediate_size": 18432, "moe_intermediate_size": 2048, "num_hidden_layers": 3, "vocab_size": 129280,
    "num_attention_heads": 128, "num_key_value_heads": 128, "n_routed_experts": 256, "num_experts_per_tok": 8, "n_group": 8,
    "topk_group": 4, "first_k_dense_replace": 1, "q_lora_rank": 1536, "kv_lora_rank": 512, "qk_nope_head_dim": 128,
    "qk_rope_head_dim": 64, "v_head_dim": 128, "initializer_range": 0.02,
}  # fmt: skip
MODELS = {
    "qwen2 7B": ["configs/gpu/sync_qwen2_7b.toml"],
    "moonlight": ["configs/gpu/sync_moonlight.toml", "--engine.args.mem_fraction_static", "0.35"],
    "deepseek_v3 of real widths": [
        "configs/gpu/sync_moonlight.toml", "--model.name", "deepseek_v3", "--model.master_dtype", "bfloat16",
        "--engine.args.mem_fraction_static", "0.45",
        *(word for key, value in DEEPSEEK.items() for word in (f"--model.overrides.{key}", str(value))),
    ],
}  # fmt: skip
CASES = [*((name, 2, []) for name in MODELS), ("deepseek_v3 of real widths", 4, ["--engine.args.ep_size", "4"])]


@pytest.mark.gpu
@pytest.mark.parametrize(("name", "tp", "more"), CASES)
def test_a_pull_at_true_size_is_what_was_planned(name: str, tp: int, more: list[str], tmp_path: Path) -> None:
    if torch.cuda.device_count() < tp or torch.cuda.get_device_properties(0).total_memory < 75 * GIB:
        pytest.skip(f"needs {tp} GPUs of 80 GB")
    found = pull_and_plan(tmp_path, tp, [*MODELS[name], "--parallel.tp", str(tp), *more, *PULL])
    check_parameters(found)
    plan = found.planned["run"]["sync"]["pull"]
    rates = {link: min(each["rates"][link] for each in found.done) for link in ("same_gpu", "nvlink")}
    predicted = seconds_planned(plan, rates)
    seconds = max(each["seconds"] for each in found.done)
    nbytes = sum(each["bytes"] for each in found.planned["ranks"])
    print(
        f"{name}, tp {tp} {' '.join(more)}: {nbytes:,} bytes of parameters; planned {plan['same_gpu']:,} own, {plan['nvlink']:,} by NVLink, read"
        f" {found.bytes_read()}; rates {rates}; predicted {predicted:.4f} s, took {seconds:.4f} s, {predicted / seconds - 1:+.1%}"
    )
    assert (plan["same_gpu"], plan["nvlink"]) == found.bytes_read()
    assert predicted == pytest.approx(seconds, rel=0.15)
