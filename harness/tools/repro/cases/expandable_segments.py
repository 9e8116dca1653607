"""The memory saver refuses to work with expandable_segments.

Schedulers inherit PYTORCH_CUDA_ALLOC_CONF, as many trainers want it.
"""

import os

from harness.tools.repro.case import Case
from harness.tools.repro.tiny_engine import tiny_engine

CASE = Case(
    needs="one_gpu",
    broken="PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True",
    healthy="PYTORCH_CUDA_ALLOC_CONF is not set",
    signature=(r"TorchMemorySaver is disabled for the current process because expandable_segments",),
    requires=("torch_memory_saver",),
    engine=True,
)


def program(broken: bool) -> None:
    os.environ.pop("PYTORCH_CUDA_ALLOC_CONF", None)
    if broken:
        os.environ["PYTORCH_CUDA_ALLOC_CONF"] = "expandable_segments:True"
    with tiny_engine() as engine:
        engine.release()
        engine.resume()
        print("the engine was released and resumed", flush=True)
