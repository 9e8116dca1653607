"""What the bench of a step computes from its measurements, and the mistakes that it must find before anything heavy."""

import subprocess
import sys
from contextlib import nullcontext
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from harness.task.data import Prompt
from harness.tools.step_bench import bench
from harness.tools.step_bench.bench import PhaseRow, StepTable, as_text, forward_flops, random_prompts, verdict
from tests.end_to_end.launching import REPOSITORY, run_script

TABLE = StepTable(
    preset="sglang",
    seconds=10.0,
    tokens=1000.0,
    response_tokens=500.0,
    matmul_flops=7e14,
    sampling_seconds=4.9,
    phases=[
        PhaseRow(phase="sync", seconds=0.5, limit=0.25),
        PhaseRow(phase="generate", seconds=5.0, limit=4.5),
        PhaseRow(phase="old_log_probs", seconds=1.0, limit=0.5),
        PhaseRow(phase="update_actor", seconds=3.0, limit=1.5),
        PhaseRow(phase="release", seconds=0.25),
    ],
)


def test_each_part_stands_beside_its_limit_and_the_rest_is_what_no_part_took() -> None:
    said = verdict(TABLE)
    assert "generation 100 tokens/s, 0.90 of" in said and "(0.98 if it samples" in said
    assert "learner 0.5 of 700 TFLOP/s" in said
    assert "everything else 5.0%" in said  # 10 - 5 - 4 - 0.5, of 10
    assert said.endswith("engine preset sglang")


def test_the_table_begins_with_the_longest_phase_and_leaves_blank_what_has_no_limit() -> None:
    shown = [line.encode("ascii", "replace").decode().replace("?", " ").split() for line in as_text(TABLE).splitlines()]
    names = {row.phase for row in TABLE.phases}
    rows = {words[0]: words[1:] for words in shown if words and words[0] in names}
    assert list(rows) == ["generate", "update_actor", "old_log_probs", "sync", "release"]
    assert rows["generate"] == ["5.0000", "50.0%", "4.5000", "0.90"]
    assert rows["release"] == ["0.2500", "2.5%"]


def test_flops_are_two_a_weight_and_token_and_half_of_attention(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bench, "all_gather", lambda value: [value, value])  # two ranks that computed the same
    weights, tokens = torch.randn(32, 48), torch.randn(10, 32)
    model = SimpleNamespace(on_device=nullcontext)
    assert forward_flops(lambda: tokens @ weights, model) == 2 * (2 * 10 * 32 * 48)
    query, few = torch.randn(1, 4, 16, 8), torch.randn(1, 2, 16, 8)

    def attend() -> None:
        with torch.nn.attention.sdpa_kernel(torch.nn.attention.SDPBackend.FLASH_ATTENTION):
            torch.nn.functional.scaled_dot_product_attention(query, few, few, is_causal=True, enable_gqa=True)

    whole = 4 * 2 * (2 * 16 * 16 * 8)  # two products for each of four heads
    assert forward_flops(attend, model) == whole, "of two ranks, half of it each"


def test_random_prompts_are_alike_on_every_rank_and_of_one_size() -> None:
    row: Any = None
    prompts = [Prompt(index=index, input_ids=[1], row=row) for index in range(3)]
    made = random_prompts(prompts, 7, 100)
    assert made == random_prompts(prompts, 7, 100) and [each.index for each in made] == [0, 1, 2]
    assert all(len(each.input_ids) == 7 and max(each.input_ids) < 100 for each in made)
    assert made[0].input_ids != made[1].input_ids


class Answering:
    """In place of sglang.Engine: answers with as many tokens as asked for, or with one less."""

    def __init__(self, missing: int) -> None:
        self.missing = missing

    def generate(self, input_ids: list[list[int]], sampling_params: list[dict[str, Any]], **named: Any) -> list[Any]:
        assert all(each["ignore_eos"] for each in sampling_params) and isinstance(input_ids[0][0], int)
        print(named["return_logprob"], {each["temperature"] for each in sampling_params})
        return [{"meta_info": {"completion_tokens": each["max_new_tokens"] - self.missing}} for each in sampling_params]

    def get_server_info(self) -> dict[str, Any]:
        return {"internal_states": [{"last_gen_throughput": 1.0}]}


SGLANGS_BENCH = """
from harness.tools.step_bench.sglang_bench import offline_throughput
from tests.tools.step_bench.test_step_bench import Answering
print(offline_throughput(Answering(0), [[1, 2], [3]], [4, 5]) >= 0)
print(offline_throughput(Answering(0), [[1, 2], [3]], [4, 5], {"temperature": 0.7}) >= 0)
offline_throughput(Answering(1), [[1, 2], [3]], [4, 5])
"""


@pytest.mark.long
def test_sglangs_bench_takes_token_ids_and_its_answers_are_counted() -> None:
    command = [sys.executable, "-c", SGLANGS_BENCH]  # importing sglang takes a process of its own
    done = subprocess.run(command, cwd=REPOSITORY, capture_output=True, text=True, timeout=120)
    assert done.stdout.splitlines()[:4] == ["False {0}", "True", "True {0.7}", "True"]
    assert "SGLang's bench made 7 tokens instead of 9" in done.stderr


@pytest.mark.parametrize(
    ("words", "wrong"),
    [
        (["--repeats", "0"], "--repeats = 0"),
        (["--prompt-tokens", "400"], "--prompt-tokens = 400"),
        (["--rollout.load", "x"], "rollout.load"),
        (["--dry-run"], "--dry-run, --check and what belongs to them are options of launch/ppo.py"),
    ],
)
def test_mistakes_exit_2_with_one_sentence(words: list[str], wrong: str) -> None:
    process = run_script("launch/step_bench.py", "configs/cpu/quickstart.toml", *words)
    assert process.returncode == 2
    assert wrong in process.stderr.strip().splitlines()[-1]
