"""Eight prompts that fit one by one and not together: releases of 2025 took them in all the same, newer ones let them wait."""

from harness.tools.repro import variant
from harness.tools.repro.case import Case
from harness.tools.repro.engine import tiny_engine

CASE = Case(
    title="prompts that together need more than the KV pool has end the scheduler",
    needs="cpu",
    broken="a pool of 256 tokens",
    healthy="a pool of 2048 tokens",
    signature=(r"(Prefill|Decode) out of memory\. Try to lower your batch size|KV cache pool is full",),
    engine=True,
    seconds=420,
)


def program(broken: bool) -> None:
    with tiny_engine(max_total_tokens=256 if broken else 2048) as engine:
        prompts = [[5 + (n + token) % 500 for token in range(200)] for n in range(8)]
        sampling = {"max_new_tokens": 20, "ignore_eos": True}
        answers = engine.engine.generate(input_ids=prompts, sampling_params=sampling)
        print(f"{len(answers)} prompts of 200 tokens are answered", flush=True)


if __name__ == "__main__":
    variant.main(program)
