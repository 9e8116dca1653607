"""A release while a request runs kills the scheduler.

A health probe, or an unfinished rollout, leaves one behind.
"""

from harness.tools.repro.case import Case
from harness.tools.repro.tiny_engine import PROMPT, tiny_engine

CASE = Case(
    broken="the engine is released after the first of 1000 tokens",
    healthy="it is released after the last of 4",
    signature=(r"release_memory_occupation should be called only when|assert self\._?is_(no_request|fully_idle)",),
    engine=True,
)


def program(broken: bool) -> None:
    with tiny_engine() as engine:
        sampling = {"max_new_tokens": 1000 if broken else 4, "ignore_eos": True}
        answer = engine.engine.generate(input_ids=PROMPT, sampling_params=sampling, stream=True)
        next(answer)
        if not broken:
            list(answer)
        engine.release()
        print("released", flush=True)
        engine.resume()
