"""On CPU two pipeline stages open one payload, and the second dies.

A payload in host memory opens once. The update answers success; stage 1 dies a moment later.
"""

import time

from harness.runtime.errors import UnsupportedEnvironment
from harness.tools.repro.case import Case
from harness.tools.repro.tiny_engine import PROMPT, checkpoint_tensors, tiny_engine

CASE = Case(
    broken="an update from tensors",
    healthy="an update from disk",
    signature=(r"KeyError: \d+|EOFError|unable to open shared memory object",),
    engine=True,
)


def program(broken: bool) -> None:
    from harness.rollout import sglang_api

    with tiny_engine(pp_size=2) as engine:
        if engine.device == "cuda":
            raise UnsupportedEnvironment("a payload in GPU memory opens any number of times; hide the GPUs.")
        if broken:
            engine.update(checkpoint_tensors(engine.trainer(seed=1)))
        else:
            sglang_api.update_weights_from_disk(engine.engine, str(engine.folder))
        print("the update answered success", flush=True)
        time.sleep(2)  # stage 1 has tried to open it by then
        engine.engine.generate(input_ids=PROMPT, sampling_params={"max_new_tokens": 4, "ignore_eos": True})
