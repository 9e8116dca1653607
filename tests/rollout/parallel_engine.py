"""parallel_engine.py MODEL ARGUMENTS FILE: a real engine of a tiny model, on the CPU in float32, and what it computes.

ARGUMENTS: of sglang.Engine, as JSON. FILE gets, as JSON, the tokens and log-probs of prompts and of greedy answers:
with the weights that the engine loaded, and with other ones after an update.
"""

import json
import sys
from pathlib import Path
from typing import Any

from harness.tools.repro.tiny_engine import TinyEngine, checkpoint_tensors, tiny_engine

PROMPTS = [list(range(start, start + length)) for start, length in ((5, 32), (40, 3), (100, 17), (200, 8), (300, 1))]
"""Several, of unlike lengths, so that every group of DP attention has other tokens at the same time."""
GREEDY = {"temperature": 0.0, "max_new_tokens": 8, "ignore_eos": True}


def main(model: str, arguments: dict[str, Any], file: Path) -> None:
    with tiny_engine(model, **arguments) as engine:
        found = [scored(engine)]
        engine.update(checkpoint_tensors(engine.trainer(seed=1)))
        found.append(scored(engine))
    file.write_text(json.dumps(found))


def scored(engine: TinyEngine) -> list[list[tuple[float, int]]]:
    """(log-prob, token) of each prompt and its answer; the first token of a prompt has no log-prob."""
    answers: Any = engine.engine.generate(
        input_ids=PROMPTS, sampling_params=GREEDY, return_logprob=True, logprob_start_len=0
    )
    parts = [[each["meta_info"][f"{part}_token_logprobs"] for part in ("input", "output")] for each in answers]
    return [[entry[:2] for entry in [*given[1:], *answered]] for given, answered in parts]


if __name__ == "__main__":
    main(sys.argv[1], json.loads(sys.argv[2]), Path(sys.argv[3]))
