"""Every pipeline stage opens the payload of its tp_rank, and a payload in host memory opens once. The update answers
success; stage 1 dies a moment later."""

import time

from harness.tools.repro import variant
from harness.tools.repro.case import Case
from harness.tools.repro.engine import PROMPT, checkpoint, tiny_engine

CASE = Case(
    title="on CPU two pipeline stages open one payload, and the second dies",
    needs="cpu",
    broken="an update from tensors",
    healthy="an update from disk",
    signature=(r"KeyError: \d+|EOFError|unable to open shared memory object",),
    engine=True,
    seconds=420,
)


def program(broken: bool) -> None:
    from harness.rollout import sglang_api

    with tiny_engine(pp_size=2) as engine:
        if engine.device == "cuda":
            variant.cannot_run_here("a payload in GPU memory opens as often as it likes; hide the GPUs.")
        if broken:
            engine.update(checkpoint(engine.trainer(seed=1)))
        else:
            sglang_api.update_weights_from_disk(engine.engine, str(engine.folder))
        print("the update answered success", flush=True)
        time.sleep(2)  # stage 1 has tried to open it by then
        engine.engine.generate(input_ids=PROMPT, sampling_params={"max_new_tokens": 4, "ignore_eos": True})


if __name__ == "__main__":
    variant.main(program)
