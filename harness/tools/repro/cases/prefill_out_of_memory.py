"""Prompts that together need more than the KV pool has end the scheduler.

Each of the eight fits alone. Releases of 2025 accepted them all, newer ones queue them.
"""

from harness.tools.repro.case import Case
from harness.tools.repro.tiny_engine import tiny_engine

CASE = Case(
    broken="a pool of 256 tokens",
    healthy="a pool of 2048 tokens",
    signature=(r"(Prefill|Decode) out of memory\. Try to lower your batch size|KV cache pool is full",),
    engine=True,
)


def program(broken: bool) -> None:
    with tiny_engine(max_total_tokens=256 if broken else 2048) as engine:
        prompts = [[5 + (n + token) % 500 for token in range(200)] for n in range(8)]
        sampling = {"max_new_tokens": 20, "ignore_eos": True}
        answers = engine.engine.generate(input_ids=prompts, sampling_params=sampling)
        print(f"{len(answers)} prompts of 200 tokens are answered", flush=True)
