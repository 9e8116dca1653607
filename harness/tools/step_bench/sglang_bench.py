"""SGLang's own offline bench, on an engine that a run has built."""

from collections.abc import Sequence
from importlib import import_module
from importlib.util import find_spec
from typing import Any


class TokenPrompts:
    """An sglang.Engine whose `prompt` is token ids: the run's engine has no tokenizer."""

    def __init__(self, engine: Any) -> None:
        self.engine = engine

    def generate(self, prompt: Sequence[Sequence[int]], **named: Any) -> Any:
        """Generate as the engine does."""
        return self.engine.generate(input_ids=prompt, **named)

    def get_server_info(self) -> Any:
        """Return what the engine says of itself."""
        return self.engine.get_server_info()


def offline_throughput(engine: Any, prompts: Sequence[Sequence[int]], lengths: Sequence[int]) -> float:
    """Return the seconds in which SGLang's bench has the engine answer prompts with so many tokens each, greedily."""
    new = "sglang.benchmark.offline_throughput"
    bench = import_module(
        new if find_spec("sglang.benchmark") and find_spec(new) else "sglang.bench_offline_throughput"
    )
    requests = [
        bench.DatasetRow(prompt=list(prompt), prompt_len=len(prompt), output_len=length)
        for prompt, length in zip(prompts, lengths, strict=True)
    ]
    found = bench.throughput_test_once("engine", TokenPrompts(engine), requests, True, {}, False)
    if found["total_output_tokens"] != sum(lengths):
        raise RuntimeError(f"SGLang's bench made {found['total_output_tokens']} tokens instead of {sum(lengths)}")
    return float(found["total_latency"])
