"""SGLang's own offline bench, on an engine that a run has built."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from importlib import import_module
from importlib.util import find_spec
from typing import Any


@dataclass(frozen=True, slots=True)
class TokenPrompts:
    """An sglang.Engine whose `prompt` is token ids: the run's engine has no tokenizer."""

    engine: Any
    with_log_probs: bool

    def generate(self, prompt: Sequence[Sequence[int]], **named: Any) -> Any:
        """Generate as the engine does."""
        return self.engine.generate(input_ids=prompt, **named | {"return_logprob": self.with_log_probs})

    def get_server_info(self) -> Any:
        """Return what the engine says of itself."""
        return self.engine.get_server_info()


def offline_throughput(
    engine: Any, prompts: Sequence[Sequence[int]], lengths: Sequence[int], sampling: Mapping[str, float] | None = None
) -> float:
    """Have SGLang's bench time the engine on these prompts, and return the seconds. lengths: tokens of each answer.

    sampling: sample like this, and return log-probs, as a rollout does. None: greedily and without, as the bench does.
    """
    new = "sglang.benchmark.offline_throughput"
    bench = import_module(
        new if find_spec("sglang.benchmark") and find_spec(new) else "sglang.bench_offline_throughput"
    )
    requests = [
        bench.DatasetRow(prompt=list(prompt), prompt_len=len(prompt), output_len=length)
        for prompt, length in zip(prompts, lengths, strict=True)
    ]
    backend = TokenPrompts(engine, with_log_probs=sampling is not None)
    found = bench.throughput_test_once("engine", backend, requests, True, dict(sampling or {}), False)
    if found["total_output_tokens"] != sum(lengths):
        raise RuntimeError(f"SGLang's bench made {found['total_output_tokens']} tokens instead of {sum(lengths)}")
    return float(found["total_latency"])
